"""The models of the demo: a network for handwritten digits, and the negative of a frame."""

import numpy as np
from numpy import ndarray

from shmserve.model import FP32, UINT8, Context


class Digits:
    max_batch_size = 32
    max_queue_delay_us = 500

    def load(self, context: Context) -> None:
        weights = np.load(context.parameters["weights"])
        self.hidden, self.hidden_bias, self.scores, self.scores_bias = weights.values()

    def predict(self, image: FP32[ndarray, 64]) -> FP32[ndarray, 10]:
        features = np.maximum(image @ self.hidden + self.hidden_bias, 0)
        scores: ndarray = features @ self.scores + self.scores_bias
        return scores


class DigitsOneByOne(Digits):
    max_batch_size = 1


class Negative:
    max_batch_size = 0

    def predict(self, image: UINT8[ndarray, -1, -1, 3]) -> UINT8[ndarray, -1, -1, 3]:
        return 255 - image
