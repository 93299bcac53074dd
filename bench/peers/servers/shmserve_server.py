"""The model classes for shmserve: one instance each."""

from typing import NamedTuple

from codec import MAX_BATCH_SIZE, load
from numpy import ndarray

from shmserve.model import FP32, INT32


class Results(NamedTuple):
    """The outputs of `Simple`."""

    sum: INT32[ndarray, 16]
    difference: INT32[ndarray, 16]


class Simple:
    """A model that adds and subtracts two arrays."""

    max_batch_size = MAX_BATCH_SIZE

    def predict(self, a: INT32[ndarray, 16], b: INT32[ndarray, 16]) -> Results:
        return Results(a + b, a - b)


class Image:
    """A model that computes the scores of an image with a small network."""

    max_batch_size = MAX_BATCH_SIZE

    def load(self, context):
        self.run = load()

    def predict(self, image: FP32[ndarray, 3, 224, 224]) -> FP32[ndarray, 10]:
        return self.run(image)
