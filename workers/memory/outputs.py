"""Output memory: arena blocks for outputs without a place of the client's, freed by their
readers."""

from __future__ import annotations

import ctypes
from collections import Counter

from shmserve.errors import Unavailable
from shmserve.ipc.capabilities import FIRST
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.tensors.descriptors import Place


class OutputMemory:
    """Blocks of the worker's arena, each tagged with the process that will read it and release it.

    A reader may take as long as it lives: its release travels through whichever scheduler there is
    by then. What no scheduler can have heard of (`undelivered`) comes back at once.

    A local client, which need not release anything, may hold as much as is free then and no more
    (dynamic thresholds: Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998): one
    that keeps all has half of the arena, n of them n/(n + 1), and the rest is left to others. Who
    holds nothing may have an output of any size.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._readers: dict[int, tuple[int, int]] = {}  # offset -> pid, byte size
        self._fresh: dict[int, int] = {}  # of what is not returned yet: offset -> byte size
        self._held: Counter[int] = Counter()  # pid -> bytes
        self._reserved: dict[int, Place] = {}  # by address: blocks that a model computes in

    def __len__(self) -> int:
        return len(self._readers)

    def allocate(self, reader_pid: int, byte_size: int) -> tuple[Place, memoryview]:
        """A block for `reader_pid` and its bytes. Raises Unavailable when memory is full, or the
        share of a local client."""
        if reader_pid >= FIRST:
            self._check_share(self._held[reader_pid], byte_size)
        place = self._arena.allocate(byte_size)
        self._readers[place.offset] = reader_pid, byte_size
        self._fresh[place.offset] = byte_size
        self._held[reader_pid] += byte_size
        return place, self._arena.view(place)

    def reserve(self, reader_pid: int, byte_size: int) -> memoryview:
        """The bytes of a block in which an output is to be computed; `claim` finds it then, and
        what nobody claims is free again when the batch is returned. Raises as `allocate`."""
        place, view = self.allocate(reader_pid, byte_size)
        self._reserved[address_of(view)] = place
        return view

    def claim(self, reader_pid: int, address: int, byte_size: int) -> Place | None:
        """The block that was reserved for such an output, if that was computed there."""
        place = self._reserved.get(address)
        if place is None or place.byte_size != byte_size:
            return None
        if self._readers.get(place.offset, (0, 0))[0] != reader_pid:
            return None
        return self._reserved.pop(address)

    def _check_share(self, held: int, byte_size: int) -> None:
        free = self._arena.memory.byte_size - self._arena.used
        if held and held + byte_size > free - byte_size:
            raise Unavailable(
                f"server memory for tensors: {byte_size} bytes were needed, {free} are free, and "
                f"this client has not released {held} yet; it may hold as much as is free then"
            )

    def release(self, reader_pid: int, offsets: list[int]) -> None:
        """Take blocks back from their reader; what is not allocated to it is ignored."""
        for offset in offsets:
            if self._readers.get(offset, (0, 0))[0] == reader_pid:
                self._free(offset)

    def drop_reader(self, reader_pid: int) -> None:
        """Take back every block of a process that has ended."""
        for offset in [at for at, (pid, _) in self._readers.items() if pid == reader_pid]:
            self._free(offset)

    @property
    def has_fresh(self) -> bool:
        """Whether anything was allocated since the last time that responses were delivered."""
        return bool(self._fresh)

    def delivered(self) -> int:
        """What was allocated since the last time is on its way to its readers; its bytes."""
        for place in self._reserved.values():
            self._fresh.pop(place.offset, None)
            self._free(place.offset)
        self._reserved.clear()
        byte_size = sum(self._fresh.values())
        self._fresh.clear()
        return byte_size

    def undelivered(self) -> int:
        """What was allocated since the last time will never be known to anybody; 0 bytes."""
        for offset in self._fresh:
            self._free(offset)
        self._fresh.clear()
        self._reserved.clear()
        return 0

    def _free(self, offset: int) -> None:
        block = self._readers.pop(offset, None)
        if block is None:  # its reader has ended meanwhile
            return
        reader_pid, byte_size = block
        self._held[reader_pid] -= byte_size
        if not self._held[reader_pid]:
            del self._held[reader_pid]
        self._arena.free(offset)


def address_of(view: memoryview) -> int:
    """Where bytes that may be written lie in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
