"""The request and the response of a call of another model, and the memory of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shmserve.errors import ShmserveError
from shmserve.ipc.memory.lent import Block, LentMemory
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.tensors.descriptors import Range, TensorRef
from shmserve.ipc.tensors.schemas import (
    INLINE_LIMIT,
    Inference,
    Inferred,
    Packed,
    RequestedOutput,
    pack_inference,
)
from shmserve.ipc.tensors.signature import Signature
from shmserve.workers.batch.backend_request import Input, Request


@dataclass(frozen=True, slots=True)
class CallInput:
    """An input tensor to send.

    Attributes:
        name: The name of the input.
        datatype: The datatype.
        shape: The shape.
        data: The serialized tensor, or the memory range that contains it.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview | Range


@dataclass(frozen=True, slots=True)
class CallRequest:
    """An inference request to another model.

    Attributes:
        model: The name of the model.
        version: The version; "" for the latest.
        inputs: The input tensors.
        outputs: The names of the requested outputs; empty for all of them.
        request_id: The id of the request.
        parameters: The parameters of the request.
        correlation_id: The id of the sequence; 0 or "" for none.
        flags: The flags of the start and the end of a sequence.
        timeout_us: The timeout in the queue of the called model, if its policy permits it.
        deadline_ns: The deadline of the caller by the monotonic clock; 0 for none.
        priority: The priority.
        trace: The trace context, as in `Submit`; "" if the call is not traced.
        origins: The requests for which the model makes the call.
        callers: The executions that wait for the response, as in `Submit`.
    """

    model: str
    version: str
    inputs: Sequence[CallInput]
    outputs: Sequence[str] = ()
    request_id: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    deadline_ns: int = 0
    priority: int = 0
    trace: str = ""
    origins: Sequence[Request] = ()
    callers: str = ""

    @property
    def cancelled(self) -> bool:
        """Return whether the requests for which the model makes this call are all cancelled."""
        return bool(self.origins) and all(origin.is_cancelled() for origin in self.origins)

    @property
    def limit_us(self) -> int:
        """Return the time limit of the call in microseconds (the parameter `deadline_us`), or 0."""
        limit_us = self.parameters.get("deadline_us", 0)
        return limit_us if type(limit_us) is int and limit_us > 0 else 0

    def packed(self, signature: Signature, inputs: Sequence[TensorRef]) -> Packed:
        """Return the schema and data of this request.

        Args:
            signature: The signature of the model.
            inputs: The inputs as they are sent.

        Raises:
            InvalidArgument: The request does not fit the signature of the model.
        """
        outputs = tuple(map(RequestedOutput, dict.fromkeys(self.outputs)))
        signature.check(self.request_id, inputs, outputs)
        return pack_inference(Inference(tuple(inputs), outputs, self.parameters))


@dataclass(frozen=True, slots=True)
class CallResponse:
    """A response of another model, whose outputs are copies in this process."""

    outputs: list[Input]
    parameters: dict[str, Any]


Outcome = CallResponse | ShmserveError


def copy_response(
    response: Inferred, mappings: Mappings, model: str
) -> CallResponse | ShmserveError:
    """Return a copy of a response of `model`, or the error if an output cannot be mapped."""
    outputs: list[Input] = []
    for ref in response.outputs:
        data = ref.data
        try:
            data_copy = bytearray(data if isinstance(data, bytes) else mappings.view(data))
        except ShmserveError as error:
            return error
        outputs.append(Input(ref.name, ref.datatype, ref.shape, memoryview(data_copy), model=model))
    return CallResponse(outputs, response.parameters)


def store_inputs(inputs: Sequence[CallInput], memory: LentMemory) -> StoredInputs:
    """Return the inputs as they are sent, with large ones copied to `memory`.

    Raises:
        Unavailable: `memory` is full.
    """
    inline_bytes = sum(len(item.data) for item in inputs if not isinstance(item.data, Range))
    refs: list[TensorRef] = []
    stored_inputs = StoredInputs(refs, [])
    try:
        for item in inputs:
            data = item.data
            if isinstance(data, Range):
                pass
            elif inline_bytes <= INLINE_LIMIT:
                data = bytes(data)
            else:
                block = memory.write(data)
                stored_inputs.blocks.append(block)
                data = block.memory_range
            refs.append(TensorRef(item.name, item.datatype, item.shape, data))
    except ShmserveError:
        stored_inputs.release()
        raise
    return stored_inputs


@dataclass(slots=True)
class StoredInputs:
    """Inputs as they are sent, and the blocks of memory that hold the large ones."""

    refs: Sequence[TensorRef]  # the inputs as they are sent
    blocks: list[Block]  # memory of the large inputs

    def release(self) -> None:
        """Free the blocks, which no worker reads any more. Idempotent."""
        while self.blocks:
            self.blocks.pop().release()
