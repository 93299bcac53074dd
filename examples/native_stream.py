"""A model that streams (shmserve serve examples/native_stream.py:Words)."""

from collections.abc import Iterator

from numpy import array, ndarray

from shmserve.model import BYTES


class Words:
    def predict(self, text: BYTES[ndarray, 1]) -> Iterator[BYTES[ndarray, 1]]:
        for word in text[0].split():
            yield array([word], object)
