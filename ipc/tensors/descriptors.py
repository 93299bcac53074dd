"""Tensor descriptors: where the bytes of a tensor are, as one process sends it to another.

The bytes of a tensor are either inside the message (small ones) or a `Range` of a `Memory`, an
object that another process of the server holds open: a client's registered region or a process's
arena.

    Memory  id, pid, fd, inode, byte_size, sealed, copied, pinned
            /proc/PID/fd/FD is that very object; the inode proves it
    Range   memory, offset, byte_size
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
class Range:
    """A memory range: `byte_size` bytes from `offset` of a memory."""

    memory: Memory
    offset: int
    byte_size: int

    def overlaps(self, other: Range) -> bool:
        """Check whether two ranges share bytes; an object may be registered under two names."""
        return (
            self.memory.object == other.memory.object
            and self.offset < other.offset + other.byte_size
            and other.offset < self.offset + self.byte_size
        )


@record
class TensorRef:
    """A tensor: its bytes, little-endian and row-major, inline or as a memory range.

    The elements of BYTES tensors are a 4-byte length and the bytes.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | Range


def pack_range(memory_range: Range) -> tuple[bytes, int, int]:
    """Return a range in the form of messages: its memory (`Memory.packed`), offset, byte size."""
    return (memory_range.memory.packed, memory_range.offset, memory_range.byte_size)


def unpack_range(raw: Any) -> Range:
    """Return the range that `pack_range` packed.

    Raises:
        MalformedMessage: `raw` is no range, or lies outside its memory.
    """
    try:
        packed, offset, byte_size = raw
        # Before the lookup, because 1.0 and True are the same key as 1.
        if type(offset) is not int or type(byte_size) is not int:
            raise MalformedMessage("a memory range has an offset or a size that is not an integer")
        return _RANGES[packed, offset, byte_size]
    except KeyError:
        pass  # a range that was not used before
    except (TypeError, ValueError) as error:
        raise MalformedMessage(f"not a memory range: {error}") from error
    memory = _MEMORIES.find(packed) or _MEMORIES.learn(packed)
    if not fits(offset, byte_size, memory.byte_size):
        raise MalformedMessage("a memory range lies outside its memory")
    if len(_RANGES) >= _MOST_RANGES:
        _RANGES.clear()
    found = _RANGES[packed, offset, byte_size] = Range(memory, offset, byte_size)
    return found


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

# Clients use the same few ranges of their regions repeatedly.
_MOST_RANGES = 4096
_RANGES: dict[tuple[bytes, int, int], Range] = {}

# Few memories are in use at a time, each by many messages.
_MEMORIES: Schemas[Memory] = Schemas(unpack_memory, 4096)
