"""Memory mappings, cached: what other processes hold is mapped on first use and kept.

Only workers map clients' regions: a client that truncates its object kills whoever touches the
lost pages. Those of clients who are not trusted are not mapped at all, but read and written by
system calls. Gateways map workers' arenas, which are sealed. What is on a device is opened by what
the worker gives for it; it looks the same from outside.
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
from shmserve.ipc.tensors.descriptors import Memory, Place
from shmserve.ipc.tensors.ranges import fits

# Python's own mmap knows no addresses.
_libc = ctypes.CDLL(None, use_errno=True)
_ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_libc.mmap.restype = _libc.mremap.restype = _ADDRESS
_libc.mmap.argtypes = [_ADDRESS, _SIZE, _INT, _INT, _INT, ctypes.c_long]
_libc.mremap.argtypes = [_ADDRESS, _SIZE, _SIZE, _INT, _ADDRESS]
_MAP_FAILED = ctypes.c_void_p(-1).value
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2

_REMEMBERED = 1024  # of the memories that were dropped last


def _truncated() -> InvalidArgument:
    return InvalidArgument(
        "the shared memory object of a region was truncated after it was registered"
    )


# Locks the pages of a mapping for a device; gives what undoes it.
Pin = Callable[[memoryview], Callable[[], None]]


class Mapping(Protocol):
    """A memory in this process. `view` can be sliced by bytes; `pid` is whose death ends it."""

    pid: int
    view: Any

    def close(self) -> None:
        """Let it go; views of it that someone holds stay valid."""


def opened(memory: Memory) -> int:
    """A descriptor of a memory in the host. Raises Unavailable when that is gone."""
    path = f"/proc/{memory.pid}/fd/{memory.fd}"
    try:
        # Whoever gave us a memfd may hold a lease on it: nobody waits for that.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Unavailable("the memory of a tensor is gone") from error
    if os.fstat(fd).st_ino != memory.inode:
        os.close(fd)
        raise Unavailable("the memory of a tensor is gone")
    return fd


class _HostMapping:
    __slots__ = ("_unpin", "fd", "map", "pid", "view")

    map: mmap.mmap
    view: Any  # none of memory that is not to be mapped

    def __init__(self, memory: Memory, pin: Pin | None) -> None:
        self._unpin: Callable[[], None] | None = None
        self.pid = memory.pid
        self.fd = opened(memory)
        try:
            if os.fstat(self.fd).st_size < memory.byte_size:
                raise _truncated()
            if not memory.copied:
                try:
                    self.map = mmap.mmap(self.fd, memory.byte_size)
                except (OSError, ValueError) as error:
                    # Its owner has sealed it against writing, or truncated it just now.
                    raise Unavailable("the memory of a tensor cannot be mapped") from error
                self.view = memoryview(self.map)
                if memory.pinned and pin is not None:
                    self._unpin = pin(self.view)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        if self._unpin is not None:
            self._unpin()  # before the pages go, which the last view of them keeps
        os.close(self.fd)

    def make_private(self, start: int, end: int) -> None:
        """Have private copies of the pages between two offsets where the shared ones are now, and
        all views of them."""
        start -= start % mmap.PAGESIZE
        end = min(-(-end // mmap.PAGESIZE) * mmap.PAGESIZE, len(self.map))
        size = end - start
        target = ctypes.addressof(ctypes.c_char.from_buffer(self.map)) + start
        protection, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        source = _libc.mmap(None, size, protection, kind, -1, 0)
        if source == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "mmap")
        ctypes.memmove(source, target, size)
        # At once, for threads of the model that read meanwhile.
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
        if _libc.mremap(source, size, size, flags, target) == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "mremap")

    def shrunk(self, end: int) -> bool:
        """Whether the object is smaller than `end` by now."""
        # The position is nobody's but ours; a whole `fstat` takes three times as long.
        return os.lseek(self.fd, 0, os.SEEK_END) < end


@dataclass(eq=False)
class Mappings:
    """Maps `Memory`s once each and gives views of `Place`s in them. For any thread, as far as they
    are sealed.

    `open_device` maps memory that lies on a device; without it there is none. `pin` locks memory
    that is to be pinned; without it that is not done.
    """

    _open_device: Callable[[Memory], Mapping] | None = None
    _pin: Pin | None = None
    _known: dict[int, Any] = field(default_factory=dict)
    _dropped: deque[int] = field(default_factory=partial(deque, maxlen=_REMEMBERED))

    def __len__(self) -> int:
        return len(self._known)

    def view(self, place: Place) -> Any:
        """The bytes at `place`, writable: a memoryview; on a device, a tensor of uint8.

        Raises Unavailable when the object is gone, InvalidArgument when it is smaller than the
        place needs.
        """
        assert not place.memory.copied, "this memory is not to be mapped"
        return self._mapping(place).view[place.offset : place.offset + place.byte_size]

    def _mapping(self, place: Place) -> Any:
        memory = place.memory
        mapping: Any = self._known.get(memory.id)
        if mapping is None:
            opened = self._open(memory)
            mapping = self._known.setdefault(memory.id, opened)
            if mapping is not opened:
                opened.close()  # another thread was faster
        if not memory.sealed and mapping.shrunk(place.offset + place.byte_size):
            raise _truncated()
        if not fits(place.offset, place.byte_size, memory.byte_size):
            raise InvalidArgument("a tensor lies outside its shared memory region")
        return mapping

    def detach(self, places: Iterable[Place]) -> None:
        """Make the bytes at `places` this process's own in all views of them that exist, which keep
        them as they are; views that are made from now on are of the shared memory, mapped anew.

        Not for memory on a device. Raises as `view`, OSError where pages cannot be moved.
        """
        detached: dict[int, _HostMapping] = {}
        for place in places:
            mapping = detached.get(place.memory.id) or self._mapping(place)
            if place.memory.id not in detached:
                detached[place.memory.id] = mapping
                del self._known[place.memory.id]
                mapping.close()
            mapping.make_private(place.offset, place.offset + place.byte_size)

    def read(self, place: Place) -> memoryview:
        """A copy of the bytes at `place` of a memory that is not to be mapped; raises as `view`."""
        mapping = self._mapping(place)
        copy = memoryview(bytearray(place.byte_size))
        at = 0
        while at < len(copy):
            count = os.preadv(mapping.fd, [copy[at:]], place.offset + at)
            if not count:
                raise _truncated()
            at += count
        return copy

    def write(self, place: Place, data: bytes | memoryview) -> None:
        """Write `data` at `place` of a memory that is not to be mapped; raises as `view`."""
        mapping = self._mapping(place)
        rest = memoryview(data).cast("B")
        at = place.offset
        while rest:
            try:
                count = os.pwrite(mapping.fd, rest, at)
            except OSError as error:
                # Pages that were taken at registration may have been given back since.
                raise Unavailable("shared memory is full") from error
            rest, at = rest[count:], at + count

    def _open(self, memory: Memory) -> Mapping:
        if memory.cuda is None:
            return _HostMapping(memory, self._pin)
        if self._open_device is None:
            raise Unavailable("the memory of a tensor is on a device, which is not used here")
        if memory.id in self._dropped:
            # A request of a client that left came after the news of it: nobody would drop it again.
            raise Unavailable("the memory of a tensor is gone")
        return self._open_device(memory)

    def drop(self, memory_id: int) -> None:
        """Forget a memory. Its pages go when the last view of it does (a model may still hold
        one)."""
        self._dropped.append(memory_id)
        mapping = self._known.pop(memory_id, None)
        if mapping is not None:
            mapping.close()

    def drop_process(self, pid: int) -> None:
        """Forget every memory that process `pid` held: it is gone."""
        for memory_id, mapping in list(self._known.items()):
            if mapping.pid == pid:
                self.drop(memory_id)

    def drop_all(self) -> None:
        """Forget every memory."""
        for memory_id in list(self._known):
            self.drop(memory_id)
