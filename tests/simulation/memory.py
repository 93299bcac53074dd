"""Simulated shared memory with the real allocator: use after free, double free, leaks."""

from __future__ import annotations

import itertools

from shmserve.errors import Unavailable
from shmserve.ipc.memory.arena import FreeList
from shmserve.ipc.tensors.descriptors import Memory, Range
from tests.simulation.world import Process, Violation


class SimulatedMemory:
    """All arenas of the world by the id of their memory.

    After an ensemble has died (`ensembles_died`), its last requests may refer to memory that
    workers have freed; their results are not awaited.
    """

    def __init__(self) -> None:
        self.ensembles_died = False
        self._arenas: dict[int, SimulatedArena] = {}
        self._ids = itertools.count(1)

    def arena(self, owner: Process, capacity: int) -> SimulatedArena:
        number = next(self._ids)
        arena = self._arenas[number] = SimulatedArena(number, owner, capacity)
        return arena

    def read(self, memory_range: Range, reader: object) -> bytes:
        """Return the bytes of a range; raise Violation if it is not allocated."""
        arena = self._arenas[memory_range.memory.id]
        data = arena.blocks.get(memory_range.offset)
        if data is None and not arena.owner.alive:
            raise Unavailable("the memory of a tensor has been released")
        if data is None or len(data) < memory_range.byte_size:
            raise Violation(
                f"{reader} reads freed memory of {arena.owner} at {memory_range.offset}"
            )
        return bytes(data[: memory_range.byte_size])

    def write(self, memory_range: Range, data: bytes, writer: object) -> None:
        """Write to a range; raise Violation if it is not allocated."""
        arena = self._arenas[memory_range.memory.id]
        if arena.owner.alive and memory_range.offset not in arena.blocks:
            raise Violation(
                f"{writer} writes freed memory of {arena.owner} at {memory_range.offset}"
            )
        arena.blocks[memory_range.offset][: len(data)] = data

    def leaks(self) -> list[str]:
        """Return the allocated blocks of live processes."""
        return [
            f"{arena.owner} at {offset}"
            for arena in self._arenas.values()
            if arena.owner.alive
            for offset in arena.blocks
        ]

    def block(self, memory_id: int, offset: int) -> bytearray | None:
        arena = self._arenas[memory_id]
        return arena.blocks.get(offset) if arena.owner.alive else None

    # The methods of `Mappings` that the cores call.

    def view(self, memory_range: Range) -> memoryview:
        return memoryview(self.read(memory_range, "a scheduler"))

    def unmap_process(self, pid: int) -> None:
        """Do nothing, because nothing is mapped."""

    def unmap(self, memory_id: int) -> None:
        """Do nothing, because nothing is mapped."""

    def unmap_all(self) -> None:
        """Do nothing, because nothing is mapped."""


class SimulatedArena:
    """A fake `Arena` without an object: `blocks` by offset; if `is_full`, allocations fail."""

    def __init__(self, number: int, owner: Process, capacity: int) -> None:
        self.owner = owner
        self.memory = Memory(number, owner.pid, -1, number, capacity, sealed=True)
        self.blocks: dict[int, bytearray] = {}
        self.is_full = False
        self._list = FreeList(capacity)

    @property
    def used_bytes(self) -> int:
        return self._list.used_bytes

    def allocate(self, byte_size: int) -> Range:
        """Allocate a block; raise Unavailable if the arena is full."""
        offset = None if self.is_full else self._list.allocate(byte_size)
        if offset is None:
            raise Unavailable("server memory for tensors is full")
        self.blocks[offset] = bytearray(byte_size)
        return Range(self.memory, offset, byte_size)

    def view(self, memory_range: Range) -> memoryview:
        return memoryview(self.blocks[memory_range.offset])[: memory_range.byte_size]

    def memory_range(self, data: bytes) -> Range:
        memory_range = self.allocate(len(data))
        self.blocks[memory_range.offset][:] = data
        return memory_range

    def free(self, offset: int) -> None:
        """Free a block; raise Violation if it is free already."""
        if not self._list.free(offset):
            raise Violation(f"{self.owner} frees {offset} of its arena twice")
        del self.blocks[offset]

    def close(self) -> None:
        pass
