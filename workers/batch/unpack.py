"""Unpacking: requests with zero-copy views of their inputs, checked against the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shmserve.errors import InvalidArgument
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages.inference import Work
from shmserve.ipc.model_spec import TensorSpec
from shmserve.ipc.tensors.descriptors import Range, unpack_range
from shmserve.ipc.tensors.inference import OutputSchema, RequestSchema, TensorSchema, overlap
from shmserve.ipc.tensors.schemas import Schemas
from shmserve.ipc.tensors.signature import Signature, id_prefix
from shmserve.ipc.transport.records import MalformedMessage
from shmserve.workers.batch.request import Copied, Input, Request, never_cancelled

_NO_RANGES: dict[str, Range] = {}


def reshape(
    shape: tuple[int, ...], dims: tuple[int, ...], target: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Return a shape that matches `dims`, reshaped to `target` with variable sizes in order.

    >>> reshape((5, 7), (-1, 7), (7, -1))
    (7, 5)
    """
    if target is None:
        return shape
    sizes = iter([size for size, dim in zip(shape, dims, strict=True) if dim == -1])
    return tuple(next(sizes) if dim == -1 else dim for dim in target)


class _Kind:
    """The properties that one model derives from the schema of a request.

    Attributes:
        schema: The unpacked schema.
        inputs: The inputs, with the shapes that the model receives.
        input_count: The number of inputs.
        batch_size: The rows of each input; 0 if the model does not batch.
        requested: The requested outputs by name.
        placed: The names of the requested outputs that have a range in the data.
        strings: The names of the BYTES inputs.
        known: The cache of responses to such requests (see `Request.known`).
    """

    __slots__ = (
        "batch_size",
        "input_count",
        "inputs",
        "known",
        "placed",
        "requested",
        "schema",
        "strings",
    )

    def __init__(
        self,
        schema: RequestSchema,
        inputs: list[TensorSchema],
        batch_size: int,
        requested: dict[str, OutputSchema],
    ) -> None:
        self.schema = schema
        self.inputs = inputs
        self.input_count = len(inputs)
        self.batch_size = batch_size
        self.requested = requested
        self.placed = [output.name for output in schema.outputs if output.placed]
        self.strings = [tensor.name for tensor in inputs if tensor.datatype == "BYTES"]
        self.known: dict[Any, Any] = {}


