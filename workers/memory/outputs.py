"""Memory for outputs without a client's place: who reads each block, when it comes back."""

from __future__ import annotations

from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.tensors.descriptors import Place


class OutputMemory:
    """Blocks of the worker's arena, each tagged with the process that will read it and release it.

    A reader may take as long as it lives: its release travels through whichever scheduler there is
    by then. What no scheduler can have heard of (`undelivered`) comes back at once.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._readers: dict[int, int] = {}  # offset -> pid
        self._fresh: dict[int, int] = {}  # of what is not returned yet: offset -> byte size

    def __len__(self) -> int:
        return len(self._readers)

    def allocate(self, reader_pid: int, byte_size: int) -> tuple[Place, memoryview]:
        """A block for `reader_pid` and its bytes. Raises Unavailable when memory is full."""
        place = self._arena.allocate(byte_size)
        self._readers[place.offset] = reader_pid
        self._fresh[place.offset] = byte_size
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

    def delivered(self) -> int:
        """What was allocated since the last time is on its way to its readers; its bytes."""
        byte_size = sum(self._fresh.values())
        self._fresh.clear()
        return byte_size

    def undelivered(self) -> int:
        """What was allocated since the last time will never be known to anybody; 0 bytes."""
        for offset in self._fresh:
            self._free(offset)
        self._fresh.clear()
        return 0

    def _free(self, offset: int) -> None:
        self._readers.pop(offset, None)
        self._arena.free(offset)
