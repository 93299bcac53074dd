"""Simulated shared memory: arenas whose every block has an owner and a reader.

The allocator is the real one. Bytes are kept by block, so that a read of what was freed, a second
release and a leak are seen at once, and not by luck.
"""

from __future__ import annotations

import itertools

from shmserve.errors import Unavailable
from shmserve.ipc.memory.arena import FreeList
from shmserve.ipc.tensors.descriptors import Memory, Range
from tests.simulation.world import Process, Violation


class SimulatedMemory:
    """All arenas of the world, by the id of their memory. Once `ensembles_died`, the last requests
    of one may be of memory that workers have taken back with its end: nobody waits for them."""

    def __init__(self) -> None:
        self.ensembles_died = False
        self._arenas: dict[int, SimulatedArena] = {}
        self._ids = itertools.count(1)

    def arena(self, owner: Process, capacity: int) -> SimulatedArena:
        number = next(self._ids)
        arena = self._arenas[number] = SimulatedArena(number, owner, capacity)
        return arena

    def read(self, memory_range: Range, who: object) -> bytes:
        """The bytes at a place. Raises Violation where they are nobody's any more."""
        arena = self._arenas[memory_range.memory.id]
        data = arena.blocks.get(memory_range.offset)
        if data is None and not arena.owner.alive:
            raise Unavailable("the memory of a tensor has been released")
        if data is None or len(data) < memory_range.byte_size:
            raise Violation(f"{who} reads freed memory of {arena.owner} at {memory_range.offset}")
        return bytes(data[: memory_range.byte_size])

    def write(self, memory_range: Range, data: bytes, who: object) -> None:
        """Write at a place. Raises Violation where it is nobody's any more."""
        arena = self._arenas[memory_range.memory.id]
        if arena.owner.alive and memory_range.offset not in arena.blocks:
            raise Violation(f"{who} writes freed memory of {arena.owner} at {memory_range.offset}")
        arena.blocks[memory_range.offset][: len(data)] = data

    def leaks(self) -> list[str]:
        """Blocks of living processes that are allocated."""
        return [
            f"{arena.owner} at {offset}"
            for arena in self._arenas.values()
            if arena.owner.alive
            for offset in arena.blocks
        ]

    def block(self, memory_id: int, offset: int) -> bytearray | None:
        """Return the block of a living process at an offset, if one is allocated."""
        arena = self._arenas[memory_id]
        return arena.blocks.get(offset) if arena.owner.alive else None

    # The methods of `Mappings` that the cores call.

    def view(self, memory_range: Range) -> memoryview:
        return memoryview(self.read(memory_range, "a scheduler"))

    def drop_process(self, pid: int) -> None:
        """As `Mappings.drop_process`: nothing is mapped here."""

    def drop(self, memory_id: int) -> None:
        """As `Mappings.drop`."""

    def drop_all(self) -> None:
        """As `Mappings.drop_all`."""


class SimulatedArena:
    """As `ipc.memory.arena.Arena`, without an object: `blocks` has the bytes of each, by offset.
    While it is `full` nothing can be allocated."""

    def __init__(self, number: int, owner: Process, capacity: int) -> None:
        self.owner = owner
        self.memory = Memory(number, owner.pid, -1, number, capacity, sealed=True)
        self.blocks: dict[int, bytearray] = {}
        self.full = False
        self._list = FreeList(capacity)

    @property
    def used(self) -> int:
        """Bytes allocated now."""
        return self._list.used

    def allocate(self, byte_size: int) -> Range:
        """A block; raises Unavailable when the arena is full."""
        offset = None if self.full else self._list.allocate(byte_size)
        if offset is None:
            raise Unavailable("server memory for tensors is full")
        self.blocks[offset] = bytearray(byte_size)
        return Range(self.memory, offset, byte_size)

    def view(self, memory_range: Range) -> memoryview:
        """The bytes of a place of this arena, writable."""
        return memoryview(self.blocks[memory_range.offset])[: memory_range.byte_size]

    def memory_range(self, data: bytes) -> Range:
        """A block with these bytes."""
        memory_range = self.allocate(len(data))
        self.blocks[memory_range.offset][:] = data
        return memory_range

    def free(self, offset: int) -> None:
        """Take a block back. Raises Violation for one that is free already."""
        if not self._list.free(offset):
            raise Violation(f"{self.owner} frees {offset} of its arena twice")
        del self.blocks[offset]

    def close(self) -> None:
        """As `Arena.close`."""
