"""Regions without a name that requests in flight still use: kept open until the last has ended.

Gateways count the requests that use a generation of a name. When it is withdrawn, each gateway that
knows it says when it uses it no more; then workers unmap it, and it is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from shmserve.common.tasks import in_background
from shmserve.ipc.messages import MemoryDropped, RegionDrained, RegionPublished, RegionWithdrawn
from shmserve.supervisor.regions.opener import RegionOpener
from shmserve.supervisor.regions.region import OpenRegion

# Sends what the function makes of an acknowledgement number to every gateway; returns once it
# holds in all of them.
Publish = Callable[[Callable[[int], Any]], Awaitable[None]]


class DrainingRegions:
    """By memory id. `publish` reaches every gateway (pids: `gateways`), `tell_workers` every
    worker."""

    def __init__(
        self,
        publish: Publish,
        gateways: Callable[[], Iterable[int]],
        tell_workers: Callable[[Any], None],
        opener: RegionOpener,
    ) -> None:
        self._publish = publish
        self._gateways = gateways
        self._tell_workers = tell_workers
        self._opener = opener
        self._regions: dict[int, OpenRegion] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def published(self) -> Iterator[RegionPublished]:
        """The messages that bring a new gateway up to date: they are listed while requests use
        them."""
        for region in self._regions.values():
            if region.listed:
                yield _draining(region, 0)

    async def drain(self, region: OpenRegion) -> None:
        """Withdraw a region from every gateway; returns when none accepts its name any more."""
        self._regions[region.memory_id] = region
        region.users = set(self._gateways())
        await self._publish(partial(RegionWithdrawn, region.name, region.memory_id))
        self._close_unused(region)
        if region.memory_id in self._regions:
            region.listed = True
            await self._publish(partial(_draining, region))

    def released(self, pid: int, memory_id: int) -> None:
        """Note that no request of gateway `pid` uses the region any more."""
        region = self._regions.get(memory_id)
        if region is not None:
            region.users.discard(pid)
            self._close_unused(region)

    def gateway_exited(self, pid: int) -> None:
        """Release what the requests of a gateway used that has ended."""
        for memory_id in list(self._regions):
            self.released(pid, memory_id)

    def _close_unused(self, region: OpenRegion) -> None:
        if region.users or self._regions.pop(region.memory_id, None) is None:
            return
        self._tell_workers(MemoryDropped(region.memory_id))
        self._opener.close(region)
        if region.listed:
            in_background(self._unlist(region.memory_id), self._tasks)

    async def _unlist(self, memory_id: int) -> None:
        await self._publish(partial(RegionDrained, memory_id))

    def close(self) -> None:
        """Close every object."""
        for region in self._regions.values():
            self._opener.close(region)
        self._regions.clear()


def _draining(region: OpenRegion, acknowledge: int) -> RegionPublished:
    return replace(region.published(acknowledge), draining=True)
