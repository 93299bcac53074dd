"""Tensor descriptors, by which one process refers to the bytes of a tensor in another process.

A small tensor is inside the message. A large tensor is a `Range` of a `Memory`: a client's
registered region or a process's arena, which another process of the server holds open.

    Memory  id, pid, fd, inode, byte_size, sealed, copied, pinned
            /proc/PID/fd/FD refers to the object; the inode identifies it
    Range   memory, offset, byte_size
            bytes [offset, offset + byte_size) of the object

Device memory has a `CudaHandle` instead of a file descriptor. Only workers open it.

Ownership: the sender of a descriptor must not change the bytes until it receives the response.

Offsets and sizes from clients are checked by `require_integer` and `is_within`, so that no other
module repeats this arithmetic.
"""

from __future__ import annotations

from dataclasses import field
from functools import lru_cache
from typing import Any

import msgpack

from shmserve.errors import InvalidArgument
from shmserve.ipc.transport.frames import MalformedMessage, Record

MAX_INT64 = 2**63 - 1
MAX_UINT64 = 2**64 - 1


def require_integer(value: object, field_name: str) -> int:
    """Return `value` as an integer in [0, 2**63); bools, floats and strings are rejected.

    Raises:
        InvalidArgument: The value is not such an integer. The text contains `field_name`.
    """
    if type(value) is not int or not 0 <= value <= MAX_INT64:
        text = f"must be an integer in [0, {MAX_INT64}], got {str(value)[:40]!r}"
        raise InvalidArgument(f"'{field_name}' {text}")
    return value


def is_within(offset: int, byte_size: int, limit: int) -> bool:
    """Check whether [offset, offset + byte_size) lies within [0, limit); all in bytes.

    The check adds no numbers, so that it is also correct in a language whose integers overflow.
    """
    return 0 <= offset <= limit and 0 <= byte_size <= limit - offset


class CudaHandle(Record):
    """The handle of a device allocation of another process.

    Attributes:
        raw: The `cudaIpcMemHandle_t` (64 bytes).
        device: The ordinal of the device in this server.
        uuid: The device's UUID (16 bytes), or empty if the exporter sent none.
    """

    raw: bytes
    device: int  # ordinal
    uuid: bytes = b""


class Memory(Record):
    """A memory object that a process holds open, or a device allocation, which is always sealed.

    Attributes:
        id: The id of the memory.
        pid: The process that holds the object open. For device memory, the process of the server
            that exported it, or 0 if a client did.
        fd: The file descriptor in that process; unused for device memory.
        inode: The inode of the object; unused for device memory.
        byte_size: The number of bytes that may be used.
        sealed: Whether the object cannot shrink.
        copied: Whether the object is read and written by system calls and never mapped, because
            its untrusted owner could shrink it.
        pinned: Whether workers on CUDA devices pin the memory for faster copies.
        cuda: The handle of device memory; None for host memory.
        packed: The encoding of this memory in messages.
        object: The inode or the device handle, which is equal for all memories of one object.
    """

    id: int  # of the memory
    pid: int  # of the process that holds `fd` open
    fd: int  # in the process `pid`
    inode: int
    byte_size: int
    sealed: bool  # whether the object cannot shrink
    copied: bool = False  # whether its bytes are copied by system calls, not mapped
    pinned: bool = False  # whether workers on CUDA devices pin it
    cuda: CudaHandle | None = None
    packed: bytes = field(init=False, compare=False, repr=False)
    object: int | bytes = field(init=False, compare=False, repr=False)  # inode or handle

    @classmethod
    def on_device(cls, memory_id: int, byte_size: int, handle: CudaHandle, pid: int = 0) -> Memory:
        """Return the memory of the first `byte_size` bytes of a device allocation."""
        return cls(memory_id, pid, -1, 0, byte_size, sealed=True, cuda=handle)

    def __post_init__(self) -> None:
        if self.cuda is not None:
            source_fields: tuple[Any, ...] = (self.cuda.device, self.cuda.raw, self.cuda.uuid)
        else:
            source_fields = (self.fd, self.inode, self.sealed, self.copied, self.pinned)
        packed_memory = msgpack.packb((self.id, self.pid, self.byte_size, *source_fields))
        object_id = self.inode if self.cuda is None else self.cuda.raw
        object.__setattr__(self, "packed", packed_memory)
        object.__setattr__(self, "object", object_id)


