"""Lent regions: memory that local clients share. Each is without a name, its client's alone until
it is given back or the client has gone, and unknown to gateways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmserve.common.access.shm_access import Peer
from shmserve.ipc.memory import posix_shm
from shmserve.ipc.messages import MemoryDropped
from shmserve.ipc.tensors.descriptors import Memory
from shmserve.supervisor.regions.opener import RegionOpener
from shmserve.supervisor.regions.region import OpenRegion


class LentRegions:
    """By memory id. `tell_workers` reaches every worker.

    What lends raises Unsupported, PermissionDenied, InvalidArgument or Unavailable.
    """

    def __init__(self, opener: RegionOpener, tell_workers: Callable[[Any], None]) -> None:
        self._opener = opener
        self._tell_workers = tell_workers
        self._lent: dict[int, OpenRegion] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def lend(
        self,
        memory_id: int,
        shared: posix_shm.SharedObject,
        byte_size: int,
        peer: Peer,
        local_client: int,
        pin: bool = False,
    ) -> None:
        """Keep a sealed object of a local client's until `give_back`; its descriptor is ours from
        then on."""
        self._lent[memory_id] = self._opener.take_lent(
            memory_id, shared, byte_size, peer, local_client, pin=pin
        )

    async def lend_cuda(self, memory: Memory, peer: Peer, local_client: int) -> None:
        """Keep a local client's device memory until `give_back`. A local client that leaves
        meanwhile is the caller's to look after."""
        self._lent[memory.id] = await self._opener.take_lent_cuda(memory, peer, local_client)

    def give_back(self, local_client: int, memory_id: int = 0) -> None:
        """A local client needs a memory no more, or (without `memory_id`) is gone."""
        for region in list(self._lent.values()):
            if region.lessor == local_client and memory_id in (0, region.memory_id):
                del self._lent[region.memory_id]
                self._tell_workers(MemoryDropped(region.memory_id))
                self._opener.close(region)

    def close(self) -> None:
        """Close every one."""
        for region in self._lent.values():
            self._opener.close(region)
        self._lent.clear()
