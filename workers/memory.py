"""Memory for outputs without a client's place: who reads each block, when it comes back."""

from __future__ import annotations

from shmserve.ipc.arena import Arena
from shmserve.ipc.tensors import Place

# Long after any reader that learnt of a block has copied it out.
_FORGOTTEN_NS = 60_000_000_000


class OutputMemory:
    """Blocks of the worker's arena, each tagged with the process that will read it and release it.

    A release travels through the scheduler. When that dies, answers and releases on their way die
    with it, so blocks from before (`lose_track`) that nobody releases within a minute are taken
    back (`sweep`).
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._readers: dict[int, int] = {}  # offset -> pid
        self._untracked: set[int] = set()
        self._untracked_since_ns = 0

    def __len__(self) -> int:
        return len(self._readers)

    def allocate(self, reader_pid: int, byte_size: int) -> tuple[Place, memoryview]:
        """A block for `reader_pid` and its bytes. Raises Unavailable when memory is full."""
        place = self._arena.allocate(byte_size)
        self._readers[place.offset] = reader_pid
        return place, self._arena.view(place)

    def release(self, reader_pid: int, offsets: list[int]) -> None:
        """Take blocks back from their reader; what is not allocated to it is ignored."""
        for offset in offsets:
            if self._readers.get(offset) == reader_pid:
                self._free(offset)

    def drop_reader(self, reader_pid: int) -> None:
        """Take back every block of a process that has ended."""
        for offset in [at for at, pid in self._readers.items() if pid == reader_pid]:
            self._free(offset)

    def lose_track(self, now_ns: int) -> None:
        """Whoever passed releases on is gone: what is allocated now may never be released."""
        self._untracked = set(self._readers)
        self._untracked_since_ns = now_ns

    def sweep(self, now_ns: int) -> None:
        """Take back what has been untracked for too long."""
        if self._untracked and now_ns - self._untracked_since_ns > _FORGOTTEN_NS:
            for offset in list(self._untracked):
                self._free(offset)

    def _free(self, offset: int) -> None:
        self._readers.pop(offset, None)
        self._untracked.discard(offset)
        self._arena.free(offset)
