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
from typing import Any, NamedTuple

import numpy as np

from shmserve.ipc.memory.mappings import Mappings
from shmserve.workers.batch.request import Array, Copied, Input, Response

logger = logging.getLogger(__name__)

_TRIAL = 8  # executions with lent inputs
_NOT_WRITABLE = "The given NumPy array is not writable"


class _Loan(NamedTuple):
    source: Input
    original: memoryview | None  # what a copy was made of


class Lender:
    """Lends the arrays of one model's inputs. Used from one thread."""

    def __init__(self, model_name: str, mappings: Mappings, copied: Copied | None = None) -> None:
        self._model_name = model_name
        self._mappings = mappings
        self._copied = copied or Copied()
        self._copying = True
        self._trials_left = _TRIAL
        self._loans: dict[int, _Loan] = {}
        self._filter: Any = None

    def prepare(self) -> None:
        """Before an execution."""
        self._loans.clear()
        if not self._copying and "torch" in sys.modules:
            self._refuse_aliases()

    def _refuse_aliases(self) -> None:
        # torch knows no read-only tensors: it warns, normally once, and lets the model write.
        sys.modules["torch"].set_warn_always(True)
        if not warnings.filters or warnings.filters[0] is not self._filter:
            warnings.filterwarnings("error", message=_NOT_WRITABLE)
            self._filter = warnings.filters[0]

    def lend(self, source: Input) -> Array:
        """The array of a shared input of the running execution; the same on every call."""
        if id(source) not in self._loans:
            original = source.raw if self._copying else None
            if self._copying:
                self._copied.inputs += source.detach()
            self._loans[id(source)] = _Loan(source, original)
        return source.numpy()

    def settle(self, responses: Sequence[Response]) -> None:
        """After an execution of which nothing is left but `responses`, and what the model keeps."""
        if not self._loans:
            return
        loans = list(self._loans.values())
        self._loans.clear()
        kept = [source for source, _ in loans if _kept(source, responses)]
        if kept or any(_changed(*loan) for loan in loans):
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


def _changed(source: Input, original: memoryview | None) -> bool:
    if original is None:
        return False
    before, after = np.frombuffer(original, np.uint8), np.frombuffer(source.raw, np.uint8)
    return not np.array_equal(before, after)


def _kept(source: Input, responses: Sequence[Response]) -> bool:
    """Whether someone besides `source` and `responses` refers to its array, or to a view of it."""
    known = 0
    views: set[int] = set()
    for response in responses:
        for output in response.outputs:
            if output.data is source.numpy():
                known += 1
            elif isinstance(output.data, np.ndarray) and output.data.base is source.numpy():
                views.add(id(output.data))
    return _references(source) > _ALONE + known + len(views)


def _references(source: Input) -> int:
    return sys.getrefcount(source.numpy())


# How the count of an array looks that only its input refers to.
_ALONE = _references(Input("", "UINT8", (1,), memoryview(bytearray(1))))
