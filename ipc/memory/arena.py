"""Arenas: each is a sealed memfd for the tensors of its owner; other processes only map it.

    memfd   |#### in use ####|    free    |## in use ##|......... not committed .........|
            0                                          ^ high-water mark                 ^ capacity

The owner allocates and frees blocks. A reader receives `Range`s, and its release message contains
the offset. The object has no name, so that it cannot outlast its processes. Its size is sealed, so
that a mapping never faults. Pages are reserved with posix_fallocate before use, so that a lack of
memory is an error and not a signal.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from bisect import bisect

from shmserve.errors import InvalidArgument, ShmserveError, Unavailable
from shmserve.ipc.tensors.descriptors import Memory, Range

_ALIGNMENT = 64  # a cache line, and the alignment of vector loads
_KEPT_BYTES = 64 * 1024 * 1024  # an empty arena returns the memory above this offset to the system
# The seals that fix the size of a memfd.
FIXED_SIZE_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class FreeList:
    """A first-fit allocator of [0, capacity) in multiples of 64 bytes, without the memory itself.

    First fit with coalescing on free: Knuth, The Art of Computer Programming vol. 1, 2.5,
    algorithms A and B.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity - capacity % _ALIGNMENT
        # (offset, size) of each free hole, sorted by offset.
        self._holes: list[tuple[int, int]] = [(0, self.capacity)]
        self._block_sizes: dict[int, int] = {}  # by offset
        self.used_bytes = 0

    def allocate(self, byte_size: int) -> int | None:
        """Return the offset of a new block of at least `byte_size` bytes, or None if none fits.

        Raises:
            InvalidArgument: The size is negative.
        """
        if byte_size < 0:
            raise InvalidArgument(f"byte_size of a block: must be at least 0, got {byte_size}")
        size = (byte_size + _ALIGNMENT - 1) & -_ALIGNMENT or _ALIGNMENT
        if size > self.capacity - self.used_bytes:
            return None
        for index, (offset, free_size) in enumerate(self._holes):
            if free_size >= size:
                if free_size == size:
                    del self._holes[index]
                else:
                    self._holes[index] = (offset + size, free_size - size)
                self._block_sizes[offset] = size
                self.used_bytes += size
                return offset
        return None

    def free(self, offset: int) -> bool:
        """Free the block at `offset`; return False if there is none (a repeated release)."""
        size = self._block_sizes.get(offset)
        if size is None:
            return False
        # No function call lies between these two statements, so that no signal handler can run
        # after only one of them.
        del self._block_sizes[offset]
        self.used_bytes -= size
        holes = self._holes
        first_hole = end_hole = bisect(holes, (offset, 0))
        if first_hole:
            previous_offset, free_size = holes[first_hole - 1]
            if previous_offset + free_size == offset:
                first_hole, offset, size = first_hole - 1, previous_offset, size + free_size
        if end_hole < len(holes):
            next_offset, free_size = holes[end_hole]
            if offset + size == next_offset:
                end_hole, size = end_hole + 1, size + free_size
        holes[first_hole:end_hole] = ((offset, size),)
        return True


class Arena:
    """A memfd of this process that other processes map, with an allocator for its bytes.

    Args:
        capacity: The size in bytes; memory is reserved only for allocated blocks.

    Raises:
        Unavailable: The limits of this process do not permit an object of this size.
    """

    def __init__(self, capacity: int) -> None:
        capacity -= capacity % mmap.PAGESIZE
        self._fd = os.memfd_create("shmserve-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, capacity)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, FIXED_SIZE_SEALS)
            self._map = mmap.mmap(self._fd, capacity)
        except OSError as error:  # the limit of ulimit -f or ulimit -v
            os.close(self._fd)
            raise Unavailable(
                f"cannot allocate {capacity} bytes of server memory for tensors: {error.strerror}; "
                "reduce --arena-byte-size, or raise the limits of ulimit -f and -v"
            ) from None
        self._view = memoryview(self._map)
        self._free_list = FreeList(capacity)
        self._committed_bytes = 0
        memory_id, inode = int.from_bytes(os.urandom(8)) >> 2, os.fstat(self._fd).st_ino
        self.memory = Memory(memory_id, os.getpid(), self._fd, inode, capacity, sealed=True)

    @property
    def used_bytes(self) -> int:
        """Return the number of allocated bytes."""
        return self._free_list.used_bytes

    def allocate(self, byte_size: int) -> Range:
        """Allocate a block of `byte_size` bytes, aligned to 64 bytes.

        Raises:
            Unavailable: The arena or the host's memory is full.
            InvalidArgument: The block is larger than the arena.
        """
        offset = self._free_list.allocate(byte_size)
        if offset is None:
            raise self._out_of_space(byte_size)
        end = offset + byte_size
        if end > self._committed_bytes:
            try:
                os.posix_fallocate(self._fd, self._committed_bytes, end - self._committed_bytes)
            except OSError as error:
                self._free_list.free(offset)
                text = f"server memory for tensors cannot grow to {end} bytes: {error.strerror}"
                raise Unavailable(text) from error
            self._committed_bytes = end
        return Range(self.memory, offset, byte_size)

    def _out_of_space(self, byte_size: int) -> ShmserveError:
        capacity = self._free_list.capacity
        if byte_size > capacity:
            return InvalidArgument(
                f"server memory for tensors is too small: {byte_size} bytes are needed, "
                f"--arena-byte-size allows {capacity}"
            )
        return Unavailable(
            f"server memory for tensors is full: {byte_size} bytes were needed, "
            f"{capacity - self._free_list.used_bytes} of {capacity} are free (--arena-byte-size)"
        )

    def view(self, memory_range: Range) -> memoryview:
        """Return a writable view of the bytes of a range of this arena."""
        return self._view[memory_range.offset : memory_range.offset + memory_range.byte_size]

    def free(self, offset: int) -> None:
        """Free the block at `offset`; an offset that is not allocated is ignored."""
        if (
            self._free_list.free(offset)
            and self._committed_bytes > _KEPT_BYTES
            and not self._free_list.used_bytes
        ):
            self._map.madvise(mmap.MADV_REMOVE, _KEPT_BYTES, self._map.size() - _KEPT_BYTES)
            self._committed_bytes = _KEPT_BYTES

    def close(self) -> None:
        """Unmap and close the arena; the mappings of readers stay valid."""
        self._view.release()
        self._map.close()
        os.close(self._fd)
