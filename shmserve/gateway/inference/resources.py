"""The resources of a request, held until no worker can touch them: an arena block, references to
regions."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from shmserve.errors import Unavailable
from shmserve.gateway.inference.body_budget import BodyBudget
from shmserve.gateway.region_table import GatewayRegion, RegionTable, Uses
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.tensors.descriptors import Place

_ALIGNMENT = 64


class Resources:
    """The resources of one request, released together.

    Where the arena is full, `budget` evicts slow bodies.
    """

    __slots__ = ("_arena", "_budget", "_offset", "_table", "_uses")

    def __init__(self, arena: Arena, budget: BodyBudget, regions: RegionTable) -> None:
        self._arena = arena
        self._budget = budget
        self._table = regions
        self._offset = -1
        self._uses: Uses | None = None

    @property
    def uses(self) -> Uses:
        """The request's references to regions."""
        if self._uses is None:
            self._uses = Uses(self._table)
        return self._uses

    @property
    def regions(self) -> Sequence[GatewayRegion]:
        """The regions that the request uses."""
        return () if self._uses is None else self._uses.regions

    def allocate(self, sizes: list[int]) -> list[Place]:
        """Places of these sizes, in bytes, in one arena block.

        Raises Unavailable when memory for tensors is full.
        """
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        block = self._block(starts.pop())
        self._offset = block.offset
        return [
            Place(block.memory, block.offset + start, size)
            for start, size in zip(starts, sizes, strict=True)
        ]

    def _block(self, byte_size: int) -> Place:
        try:
            return self._arena.allocate(byte_size)
        except Unavailable:
            if byte_size <= self._arena.memory.byte_size:
                for _ in self._budget.evict():
                    with contextlib.suppress(Unavailable):
                        return self._arena.allocate(byte_size)
            raise

    def view(self, place: Place) -> memoryview:
        """The bytes of a place that `allocate` gave."""
        return self._arena.view(place)

    def __bool__(self) -> bool:
        return self._offset >= 0 or self._uses is not None

    @property
    def repeatable(self) -> bool:
        """Whether another request with the same header could be made of the same template."""
        return self._offset < 0

    def release(self) -> None:
        """Release everything; a second time does nothing."""
        if self._offset >= 0:
            self._arena.free(self._offset)
            self._offset = -1
        if self._uses is not None:
            self._uses.release()
