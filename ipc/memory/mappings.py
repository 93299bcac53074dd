"""Cached memory mappings: memory of other processes is mapped at its first use and stays mapped.

Only workers map regions of clients: a client that truncates its object kills the process that
touches the lost pages. The memory of untrusted clients is never mapped, but read and written by
system calls. Gateways map the arenas of workers, which are sealed. Device memory is opened by a
function of the worker, and has the same interface.

This module does not check ranges: `unpack_range` has checked those that arrive in messages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.tensors.descriptors import Memory, Range

# Python's mmap cannot map memory at a given address.
_libc = ctypes.CDLL(None, use_errno=True)
_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.mmap.restype = _libc.mremap.restype = _ADDRESS
_libc.mmap.argtypes = [_ADDRESS, _SIZE, _INT, _INT, _INT, ctypes.c_long]
_libc.mremap.argtypes = [_ADDRESS, _SIZE, _SIZE, _INT, _ADDRESS]
_MAP_FAILED = ctypes.c_void_p(-1).value
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2

_MAX_UNMAPPED_IDS = 1024  # number of unmapped memories whose ids are stored


def _truncation_error() -> InvalidArgument:
    return InvalidArgument(
        "the shared memory object of a region was truncated after it was registered"
    )


# Locks the pages of a mapping for a device; returns the function that unlocks them.
Pin = Callable[[memoryview], Callable[[], None]]


class Mapping(Protocol):
    """A memory that is mapped into this process.

    Attributes:
        pid: The process that holds the memory; the mapping ends with that process.
        view: The bytes; a slice of it is a view of a part.
    """

    pid: int
    view: Any

    def close(self) -> None:
        """Release the mapping; existing views stay valid."""


def open_memory(memory: Memory) -> int:
    """Open a memory of this host and return the descriptor.

    Raises:
        Unavailable: The memory no longer exists.
    """
    path = f"/proc/{memory.pid}/fd/{memory.fd}"
    try:
        # The owner of a memfd may hold a lease on it, which `open` would wait for.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Unavailable("the memory of a tensor has been released") from error
    if os.fstat(fd).st_ino != memory.inode:
        os.close(fd)
        raise Unavailable("the memory of a tensor has been released")
    return fd


class _HostMapping:
    __slots__ = ("_unpin", "fd", "map", "pid", "view")

    map: mmap.mmap
    view: Any  # absent if `Memory.copied` is set, because such memory is not mapped

    def __init__(self, memory: Memory, pin: Pin | None) -> None:
        self._unpin: Callable[[], None] | None = None
        self.pid = memory.pid
        self.fd = open_memory(memory)
        try:
            if os.fstat(self.fd).st_size < memory.byte_size:
                raise _truncation_error()
            if not memory.copied:
                try:
                    self.map = mmap.mmap(self.fd, memory.byte_size)
                except (OSError, ValueError) as error:
                    # The owner has sealed the memory against writing, or truncated it just now.
                    text = f"the memory of a tensor cannot be mapped: {error}"
                    raise Unavailable(text) from error
                self.view = memoryview(self.map)
                if memory.pinned and pin is not None:
                    self._unpin = pin(self.view)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        if self._unpin is not None:
            self._unpin()  # before the last view unmaps the pages
        os.close(self.fd)

    def make_private(self, start: int, end: int) -> None:
        """Replace the shared pages between two offsets by private copies, in all views of them."""
        start -= start % mmap.PAGESIZE
        end = min(-(-end // mmap.PAGESIZE) * mmap.PAGESIZE, len(self.map))
        size = end - start
        old_address = ctypes.addressof(ctypes.c_char.from_buffer(self.map)) + start
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        new_address = _libc.mmap(None, size, protection, flags, -1, 0)
        if new_address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "mmap")
        ctypes.memmove(new_address, old_address, size)
        # mremap replaces the pages in one atomic step, because threads of the model may read them.
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
        if _libc.mremap(new_address, size, size, flags, old_address) == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "mremap")


@dataclass(eq=False)
class Mappings:
    """The mapped memories of a process, and views of ranges in them.

    Any thread may use the mappings of sealed memories.

    Args:
        _open_device: Maps device memory; None if device memory is not supported.
        _pin: Pins a memory with `pinned` set; None if no memory is pinned.
    """

    _open_device: Callable[[Memory], Mapping] | None = None  # maps device memory
    _pin: Pin | None = None  # pins host memory for a device
    _mappings_by_id: dict[int, Any] = field(default_factory=dict)
    _unmapped_ids: deque[int] = field(default_factory=partial(deque, maxlen=_MAX_UNMAPPED_IDS))

    def view(self, memory_range: Range) -> Any:
        """Return the writable bytes of a range: a memoryview, or a uint8 tensor on a device.

        Raises:
            Unavailable: The memory no longer exists.
            InvalidArgument: The memory was truncated before the end of the range.
        """
        assert not memory_range.memory.copied, "a memory with `copied` set must not be mapped"
        start = memory_range.offset
        return self._mapping(memory_range).view[start : start + memory_range.byte_size]

    def _mapping(self, memory_range: Range) -> Any:
        """Return the mapping of a range's memory. Raises the exceptions of `view`."""
        memory = memory_range.memory
        try:
            mapping = self._mappings_by_id[memory.id]
        except KeyError:
            new_mapping = self._open(memory)
            mapping = self._mappings_by_id.setdefault(memory.id, new_mapping)
            if mapping is not new_mapping:
                new_mapping.close()  # another thread has opened the memory in the meantime
        # lseek(2) returns the object's size in a third of the time of fstat(2). The file position,
        # which it changes, is unused.
        if not memory.sealed and (
            os.lseek(mapping.fd, 0, os.SEEK_END) < memory_range.offset + memory_range.byte_size
        ):
            raise _truncation_error()
        return mapping

    def detach(self, memory_ranges: Iterable[Range]) -> None:
        """Replace the pages of ranges by private copies in all existing views.

        Later views show the shared memory, which is mapped again. Device memory is not supported.

        Raises:
            ShmserveError: A range cannot be mapped (see `view`).
            OSError: The pages cannot be moved.
        """
        detached_mappings: dict[int, _HostMapping] = {}
        for memory_range in memory_ranges:
            mapping = detached_mappings.get(memory_range.memory.id) or self._mapping(memory_range)
            if memory_range.memory.id not in detached_mappings:
                detached_mappings[memory_range.memory.id] = mapping
                del self._mappings_by_id[memory_range.memory.id]
                mapping.close()
            mapping.make_private(memory_range.offset, memory_range.offset + memory_range.byte_size)

    def read(self, memory_range: Range) -> memoryview:
        """Return a copy of a range of a memory that is not mapped (`Memory.copied`).

        Raises:
            ShmserveError: As in `view`.
        """
        mapping = self._mapping(memory_range)
        content = memoryview(bytearray(memory_range.byte_size))
        position = 0
        while position < len(content):
            count = os.preadv(mapping.fd, [content[position:]], memory_range.offset + position)
            if not count:
                raise _truncation_error()
            position += count
        return content

    def write(self, memory_range: Range, data: bytes | memoryview) -> None:
        """Write `data` to a range of a memory that is not mapped (`Memory.copied`).

        Raises:
            Unavailable: The host is out of shared memory, or the memory no longer exists.
            InvalidArgument: The memory was truncated before the end of the range.
        """
        mapping = self._mapping(memory_range)
        remaining_data = memoryview(data).cast("B")
        offset = memory_range.offset
        while remaining_data:
            try:
                count = os.pwrite(mapping.fd, remaining_data, offset)
            except OSError as error:
                # Pages that were allocated at registration may have been freed since.
                text = f"an output cannot be written to shared memory: {error.strerror}"
                raise Unavailable(text) from error
            remaining_data, offset = remaining_data[count:], offset + count

    def _open(self, memory: Memory) -> Mapping:
        if memory.cuda is None:
            return _HostMapping(memory, self._pin)
        if self._open_device is None:
            raise Unavailable("this process cannot read a tensor in device memory")
        if memory.id in self._unmapped_ids:
            # The request arrived after the report of its client's exit, so no later report would
            # unmap it.
            raise Unavailable("the memory of a tensor has been released")
        return self._open_device(memory)

    def unmap(self, memory_id: int) -> None:
        """Unmap a memory. Its pages are released with the last view, which a model may hold."""
        self._unmapped_ids.append(memory_id)
        mapping = self._mappings_by_id.pop(memory_id, None)
        if mapping is not None:
            mapping.close()

    def unmap_process(self, pid: int) -> None:
        """Unmap every memory of a process that has exited."""
        for memory_id, mapping in list(self._mappings_by_id.items()):
            if mapping.pid == pid:
                self.unmap(memory_id)

    def unmap_all(self) -> None:
        """Unmap every memory."""
        for memory_id in list(self._mappings_by_id):
            self.unmap(memory_id)
