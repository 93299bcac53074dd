"""The request and the response of a call of another model, and the memory of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shmserve.errors import ShmserveError
from shmserve.ipc.memory.lent import Block, LentMemory
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.tensors.descriptors import Range, TensorRef
from shmserve.ipc.tensors.inference import (
    INLINE_LIMIT,
    Inference,
    Inferred,
    Packed,
    RequestedOutput,
    pack_inference,
)
from shmserve.ipc.tensors.signature import Signature
from shmserve.workers.batch.request import Input


@dataclass(frozen=True, slots=True)
class CallInput:
    """A tensor to send; `data` is its wire form, or where that already lies."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview | Range


@dataclass(frozen=True, slots=True)
class CallRequest:
    """One inference of another model; `version` "" is the latest, no `outputs` all of them.

    `timeout_us` is the call's own limit, `deadline_ns` (monotonic) when its caller's ends; 0: none.
    With a `trace`, as `Submit` has it, its times are told.
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

    def packed(self, signature: Signature, inputs: Sequence[TensorRef]) -> Packed:
        """Return the schema and data of this request, with the inputs where they lie now.

        Raises:
            InvalidArgument: The request does not fit the signature of the model.
        """
        outputs = tuple(map(RequestedOutput, dict.fromkeys(self.outputs)))
        signature.check(self.request_id, inputs, outputs)
        return pack_inference(Inference(tuple(inputs), outputs, self.parameters))


@dataclass(frozen=True, slots=True)
class CallResponse:
    """A response of another model; the outputs are this process's own."""

    outputs: list[Input]
    parameters: dict[str, Any]


def copied(response: Inferred, mappings: Mappings, model: str) -> CallResponse | ShmserveError:
    """A response of `model` with outputs of this process's own, or why one cannot be had."""
    outputs: list[Input] = []
    for ref in response.outputs:
        data = ref.data
        try:
            own = bytearray(data if isinstance(data, bytes) else mappings.view(data))
        except ShmserveError as error:
            return error
        outputs.append(Input(ref.name, ref.datatype, ref.shape, memoryview(own), model=model))
    return CallResponse(outputs, response.parameters)


def place(inputs: Sequence[CallInput], memory: LentMemory) -> PlacedInputs:
    """The inputs as they travel, large ones in `memory`. Raises Unavailable when that is full."""
    loose = sum(len(item.data) for item in inputs if not isinstance(item.data, Range))
    refs: list[TensorRef] = []
    placed = PlacedInputs(refs, [])
    try:
        for item in inputs:
            data = item.data
            if isinstance(data, Range):
                pass
            elif loose <= INLINE_LIMIT:
                data = bytes(data)
            else:
                block = memory.write(data)
                placed.blocks.append(block)
                data = block.place
            refs.append(TensorRef(item.name, item.datatype, item.shape, data))
    except ShmserveError:
        placed.release()
        raise
    return placed


@dataclass(slots=True)
class PlacedInputs:
    """Inputs as they travel, and the blocks that large ones lie in."""

    refs: Sequence[TensorRef]
    blocks: list[Block]

    def release(self) -> None:
        """No worker reads them any more; a second time does nothing."""
        while self.blocks:
            self.blocks.pop().release()