class Range(Record):
    """A memory range: `byte_size` bytes from `offset` of a memory."""

    memory: Memory
    offset: int
    byte_size: int

    def overlaps(self, other: Range) -> bool:
        """Check whether two ranges share bytes. One object may be registered under two names."""
        return (
            self.memory.object == other.memory.object
            and self.offset < other.offset + other.byte_size
            and other.offset < self.offset + self.byte_size
        )


class TensorRef(Record):
    """A tensor: its bytes, little-endian and row-major, inline or as a memory range.

    Each element of a BYTES tensor is a 4-byte length followed by its bytes.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | Range  # inline, or in memory


def pack_range(memory_range: Range) -> tuple[bytes, int, int]:
    """Return a range as messages encode it: its memory (`Memory.packed`), offset, byte size."""
    return (memory_range.memory.packed, memory_range.offset, memory_range.byte_size)


def unpack_range(packed_range: Any) -> Range:
    """Return the range that `pack_range` packed.

    Raises:
        MalformedMessage: `packed_range` is not a range, or the range exceeds its memory.
    """
    try:
        packed_memory, offset, byte_size = packed_range
        # Checked before the lookup, because 1.0 and True are the same key as 1 in a cache.
        if type(offset) is not int or type(byte_size) is not int:
            raise MalformedMessage("a memory range has an offset or a size that is not an integer")
        return _unpack_range_cached(packed_memory, offset, byte_size)
    except (TypeError, ValueError) as error:
        raise MalformedMessage(f"malformed memory range: {error}") from error


# Unpacked ranges are cached, because clients use the same few ranges of their regions repeatedly.
@lru_cache(4096)
def _unpack_range_cached(packed_memory: bytes, offset: int, byte_size: int) -> Range:
    memory = _unpack_memory_cached(packed_memory)
    if not is_within(offset, byte_size, memory.byte_size):
        raise MalformedMessage(f"a memory range exceeds the {memory.byte_size} bytes of its memory")
    return Range(memory, offset, byte_size)


def unpack_memory(packed: bytes) -> Memory:
    """Return the memory from its packed form (`Memory.packed`).

    Raises:
        MalformedMessage: The bytes are not a packed memory.
    """
    if type(packed) is not bytes or len(packed) > _MAX_PACKED_MEMORY_SIZE:
        raise MalformedMessage("a memory descriptor is not bytes, or is too long")
    try:
        memory_id, pid, byte_size, *location = msgpack.unpackb(packed)
        if len(location) == 3:
            device, handle, uuid = location
            numbers: tuple[Any, ...] = (memory_id, pid, byte_size, device)
            if type(handle) is not bytes or type(uuid) is not bytes:
                raise MalformedMessage("a device memory's handle or UUID is not bytes")
            memory = Memory.on_device(memory_id, byte_size, CudaHandle(handle, device, uuid), pid)
        else:
            fd, inode, is_sealed, is_copied, is_pinned = location
            numbers = (memory_id, pid, byte_size, fd, inode)
            flags = (bool(is_sealed), bool(is_copied), bool(is_pinned))
            memory = Memory(memory_id, pid, fd, inode, byte_size, *flags)
    except MalformedMessage:
        raise
    except Exception as error:  # msgpack and unpacking raise many types for malformed bytes
        raise MalformedMessage(f"malformed memory descriptor: {error}") from error
    if any(type(number) is not int for number in numbers):
        raise MalformedMessage(f"memory descriptor: its numbers must be integers, got {numbers}")
    return memory


# A handle has 64 bytes and a UUID 16. Longer packed memories are rejected, because memories of
# local clients are cached before their owner is checked.
_MAX_PACKED_MEMORY_SIZE = 256

# Unpacked memories are cached, because few memories are in use at a time, each by many messages.
_unpack_memory_cached = lru_cache(4096)(unpack_memory)
