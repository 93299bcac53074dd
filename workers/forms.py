"""Requests that are packed alike, read once: programs send the same form again and again.

in memory    all tensors lie in regions: the very same bytes come again
inline       the same pieces come again around the numbers of tensors of the same sizes

What differs each time by its nature, a deadline or an id, is not worth knowing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shmserve.ipc.tensors import Inference, InferenceTemplate, RequestedOutput, TensorRef

_MOST_KNOWN = 256
_LONGEST_KNOWN = 4096  # bytes of a packed request


class Form(NamedTuple):
    """What was read: the inputs with the shapes that the model sees, and what answers to such
    requests were packed to (see `Request.bodies`)."""

    inference: Inference
    tensors: list[tuple[TensorRef, tuple[int, ...]]]
    batch_size: int
    requested: dict[str, RequestedOutput]
    bodies: dict[Any, bytes]


class _Cut(NamedTuple):
    """A form with inline tensors: what is before each one's bytes, how many these are, the rest."""

    form: Form
    pieces: list[tuple[bytes, int]]
    rest: bytes

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


class Forms:
    """The forms that one model's requests have lately had."""

    def __init__(self) -> None:
        self._whole: dict[bytes, Form] = {}
        self._cut: dict[int, _Cut] = {}  # by the size of the packed request
        self._seen: set[int] = set()  # sizes of requests that were not known

    def find(self, work: bytes) -> tuple[Form, list[bytes]] | None:
        """The form of a packed request, and the bytes of its inline tensors in order."""
        form = self._whole.get(work)
        if form is not None:
            return form, []
        cut = self._cut.get(len(work))
        if cut is None:
            return None
        datas = cut.datas(work)
        return None if datas is None else (cut.form, datas)

    def learn(self, work: bytes, form: Form) -> None:
        """Know it again, if that is worth it."""
        inference = form.inference
        if len(work) > _LONGEST_KNOWN or inference.deadline_ns or inference.request_id:
            return
        if not any(type(tensor.data) is bytes for tensor in inference.inputs):
            if len(self._whole) >= _MOST_KNOWN:
                self._whole.clear()
            self._whole[work] = form
        elif len(work) in self._seen:
            self._learn_cut(work, form)
        else:
            # Shapes that vary from request to request are not learnt for one use.
            if len(self._seen) >= _MOST_KNOWN:
                self._seen.clear()
            self._seen.add(len(work))

    def _learn_cut(self, work: bytes, form: Form) -> None:
        datas = [data for ref in form.inference.inputs if type(data := ref.data) is bytes]
        *pieces, rest = InferenceTemplate(form.inference).pieces(0)
        cut = _Cut(form, list(zip(pieces, map(len, datas), strict=True)), rest)
        if cut.datas(work) == datas:  # else it was packed by someone who packs in another way
            if len(self._cut) >= _MOST_KNOWN:
                self._cut.clear()
            self._cut[len(work)] = cut
