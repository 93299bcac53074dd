"""Packed requests of one form: the same pieces around the numbers of tensors of the same sizes.

Programs send the same form again and again; what follows from it alone is then known without
unpacking. What differs each time by its nature, a deadline or an id, is not worth knowing.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from shmserve.ipc.tensors import Inference, InferenceTemplate

T = TypeVar("T")

_MOST_KNOWN = 256
LONGEST_KNOWN = 4096  # bytes of a packed request


class _Cut(NamedTuple, Generic[T]):
    """What is before each inline tensor's bytes, how many these are, the rest; what it means."""

    pieces: list[tuple[bytes, int]]
    rest: bytes
    meaning: T

    def datas(self, work: bytes) -> list[bytes] | None:
        """The inline tensors' bytes, if `work` is of this form."""
        at = 0
        datas: list[bytes] = []
        for piece, size in self.pieces:
            start = at + len(piece)
            if work[at:start] != piece:
                return None
            at = start + size
            datas.append(work[start:at])
        return datas if work[at:] == self.rest else None


class Forms(Generic[T]):
    """What the forms mean that requests with inline tensors have lately had."""

    def __init__(self) -> None:
        self._known: dict[int, _Cut[T]] = {}  # by the size of the packed request
        self._seen: set[int] = set()  # sizes of requests that were not known

    def find(self, work: bytes) -> tuple[T, list[bytes]] | None:
        """What a packed request's form means, and the bytes of its inline tensors in order."""
        known = self._known.get(len(work))
        if known is None:
            return None
        datas = known.datas(work)
        return None if datas is None else (known.meaning, datas)

    def learn(self, work: bytes, inference: Inference, meaning: T) -> None:
        """Know the form of `work`, which is `inference`, if it comes more than once."""
        if len(work) > LONGEST_KNOWN or inference.deadline_ns or inference.request_id:
            return
        if len(work) not in self._seen:
            # Shapes that vary from request to request are not learnt for one use.
            if len(self._seen) >= _MOST_KNOWN:
                self._seen.clear()
            self._seen.add(len(work))
            return
        datas = [data for ref in inference.inputs if type(data := ref.data) is bytes]
        *pieces, rest = InferenceTemplate(inference).pieces(0)
        cut = _Cut(list(zip(pieces, map(len, datas), strict=True)), rest, meaning)
        if cut.datas(work) == datas:  # else it was packed by someone who packs in another way
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[len(work)] = cut
