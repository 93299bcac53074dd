"""Requests and responses of backends: inputs are views, outputs are arrays.

An `Unpacker` creates a request from the scheduler's message, and checks it against the model.

Request   work (the scheduler's message), schema, batch_size
  └─ inputs: {name: Input}     name, datatype, shape and bytes; an array on demand
Response    outputs: [Output(name, datatype, data)] and parameters, or an error
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.inference import Work
from shmserve.ipc.tensors.arrays import STORAGE_DTYPES, decode_bytes
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import Range, unpack_range
from shmserve.ipc.tensors.schemas import (
    OutputSchema,
    RequestSchema,
    Schemas,
    TensorSchema,
    has_overlap,
)
from shmserve.ipc.tensors.signature import Signature, id_prefix, model_shape
from shmserve.ipc.transport.frames import MalformedMessage

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]


@dataclass(slots=True, eq=False)
class CopyCounter:
    """A counter of the bytes of inputs and of outputs that a worker has copied."""

    inputs: int = 0  # bytes
    outputs: int = 0  # bytes

    def take(self) -> tuple[int, int]:
        """Return the bytes (inputs, outputs) that were copied since the last call."""
        counts = self.inputs, self.outputs
        self.inputs = self.outputs = 0
        return counts


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
        is_shared: Whether other processes use the bytes, too, so that the model must not write
            into them.
        is_state: Whether the bytes are a sequence's state that the model must not change.
        is_private: Whether only the model uses the bytes, so that it may change them.
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
    is_shared: bool = False
    is_state: bool = False
    is_private: bool = False
    batch: Any = None
    array: Array | None = None

    def detach(self) -> int:
        """Copy the bytes if they are shared, so that the model may write into the copy.

        Returns:
            The number of copied bytes.
        """
        if not self.is_shared:
            return 0
        self.raw = self.raw.clone() if self.on_device else memoryview(bytearray(self.raw))
        self.memory_range = None
        self.is_shared = False
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
            array: Array = np.ndarray(self.shape, STORAGE_DTYPES[self.datatype], self.raw)
            if self.memory_range is not None:
                # A client may choose any offset. Unaligned arrays are slow, and undefined behaviour
                # in compiled code.
                if not array.flags.aligned:
                    array = array.copy()
                else:
                    array.flags.writeable = False
            self.array = array
        return self.array

    def is_text(self) -> bool:
        """Check, without a copy, whether a BYTES tensor is one element with a valid length."""
        length = int.from_bytes(self.raw[:4], "little")
        return element_count(self.shape) == 1 and length == len(self.raw) - 4

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

    @classmethod
    def of_values(cls, name: str, datatype: str, values: Iterable[Any]) -> Output:
        """Return an output with one dimension; the values are Python's (BYTES: bytes or str)."""
        return cls(name, datatype, np.array(list(values), STORAGE_DTYPES[datatype]))

    @classmethod
    def select(
        cls, values: Mapping[str, tuple[str, Iterable[Any]]], requested_outputs: Collection[str]
    ) -> list[Output]:
        """Return the requested outputs of a response, given the datatype and values of each name.

        Values of other outputs are not iterated over, so generators compute requested values only.
        """
        return [cls.of_values(name, *values[name]) for name in values if name in requested_outputs]

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
        is_rescheduled: Whether the model asks to execute the request again instead of a response.
        states: Outputs for the next request of the sequence.
    """

    outputs: list[Output] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    error: ShmserveError | None = None
    is_rescheduled: bool = False
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
        requested_outputs: The requested outputs by name, or all outputs of the model if the client
            named none. Requests with equal schemas share this dictionary.
        memory_ranges: The ranges of the outputs that are written to clients' memory, by name.
        is_cancelled: Reads pending messages and returns whether the request was cancelled; safe in
            any thread.
        response_templates: A cache of (schema, destinations of the outputs), by the properties of
            a response (see scatter.py). Requests with equal schemas share this cache.
        is_aliased: Whether an output is written over an input.
        byte_size: The total bytes of the inputs.
        has_shared_inputs: Whether an input may be in shared memory.
        states: The names of the outputs that the model keeps for the next request of its sequence.
    """

    work: Work
    schema: RequestSchema
    batch_size: int
    inputs: dict[str, Input]
    requested_outputs: dict[str, OutputSchema]
    memory_ranges: dict[str, Range] = field(default_factory=dict)
    is_cancelled: Callable[[], bool] = never_cancelled
    response_templates: dict[Any, Any] = field(default_factory=dict)
    is_aliased: bool = False
    byte_size: int = 0
    has_shared_inputs: bool = False
    states: tuple[str, ...] = ()

    def range_of_input(self, array: Array) -> Range | None:
        """Return the memory range of the input whose method `numpy` has returned this array.

        Returns:
            The range, or None if no input has this array, or an output is written over an input.
        """
        if self.is_aliased:
            return None
        return next((i.memory_range for i in self.inputs.values() if i.array is array), None)


