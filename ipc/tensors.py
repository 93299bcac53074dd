"""Tensors as descriptors: what a request and its answer look like between processes.

A tensor's bytes are either inside the message (small ones) or at a `Place` in a `Memory`, an
object that another process of the server holds open: a client's registered region or a process's
arena.

    Memory  id, pid, fd, inode, byte_size, sealed, copied, pinned
            /proc/PID/fd/FD is that very object; the inode proves it
    Place   memory, offset, byte_size
            bytes [offset, offset + byte_size) of the object

Memory on a device has a `CudaHandle` instead of a descriptor; only workers open it.

Ownership: the sender of a descriptor leaves the bytes alone until the answer; the answer hands
them back.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import msgpack
import numpy as np

from shmserve.errors import InvalidArgument
from shmserve.ipc.ranges import fits
from shmserve.ipc.records import record

# All tensor bytes of one request, or of one answer, up to this many travel inside the messages:
# below it the copies through two sockets cost less than an arena's allocation and release message.
INLINE_LIMIT = 16 * 1024

# Protocol name -> (bytes per element, numpy dtype); BYTES elements vary, BF16 has no numpy dtype.
ITEM_SIZE: dict[str, int] = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "FP32": 4,
    "FP64": 8,
    "BF16": 2,
    "BYTES": 0,
}
NUMPY: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BYTES": np.dtype(np.object_),
}
# The configuration's spelling: TYPE_STRING is the protocol's BYTES.
FROM_CONFIG: dict[str, str] = {
    ("TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"): name for name in ITEM_SIZE
}
TO_CONFIG: dict[str, str] = {protocol: config for config, protocol in FROM_CONFIG.items()}


@record
class CudaHandle:
    """What opens an allocation that another process exported: its `cudaIpcMemHandle_t`, 64 bytes.

    `device` is the ordinal of the device in this server; `uuid` the device's 16 bytes where the
    exporter gave them, else empty.
    """

    raw: bytes
    device: int
    uuid: bytes = b""


@record
class Memory:
    """An object that process `pid` holds as `fd`; `byte_size` is how much of it may be used.

    `sealed`: it cannot shrink. `copied`: whoever owns it is not trusted not to shrink it, so it is
    never mapped, only read and written by system calls. `pinned`: workers on CUDA devices lock it,
    for faster copies. With `cuda` it is device memory, and `pid`, `fd` and `inode` mean nothing.
    Nobody can cut an allocation short, so it counts as sealed.
    """

    id: int
    pid: int
    fd: int
    inode: int
    byte_size: int
    sealed: bool
    copied: bool = False
    pinned: bool = False
    cuda: CudaHandle | None = None

    @classmethod
    def on_device(cls, memory_id: int, byte_size: int, handle: CudaHandle) -> Memory:
        """Device memory: the first `byte_size` bytes of what `handle` opens."""
        return cls(memory_id, 0, -1, 0, byte_size, sealed=True, cuda=handle)

    @property
    def object(self) -> int | bytes:
        """What two memories that are parts of one object, or of one allocation, have in common."""
        return self.inode if self.cuda is None else self.cuda.raw


@record
class Place:
    """`byte_size` bytes from `offset` of a memory."""

    memory: Memory
    offset: int
    byte_size: int

    def overlaps(self, other: Place) -> bool:
        """Whether some bytes are in both; one object may have been registered under two names."""
        return (
            self.memory.object == other.memory.object
            and self.offset < other.offset + other.byte_size
            and other.offset < self.offset + self.byte_size
        )


@record
class TensorRef:
    """A tensor: its bytes little-endian and row-major, inline or at a place (BYTES: 4-byte length
    + bytes each)."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | Place


@record
class RequestedOutput:
    """An output the client asked for; with a `place`, its bytes go there (`byte_size` is the
    room)."""

    name: str
    place: Place | None = None


