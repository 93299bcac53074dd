"""A server's response -> tensors for the program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from shmserve.client.errors import Released
from shmserve.client.memory.cuda import DeviceSegment
from shmserve.client.memory.segments import AnySegment
from shmserve.client.memory.views import MemoryLease, nothing
from shmserve.client.request.arrays import Array, dtype_of, to_torch
from shmserve.client.request.prepare import PackedRequest
from shmserve.errors import Unavailable, Unsupported
from shmserve.ipc.memory.lent import releases, unread
from shmserve.ipc.messages.inference import Release
from shmserve.ipc.tensors.datatypes import decode_bytes
from shmserve.ipc.tensors.descriptors import Memory, Place, TensorRef
from shmserve.ipc.tensors.inference import Inferred, unpack_inferred


class Result(Mapping[str, Any]):
    """A response: its outputs by name, numpy arrays or torch tensors as the inputs were.

    Large outputs lie in shared memory, and stay as long as an array over them does; `release` (or
    the end of a `with`) gives them back at once, and what is used then raises Released.
    """

    __slots__ = ("_lease", "_outputs", "parameters")

    def __init__(
        self, outputs: dict[str, Any], parameters: dict[str, Any], lease: MemoryLease | None
    ) -> None:
        self._outputs = outputs
        self.parameters = parameters
        self._lease = lease

    def __getitem__(self, name: str) -> Any:
        return self._outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def __repr__(self) -> str:
        return f"Result({self._outputs!r})"

    def release(self) -> None:
        """Give the outputs' memory back."""
        if self._lease is not None:
            self._lease.released = True
            self._lease = None
        self._outputs = _Released()

    def __enter__(self) -> Result:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


class _Released(dict[str, Any]):
    """The outputs of a result that was released."""

    def __missing__(self, name: str) -> Any:
        raise Released("this result was released")

    def __iter__(self) -> Iterator[str]:
        raise Released("this result was released")

    def __len__(self) -> int:
        raise Released("this result was released")


def read(
    built: PackedRequest,
    body: bytes,
    copied: Callable[[Place], bytes],
    release: Callable[[Release], None],
) -> Result:
    """The result in the only response of a request. `copied(place)` gives what is in a worker's
    memory, and `release` sends what tells the worker that it was read.

    The request's memory is given back, or kept by the arrays over it. Raises Unavailable when the
    worker's memory is gone, Unsupported when only the server's own user may read it; the request
    has its memory still then.
    """
    lease = None if built.slot is None else MemoryLease(nothing)
    result, placed = _read(built, body, lease, copied, release)
    if lease is None or not placed:
        built.end()
    else:
        lease.on_end = built.end  # it ends with the last array
    return result


def read_one_of_many(
    built: PackedRequest,
    body: bytes,
    copied: Callable[[Place], bytes],
    release: Callable[[Release], None],
) -> Result:
    """As `read`, of a response that others may follow: the request keeps its memory."""
    return _read(built, body, None, copied, release)[0]


def discard(built: PackedRequest, body: bytes, release: Callable[[Release], None]) -> None:
    """Release the outputs of a response that nobody reads."""
    for left in unread(body, _own(built)):
        release(left)


def _read(
    built: PackedRequest,
    body: bytes,
    lease: MemoryLease | None,
    copied: Callable[[Place], bytes],
    release: Callable[[Release], None],
) -> tuple[Result, bool]:
    """The result, and whether outputs of it may lie in memory."""
    responses = built.model.responses
    known = responses.find(body)
    if known is None:
        response = unpack_inferred(body)
        responses.learn(body, response, response)
        datas: list[bytes] = [ref.data for ref in response.outputs if type(ref.data) is bytes]
    else:
        response, datas = known
    if len(datas) < len(response.outputs):
        outputs = _placed(built, response, datas, lease, copied, release)
        return _result(outputs, dict(response.parameters), lease, built.as_torch), True
    arrays: dict[str, Any] = {}
    for ref, data in zip(response.outputs, datas, strict=True):
        array = _inline(built, ref, data)
        arrays[ref.name] = to_torch(array, ref.datatype) if built.as_torch else array
    return Result(arrays, dict(response.parameters), None), False


def _inline(built: PackedRequest, ref: TensorRef, data: bytes) -> Array:
    if ref.datatype == "BYTES":
        return decode_bytes(data, ref.shape, ref.name, built.model.name)
    return np.ndarray(ref.shape, dtype_of(ref.datatype), bytearray(data))


def _placed(
    built: PackedRequest,
    response: Inferred,
    datas: list[bytes],
    lease: MemoryLease | None,
    copied: Callable[[Place], bytes],
    release: Callable[[Release], None],
) -> dict[str, tuple[Array, str]]:
    inline = iter(datas)
    found = _Outputs(built, lease, copied)
    try:
        return {
            ref.name: found.array(ref)
            if isinstance(ref.data, Place)
            else (_inline(built, ref, next(inline)), ref.datatype)
            for ref in response.outputs
        }
    finally:
        for read in releases(response.outputs, _own(built)):
            release(read)


def _result(
    arrays: dict[str, tuple[Array, str]],
    parameters: dict[str, Any],
    lease: MemoryLease | None,
    as_torch: bool,
) -> Result:
    if as_torch:
        return Result({n: to_torch(*pair) for n, pair in arrays.items()}, parameters, lease)
    return Result({name: pair[0] for name, pair in arrays.items()}, parameters, lease)


def _own(built: PackedRequest) -> set[int]:
    """The ids of the memory of a request's own."""
    return {segment.memory.id for segment in built.segments if segment.memory is not None}


class _Outputs:
    """The outputs of one response that lie in memory, found there."""

    def __init__(
        self, built: PackedRequest, lease: MemoryLease | None, copied: Callable[[Place], bytes]
    ) -> None:
        self._prepared = built
        self._lease = lease
        self._from_worker = copied

    def array(self, ref: TensorRef) -> tuple[Array, str]:
        """An output that lies in memory, and its datatype."""
        place: Place = ref.data  # type: ignore[assignment]
        segment = self._segment(place.memory)
        if segment is not None and ref.datatype != "BYTES":
            lease = self._lease or self._region_lease(segment)
            return segment.view(place.offset, ref.shape, ref.datatype, lease), ref.datatype
        return _inline(self._prepared, ref, self._copied(place, segment)), ref.datatype

    def _segment(self, memory: Memory) -> Any:
        for segment in self._prepared.segments:
            if segment.memory is not None and segment.memory.id == memory.id:
                return segment
        return None

    def _region_lease(self, segment: AnySegment) -> MemoryLease:
        built = self._prepared
        # Outputs come after inputs.
        for other, holder in zip(built.segments[::-1], built.holders[::-1], strict=True):
            if other is segment and isinstance(holder, MemoryLease):
                return holder
        return MemoryLease(nothing)

    def _copied(self, place: Place, segment: AnySegment | None) -> bytes:
        if segment is not None:
            if isinstance(segment, DeviceSegment):
                raise Unsupported("strings on a device cannot be read there: give them no place")
            return bytes(segment.bytes[place.offset : place.offset + place.byte_size])
        try:
            return self._from_worker(place)
        except Unavailable as error:
            if not isinstance(error.__cause__, PermissionError):
                raise
            raise Unsupported(
                "an output is too large for a message: name a place for it, from `allocate`"
            ) from None