_NO_RANGES: dict[str, Range] = {}


@dataclass(slots=True, eq=False)
class _RequestProperties:
    """The properties of a request that its schema and the model determine.

    Attributes:
        schema: The unpacked schema.
        inputs: The inputs, with the shapes that the model receives.
        batch_size: The rows of each input; 0 if the model does not batch.
        requested_outputs: The requested outputs by name.
        outputs_with_range: The names of the requested outputs that have a range in the data.
        string_inputs: The names of the BYTES inputs.
        response_templates: The cache for requests with this schema (see
            `Request.response_templates`).
    """

    schema: RequestSchema
    inputs: list[TensorSchema]
    batch_size: int
    requested_outputs: dict[str, OutputSchema]
    outputs_with_range: list[str]
    string_inputs: list[str]
    response_templates: dict[Any, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Unpacker:
    """A converter of `Work` messages to the `Request`s of one model.

    With `_device_inputs`, inputs in device memory stay there. Otherwise they are copied to the
    host.
    """

    _signature: Signature
    _mappings: Mappings
    _copy_counter: CopyCounter = field(default_factory=CopyCounter)
    _device_inputs: bool = False  # pass device memory without a copy

    def __post_init__(self) -> None:
        self._supports_batching = self._signature.max_batch_size > 0
        outputs = self._signature.outputs
        self._all_outputs = {name: OutputSchema(name, False, False) for name in outputs}
        self._properties_by_schema = Schemas(self._derive_properties)

    def request(
        self,
        work: Work,
        is_cancelled: Callable[[], bool] = never_cancelled,
        *,
        copies_text: bool = True,
    ) -> Request:
        """Return one request of a batch.

        Args:
            work: The request.
            is_cancelled: Returns whether the request was cancelled.
            copies_text: Whether a BYTES input of one element is copied to check it. Otherwise its
                client may still change its length, and `numpy` raises the error.

        Raises:
            MalformedMessage: The message does not contain a request.
            InvalidArgument: The request does not fit the model, or names memory that is too small.
            Unavailable: The memory of a tensor no longer exists.
        """
        properties, data = self._properties_by_schema[work.schema], work.data
        if len(data) != properties.schema.data_count:
            raise MalformedMessage(
                f"expected {properties.schema.data_count} data entries, got {len(data)}"
            )
        inputs: dict[str, Input] = {}
        model = self._signature.name
        byte_size = 0
        shared_ranges: list[Range] = []
        for (name, datatype, shape, expected_size), raw in zip(
            properties.inputs, data, strict=False
        ):
            if type(raw) is bytes:
                # Copied, so that the model may write into it.
                input_bytes = memoryview(bytearray(raw))
                size = input_bytes.nbytes
                if expected_size not in (size, -1):
                    raise self._size_error(name, expected_size, size)
                self._copy_counter.inputs += size
                inputs[name] = Input(name, datatype, shape, input_bytes, None, model)
            else:
                memory_range = unpack_range(raw)
                size = memory_range.byte_size
                if expected_size not in (size, -1):
                    raise self._size_error(name, expected_size, size)
                inputs[name] = self._input_in_range(name, datatype, shape, memory_range)
                shared_ranges += [memory_range]
            byte_size += size
        if properties.string_inputs:
            names = properties.string_inputs
            if not copies_text:
                names = [name for name in names if not inputs[name].is_text()]
            _check_elements(inputs, names, work.request_id)
        memory_ranges, is_aliased = _NO_RANGES, False
        if properties.outputs_with_range:
            outputs = map(unpack_range, data[len(properties.inputs) :])
            memory_ranges = dict(zip(properties.outputs_with_range, outputs, strict=True))
            is_aliased = has_overlap(shared_ranges, memory_ranges.values())
        return Request(
            work,
            properties.schema,
            properties.batch_size,
            inputs,
            properties.requested_outputs,
            memory_ranges,
            is_cancelled,
            properties.response_templates,
            is_aliased,
            byte_size,
            bool(shared_ranges),
        )

    def _derive_properties(self, packed_schema: bytes) -> _RequestProperties:
        """Return the derived properties of a packed schema. Raises errors like `request`."""
        schema = RequestSchema(packed_schema)
        inputs: list[TensorSchema] = []
        batch_size = 0
        for tensor in schema.inputs:
            inputs.append(self._model_schema(tensor))
            if self._supports_batching:
                batch_size = tensor.shape[0]
        requested_outputs = self._all_outputs
        if schema.outputs:
            requested_outputs = {output.name: output for output in schema.outputs}
        outputs_with_range = [output.name for output in schema.outputs if output.has_range]
        string_inputs = [tensor.name for tensor in inputs if tensor.datatype == "BYTES"]
        outputs = (requested_outputs, outputs_with_range)
        return _RequestProperties(schema, inputs, batch_size, *outputs, string_inputs)

    def _model_schema(self, tensor: TensorSchema) -> TensorSchema:
        """Return an input with the shape that the model receives.

        Raises:
            InvalidArgument: The model has no such input.
        """
        spec = self._signature.inputs.get(tensor.name)
        shape = tensor.shape
        if spec is None or (self._supports_batching and not shape):
            text = f"unexpected inference input '{tensor.name}' for model '{self._signature.name}'"
            raise InvalidArgument(text)
        if spec.reshape is None:
            return tensor
        return tensor._replace(shape=model_shape(spec, shape, self._supports_batching))

    def _size_error(self, name: str, expected_size: int, actual_size: int) -> InvalidArgument:
        return InvalidArgument(
            f"input byte size mismatch for input '{name}' for model '{self._signature.name}'. "
            f"Expected {expected_size}, got {actual_size}"
        )

    def _input_in_range(
        self, name: str, datatype: str, shape: tuple[int, ...], client_range: Range
    ) -> Input:
        """Return an input over a memory range, or over a copy if the model cannot use the range."""
        memory_range: Range | None = None
        on_device = is_shared = False
        if client_range.memory.copied:
            data = self._mappings.read(client_range)
            self._copy_counter.inputs += len(data)
        else:
            memory_range = client_range
            data = self._mappings.view(client_range)
            is_shared = datatype != "BYTES"
            on_device = client_range.memory.cuda is not None
            if on_device and not (is_shared and self._device_inputs):
                from shmserve.workers.memory.tensors import to_host

                self._copy_counter.inputs += len(data)
                data, memory_range = to_host(data), None
                on_device = is_shared = False
        model = self._signature.name
        return Input(name, datatype, shape, data, memory_range, model, on_device, is_shared)


def _check_elements(inputs: dict[str, Input], names: Sequence[str], request_id: str) -> None:
    """Check the strings of all BYTES inputs before the batch runs, so that only this request fails.

    Raises:
        InvalidArgument: The lengths of an input's elements do not match its byte size.
    """
    problems: list[str] = []
    for name in names:
        try:
            inputs[name].numpy()
        except InvalidArgument as error:
            problems.append(error.message)
    if problems:
        raise InvalidArgument(id_prefix(request_id) + "; ".join(problems))
