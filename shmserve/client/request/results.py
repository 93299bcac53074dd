"""Conversion of a server's response to tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shmserve.client.memory.cuda import DeviceSegment
from shmserve.client.memory.segments import AnySegment, Segment
from shmserve.client.memory.views import MemoryLease, noop
from shmserve.client.request.arrays import to_torch
from shmserve.client.request.prepare import PackedRequest
from shmserve.errors import Internal, Released, Unsupported
from shmserve.ipc.memory.lent import release_messages
from shmserve.ipc.messages.inference import Finished, Release, Responded
from shmserve.ipc.tensors.arrays import STORAGE_DTYPES, decode_bytes
from shmserve.ipc.tensors.descriptors import Memory, Range, unpack_range
from shmserve.ipc.tensors.schemas import RequestSchema, TensorSchema, unpack_ranges
from shmserve.ipc.transport.frames import MalformedMessage


@dataclass(slots=True, eq=False)
class Result(Mapping[str, Any]):
    """A response: a mapping of the outputs' names to numpy arrays, or to torch tensors.

        with server.infer("blur", image=image) as result:
            brightest = result["output"].max()

    The outputs are torch tensors if an input was one. BF16 is uint16 in numpy, and a BYTES output
    is an object array of bytes.

    Large outputs are in shared memory, which remains allocated while an array refers to it.
    `release` or the end of a `with` block frees the memory immediately. Access to the outputs then
    raises Released.

    Attributes:
        parameters: The response's parameters by name.
    """

    _outputs: dict[str, Any]
    parameters: dict[str, Any]
    _lease: MemoryLease | None

    # `Mapping` would compare arrays, whose comparison has no truth value.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> Any:
        try:
            return self._outputs[name]
        except KeyError:
            raise KeyError(f"the result has no output {name!r}, only {[*self._outputs]}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def __repr__(self) -> str:
        return f"Result({self._outputs!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Result, (dict(self), self.parameters, None)  # the arrays are copied

    def release(self) -> None:
        """Free the memory of the outputs; access to them then raises Released. Idempotent."""
        if self._lease is not None:
            self._lease.released = True
            self._lease = None
        self._outputs = _Released()

    def __enter__(self) -> Result:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class _Released(dict[str, Any]):
    """The outputs of a released result; every access raises Released."""

    def __missing__(self, name: str) -> Any:
        raise Released("this result was released")

    def __iter__(self) -> Iterator[str]:
        raise Released("this result was released")

    def __len__(self) -> int:
        raise Released("this result was released")


class Reader(Protocol):
    """The interface of a request whose response is converted to a `Result`."""

    packed_request: PackedRequest

    def copy_range(self, memory_range: Range) -> bytearray:
        """Return a copy of a range in a worker's memory."""

    def release(self, messages: Sequence[Release]) -> None:
        """Notify the workers that the outputs have been read, so that they free the memory."""


def read(reader: Reader, message: Finished) -> Result:
    """Return the result of the single response to a request.

    This function frees the memory of the request, or keeps it until no array refers to it. After
    an error, the caller must free the memory.

    Raises:
        Unavailable: The worker's memory no longer exists.
        Unsupported: Only the server's own user may read the memory.
        Internal: The response lacks a requested output.
    """
    packed_request = reader.packed_request
    lease = None if packed_request.slot is None else MemoryLease(noop)
    result, in_shared_memory = _read(reader, message, lease)
    model = packed_request.model
    if len(result) < len(model.signature.outputs) and not model.may_omit_outputs:
        _check_complete(packed_request, result)
    if lease is None or not in_shared_memory:
        packed_request.release_memory()
    else:
        lease.on_end = packed_request.release_memory  # the lease ends with the last array
    return result


def _check_complete(packed_request: PackedRequest, result: Result) -> None:
    expected_names = [output.name for output in RequestSchema(packed_request.schema).outputs]
    missing_names = [
        name
        for name in expected_names or packed_request.model.signature.outputs
        if name not in result
    ]
    if missing_names:
        names = ", ".join(f"'{name}'" for name in missing_names)
        raise Internal(
            f"model '{packed_request.model.name}' did not return the requested outputs {names}"
        )


