"""A complete model (shmserve serve examples/native_model.py:Blur)."""

import torch
from torch import Tensor

from shmserve.model import FP32


class Blur:
    max_batch_size = 16

    def predict(self, image: FP32[Tensor, -1, -1]) -> FP32[Tensor, -1, -1]:
        return torch.nn.functional.avg_pool2d(image, kernel_size=3, stride=1, padding=1)
