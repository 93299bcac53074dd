"""A complete model (shmserve serve examples/native_model.py:Blur)."""

import numpy as np
from numpy import ndarray

from shmserve.model import FP32


class Blur:
    def predict(self, image: FP32[ndarray, -1, -1]) -> FP32[ndarray, -1, -1]:
        padded = np.pad(image, ((0, 0), (1, 1), (1, 1)))
        rows = padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]
        blurred: ndarray = (rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]) / 9
        return blurred
