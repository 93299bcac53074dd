"""Inference requests and responses, as values and as the schema and data of messages.

    request schema   [[name, datatype, shape], ...], [[name, kind], ...], parameters
    request data     the bytes or range of each input; the range of each output that has one
    response schema  [[name, datatype, shape], ...], parameters
    response data    the bytes or range of each output

Ranges are packed by `descriptors.pack_range`. The properties of a single request (id, sequence,
timeouts) are separate fields of `Submit` and `Work`.

The sender packs a schema once for all messages with the same names, datatypes, shapes and
parameters. A receiver caches what it derives from a schema by the schema's bytes:

    entry = schemas[message.schema]
    for tensor, data in zip(entry.inputs, message.data): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from typing import Any, Generic, NamedTuple, TypeVar

import msgpack

from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.descriptors import Range, TensorRef, pack_range, unpack_range
from shmserve.ipc.transport.frames import MalformedMessage, Record

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

# A request or response with at most this many tensor bytes contains them in its messages. Below
# this size, copying through two sockets costs less than an arena allocation and a release message.
INLINE_LIMIT = 16 * 1024

# The maximum number of inputs, of outputs and of parameters of a request or response. A process
# handles this number in about 10 ms; millions would block the process for seconds.
MAX_MEMBERS = 4096

# Bits of `Submit.flags`: the request is the first or the last one of its sequence.
SEQUENCE_START, SEQUENCE_END = 1, 2
LONGEST_CORRELATION_ID = 128  # maximum number of characters of a correlation id

# The `kind` of an output in a schema. The server chooses the memory of the output, or the client
# gives its range. With the last kind, an output that is an unchanged input may also stay in the
# memory of the input.
_ANYWHERE, _PLACED, _PLACED_OR_INPUT = 0, 1, 2

_MAX_SCHEMAS = 256
# In bytes. Longer schemas are not cached, because a local client could fill the cache with them.
_MAX_CACHED_SCHEMA_SIZE = 4096

_PACKER = msgpack.Packer()  # creating a packer takes as long as packing a request

# A schema and its data, as messages carry them.
Packed = tuple[bytes, list[Any]]


class RequestedOutput(Record):
    """An output requested by the client.

    Attributes:
        name: The output's name.
        memory_range: The memory range that its bytes are written to, or None.
        may_reuse_input: Whether an output that is identical to an input may be returned as the
            range of that input.
    """

    name: str
    memory_range: Range | None = None
    may_reuse_input: bool = False  # whether an input may be returned as this output


class Inference(Record):
    """The content of an inference request. Empty `outputs` request all outputs of the model."""

    inputs: tuple[TensorRef, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)


def has_overlap(inputs: Iterable[Range], outputs: Iterable[Range]) -> bool:
    """Return whether an output is written over an input.

    The execution of a request with overlapping memory overwrites its inputs, so the request can run
    only once. The request fails if its scheduler is lost after the execution may have started. An
    output of such a request is never returned as the range of an input, either.
    """
    input_ranges = list(inputs)
    for output in outputs:
        start, end = output.offset, output.offset + output.byte_size
        for memory_range in input_ranges:
            is_disjoint = (
                end <= memory_range.offset or memory_range.offset + memory_range.byte_size <= start
            )
            if not is_disjoint and memory_range.memory.object == output.memory.object:
                return True
    return False


class Inferred(Record):
    """The response to an `Inference`. An output in the client's memory is returned as its range."""

    outputs: tuple[TensorRef, ...]
    parameters: dict[str, Any] = field(default_factory=dict)


