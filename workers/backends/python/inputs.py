"""Input lending: models get zero-copy views of their inputs, or copies where they keep them.

A model written for Triton owns the arrays it is given: it may write into them and keep them. Ours
are views of memory that others use again. So the first inputs are lent as copies; a model that has
neither changed nor kept one of those gets read-only views from then on, until it keeps one: the
memory of that becomes the model's before anybody else uses it again (copy-on-keep).
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from shmserve.ipc.memory.mappings import Mappings
from shmserve.workers.batch.request import Array, Copied, Input, Response

logger = logging.getLogger(__name__)

_TRIAL = 8  # executions with lent inputs
_NOT_WRITABLE = "The given NumPy array is not writable"


class Lender:
    """Lends the arrays of one model's inputs. Used from one thread."""

    def __init__(self, model_name: str, mappings: Mappings, copied: Copied | None = None) -> None:
        self._model_name = model_name
        self._mappings = mappings
        self._copied = copied or Copied()
        self._copying = True
        self._trials_left = _TRIAL
        # What is lent in this execution, and what a copy was made of.
        self._loans: dict[Input, memoryview | None] = {}
        self._filter: Any = None

    def lend(self, source: Input) -> Array:
        """The array of a shared input of the running execution; the same on every call."""
        if source not in self._loans:
            if self._copying:
                self._loans[source] = source.raw
                self._copied.inputs += source.detach()
            else:
                if not self._loans and "torch" in sys.modules:
                    self._refuse_aliases()
                self._loans[source] = None
        return source.numpy()

    def _refuse_aliases(self) -> None:
        # torch knows no read-only tensors: it warns, normally once, and lets the model write.
        sys.modules["torch"].set_warn_always(True)
        if not warnings.filters or warnings.filters[0] is not self._filter:
            warnings.filterwarnings("error", message=_NOT_WRITABLE)
            self._filter = warnings.filters[0]

    def forget(self) -> None:
        """After an execution that has failed: nobody knows what refers to what it was lent."""
        self._loans = {}

    def settle(self, responses: Sequence[Response]) -> None:
        """After an execution of which nothing is left but `responses`, and what the model keeps."""
        if not self._loans:
            return
        loans, self._loans = self._loans, {}
        kept: list[Input] = []
        changed = False
        for source in loans:
            original = loans[source]
            if _references(source, responses) > _ALONE:
                kept.append(source)
            elif original is not None and not changed:
                changed = _changed(source, original)
        if kept or changed:
            self._trials_left = 0
            if not self._copying:
                self._own(kept)
            self._copying = True
        elif self._trials_left:
            self._trials_left -= 1
            self._copying = self._trials_left > 0

    def _own(self, kept: Sequence[Input]) -> None:
        logger.warning(
            "model '%s' has begun to keep its inputs, so each is copied for it", self._model_name
        )
        places = [source.place for source in kept if source.place is not None]
        self._mappings.detach(places)
        self._copied.inputs += sum(place.byte_size for place in places)


def _changed(source: Input, original: memoryview) -> bool:
    before, after = np.frombuffer(original, np.uint8), np.frombuffer(source.raw, np.uint8)
    return not np.array_equal(before, after)


def _references(source: Input, responses: Sequence[Response]) -> int:
    """How often the array of an input is referred to, but for `responses` and their views of it."""
    array = source.array
    known = 0
    views: set[int] = set()
    for response in responses:
        for output in response.outputs:
            if output.data is array:
                known += 1
            elif isinstance(output.data, np.ndarray) and output.data.base is array:
                views.add(id(output.data))
    return sys.getrefcount(array) - known - len(views)


def _alone() -> int:
    """How the count of an array looks that only its input refers to."""
    source = Input("", "UINT8", (1,), memoryview(bytearray(1)))
    source.numpy()
    return _references(source, ())


_ALONE = _alone()