@dataclass(eq=False)
class Unpacker:
    """A converter of `Work` messages to the `Request`s of one model.

    With `device_inputs`, inputs in device memory stay there. Otherwise they are copied to the host.
    """

    _signature: Signature
    _mappings: Mappings
    _copied: Copied = field(default_factory=Copied)
    _device_inputs: bool = False

    def __post_init__(self) -> None:
        self._batched = self._signature.max_batch_size > 0
        outputs = self._signature.outputs
        self._all_outputs = {name: OutputSchema(name, False, False) for name in outputs}
        self._kinds = Schemas(self._derive)

    def request(
        self,
        work: Work,
        is_cancelled: Callable[[], bool] = never_cancelled,
    ) -> Request:
        """Return one request of a batch.

        Raises:
            MalformedMessage: The message does not contain a request.
            InvalidArgument: The request does not fit the model, or names memory that is too small.
            Unavailable: The memory of a tensor no longer exists.
        """
        known, schema = self._kinds.known, work.schema
        kind = known[schema] if schema in known else self._kinds.learn(schema)
        data = work.data
        if len(data) != kind.schema.count:
            raise MalformedMessage("a request's data do not match its schema")
        inputs: dict[str, Input] = {}
        model = self._signature.name
        byte_size = 0
        shared: list[Range] = []
        for (name, datatype, shape, expected), raw in zip(kind.inputs, data, strict=False):
            if type(raw) is bytes:
                # Copied, so that the model may write into it.
                own = memoryview(bytearray(raw))
                size = own.nbytes
                if expected not in (size, -1):
                    raise self._wrong_size(name, expected, size)
                self._copied.inputs += size
                inputs[name] = Input(name, datatype, shape, own, None, model)
            else:
                memory_range = unpack_range(raw)
                size = memory_range.byte_size
                if expected not in (size, -1):
                    raise self._wrong_size(name, expected, size)
                inputs[name] = self._placed(name, datatype, shape, memory_range)
                shared += [memory_range]
            byte_size += size
        if kind.strings:
            _check_elements(inputs, kind.strings, work.request_id)
        memory_ranges, aliased = _NO_RANGES, False
        if kind.placed:
            outputs = map(unpack_range, data[kind.input_count :])
            memory_ranges = dict(zip(kind.placed, outputs, strict=True))
            aliased = overlap(shared, memory_ranges.values())
        return Request(
            work,
            kind.schema,
            kind.batch_size,
            inputs,
            kind.requested,
            memory_ranges,
            is_cancelled,
            kind.known,
            aliased,
            byte_size,
            bool(shared),
        )

    def _derive(self, packed: bytes) -> _Kind:
        """Return the derived properties of a packed schema. Raises the exceptions of `request`."""
        schema = RequestSchema(packed)
        inputs: list[TensorSchema] = []
        batch_size = 0
        for tensor in schema.inputs:
            inputs.append(self._as_model_sees(tensor))
            if self._batched:
                batch_size = tensor.shape[0]
        requested = self._all_outputs
        if schema.outputs:
            requested = {output.name: output for output in schema.outputs}
        return _Kind(schema, inputs, batch_size, requested)

    def _as_model_sees(self, tensor: TensorSchema) -> TensorSchema:
        """Return an input with the shape that the model receives.

        Raises:
            InvalidArgument: The model has no such input.
        """
        spec = self._signature.inputs.get(tensor.name)
        shape = tensor.shape
        if spec is None or (self._batched and not shape):
            raise InvalidArgument(
                f"unexpected inference input '{tensor.name}' for model '{self._signature.name}'"
            )
        if spec.reshape is None:
            return tensor
        return tensor._replace(shape=self._model_shape(shape, spec))

    def _wrong_size(self, name: str, expected: int, got: int) -> InvalidArgument:
        return InvalidArgument(
            f"input byte size mismatch for input '{name}' for model '{self._signature.name}'. "
            f"Expected {expected}, got {got}"
        )

    def _placed(self, name: str, datatype: str, shape: tuple[int, ...], data: Range) -> Input:
        """Return the input in a memory range."""
        memory_range: Range | None = None
        on_device = shared = False
        if data.memory.copied:
            raw = self._mappings.read(data)
            self._copied.inputs += len(raw)
        else:
            memory_range = data
            raw = self._mappings.view(data)
            shared = datatype != "BYTES"
            on_device = data.memory.cuda is not None
            if on_device and not (shared and self._device_inputs):
                from shmserve.workers.memory.tensors import to_host

                self._copied.inputs += len(raw)
                raw, memory_range = to_host(raw), None
                on_device = shared = False
        model = self._signature.name
        return Input(name, datatype, shape, raw, memory_range, model, on_device, shared)

    def _model_shape(self, shape: tuple[int, ...], spec: TensorSpec) -> tuple[int, ...]:
        if self._batched:
            return (shape[0], *reshape(shape[1:], spec.dims, spec.reshape))
        return reshape(shape, spec.dims, spec.reshape)


def _check_elements(inputs: dict[str, Input], names: Sequence[str], request_id: str) -> None:
    """Check the strings of all BYTES inputs before the batch runs, so that only this request fails.

    Raises:
        InvalidArgument: The lengths of an input's elements do not match its byte size.
    """
    wrong: list[str] = []
    for name in names:
        try:
            inputs[name].numpy()
        except InvalidArgument as error:
            wrong.append(error.message)
    if wrong:
        raise InvalidArgument(id_prefix(request_id) + "; ".join(wrong))