class TensorSchema(NamedTuple):
    """A tensor without its data. `byte_size` is -1 if it is not known, as in schemas of BYTES."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    byte_size: int

    def ref(self, data: bytes | Range) -> TensorRef:
        """Return the tensor with this data."""
        return TensorRef(self.name, self.datatype, self.shape, data)


class OutputSchema(NamedTuple):
    """A requested output without its range; `has_range` is whether the data have its range."""

    name: str
    has_range: bool  # whether the data have its range
    may_reuse_input: bool  # whether an input may be returned as this output


class RequestSchema:
    """An unpacked request schema, which requests that differ only in their data have in common.

    Attributes:
        inputs: Names, datatypes and shapes of the inputs.
        outputs: The requested outputs; empty for all outputs of the model.
        parameters: The request's parameters.
        data_count: The number of elements in the data: one per input, one per output with a range.
    """

    __slots__ = ("data_count", "inputs", "outputs", "parameters")

    def __init__(self, schema: bytes) -> None:
        """Unpack a schema; raise MalformedMessage if it is no request schema."""
        try:
            inputs, outputs, parameters = msgpack.unpackb(schema)
            self.inputs = tuple(map(_tensor_schema, inputs))
            self.outputs = tuple(map(_output_schema, outputs))
            self.parameters: dict[str, Any] = _checked_parameters(parameters)
        except MalformedMessage:
            raise
        except Exception as error:  # msgpack and unpacking raise many types for malformed bytes
            raise MalformedMessage(f"invalid schema of a request: {error}") from error
        self.data_count = len(self.inputs) + sum(output.has_range for output in self.outputs)

    def inference(self, data: Sequence[Any]) -> Inference:
        """Return the request with these data.

        Raises:
            MalformedMessage: The data do not match the schema.
        """
        if len(data) != self.data_count:
            raise MalformedMessage(f"expected data of {self.data_count} tensors, got {len(data)}")
        parts = iter(data)
        inputs = _tensors(self.inputs, parts)
        if not self.outputs:
            return Inference(inputs, (), self.parameters)
        outputs = tuple(
            RequestedOutput(name, unpack_range(next(parts)) if has_range else None, may_reuse_input)
            for name, has_range, may_reuse_input in self.outputs
        )
        return Inference(inputs, outputs, self.parameters)


class ResponseSchema:
    """An unpacked response schema: outputs without their data, and parameters."""

    __slots__ = ("outputs", "parameters")

    def __init__(self, schema: bytes) -> None:
        """Unpack a schema; raise MalformedMessage if it is no response schema."""
        try:
            outputs, parameters = msgpack.unpackb(schema)
            self.outputs = tuple(map(_tensor_schema, outputs))
            self.parameters: dict[str, Any] = parameters
        except MalformedMessage:
            raise
        except Exception as error:
            raise MalformedMessage(f"invalid schema of a response: {error}") from error

    def inferred(self, data: Sequence[Any]) -> Inferred:
        """Return the response with these data.

        Raises:
            MalformedMessage: The data do not match the schema.
        """
        if len(data) != len(self.outputs):
            raise MalformedMessage(f"expected data of {len(self.outputs)} outputs, got {len(data)}")
        return Inferred(_tensors(self.outputs, data), self.parameters)


def _tensor_schema(packed_schema: Any) -> TensorSchema:
    name, datatype, shape = packed_schema
    if type(name) is not str or datatype not in ITEM_SIZE or type(shape) is not list:
        raise MalformedMessage(f"a tensor is not [name, datatype, shape]: {packed_schema!r:.80}")
    for dim in shape:
        if type(dim) is not int or dim < 0:
            raise MalformedMessage(f"a tensor's dimension must be an integer >= 0, got {dim!r:.20}")
    return tensor_schema(name, datatype, tuple(shape))


def tensor_schema(name: str, datatype: str, shape: tuple[int, ...]) -> TensorSchema:
    """Return the schema of a tensor, including its byte size."""
    itemsize = ITEM_SIZE[datatype]
    return TensorSchema(name, datatype, shape, element_count(shape) * itemsize if itemsize else -1)


def _output_schema(packed_output: Any) -> OutputSchema:
    name, placement = packed_output
    if type(name) is not str or placement not in (_ANYWHERE, _PLACED, _PLACED_OR_INPUT):
        raise MalformedMessage(f"a requested output is not [name, kind]: {packed_output!r:.80}")
    return OutputSchema(name, placement != _ANYWHERE, placement == _PLACED_OR_INPUT)


def _checked_parameters(parameters: Any) -> dict[str, Any]:
    if type(parameters) is not dict or not all(type(key) is str for key in parameters):
        raise MalformedMessage(f"parameters must be a map with text keys, got {parameters!r:.80}")
    return parameters


def _tensors(schemas: Sequence[TensorSchema], data: Iterable[Any]) -> tuple[TensorRef, ...]:
    return tuple(
        [
            TensorRef(name, datatype, shape, item if type(item) is bytes else unpack_range(item))
            for (name, datatype, shape, _), item in zip(schemas, data, strict=False)
        ]
    )


def pack_request_schema(
    inputs: Iterable[TensorRef],
    outputs: Iterable[tuple[str, bool, bool]],
    parameters: dict[str, Any],
) -> bytes:
    """Return the packed schema of requests with these inputs, outputs and parameters.

    Args:
        inputs: The inputs; their data are ignored.
        outputs: The fields of the `OutputSchema` of each requested output; empty for all outputs of
            the model.
        parameters: The parameters.
    """
    tensors = [(tensor.name, tensor.datatype, tensor.shape) for tensor in inputs]
    kinds = (_PLACED, _PLACED_OR_INPUT)
    output_kinds = [(n, kinds[reuse] if placed else _ANYWHERE) for n, placed, reuse in outputs]
    packed_schema: bytes = _PACKER.pack((tensors, output_kinds, parameters))
    return packed_schema


def pack_inference(request: Inference) -> Packed:
    """Return the schema and data of a request, for `Submit`."""
    data = pack_data(tensor.data for tensor in request.inputs)
    data += [pack_range(o.memory_range) for o in request.outputs if o.memory_range is not None]
    outputs = [(o.name, o.memory_range is not None, o.may_reuse_input) for o in request.outputs]
    return pack_request_schema(request.inputs, outputs, request.parameters), data


def unpack_inference(schema: bytes, data: Sequence[Any]) -> Inference:
    """Return the request with this schema and these data.

    Raises:
        MalformedMessage: The schema is malformed, or the data do not match it.
    """
    return RequestSchema(schema).inference(data)


def pack_response_schema(outputs: Iterable[TensorRef], parameters: dict[str, Any]) -> bytes:
    """Return the schema of a response; the data of `outputs` are ignored."""
    tensors = [(tensor.name, tensor.datatype, tensor.shape) for tensor in outputs]
    packed_schema: bytes = _PACKER.pack((tensors, parameters))
    return packed_schema


def pack_inferred(response: Inferred) -> Packed:
    """Return the schema and data of a response, for `Finished`."""
    schema = pack_response_schema(response.outputs, response.parameters)
    return schema, pack_data(tensor.data for tensor in response.outputs)


def unpack_inferred(schema: bytes, data: Sequence[Any]) -> Inferred:
    """Return the response with this schema and these data.

    Raises:
        MalformedMessage: The schema is malformed, or the data do not match it.
    """
    return ResponseSchema(schema).inferred(data)


def pack_data(data: Iterable[bytes | Range]) -> list[Any]:
    """Return the data of tensors as messages contain it: bytes, and packed ranges."""
    return [item if isinstance(item, bytes) else pack_range(item) for item in data]


def unpack_ranges(data: Iterable[Any]) -> list[Range]:
    """Return the memory ranges in a message's data.

    Raises:
        MalformedMessage: An element is neither bytes nor a valid range.
    """
    return [unpack_range(item) for item in data if type(item) is not bytes]


def byte_size_of(data: Iterable[Any]) -> int:
    """Return the number of tensor bytes in a message's data, inline and in memory ranges."""
    return sum([len(item) if type(item) is bytes else item[2] for item in data])


