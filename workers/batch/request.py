"""Requests and responses of backends: inputs are views, outputs are arrays.

Request   work (the scheduler's message), schema, batch_size
  └─ inputs: {name: Input}     name, datatype, shape and bytes; an array on demand
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
from shmserve.ipc.tensors.descriptors import Range
from shmserve.ipc.tensors.inference import OutputSchema, RequestSchema

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]


@dataclass(slots=True, eq=False)
class Copied:
    """The numbers of bytes that a worker has copied: of inputs, and of outputs."""

    inputs: int = 0
    outputs: int = 0

    def take(self) -> tuple[int, int]:
        """Return the bytes (inputs, outputs) that were copied since the last call."""
        taken = self.inputs, self.outputs
        self.inputs = self.outputs = 0
        return taken


@final
@dataclass(slots=True, eq=False)
class Input:
    """One input of one request.

    Shared memory may be read again, by the client or in a second execution. Arrays over it are
    therefore read-only, until the executor detects that the model writes into its inputs and calls
    `detach`.

    Attributes:
        name: The input's name.
        datatype: The protocol's datatype.
        shape: The shape that the model sees, with the batch dimension, after `reshape`.
        raw: The writable bytes: a copy from the message, a view of shared memory, or the stored
            state of a sequence.
        memory_range: The range of the bytes, if `raw` is a view of an arena or of a region.
        model: The name of the model, for error texts.
        on_device: Whether the bytes are in device memory.
        shared: Whether the bytes are shared, so that the model must not write into them.
        kept: Whether the bytes are a sequence's state that the model must not change.
        writable: Whether the bytes are private, so that the model may change them.
        batch: The bytes of the whole batch if `raw` is a part of them. The other parts belong to
            the other requests of the batch.
        array: The array that `numpy` has returned.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: Any
    memory_range: Range | None = None
    model: str = ""
    on_device: bool = False
    shared: bool = False
    kept: bool = False
    writable: bool = False
    batch: Any = None
    array: Array | None = None

    def detach(self) -> int:
        """Copy the bytes if they are shared, so that the model may write into them.

        Returns:
            The number of copied bytes.
        """
        if not self.shared:
            return 0
        self.raw = self.raw.clone() if self.on_device else memoryview(bytearray(self.raw))
        self.memory_range = None
        self.shared = False
        self.array = None
        return len(self.raw)

    def numpy(self) -> Array:
        """Return the tensor as a numpy array, a view if possible; the same array on every call.

        BYTES become an object array of `bytes`. BF16, which numpy lacks, becomes an array of uint16
        bit patterns.

        Raises:
            InvalidArgument: The lengths of the elements of a BYTES tensor are wrong.
        """
        if self.array is None:
            if not ITEM_SIZE[self.datatype]:
                self.array = decode_bytes(self.raw, self.shape, self.name, self.model)
                return self.array
            array: Array = np.ndarray(self.shape, STORED[self.datatype], self.raw)
            if self.memory_range is not None:
                # A client may choose any offset. Unaligned arrays are slow, and undefined behaviour
                # in compiled code.
                if not array.flags.aligned:
                    array = array.copy()
                else:
                    array.flags.writeable = False
            self.array = array
        return self.array

    def torch(self) -> torch.Tensor:
        """Return the tensor as a torch tensor, a view if possible; not for BYTES.

        Callers must not write into the tensor: torch does not support read-only tensors.
        """
        from shmserve.workers.memory.tensors import as_torch

        return as_torch(self.datatype, self.shape, self.raw)


class Output(NamedTuple):
    """One output of one request.

    Attributes:
        name: The output's name.
        datatype: The protocol's datatype.
        data: A numpy array or a torch tensor, with the batch dimension. BYTES: an object array of
            bytes or str, or numpy's S and U types. BF16: a torch tensor, or uint16 bit patterns.
    """

    name: str
    datatype: str
    data: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the array."""
        return tuple(self.data.shape)


@dataclass(slots=True)
class Response:
    """The response to one request.

    Attributes:
        outputs: The outputs.
        parameters: The parameters.
        error: The error for the client instead of outputs, or None.
        rescheduled: Whether the model asks to execute the request again instead of a response.
        states: Outputs for the next request of the sequence.
    """

    outputs: list[Output] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    error: ShmserveError | None = None
    rescheduled: bool = False
    states: list[Output] = field(default_factory=list)


def never_cancelled() -> bool:
    """Return False, for a request that cannot be cancelled."""
    return False


@final
@dataclass(slots=True, eq=False)
class Request:
    """One request of a batch.

    Attributes:
        work: The scheduler's message.
        schema: The unpacked schema of the request.
        batch_size: The rows of each input; 0 if the model does not batch.
        inputs: The inputs by name.
        requested: The requested outputs by name, or all outputs of the model if the client named
            none. Requests with equal schemas share this dictionary.
        memory_ranges: The ranges of the outputs that are written to clients' memory, by name.
        is_cancelled: Reads pending messages and returns whether the request was cancelled; safe in
            any thread.
        known: The schema and the destinations of outputs by kind of response. Requests with equal
            schemas share this cache.
        aliased: Whether an output is written over an input.
        byte_size: The total bytes of the inputs.
        shared: Whether an input may be in shared memory.
        states: The names of the outputs that the model keeps for the next request of its sequence.
    """

    work: Work
    schema: RequestSchema
    batch_size: int
    inputs: dict[str, Input]
    requested: dict[str, OutputSchema]
    memory_ranges: dict[str, Range] = field(default_factory=dict)
    is_cancelled: Callable[[], bool] = never_cancelled
    known: dict[Any, Any] = field(default_factory=dict)
    aliased: bool = False
    byte_size: int = 0
    shared: bool = False
    states: tuple[str, ...] = ()

    def returned(self, array: Array) -> Range | None:
        """Return the memory range of the input that an array was returned for by `Input.numpy`.

        Returns:
            The range, or None if the array is no input's or an output is written over an input.
        """
        if self.aliased:
            return None
        return next(
            (item.memory_range for item in self.inputs.values() if item.array is array), None
        )
