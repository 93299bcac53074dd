"""Templates of requests with equal names, datatypes and shapes, and different values.

    small inputs    in the message, after the shared schema
    large inputs    in a ring of slots in shared memory, each with its data packed in advance
    slot    | input | input | output | output |      each aligned to 64 bytes

A slot has space for outputs of known size if they are large in total. Other outputs are in the
response, or are copied from the worker's memory.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmserve.client.memory.segments import Memories, MemoryBlock, aligned
from shmserve.client.request.arrays import Array
from shmserve.ipc.tensors.arrays import STORAGE_DTYPES
from shmserve.ipc.tensors.descriptors import MAX_INT64, Memory, Range, TensorRef, pack_range
from shmserve.ipc.tensors.schemas import (
    INLINE_LIMIT,
    Inference,
    Packed,
    RequestedOutput,
    TensorSchema,
    pack_inference,
    pack_request_schema,
)
from shmserve.ipc.tensors.signature import Signature

_NO_MEMORY = Memory(0, 0, 0, 0, MAX_INT64, True)  # a placeholder


def pack(
    inputs: Sequence[TensorRef],
    outputs: Sequence[RequestedOutput],
    parameters: Mapping[str, Any] | None,
) -> Packed:
    """Return the schema and data of a request."""
    return pack_inference(Inference(tuple(inputs), tuple(outputs), dict(parameters or {})))


@dataclass(slots=True, eq=False)
class TemplateSlot:
    """A slot of a request template: memory that one request uses at a time.

    Attributes:
        template: The template that owns the slot.
        block: The slot's block of shared memory.
        inputs: Arrays to write the inputs to; empty if the inputs are sent in the message.
        input_data: The packed ranges of `inputs`.
        output_data: The packed ranges of the outputs with space in the slot.
    """

    template: ClientTemplate
    block: MemoryBlock
    inputs: list[Array]
    input_data: list[Any]
    output_data: list[Any]

    def release(self) -> None:
        """Return this slot to its template, so that another request can use it."""
        self.template.return_slot(self)


class ClientTemplate:
    """The template of the requests whose inputs have the same names, datatypes and shapes."""

    def __init__(
        self,
        signature: Signature,
        schemas: Sequence[TensorSchema],
        outputs: Sequence[str],
        memories: Memories,
        *,
        with_outputs: bool = True,
    ) -> None:
        """Prepare a template of requests to a model.

        Args:
            signature: The model's signature.
            schemas: The schemas of the inputs.
            outputs: The names of the requested outputs; empty for all outputs.
            memories: The client's memory, for slots.
            with_outputs: Whether large outputs have space in the slots.

        Raises:
            InvalidArgument: The inputs do not fit the model.
        """
        self._schemas = schemas
        self._memories = memories
        refs = [schema.ref(Range(_NO_MEMORY, 0, schema.byte_size)) for schema in schemas]
        properties = signature.check("", refs, [RequestedOutput(name) for name in outputs])
        self._is_inline = sum(schema.byte_size for schema in schemas) <= INLINE_LIMIT
        output_names = outputs or tuple(signature.outputs)
        sizes = {name: signature.output_size(name, properties.batch_size) for name in output_names}
        outputs_in_slot = with_outputs and sum(filter(None, sizes.values())) > INLINE_LIMIT
        self._output_sizes = {n: s for n, s in sizes.items() if s is not None and outputs_in_slot}
        self._refs, self._requested_names = refs, tuple(sizes if outputs_in_slot else outputs)
        self._packed_schema = self._pack_schema({})
        self.uses_slots = outputs_in_slot or not self._is_inline
        self._free_slots: deque[TemplateSlot] = deque()
        self._is_closed = False
        if self.uses_slots:
            memories.register_owner(self)

    def _pack_schema(self, parameters: Mapping[str, Any]) -> bytes:
        sizes, names = self._output_sizes, self._requested_names
        outputs = [(name, name in sizes, False) for name in names]
        return pack_request_schema(self._refs, outputs, dict(parameters))

    def pack_request(
        self,
        arrays: Sequence[Array],
        slot: TemplateSlot | None,
        parameters: Mapping[str, Any] | None,
    ) -> Packed:
        """Return a request's schema and data.

        Args:
            arrays: The inputs.
            slot: The slot that contains the large inputs; None if the template has no slots.
            parameters: The parameters.
        """
        schema = self._pack_schema(parameters) if parameters else self._packed_schema
        if slot is None:
            return schema, [array.tobytes() for array in arrays]
        inputs = slot.input_data or [array.tobytes() for array in arrays]
        return schema, inputs + slot.output_data

    # --- slots

    def slot(self) -> TemplateSlot:
        """Return a free slot, or allocate a new one.

        Raises:
            Unavailable: The client's memory limit is reached, or the machine has not enough memory.
        """
        try:
            return self._free_slots.popleft()
        except IndexError:
            return self._new_slot()

    def _new_slot(self) -> TemplateSlot:
        slot_schemas = [] if self._is_inline else self._schemas
        sizes = [*[schema.byte_size for schema in slot_schemas], *self._output_sizes.values()]
        block = self._memories.allocate(sum(map(aligned, sizes)))
        offset, segment = block.offset, block.segment
        arrays: list[Array] = []
        inputs: list[Any] = []
        for schema in slot_schemas:
            dtype = STORAGE_DTYPES[schema.datatype]
            arrays.append(np.ndarray(schema.shape, dtype, segment.bytes, offset))
            inputs.append(pack_range(segment.memory_range(offset, schema.byte_size)))
            offset += aligned(schema.byte_size)
        outputs: list[Any] = []
        for size in self._output_sizes.values():
            outputs.append(pack_range(segment.memory_range(offset, size)))
            offset += aligned(size)
        return TemplateSlot(self, block, arrays, inputs, outputs)

    def return_slot(self, slot: TemplateSlot) -> None:
        """Add a slot to the free slots; safe in any thread and at any time."""
        self._free_slots.append(slot)
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """Free the slots; slots in use are freed when their requests end."""
        self._is_closed = True
        self.free_idle()

    def free_idle(self) -> None:
        """Free the unused slots; safe in any thread and at any time."""
        with contextlib.suppress(IndexError):  # another thread may have taken the last slot
            while True:
                self._free_slots.popleft().block.recycle()
