"""Requests and responses as backends have them: inputs are views, outputs arrays.

Request   work (as the scheduler sent it), schema, batch_size
  └─ inputs: {name: Input}     name, datatype, shape and bytes; an array when asked for
Response    outputs: [Output(name, datatype, data)] and parameters, or an error
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from shmserve.errors import ShmserveError
from shmserve.ipc.messages.inference import Work
from shmserve.ipc.tensors.arrays import STORED, decode_bytes
from shmserve.ipc.tensors.datatypes import ITEM_SIZE
from shmserve.ipc.tensors.descriptors import Place
from shmserve.ipc.tensors.inference import OutputSchema, RequestSchema

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]


@dataclass(slots=True, eq=False)
class Copied:
    """Bytes of tensors that a worker has copied: on their way to the model, and from it."""

    inputs: int = 0
    outputs: int = 0

    def take(self) -> tuple[int, int]:
        """The bytes (inputs, outputs) that were copied since the last call."""
        taken = self.inputs, self.outputs
        self.inputs = self.outputs = 0
        return taken


@final
@dataclass(slots=True, eq=False)
class Input:
    """One input of one request. `shape`: as the model sees it, batch dimension and `reshape` done.

    `raw` holds the bytes, `on_device` or in host memory, writable: a copy of those in the message,
    or (then `place` says where) a view of an arena or of a client's region. What lies there may be
    used again, by the client or for a second try, so arrays over it are read-only (`shared`) until
    the loop has found that the model writes into its inputs and calls `detach`.

    Of a sequence's state `raw` is where it is stored: `kept` where the model must not write there,
    `writable` where it may on purpose. `batch`: the bytes of the whole batch, where `raw` is this
    request's part of them and those of the batch's other requests are the rest. `array`: what
    `numpy` has given.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: Any
    place: Place | None = None
    model: str = ""
    on_device: bool = False
    shared: bool = False
    kept: bool = False
    writable: bool = False
    batch: Any = None
    array: Array | None = None

    def detach(self) -> int:
        """Make the bytes this process's own, which the model may write into; how many it copied."""
        if not self.shared:
            return 0
        self.raw = self.raw.clone() if self.on_device else memoryview(bytearray(self.raw))
        self.place = None
        self.shared = False
        self.array = None
        return len(self.raw)

    def numpy(self) -> Array:
        """The tensor as a numpy array: a view where that is possible, the same on every call.

        BYTES become an object array of `bytes`; BF16, which numpy lacks, comes as its uint16 bit
        patterns. Raises InvalidArgument for BYTES whose lengths do not add up.
        """
        if self.array is None:
            if not ITEM_SIZE[self.datatype]:
                self.array = decode_bytes(self.raw, self.shape, self.name, self.model)
                return self.array
            array: Array = np.ndarray(self.shape, STORED[self.datatype], self.raw)
            if self.place is not None:
                # A client may choose any offset; unaligned arrays are slow, and undefined for
                # compiled code.
                if not array.flags.aligned:
                    array = array.copy()
                else:
                    array.flags.writeable = False
            self.array = array
        return self.array

    def torch(self) -> torch.Tensor:
        """The tensor as a torch tensor where its bytes are, a view if possible. Not for BYTES.

        Writable whatever it lies in, because torch knows no read-only tensors: callers must not
        write into it.
        """
        from shmserve.workers.memory.tensors import as_torch

        return as_torch(self.datatype, self.shape, self.raw)


class Output(NamedTuple):
    """One output of one request: a numpy array or a torch tensor, batch dimension included.

    `datatype` is the protocol's name. BYTES: an object array of bytes or str, or numpy's S and U
    types. BF16: a torch tensor, or uint16 bit patterns.
    """

    name: str
    datatype: str
    data: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """As the array has it."""
        return tuple(self.data.shape)


@dataclass(slots=True)
class Response:
    """The response to one request: outputs and parameters, or an error that is for the client.
    `rescheduled`: none yet, the model asks for the request once more. `states` are outputs that are
    for the next request of its sequence."""

    outputs: list[Output] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    error: ShmserveError | None = None
    rescheduled: bool = False
    states: list[Output] = field(default_factory=list)


def never_cancelled() -> bool:
    """Of a request that nobody can cancel."""
    return False


@final
@dataclass(slots=True, eq=False)
class Request:
    """One request of a batch.

    Attributes:
        work: The request as the scheduler sent it.
        schema: Its constant part, unpacked.
        batch_size: Rows in each input; 0 when the model does not batch.
        inputs: Its inputs by name.
        requested: The requested outputs by name; all of the model's if the client named none.
            Requests with equal schemas share it.
        places: The memory ranges of the outputs that are written to clients' memory, by name.
        is_cancelled: Returns, in any thread, whether nobody waits for the response any more; takes
            the messages that have arrived until now.
        known: What follows from the types and shapes of a response's outputs; requests with equal
            schemas share it.
        aliased: An output is written over an input.
        byte_size: Bytes of all inputs together.
        shared: An input may lie in shared memory.
        states: The names of the outputs that the model keeps for the next request of its sequence.
    """

    work: Work
    schema: RequestSchema
    batch_size: int
    inputs: dict[str, Input]
    requested: dict[str, OutputSchema]
    places: dict[str, Place] = field(default_factory=dict)
    is_cancelled: Callable[[], bool] = never_cancelled
    known: dict[Any, Any] = field(default_factory=dict)
    aliased: bool = False
    byte_size: int = 0
    shared: bool = False
    states: tuple[str, ...] = ()

    def returned(self, array: Array) -> Place | None:
        """Return the place of the input whose own array this is; None if there is no such input,
        or an output is written over an input."""
        if self.aliased:
            return None
        return next((item.place for item in self.inputs.values() if item.array is array), None)
