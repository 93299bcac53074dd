"""Templates of requests: the same names, types and shapes again, with other numbers.

    small inputs    the packed request is cut where the tensors are: the next one is a join
    large inputs    a ring of slots in shared memory, each with its request packed beforehand

    slot    | input | input | output | output |      each on 64 bytes

Outputs of known size have room in the slot when they are large together; others come inside the
message, or are copied out of the worker's memory.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shmserve.client.memory.segments import Memories, MemoryBlock, aligned
from shmserve.client.request.arrays import Array, dtype_of
from shmserve.ipc.tensors.descriptors import Memory, Place, TensorRef
from shmserve.ipc.tensors.inference import (
    INLINE_LIMIT,
    Inference,
    PackedTemplate,
    RequestedOutput,
    pack_inference,
)
from shmserve.ipc.tensors.ranges import LARGEST
from shmserve.ipc.tensors.signature import Signature

_NOWHERE = Memory(0, 0, 0, 0, LARGEST, True)


class TensorTemplate(NamedTuple):
    """A tensor without its numbers."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    byte_size: int

    def ref(self, data: bytes | Place) -> TensorRef:
        """The tensor with these bytes."""
        return TensorRef(self.name, self.datatype, self.shape, data)


def pack(
    inputs: Sequence[TensorRef],
    outputs: Sequence[RequestedOutput],
    parameters: Mapping[str, Any] | None,
) -> bytes:
    """A request as it travels."""
    return pack_inference(Inference(tuple(inputs), tuple(outputs), dict(parameters or {})))


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory for one request at a time. `inputs` are arrays to write to, `work` its packed request
    (b"": not the same each time)."""

    prepared: RequestTemplate
    block: MemoryBlock
    inputs: list[Array]
    places: list[Place]
    outputs: tuple[RequestedOutput, ...]
    work: bytes = b""

    def end(self) -> None:
        """Free for the next request."""
        self.prepared.take_back(self)


class RequestTemplate:
    """The template of requests with inputs of these names, types and shapes."""

    def __init__(
        self,
        signature: Signature,
        templates: Sequence[TensorTemplate],
        outputs: Sequence[str],
        memories: Memories,
        *,
        rooms: bool = True,
    ) -> None:
        """`rooms`: large outputs have room in the slots. Raises InvalidArgument when the inputs do
        not fit the model."""
        self._templates = templates
        self._memories = memories
        self._asked = tuple(map(RequestedOutput, outputs))
        refs = [template.ref(Place(_NOWHERE, 0, template.byte_size)) for template in templates]
        fit = signature.check("", refs, self._asked)
        self.batch_size, self.shape_key = fit.batch_size, fit.shape_key
        self._inline = sum(template.byte_size for template in templates) <= INLINE_LIMIT
        wanted = outputs or tuple(signature.outputs)
        sizes = {name: signature.output_size(name, self.batch_size) for name in wanted}
        placed = rooms and sum(filter(None, sizes.values())) > INLINE_LIMIT
        self._rooms = sizes if placed else {}
        self.slotted = placed or not self._inline
        self._pieces = [] if self.slotted else self._cut()
        self._ring: deque[Buffer] = deque()
        self._closed = False
        if self.slotted:
            memories.serve(self)

    # --- small

    def joined(self, arrays: Sequence[Array]) -> bytes:
        """The request with these small inputs and no parameters."""
        pieces = self._pieces
        parts: list[bytes] = []
        for index, array in enumerate(arrays):
            parts.append(pieces[index])
            parts.append(array.tobytes())
        parts.append(pieces[-1])
        return b"".join(parts)

    def _cut(self) -> list[bytes]:
        refs = [template.ref(bytes(template.byte_size)) for template in self._templates]
        return PackedTemplate(Inference(tuple(refs), self._asked)).pieces

    # --- large

    def slot(self) -> Buffer:
        """A free slot; raises Unavailable when there is no memory for one more."""
        try:
            return self._ring.popleft()
        except IndexError:
            return self._new_slot()

    def _new_slot(self) -> Buffer:
        inside = [] if self._inline else self._templates
        rooms = [size for size in self._rooms.values() if size is not None]
        sizes = [template.byte_size for template in inside] + rooms
        block = self._memories.allocate(sum(map(aligned, sizes)))
        at, segment = block.offset, block.segment
        arrays: list[Array] = []
        places: list[Place] = []
        for template in inside:
            arrays.append(
                np.ndarray(template.shape, dtype_of(template.datatype), segment.bytes, at)
            )
            places.append(segment.place(at, template.byte_size))
            at += aligned(template.byte_size)
        outputs: list[RequestedOutput] = []
        for name, size in self._rooms.items():
            place = None if size is None else segment.place(at, size)
            outputs.append(RequestedOutput(name, place))
            at += aligned(size or 0)
        slot = Buffer(self, block, arrays, places, tuple(outputs) or self._asked)
        if inside:
            slot.work = self.packed((), slot, None)
        return slot

    def take_back(self, slot: Buffer) -> None:
        """A slot is free again; at any moment, in any thread."""
        self._ring.append(slot)
        if self._closed:
            self.close()

    def packed(
        self, arrays: Sequence[Array], slot: Buffer | None, parameters: Mapping[str, Any] | None
    ) -> bytes:
        """The request, packed from its parts; inputs with a place in the slot are there."""
        places = slot.places if slot is not None else []
        datas: Sequence[bytes | Place] = places or [array.tobytes() for array in arrays]
        refs = [template.ref(data) for template, data in zip(self._templates, datas, strict=True)]
        return pack(refs, self._asked if slot is None else slot.outputs, parameters)

    def close(self) -> None:
        """Give the slots back; those in use follow when they end."""
        self._closed = True
        self.give_up()

    def give_up(self) -> None:
        """Give the slots back that are not in use; at any moment, in any thread."""
        with contextlib.suppress(IndexError):  # somebody else may be at it
            while True:
                self._ring.popleft().block.give_back()
