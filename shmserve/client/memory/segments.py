"""The client's own memory: sealed memfds that the server's workers map. What lies on a device
(cuda.py) is kept in the same list.

    Segment    |## region ##|### slot ###|### slot ###|......... free .........|
                             inputs, each on 64 bytes | outputs

Only the client allocates here. A block that a request uses comes back when the server has answered
and nobody holds an array over it any more.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from shmserve.client.memory.cuda import DeviceSegment
from shmserve.client.memory.views import MemoryLease, View, nothing
from shmserve.client.request.arrays import dtype_of
from shmserve.errors import Unavailable
from shmserve.ipc.memory.arena import FreeList
from shmserve.ipc.messages import control_requests as m
from shmserve.ipc.tensors.descriptors import Memory, Place, unpack_memory

ALIGNMENT = 64
_SMALLEST = 4 * 1024 * 1024
_LARGEST_SHARED = 64 * 1024 * 1024
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def aligned(byte_size: int) -> int:
    """`byte_size`, rounded up to where the next tensor may begin."""
    return -(-byte_size // ALIGNMENT) * ALIGNMENT


class Segment:
    """One memfd, mapped; `memory` is how the connected server knows it."""

    fd = -1  # until there is one

    def __init__(self, byte_size: int, *, pin: bool = False, huge_pages: bool = False) -> None:
        """Reserve the memory. Raises Unavailable when the machine has none left."""
        self._pin = pin
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge_pages else 0)
        try:
            self.fd = os.memfd_create("shmserve-client", flags)
        except OSError as error:  # a kernel without huge pages, or no descriptor is left
            raise Unavailable("shared memory cannot be had") from error
        page = os.fstatvfs(self.fd).f_bsize
        self.size = -(-byte_size // page) * page
        try:
            os.ftruncate(self.fd, self.size)
            os.posix_fallocate(self.fd, 0, self.size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            mapped = mmap.mmap(self.fd, self.size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException as error:  # also where a program is interrupted, as this may take long
            self.close()
            if not isinstance(error, OSError):
                raise
            text = f"{byte_size} bytes of shared memory cannot be had"
            if huge_pages:
                text += f": too few huge pages of {page} bytes are free (vm.nr_hugepages)"
            raise Unavailable(text) from error
        # numpy keeps this object and no more: it is unmapped with the last array over it.
        self.bytes = memoryview(mapped)
        self.address: int = np.frombuffer(self.bytes, np.uint8).ctypes.data
        self.free = FreeList(self.size)
        self.memory: Memory | None = None

    def sharing(self, number: int) -> tuple[Any, tuple[int, ...]]:
        """The message that makes it known to a server, and the descriptors that go with it."""
        return m.ShareMemory(number, self.size, self._pin), (self.fd,)

    def shared(self, memory: bytes) -> None:
        """Take the server's description of the memory."""
        self.memory = unpack_memory(memory)

    def view(self, offset: int, shape: tuple[int, ...], datatype: str, lease: MemoryLease) -> View:
        """The tensor at `offset`."""
        return View.over(self.bytes, offset, shape, dtype_of(datatype), lease)

    def place(self, offset: int, byte_size: int) -> Place:
        """The place of these bytes, for the server."""
        assert self.memory is not None
        return Place(self.memory, offset, byte_size)

    def close(self) -> None:
        """Give the memory back once the last array over it is gone. A second time is fine."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()  # nobody has it, since its program was interrupted


AnySegment = Segment | DeviceSegment


class MemoryBlock:
    """Bytes [offset, offset + size) of a segment. One that nobody gives back, since its program was
    interrupted, goes back when it is collected."""

    __slots__ = ("_memories", "offset", "segment", "size")

    def __init__(self, segment: Any, offset: int, size: int, memories: Memories) -> None:
        self.segment = segment  # most are a Segment, with `bytes`
        self.offset = offset
        self.size = size
        self._memories: Memories | None = memories

    def give_back(self) -> None:
        """Nothing uses it any more. It is free from the next `settle` on, so this may run at any
        moment: where the last array over it is collected. A second time is fine."""
        memories, self._memories = self._memories, None
        if memories is not None:
            memories.returned.append((self.segment, self.offset))

    def __del__(self) -> None:
        self.give_back()


class BlockOwner(Protocol):
    """An owner of blocks that may be idle."""

    def give_up(self) -> None:
        """Give back those that are."""


@dataclass(eq=False)
class Memories:
    """The allocator of a client, over all its segments; for any thread.

    `share(segment)` makes one known to the server, `withdraw(segment)` unknown; `nudge()` has
    somebody call `settle_if_free`.
    """

    _limit: int
    _share: Callable[[AnySegment], None]
    _withdraw: Callable[[AnySegment], None]
    _nudge: Callable[[], None] = nothing
    _lock: threading.RLock = field(init=False, default_factory=threading.RLock)
    # Held in the middle of a step: a signal's handler that our own thread runs may find it so,
    # and then gets memory of its own.
    _steps: threading.Lock = field(init=False, default_factory=threading.Lock)
    _segments: list[AnySegment] = field(init=False, default_factory=list)
    returned: deque[tuple[AnySegment, int]] = field(init=False, default_factory=deque)
    _keepers: weakref.WeakKeyDictionary[BlockOwner, None] = field(
        init=False, default_factory=weakref.WeakKeyDictionary
    )

    def allocate(self, byte_size: int, *, alone: bool = False) -> MemoryBlock:
        """A block, in a segment of its own if `alone`.

        Raises Unavailable when that were more than the client may use, or than there is.
        """
        with self._lock:
            if self._steps.locked():
                block = self._in_another(byte_size)
            else:
                with self._steps:
                    self._settle()
                    found = None if alone else self._found(byte_size)
                    if found is None and self._make_room(byte_size) and not alone:
                        found = self._found(byte_size)
                    if found is not None:
                        return found
                    used = self._used()
                    # Room for others too, as far as there is any.
                    roomy = min(max(_SMALLEST, min(used, _LARGEST_SHARED)), self._limit - used)
                    size = byte_size if alone else max(byte_size, roomy)
                    block = self._in_another(size, None if alone else byte_size)
        self._tell(block.segment)
        return block

    def _in_another(self, size: int, byte_size: int | None = None) -> MemoryBlock:
        """A block in a new segment, or all of it."""
        self._check_limit(self._used(), size)
        made = Segment(size)
        return self._first_block(made, made.size if byte_size is None else byte_size)

    def _found(self, byte_size: int) -> MemoryBlock | None:
        for segment in self._segments:
            if segment.memory is None:
                continue  # the server does not know it yet
            offset = segment.free.allocate(byte_size)
            if offset is not None:
                return MemoryBlock(segment, offset, byte_size, self)
        return None

    def _make_room(self, byte_size: int) -> bool:
        """Take back what is kept for later requests, if so much more were too much."""
        if self._used() + byte_size <= self._limit:
            return False
        # As they are now: a signal's handler may ask in the middle of this, and be another one.
        for reference in self._keepers.keyrefs():
            keeper = reference()
            if keeper is not None:
                keeper.give_up()
        self._settle()
        return True

    def serve(self, keeper: BlockOwner) -> None:
        """Register an owner of idle blocks, which is asked for them when memory is short."""
        with self._lock:
            self._keepers[keeper] = None

    def add(self, segment: AnySegment) -> MemoryBlock:
        """The whole of a segment that was made elsewhere, as a block; raises as `allocate` does."""
        with self._lock:
            if not self._steps.locked():
                with self._steps:
                    self._settle()
                    if type(segment) is Segment:
                        self._make_room(segment.size)
            if type(segment) is Segment:
                try:
                    self._check_limit(self._used(), segment.size)
                except Unavailable:
                    segment.close()
                    raise
            block = self._first_block(segment, segment.size)
        self._tell(segment)
        return block

    def _used(self) -> int:
        return sum(segment.size for segment in self._segments if type(segment) is Segment)

    def _check_limit(self, used: int, size: int) -> None:
        if used + size > self._limit:
            raise Unavailable(
                f"this client may use {self._limit} bytes of shared memory: {used} are in use, "
                f"{size} more are needed (release results and regions, or connect with a "
                "larger memory_limit)"
            )

    def _first_block(self, segment: AnySegment, byte_size: int) -> MemoryBlock:
        offset = segment.free.allocate(byte_size)
        assert offset is not None
        self._segments.append(segment)
        return MemoryBlock(segment, offset, byte_size, self)

    def _tell(self, segment: AnySegment) -> None:
        # Without the lock: the response is read by a thread that may want memory itself.
        try:
            self._share(segment)
        except BaseException:
            with self._lock:
                if segment in self._segments:
                    self._segments.remove(segment)
                    segment.close()
            raise
        self.settle()

    def part_with(self, block: MemoryBlock) -> None:
        """Give a whole segment back: the server, and the machine, have it soon."""
        block.give_back()
        self._nudge()

    def settle_if_free(self) -> None:
        """`settle`, in a thread that must not wait: whoever is in the way does it."""
        if self._lock.acquire(blocking=False):
            try:
                self.settle()
            finally:
                self._lock.release()

    def settle(self) -> None:
        """Take back what was given back."""
        with self._lock:
            if not self._steps.locked():
                with self._steps:
                    self._settle()

    def _settle(self) -> None:
        returned = self.returned  # a signal's handler may close this, which puts another one there
        while returned:
            segment, offset = returned[0]
            segment.free.free(offset)
            if not segment.free.used and segment in self._segments:
                self._segments.remove(segment)
                self._withdraw(segment)
                segment.close()
            # Last: who is interrupted before does it again.
            returned.popleft()

    def find(self, address: int, byte_size: int) -> tuple[AnySegment, int] | None:
        """The segment, and the offset in it, of memory at an address of this process."""
        for segment in tuple(self._segments):
            offset = address - segment.address
            if offset >= 0 and offset + byte_size <= segment.size:
                return segment, offset
        return None

    def any_within(self, arrays: Sequence[np.ndarray]) -> bool:
        """Whether one of the arrays lies in a segment."""
        if not self._segments:
            return False
        return any(self.find(array.ctypes.data, array.nbytes) for array in arrays)

    def share_again(self, share: Callable[[AnySegment], None]) -> None:
        """Make everything known, by `share`, to a server that has started anew."""
        with self._lock:
            for segment in tuple(self._segments):
                share(segment)

    def close(self) -> None:
        """Give everything back."""
        with self._lock:
            for segment in self._segments:
                segment.close()
            self._segments.clear()
            self.returned = deque(maxlen=0)  # what comes back yet is kept by nobody
