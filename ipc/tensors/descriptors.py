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

from dataclasses import field
from typing import Any

import msgpack

from shmserve.ipc.tensors.ranges import fits
from shmserve.ipc.tensors.schemas import Schemas
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
    packed: bytes = field(init=False, compare=False, repr=False)  # as messages carry it
    # The identity common to all memories that are parts of one object or allocation.
    object: int | bytes = field(init=False, compare=False, repr=False)

    @classmethod
    def on_device(cls, memory_id: int, byte_size: int, handle: CudaHandle, pid: int = 0) -> Memory:
        """Device memory: the first `byte_size` bytes of what `handle` opens."""
        return cls(memory_id, pid, -1, 0, byte_size, sealed=True, cuda=handle)

    def __post_init__(self) -> None:
        if self.cuda is not None:
            rest: tuple[Any, ...] = (self.cuda.device, self.cuda.raw, self.cuda.uuid)
        else:
            rest = (self.fd, self.inode, self.sealed, self.copied, self.pinned)
        packed = msgpack.packb((self.id, self.pid, self.byte_size, *rest))
        identity = self.inode if self.cuda is None else self.cuda.raw
        object.__setattr__(self, "packed", packed)
        object.__setattr__(self, "object", identity)


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


def pack_place(place: Place) -> tuple[bytes, int, int]:
    """Return a place as messages carry it: its memory (`Memory.packed`), offset and byte size."""
    return (place.memory.packed, place.offset, place.byte_size)


def unpack_place(raw: Any) -> Place:
    """Return the place that `pack_place` packed.

    Raises:
        MalformedMessage: `raw` is no place, or lies outside its memory.
    """
    try:
        packed, offset, byte_size = raw
        # Before the place is looked up, because 1.0 and True are the same key as 1.
        if type(offset) is not int or type(byte_size) is not int:
            raise MalformedMessage("a place holds something that is not an integer")
        return _PLACES[packed, offset, byte_size]
    except KeyError:
        pass  # a place that was not used before
    except (TypeError, ValueError) as error:
        raise MalformedMessage(f"not a place: {error}") from error
    memory = _MEMORIES.find(packed) or _MEMORIES.learn(packed)
    if not fits(offset, byte_size, memory.byte_size):
        raise MalformedMessage("a place lies outside its memory")
    if len(_PLACES) >= _MOST_PLACES:
        _PLACES.clear()
    place = _PLACES[packed, offset, byte_size] = Place(memory, offset, byte_size)
    return place


def unpack_memory(packed: bytes) -> Memory:
    """Return the memory that was packed so (`Memory.packed`). Raises MalformedMessage."""
    if type(packed) is not bytes or len(packed) > _LONGEST_MEMORY:
        raise MalformedMessage("a memory is no bytes, or has too many")
    try:
        ident, pid, byte_size, *rest = msgpack.unpackb(packed)
        if len(rest) == 3:
            device, handle, uuid = rest
            numbers: tuple[Any, ...] = (ident, pid, byte_size, device)
            if type(handle) is not bytes or type(uuid) is not bytes:
                raise MalformedMessage("a memory on a device is wrong")
            cuda = CudaHandle(handle, device, uuid)
            memory = Memory.on_device(ident, byte_size, cuda, pid)
        else:
            fd, inode, sealed, copied, pinned = rest
            numbers = (ident, pid, byte_size, fd, inode)
            flags = (bool(sealed), bool(copied), bool(pinned))
            memory = Memory(ident, pid, fd, inode, byte_size, *flags)
    except MalformedMessage:
        raise
    except Exception as error:  # msgpack and unpacking raise many kinds; all mean the same
        raise MalformedMessage(f"not a memory: {error}") from error
    if any(type(number) is not int for number in numbers):
        raise MalformedMessage("a memory holds something that is not an integer")
    return memory


# A handle has 64 bytes, and a device's uuid 16. Longer memories are refused, because those of local
# clients are kept before it is known whose they are.
_LONGEST_MEMORY = 256

# Clients use the same few places of their regions again and again.
_MOST_PLACES = 4096
_PLACES: dict[tuple[bytes, int, int], Place] = {}

# Few memories are in use at a time, each by many messages.
_MEMORIES: Schemas[Memory] = Schemas(unpack_memory, 4096)