def read_one_of_many(reader: Reader, message: Responded) -> Result:
    """Return the result of one of many responses.

    Unlike `read`, this function does not free the request's memory.
    """
    return _read(reader, message, None)[0]


def _read(
    reader: Reader, message: Finished | Responded, lease: MemoryLease | None
) -> tuple[Result, bool]:
    """Return the result of a response, and whether its outputs may be in shared memory.

    The arrays in shared memory keep `lease` alive, or without it the lease of their region.
    """
    packed_request = reader.packed_request
    schema = packed_request.model.response_schemas[message.schema]
    payloads = message.data
    if len(payloads) != len(schema.outputs):
        raise MalformedMessage(f"expected {len(schema.outputs)} outputs, found {len(payloads)}")
    outputs: dict[str, Any] = {}
    for tensor, data in zip(schema.outputs, payloads, strict=True):
        if type(data) is not bytes:
            outputs = _tensors_of(reader, schema.outputs, payloads, lease)
            return Result(outputs, dict(schema.parameters), lease), True
        outputs[tensor.name] = _decode(packed_request, tensor, data)
    return Result(outputs, dict(schema.parameters), None), False


def _decode(packed_request: PackedRequest, output: TensorSchema, data: bytes | bytearray) -> Any:
    if output.datatype == "BYTES":
        return decode_bytes(data, output.shape, output.name, packed_request.model.name)
    writable_data = data if type(data) is bytearray else bytearray(data)
    array = np.ndarray(output.shape, STORAGE_DTYPES[output.datatype], writable_data)
    return to_torch(array, output.datatype) if packed_request.as_torch else array


def _tensors_of(
    reader: Reader, outputs: Sequence[TensorSchema], payloads: list[Any], lease: MemoryLease | None
) -> dict[str, Any]:
    contents = [data if type(data) is bytes else unpack_range(data) for data in payloads]
    try:
        return {
            output.name: _map_output(reader, lease, output, data)
            if isinstance(data, Range)
            else _decode(reader.packed_request, output, data)
            for output, data in zip(outputs, contents, strict=True)
        }
    finally:
        memory_ids = own_memories(reader.packed_request)
        reader.release(release_messages(unpack_ranges(payloads), memory_ids))


def own_memories(packed_request: PackedRequest) -> set[int]:
    """Return the ids of the memory segments that contain tensors of a request."""
    return {segment.memory.id for segment in packed_request.segments if segment.memory is not None}


def _map_output(
    reader: Reader, lease: MemoryLease | None, output: TensorSchema, memory_range: Range
) -> Any:
    """Return an output in shared memory: an array over it, or a copy of a worker's memory."""
    packed_request = reader.packed_request
    segment = _find_segment(packed_request, memory_range.memory)
    if segment is None or output.datatype == "BYTES":
        if isinstance(segment, DeviceSegment):
            raise Unsupported(
                f"output '{output.name}': strings cannot be read from device memory; request the "
                "output without memory for it"
            )
        return _decode(packed_request, output, _copy_output(reader, memory_range, segment))
    lease = lease or _region_lease(packed_request, segment)
    array = segment.view(memory_range.offset, output.shape, output.datatype, lease)
    return to_torch(array, output.datatype) if packed_request.as_torch else array


def _find_segment(packed_request: PackedRequest, memory: Memory) -> Any:
    for segment in packed_request.segments:
        if segment.memory is not None and segment.memory.id == memory.id:
            return segment
    return None


def _region_lease(packed_request: PackedRequest, segment: AnySegment) -> MemoryLease:
    # `segments` has the outputs' segments after those of the inputs, so the search for the lease
    # of an output runs backwards.
    for candidate, holder in zip(
        packed_request.segments[::-1], packed_request.holders[::-1], strict=True
    ):
        if candidate is segment and isinstance(holder, MemoryLease):
            return holder
    return MemoryLease(noop)


def _copy_output(reader: Reader, memory_range: Range, segment: Segment | None) -> bytearray:
    if segment is not None:
        start = memory_range.offset
        return bytearray(segment.bytes[start : start + memory_range.byte_size])
    return reader.copy_range(memory_range)
