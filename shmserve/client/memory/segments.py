"""The client's shared memory: an allocator over sealed memfds, which workers map.

Device memory (cuda.py) is managed in the same list.

    Segment    |## region ##|### slot ###|### slot ###|......... free .........|
                             inputs, then outputs, each aligned to 64 bytes

Only the client allocates. A request's block is freed once the server has responded and no array
refers to it.
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
from shmserve.client.memory.views import MemoryLease, RegisteredMemory, View, noop
from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.memory.arena import FIXED_SIZE_SEALS, FreeList
from shmserve.ipc.messages import control_requests as m
from shmserve.ipc.tensors.arrays import STORAGE_DTYPES

ALIGNMENT = 64
_MIN_SEGMENT_BYTES = 4 * 1024 * 1024
_MAX_SHARED_SEGMENT_BYTES = 64 * 1024 * 1024


def aligned(byte_size: int) -> int:
    """Return `byte_size` rounded up to the next tensor's alignment."""
    return -(-byte_size // ALIGNMENT) * ALIGNMENT


class Segment(RegisteredMemory):
    """A memfd that is mapped into this process.

    Attributes:
        counts_against_limit: Whether the memory counts against the client's limit.
    """

    fd = -1  # for `close`, if the memfd cannot be created
    counts_against_limit = True

    def __init__(self, byte_size: int, *, pin: bool = False, huge_pages: bool = False) -> None:
        """Create and map the memfd. Raises Unavailable if the machine has not enough memory."""
        self.pin = pin
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge_pages else 0)
        try:
            self.fd = os.memfd_create("shmserve-client", flags)
        except OSError as error:  # there are no huge pages, or no free descriptor
            text = f"{byte_size} bytes of shared memory cannot be allocated: {error}"
            raise Unavailable(text) from error
        page_size = os.fstatvfs(self.fd).f_bsize
        self.size = -(-byte_size // page_size) * page_size
        try:
            os.ftruncate(self.fd, self.size)
            os.posix_fallocate(self.fd, 0, self.size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, FIXED_SIZE_SEALS)
            mapping = mmap.mmap(self.fd, self.size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException as error:  # also KeyboardInterrupt: an allocation may take long
            self.close()
            if not isinstance(error, OSError):
                raise
            text = f"{byte_size} bytes of shared memory cannot be allocated"
            if huge_pages:
                text += f": too few huge pages of {page_size} bytes are free (vm.nr_hugepages)"
            else:
                text += f": {error.strerror}"
            raise Unavailable(text) from error
        self._set_mapping(mapping)

    def _set_mapping(self, mapping: mmap.mmap) -> None:
        # Each array refers to `mapping`, so the memory is unmapped with the last array.
        self.bytes = memoryview(mapping)
        self.address: int = np.frombuffer(self.bytes, np.uint8).ctypes.data
        self.free_list = FreeList(aligned(self.size))

    def make_share_request(self, request_number: int) -> tuple[Any, tuple[int, ...]]:
        """Return the message that shares the segment with a server, and the descriptors to pass."""
        return m.ShareMemory(request_number, self.size, self.pin), (self.fd,)

    def view(self, offset: int, shape: tuple[int, ...], datatype: str, lease: MemoryLease) -> View:
        """Return an array over the tensor at `offset`, which keeps the memory of `lease` alive."""
        return View.from_memory(self.bytes, offset, shape, STORAGE_DTYPES[datatype], lease)

    def close(self) -> None:
        """Unmap the memory once its last array is gone. This method is idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()  # an interrupted call may leave a segment that nothing else closes


class AttachedSegment(Segment):
    """A mapping of memory that another process or client has created and owns."""

    counts_against_limit = False

    def __init__(self, fd: int, pin: bool, byte_size: int) -> None:
        """Map the memory of `fd`; `close` then closes the descriptor.

        Raises:
            InvalidArgument: The descriptor is no shared memory of at least `byte_size` bytes, or is
                not open for reading and writing.
            Unavailable: The machine has not enough memory.
        """
        self.fd = fd
        self.pin = pin
        self.size = os.fstat(fd).st_size
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            raise InvalidArgument("only a memfd or an object in /dev/shm can be attached") from None
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
            raise InvalidArgument("the memory's descriptor is not open for reading and writing")
        if self.size < max(1, byte_size):
            text = f"the memory has {self.size} bytes, and the tensors need {byte_size}"
            raise InvalidArgument(text)
        try:
            # Workers map only memory that cannot shrink, so the seal is added if it may be added.
            if not seals & fcntl.F_SEAL_SEAL:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            # Pages that the maker has not written yet are reserved now.
            os.posix_fallocate(fd, 0, self.size)
            self._set_mapping(mmap.mmap(fd, self.size, mmap.MAP_SHARED))
        except OSError as error:
            text = f"{self.size} bytes of attached memory cannot be reserved and mapped: {error}"
            raise Unavailable(f"{text}; free memory, or raise the limit") from error


AnySegment = Segment | DeviceSegment


class MemoryBlock:
    """Allocated bytes of a segment, from `offset` on.

    A block is recycled at the latest when it is garbage-collected, for example after an interrupt.
    """

    __slots__ = ("_memories", "offset", "segment")

    def __init__(self, segment: Any, offset: int, memories: Memories) -> None:
        self.segment = segment  # usually a `Segment`, which has `bytes`
        self.offset = offset
        self._memories: Memories | None = memories

    def recycle(self) -> None:
        """Mark the block as unused; the next `free_recycled` frees it.

        This method is idempotent, and safe in the garbage collector.
        """
        memories, self._memories = self._memories, None
        if memories is not None:
            memories.recycled.append((self.segment, self.offset))

    def __del__(self) -> None:
        self.recycle()


class BlockOwner(Protocol):
    """An object that keeps idle blocks, which are freed when memory is short."""

    def free_idle(self) -> None:
        """Free the blocks that no request uses at present."""


@dataclass(eq=False)
class Memories:
    """A client's allocator over all its segments; thread-safe.

    Args:
        _limit: The maximum total size of the segments in bytes.
        _share: A function that shares a segment with the server.
        _withdraw: A function that withdraws a segment from the server.
        _schedule_free: A function that schedules a call of `free_recycled_if_unlocked`.
    """

    _limit: int
    _share: Callable[[AnySegment], None]
    _withdraw: Callable[[AnySegment], None]
    _schedule_free: Callable[[], None] = noop
    _lock: threading.RLock = field(init=False, default_factory=threading.RLock)
    _segments: list[AnySegment] = field(init=False, default_factory=list)
    recycled: deque[tuple[AnySegment, int]] = field(init=False, default_factory=deque)
    _block_owners: weakref.WeakKeyDictionary[BlockOwner, None] = field(
        init=False, default_factory=weakref.WeakKeyDictionary
    )

    def allocate(self, byte_size: int, *, whole_segment: bool = False) -> MemoryBlock:
        """Return a block; with `whole_segment`, the block is a new segment.

        Raises:
            Unavailable: The client's limit would be exceeded, or the machine has not enough memory.
        """
        with self._lock:
            self.free_recycled()
            block = None if whole_segment else self._allocate_in_existing(byte_size)
            if block is None and self._free_idle(byte_size) and not whole_segment:
                block = self._allocate_in_existing(byte_size)
            if block is not None:
                return block
            used_bytes = self._used_bytes()
            # A larger segment also serves later requests.
            grown_size = max(_MIN_SEGMENT_BYTES, min(used_bytes, _MAX_SHARED_SEGMENT_BYTES))
            preferred_size = min(grown_size, self._limit - used_bytes)
            size = byte_size if whole_segment else max(byte_size, preferred_size)
            self._check_limit(used_bytes, size)
            segment = Segment(size)
            block = self._first_block(segment, segment.size if whole_segment else byte_size)
        self._share_new_segment(block.segment)
        return block

    def _allocate_in_existing(self, byte_size: int) -> MemoryBlock | None:
        for segment in self._segments:
            if segment.memory is None:
                continue  # the segment is not shared with the server yet
            offset = segment.free_list.allocate(byte_size)
            if offset is not None:
                return MemoryBlock(segment, offset, self)
        return None

    def _free_idle(self, byte_size: int) -> bool:
        """Ask the owners to free idle blocks if `byte_size` more bytes would exceed the limit.

        Returns:
            Whether the owners were asked.
        """
        if self._used_bytes() + byte_size <= self._limit:
            return False
        for reference in self._block_owners.keyrefs():
            owner = reference()
            if owner is not None:
                owner.free_idle()
        self.free_recycled()
        return True

    def register_owner(self, owner: BlockOwner) -> None:
        """Register an owner of idle blocks, which frees the blocks when memory is short."""
        with self._lock:
            self._block_owners[owner] = None

    def add(self, segment: AnySegment) -> MemoryBlock:
        """Share an existing segment with the server; return it as one block.

        Raises:
            Unavailable: The client's limit would be exceeded.
        """
        with self._lock:
            self.free_recycled()
            if segment.counts_against_limit:
                self._free_idle(segment.size)
                try:
                    self._check_limit(self._used_bytes(), segment.size)
                except Unavailable:
                    segment.close()
                    raise
            block = self._first_block(segment, segment.size)
        self._share_new_segment(segment)
        return block

    def _used_bytes(self) -> int:
        return sum(segment.size for segment in self._segments if segment.counts_against_limit)

    def _check_limit(self, used_bytes: int, size: int) -> None:
        if used_bytes + size > self._limit:
            raise Unavailable(
                f"this client may use {self._limit} bytes of shared memory: {used_bytes} are in "
                f"use, {size} more are needed (release results and regions, or connect with a "
                "larger memory_limit)"
            )

    def _first_block(self, segment: AnySegment, byte_size: int) -> MemoryBlock:
        offset = segment.free_list.allocate(byte_size)
        assert offset is not None
        self._segments.append(segment)
        return MemoryBlock(segment, offset, self)

    def _share_new_segment(self, segment: AnySegment) -> None:
        # No lock may be held: the thread that reads the server's response may allocate memory.
        try:
            self._share(segment)
        except BaseException:
            with self._lock:
                if segment in self._segments:
                    self._segments.remove(segment)
                    segment.close()
            raise
        self.free_recycled()

    def withdraw_block(self, block: MemoryBlock) -> None:
        """Free a block that is a whole segment, and withdraw the segment from the server."""
        block.recycle()
        self._schedule_free()

    def free_recycled_if_unlocked(self) -> None:
        """Call `free_recycled`, unless the lock is held: its holder then calls the function."""
        if self._lock.acquire(blocking=False):
            try:
                self.free_recycled()
            finally:
                self._lock.release()

    def free_recycled(self) -> None:
        """Free the blocks that `MemoryBlock.recycle` has marked as unused."""
        with self._lock:
            while self.recycled:
                segment, offset = self.recycled.popleft()
                segment.free_list.free(offset)
                if not segment.free_list.used_bytes and segment in self._segments:
                    self._segments.remove(segment)
                    self._withdraw(segment)
                    segment.close()

    def find(self, address: int, byte_size: int) -> tuple[AnySegment, int] | None:
        """Return the segment that contains `byte_size` bytes at an address, and their offset in it.

        Returns:
            None if no segment contains all of these bytes.
        """
        for segment in tuple(self._segments):
            offset = address - segment.address
            if offset >= 0 and offset + byte_size <= segment.size:
                return segment, offset
        return None

    def any_within(self, arrays: Sequence[np.ndarray]) -> bool:
        """Check whether any of the arrays lies in a segment."""
        if not self._segments:
            return False
        return any(self.find(array.ctypes.data, array.nbytes) for array in arrays)

    def share_again(self, share: Callable[[AnySegment], None]) -> None:
        """Share all segments with a restarted server; `share` shares one segment."""
        with self._lock:
            for segment in tuple(self._segments):
                share(segment)

    def close(self) -> None:
        """Withdraw and free all segments."""
        with self._lock:
            for segment in self._segments:
                segment.close()
            self._segments.clear()
            self.recycled = deque(maxlen=0)  # blocks recycled after this are ignored
