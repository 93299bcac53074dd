"""Tensor descriptors: where a tensor's bytes are, and how that is told to another process.

A tensor's bytes are either inside the message (small ones) or at a `Place` in a `Memory`, an
object that another process of the server holds open: a client's registered region or a process's
arena.

    Memory  id, pid, fd, inode, byte_size, sealed, copied, pinned
            /proc/PID/fd/FD is that very object; the inode proves it
    Place   memory, offset, byte_size
            bytes [offset, offset + byte_size) of the object

Memory on a device has a `CudaHandle` instead of a descriptor; only workers open it.

Ownership: the sender of a descriptor leaves the bytes alone until the response; the response hands
them back.
"""

from __future__ import annotations

from typing import Any

from shmserve.ipc.tensors.datatypes import ITEM_SIZE
from shmserve.ipc.tensors.ranges import fits
from shmserve.ipc.transport.records import MalformedMessage, record


@record
class CudaHandle:
    """The handle of an allocation of another process: its `cudaIpcMemHandle_t`, 64 bytes.

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
    for faster copies. With `cuda` it is device memory: `fd` and `inode` mean nothing, and `pid` is
    the process of the server that exported it, 0 where a client has. Nobody can cut an allocation
    short, so it counts as sealed.
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
    def on_device(cls, memory_id: int, byte_size: int, handle: CudaHandle, pid: int = 0) -> Memory:
        """Device memory: the first `byte_size` bytes of what `handle` opens."""
        return cls(memory_id, pid, -1, 0, byte_size, sealed=True, cuda=handle)

    @property
    def object(self) -> int | bytes:
        """The identity common to all memories that are parts of one object or allocation."""
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


def described(tensor: TensorRef) -> tuple[Any, ...]:
    """All of a tensor but its bytes and where they lie: -1 and its size where it is not in the
    message."""
    data = tensor.data
    size = (len(data),) if isinstance(data, bytes) else (-1, data.byte_size)
    return (tensor.name, tensor.datatype, tensor.shape, *size)


def pack_place(place: Place) -> tuple[Any, ...]:
    """A place as MessagePack takes it: 10 values, or 7 of one on a device, 8 of one of ours."""
    memory = place.memory
    if memory.cuda is not None:
        handle = memory.cuda
        return (
            *(memory.id, memory.byte_size, handle.device, handle.raw, handle.uuid),
            *(place.offset, place.byte_size),
            *((memory.pid,) if memory.pid else ()),
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


def unpack_place(raw: Any) -> Place:
    """The place that `pack_place` packed; raises MalformedMessage."""
    if len(raw) < 10:
        return _unpack_device_place(*raw)
    ident, pid, fd, inode, size, sealed, copied, pinned, offset, byte_size = raw
    for value in (ident, pid, fd, inode, size, offset, byte_size):
        if type(value) is not int:
            raise MalformedMessage("a place holds something that is not an integer")
    if not fits(offset, byte_size, size):
        raise MalformedMessage("a place lies outside its memory")
    memory = Memory(ident, pid, fd, inode, size, bool(sealed), bool(copied), bool(pinned))
    return Place(memory, offset, byte_size)


def _unpack_device_place(
    ident: Any,
    size: Any,
    device: Any,
    handle: Any,
    uuid: Any,
    offset: Any,
    byte_size: Any,
    pid: Any = 0,
) -> Place:
    for value in (ident, size, offset, byte_size, device, pid):
        if type(value) is not int:
            raise MalformedMessage("a place holds something that is not an integer")
    if type(handle) is not bytes or type(uuid) is not bytes or not fits(offset, byte_size, size):
        raise MalformedMessage("a place on a device is wrong")
    memory = Memory.on_device(ident, size, CudaHandle(handle, device, uuid), pid)
    return Place(memory, offset, byte_size)


def pack_tensor(tensor: TensorRef) -> tuple[Any, ...]:
    """A tensor as MessagePack takes it: name, datatype, shape, and bytes or a place."""
    data = tensor.data
    return (
        tensor.name,
        tensor.datatype,
        tensor.shape,
        data if type(data) is bytes else pack_place(data),  # type: ignore[arg-type]
    )


def unpack_tensor(raw: Any) -> TensorRef:
    """The tensor that `pack_tensor` packed; raises MalformedMessage."""
    name, datatype, shape, data = raw
    if type(name) is not str or datatype not in ITEM_SIZE or type(shape) is not list:
        raise MalformedMessage("a tensor's name, datatype or shape is wrong")
    for dim in shape:
        if type(dim) is not int or dim < 0:
            raise MalformedMessage("a tensor's dimension is wrong")
    return TensorRef(
        name, datatype, tuple(shape), data if type(data) is bytes else unpack_place(data)
    )