@record
class Inference:
    """One request as the worker sees it. No `outputs` means all of them.

    `timeout_us` is the request's own limit, `deadline_ns` (monotonic) when nobody waits any more:
    what the model asks of other models on its behalf ends then too. 0 means none.
    """

    request_id: str
    inputs: tuple[TensorRef, ...]
    outputs: tuple[RequestedOutput, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    priority: int = 0
    deadline_ns: int = 0


@record
class Inferred:
    """The answer to an `Inference`; an output that went to the client's place carries that
    place."""

    outputs: tuple[TensorRef, ...]
    parameters: dict[str, Any] = field(default_factory=dict)


class MalformedMessage(Exception):
    """Bytes from a socket are not a message; the text is for our log only."""


BEYOND = 2**64  # elements


def element_count(shape: tuple[int, ...] | list[int]) -> int:
    """How many elements a tensor of `shape` has; 1 for a scalar. If they are more than any can
    have, it is `BEYOND`: exact, that number has as many digits as a client likes, and takes hours.
    """
    count = 1
    for dim in shape:
        count *= dim
        if not -BEYOND < count < BEYOND:
            return 0 if 0 in shape else BEYOND
    return count


def _pack_place(place: Place) -> tuple[Any, ...]:
    memory = place.memory
    if memory.cuda is not None:
        handle = memory.cuda
        return (
            *(memory.id, memory.byte_size, handle.device, handle.raw, handle.uuid),
            *(place.offset, place.byte_size),
        )
    return (
        memory.id,
        memory.pid,
        memory.fd,
        memory.inode,
        memory.byte_size,
        memory.sealed,
        memory.copied,
        memory.pinned,
        place.offset,
        place.byte_size,
    )


def _unpack_place(raw: Any) -> Place:
    if len(raw) == 7:
        return _unpack_device_place(raw)
    ident, pid, fd, inode, size, sealed, copied, pinned, offset, byte_size = raw
    for value in (ident, pid, fd, inode, size, offset, byte_size):
        if type(value) is not int:
            raise MalformedMessage("a place holds something that is not an integer")
    if not fits(offset, byte_size, size):
        raise MalformedMessage("a place lies outside its memory")
    memory = Memory(ident, pid, fd, inode, size, bool(sealed), bool(copied), bool(pinned))
    return Place(memory, offset, byte_size)


def _unpack_device_place(raw: Any) -> Place:
    ident, size, device, handle, uuid, offset, byte_size = raw
    for value in (ident, size, offset, byte_size, device):
        if type(value) is not int:
            raise MalformedMessage("a place holds something that is not an integer")
    if type(handle) is not bytes or type(uuid) is not bytes or not fits(offset, byte_size, size):
        raise MalformedMessage("a place on a device is wrong")
    return Place(Memory.on_device(ident, size, CudaHandle(handle, device, uuid)), offset, byte_size)


def _pack_tensor(tensor: TensorRef) -> tuple[Any, ...]:
    data = tensor.data
    return (
        tensor.name,
        tensor.datatype,
        tensor.shape,
        data if type(data) is bytes else _pack_place(data),  # type: ignore[arg-type]
    )


def _unpack_tensor(raw: Any) -> TensorRef:
    name, datatype, shape, data = raw
    if type(name) is not str or datatype not in ITEM_SIZE or type(shape) is not list:
        raise MalformedMessage("a tensor's name, datatype or shape is wrong")
    for dim in shape:
        if type(dim) is not int or dim < 0:
            raise MalformedMessage("a tensor's dimension is wrong")
    return TensorRef(
        name, datatype, tuple(shape), data if type(data) is bytes else _unpack_place(data)
    )


def pack_inference(request: Inference) -> bytes:
    """An `Inference` as bytes, for `Submit.work`."""
    packed: bytes = msgpack.packb(
        (
            request.request_id,
            [_pack_tensor(tensor) for tensor in request.inputs],
            [(out.name, out.place and _pack_place(out.place)) for out in request.outputs],
            request.parameters,
            request.correlation_id,
            request.flags,
            request.timeout_us,
            request.priority,
            request.deadline_ns,
        )
    )
    return packed


class InferenceTemplate:
    """A packed `Inference` but for what differs between requests that are described alike: the
    bytes of the inline tensors, whose sizes stay, and the deadline."""

    __slots__ = ("_pieces", "_sizes")

    def __init__(self, request: Inference) -> None:
        self._sizes: list[int] = []
        self._pieces: list[bytes] = []  # what comes before each inline tensor's bytes, and after
        packer = msgpack.Packer(autoreset=False)
        packer.pack_array_header(9)
        packer.pack(request.request_id)
        packer.pack_array_header(len(request.inputs))
        for tensor in request.inputs:
            packer.pack_array_header(4)
            *described, data = _pack_tensor(tensor)
            for value in described:
                packer.pack(value)
            packer.pack(data)
            if type(data) is bytes:
                self._sizes.append(len(data))
                self._pieces.append(packer.bytes().removesuffix(data))
                packer.reset()
        packer.pack([(out.name, out.place and _pack_place(out.place)) for out in request.outputs])
        for value in (
            request.parameters,
            request.correlation_id,
            request.flags,
            request.timeout_us,
            request.priority,
        ):
            packer.pack(value)
        self._pieces.append(packer.bytes())

    def fill(self, body: bytes, at: int, deadline_ns: int) -> bytes:
        """What `pack_inference` gives for the tensors whose bytes are in `body`, one after the
        other, from `at`."""
        pieces: list[bytes] = []
        for piece, size in zip(self._pieces, self._sizes, strict=False):
            pieces += (piece, body[at : at + size])
            at += size
        pieces += (self._pieces[-1], msgpack.packb(deadline_ns))
        return b"".join(pieces)

    def pieces(self, deadline_ns: int) -> list[bytes]:
        """What is around the inline tensors' bytes, in order."""
        return [*self._pieces[:-1], self._pieces[-1] + msgpack.packb(deadline_ns)]


def unpack_inference(work: bytes) -> Inference:
    """The `Inference` in `work`; raises MalformedMessage."""
    try:
        (
            request_id,
            inputs,
            outputs,
            parameters,
            correlation_id,
            flags,
            timeout,
            priority,
            deadline,
        ) = msgpack.unpackb(work)
        return Inference(
            request_id,
            tuple(map(_unpack_tensor, inputs)),
            tuple(
                RequestedOutput(name, None if place is None else _unpack_place(place))
                for name, place in outputs
            ),
            parameters,
            correlation_id,
            flags,
            timeout,
            priority,
            deadline,
        )
    except MalformedMessage:
        raise
    except Exception as error:  # msgpack and unpacking raise many kinds; all mean the same
        raise MalformedMessage(f"not an inference: {error}") from error


def pack_inferred(answer: Inferred) -> bytes:
    """An `Inferred` as bytes, for `Finished.body`."""
    packed: bytes = msgpack.packb(
        ([_pack_tensor(tensor) for tensor in answer.outputs], answer.parameters)
    )
    return packed


class InferredTemplate:
    """A packed `Inferred` but for the bytes of its inline tensors, whose sizes stay."""

    __slots__ = ("_pieces",)

    def __init__(self, answer: Inferred) -> None:
        packer = msgpack.Packer(autoreset=False)
        packer.pack_array_header(2)
        packer.pack_array_header(len(answer.outputs))
        self._pieces: list[bytes] = []  # what comes before each inline tensor's bytes, and after
        for tensor in answer.outputs:
            packer.pack_array_header(4)
            packed = _pack_tensor(tensor)
            for value in packed:
                packer.pack(value)
            if type(data := packed[3]) is bytes:
                self._pieces.append(packer.bytes().removesuffix(data))
                packer.reset()
        packer.pack(answer.parameters)
        self._pieces.append(packer.bytes())

    def fill(self, datas: list[bytes]) -> bytes:
        """What `pack_inferred` gives for inline tensors of the same sizes with these bytes."""
        pieces: list[bytes] = []
        for piece, data in zip(self._pieces, datas, strict=False):
            pieces += (piece, data)
        pieces.append(self._pieces[-1])
        return b"".join(pieces)

    def pieces(self) -> list[bytes]:
        """What is around the inline tensors' bytes, in order."""
        return list(self._pieces)


def unpack_inferred(body: bytes) -> Inferred:
    """The `Inferred` in `body`; raises MalformedMessage."""
    try:
        outputs, parameters = msgpack.unpackb(body)
        return Inferred(tuple(map(_unpack_tensor, outputs)), parameters)
    except MalformedMessage:
        raise
    except Exception as error:
        raise MalformedMessage(f"not an answer: {error}") from error


def to_bf16(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The upper halves of 32-bit floats as uint16, rounded to the nearest, ties to even."""
    bits = array.astype(np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    kept = np.where(np.isnan(array), bits | 0x400000, rounded)
    return (kept >> 16).astype(np.uint16)


def encode_bytes(array: np.ndarray[Any, Any]) -> bytes:
    """A BYTES tensor's wire form: 4-byte little-endian length and the bytes of each element,
    row-major.

    Elements may be bytes, str (UTF-8) or anything with a `str()`, as in Triton's clients.
    """
    parts: list[bytes] = []
    for item in array.ravel():
        raw = item if isinstance(item, bytes) else str(item).encode("utf-8")
        parts.append(len(raw).to_bytes(4, "little"))
        parts.append(raw)
    return b"".join(parts)


def decode_bytes(
    raw: bytes | memoryview, shape: tuple[int, ...], name: str, model: str
) -> np.ndarray[Any, Any]:
    """The elements of a BYTES tensor as an object array of `shape`.

    `raw` is copied once before a length in it is read, so a client that rewrites its region
    meanwhile changes nothing. Raises InvalidArgument when the lengths and the element count do not
    agree with `raw`.
    """
    data = bytes(raw)
    want = element_count(shape)
    # Each element needs its length field: a count that the bytes cannot hold takes no memory.
    items = np.empty(min(want, len(data) // 4), dtype=np.object_)
    at = got = 0
    while at < len(data):
        if len(data) - at < 4:
            raise InvalidArgument(
                f"incomplete string length indicator for inference input '{name}' for model "
                f"'{model}', expecting 4 bytes but only {len(data) - at} bytes available. "
                "Please make sure the string length indicator is in one buffer."
            )
        length = int.from_bytes(data[at : at + 4], "little")
        at += 4
        if length > len(data) - at:
            raise InvalidArgument(
                f"incomplete string data for inference input '{name}' for model '{model}', "
                f"expecting string of length {length} but only {len(data) - at} bytes available"
            )
        if got == want:
            raise InvalidArgument(
                f"unexpected number of string elements {got + 1} for inference input '{name}' "
                f"for model '{model}', expecting {want}"
            )
        items[got] = data[at : at + length]
        at += length
        got += 1
    if got != want:
        raise InvalidArgument(
            f"expected {want} string elements for inference input '{name}' for model '{model}', "
            f"got {got}"
        )
    return items.reshape(shape)