def inline_size_of(data: Iterable[Any]) -> int:
    """Return the number of tensor bytes inside a message's data."""
    return sum([len(item) for item in data if type(item) is bytes])


def runs_once(schema: bytes, data: Sequence[Any]) -> bool:
    """Return whether a request can run only once: an output overwrites an input (`has_overlap`).

    The result is False for a malformed request, which fails on every worker.
    """
    if sum([type(item) is not bytes for item in data]) < 2:
        return False
    try:
        request = unpack_inference(schema, data)
    except MalformedMessage:
        return False
    inputs = [tensor.data for tensor in request.inputs if isinstance(tensor.data, Range)]
    return has_overlap(inputs, [o.memory_range for o in request.outputs if o.memory_range])


class BoundedCache(Generic[K, V]):
    """A cache of at most `capacity` values by key.

    When the cache is full, all values are evicted, which is the cheapest policy. With `on_evict`,
    only the oldest value is evicted, and `on_evict` is called with each evicted value. Thread-safe.
    """

    __slots__ = ("_capacity", "_on_evict", "_seen_keys", "_values", "find")

    def __init__(self, capacity: int, on_evict: Callable[[V], None] | None = None) -> None:
        self._values: dict[K, V] = {}
        self._seen_keys: set[K] = set()
        self._capacity = capacity
        self._on_evict = on_evict
        # Returns the value of a key, or None. The dictionary's own method avoids a Python call.
        self.find: Callable[[K], V | None] = self._values.get

    def __len__(self) -> int:
        return len(self._values)

    def mark_seen(self, key: K) -> bool:
        """Record a key, and return whether it was seen before.

        A caller that derives values only for repeated keys saves the work for keys used once.
        """
        if key in self._values or key in self._seen_keys:
            return True
        if len(self._seen_keys) >= self._capacity:
            self._seen_keys.clear()
        self._seen_keys.add(key)
        return False

    def store(self, key: K, value: V) -> None:
        """Store or replace the value of a key."""
        self._evict_if_full(key)
        self._values[key] = value

    def store_if_absent(self, key: K, value: V) -> V:
        """Store a value unless another thread has stored one; return the stored one."""
        self._evict_if_full(key)
        return self._values.setdefault(key, value)

    def remove(self, key: K) -> None:
        """Remove the value of a key, if there is one."""
        self._values.pop(key, None)

    def clear(self) -> None:
        """Evict all values."""
        for key in list(self._values):
            self._evict(key)

    def _evict_if_full(self, key: K) -> None:
        if len(self._values) < self._capacity or key in self._values:
            return
        if self._on_evict is None:
            self.clear()
        else:
            keys = list(self._values)
            for oldest_key in keys[: len(keys) - self._capacity + 1]:
                self._evict(oldest_key)

    def _evict(self, key: K) -> None:
        value = self._values.pop(key, None)
        if value is not None and self._on_evict is not None:
            self._on_evict(value)


class Schemas(dict[bytes, T]):
    """A cache of the values that a process derives from received schemas, by packed schema.

    `schemas[schema]` derives a missing value, and propagates the exceptions of `derive`.

    Args:
        derive: Returns the value of a packed schema.
        capacity: The capacity. A full cache is cleared.
    """

    __slots__ = ("_capacity", "_derive")

    def __init__(self, derive: Callable[[bytes], T], capacity: int = _MAX_SCHEMAS) -> None:
        self._derive = derive
        self._capacity = capacity

    def __missing__(self, schema: bytes) -> T:
        """Derive and store the value of a schema."""
        value = self._derive(schema)
        if len(schema) <= _MAX_CACHED_SCHEMA_SIZE:
            if len(self) >= self._capacity:
                self.clear()
            self[schema] = value
        return value
