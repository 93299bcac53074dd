"""Packed requests, or answers, of one form: the same pieces around tensors of the same sizes.

Programs send the same form again and again; what follows from it alone is then known without
unpacking. What differs each time by its nature, a deadline or an id, is not worth knowing.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from shmserve.ipc.tensors.inference import Inference, InferenceTemplate, Inferred, InferredTemplate

T = TypeVar("T")

_MOST_KNOWN = 256
LONGEST_KNOWN = 4096  # bytes of a packed request or answer


class _Cut(NamedTuple, Generic[T]):
    """What is before each inline tensor's bytes, how many these are, the rest; what it means."""

    pieces: list[tuple[bytes, int]]
    rest: bytes
    meaning: T

    def datas(self, packed: bytes) -> list[bytes] | None:
        """The inline tensors' bytes, if `packed` is of this form."""
        at = 0
        datas: list[bytes] = []
        for piece, size in self.pieces:
            start = at + len(piece)
            if packed[at:start] != piece:
                return None
            at = start + size
            datas.append(packed[start:at])
        return datas if packed[at:] == self.rest else None


class TemplateCache(Generic[T]):
    """What the forms mean that requests, or answers, have lately had; of `most` forms at a time."""

    __slots__ = ("_known", "_most", "_seen")

    def __init__(self, most: int = _MOST_KNOWN) -> None:
        self._most = most
        self._known: dict[int, _Cut[T]] = {}  # by the size of what is packed
        self._seen: set[int] = set()  # sizes of what was not known

    def find(self, packed: bytes) -> tuple[T, list[bytes]] | None:
        """What the form of `packed` means, and the bytes of its inline tensors in order."""
        known = self._known.get(len(packed))
        if known is None:
            return None
        datas = known.datas(packed)
        return None if datas is None else (known.meaning, datas)

    def learn(self, packed: bytes, unpacked: Inference | Inferred, meaning: T) -> None:
        """Know the form of `packed`, if it comes more than once."""
        if len(packed) > LONGEST_KNOWN or _is_unique(unpacked):
            return
        if len(packed) not in self._seen:
            # Shapes that vary from request to request are not learnt for one use.
            if len(self._seen) >= self._most:
                self._seen.clear()
            self._seen.add(len(packed))
            return
        if isinstance(unpacked, Inference):
            tensors, all_pieces = unpacked.inputs, InferenceTemplate(unpacked).pieces(0)
        else:
            tensors, all_pieces = unpacked.outputs, InferredTemplate(unpacked).pieces()
        datas = [data for ref in tensors if type(data := ref.data) is bytes]
        *pieces, rest = all_pieces
        cut = _Cut(list(zip(pieces, map(len, datas), strict=True)), rest, meaning)
        if cut.datas(packed) == datas:  # else it was packed by someone who packs in another way
            if len(self._known) >= self._most:
                self._known.clear()
            self._known[len(packed)] = cut


def _is_unique(unpacked: Inference | Inferred) -> bool:
    return isinstance(unpacked, Inference) and bool(unpacked.deadline_ns or unpacked.request_id)
