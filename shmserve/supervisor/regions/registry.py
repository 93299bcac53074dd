"""The registry of clients' shared memory regions: one name space for every listener, held by the
supervisor.

A region is a numbered generation of a name:

    register --> ACTIVE --unregister--> DRAINING --last release--> closed
                                        (the name is free, requests in flight go on; it is listed
                                        while there are some)

The object is opened once, here; workers map that very object through the supervisor's descriptor,
so a key that is unlinked and made again is never confused with what was registered. Who may
register and unregister what is decided by shmserve.common.peers, how much by
shmserve.supervisor.regions.opener.

What is registered of system memory is kept beyond the server where somebody does (`keeping`).

CUDA memory is registered by a handle that workers alone open. Where the process is known that
exported it, its death unregisters the region.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from shmserve.common.host import cuda_not_supported
from shmserve.common.peers import EVERYONE, Peer
from shmserve.common.tasks import in_background
from shmserve.errors import AlreadyExists, InvalidArgument
from shmserve.ipc.memory import posix_shm
from shmserve.ipc.messages.publications import (
    MemoryDropped,
    RegionBlamed,
    RegionDrained,
    RegionPublished,
    RegionUnregistered,
    RegionWithdrawn,
)
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory
from shmserve.ipc.tensors.ranges import whole
from shmserve.supervisor.regions.keeping import KeptRegions
from shmserve.supervisor.regions.opener import RegionOpener
from shmserve.supervisor.regions.region import OpenRegion

logger = logging.getLogger(__name__)


class Processes(Protocol):
    """The gateways and workers, by role; as the control socket reaches them."""

    def publish(self, make: Callable[[int], Any], *roles: str) -> Awaitable[None]:
        """Send what `make(number)` gives; returns once it holds in each that lives."""

    def broadcast(self, message: Any, *roles: str) -> None:
        """Send a message to each."""

    def pids(self, *roles: str) -> list[int]:
        """Those that have made contact."""


@dataclass(slots=True, eq=False)
class DrainingRegions:
    """Regions without a name that requests in flight still use, by memory id: kept open until the
    last has ended.

    Gateways count the requests that use a generation of a name. When it is withdrawn, each gateway
    that knows it releases it when it uses it no more; then workers unmap it, and it is closed.
    """

    _processes: Processes
    _opener: RegionOpener
    _regions: dict[int, OpenRegion] = field(init=False, default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    def published(self) -> Iterator[RegionPublished]:
        """The messages that bring a new gateway up to date: they are listed while requests use
        them."""
        for region in self._regions.values():
            if region.listed:
                yield region.listed_only(0)

    async def drain(self, region: OpenRegion) -> None:
        """Withdraw a region from every gateway; returns when none accepts its name any more."""
        self._regions[region.memory_id] = region
        region.users = set(self._processes.pids("gateway"))
        await self._processes.publish(
            partial(RegionWithdrawn, region.name, region.memory_id), "gateway"
        )
        self._close_unused(region)
        if region.memory_id in self._regions:
            region.listed = True
            await self._processes.publish(region.listed_only, "gateway")

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
        self._processes.broadcast(MemoryDropped(region.memory_id), "worker")
        self._opener.close(region)
        if region.listed:
            in_background(self._unlist(region.memory_id), self._tasks)

    async def _unlist(self, memory_id: int) -> None:
        await self._processes.publish(partial(RegionDrained, memory_id), "gateway")

    def close(self) -> None:
        """Close every object."""
        for region in self._regions.values():
            self._opener.close(region)
        self._regions.clear()


class RegionRegistry:
    """Registers and unregisters; `publish_event` is for subscribers of events."""

    def __init__(
        self,
        processes: Processes,
        opener: RegionOpener,
        publish_event: Callable[[Any], None],
        kept: KeptRegions,
    ) -> None:
        self._processes = processes
        self._publish_event = publish_event
        self._opener = opener
        self._kept = kept
        self.draining = DrainingRegions(processes, opener)
        self._endings: set[asyncio.Task[None]] = set()
        self._active: dict[str, OpenRegion] = {}
        # Registrations and unregistrations take effect one after the other, everywhere.
        self._turn = asyncio.Lock()

    def restore(self, given: dict[str, list[int]]) -> None:
        """Register again what was kept of a server before, before there are gateways."""
        for region in self._kept.restore(given, self._opener):
            self._active[region.name] = region
        if given:
            logger.info("%d registered regions are those of the server before", len(self._active))

    async def adopt(self, kept_as: str, fds: list[int]) -> None:
        """Have a region that another server has. A name that was registered at both, at the same
        time, has the region that each has opened."""
        async with self._turn:
            for region in self._kept.restore({kept_as: fds}, self._opener):
                if known := self._active.get(region.name):
                    known.kept_as = max(known.kept_as, kept_as)  # there, too
                    self._opener.close(region)
                    return
                self._active[region.name] = region
                self._publish_event(region.registered())
                await self._processes.publish(region.published, "gateway")

    async def forget(self, kept_as: str) -> None:
        """Unregister what another server has no more."""
        async with self._turn:
            for region in self.active():
                if region.kept_as == kept_as:
                    await self._withdraw(region)

    def active(self) -> list[OpenRegion]:
        """Every region that has a name."""
        return list(self._active.values())

    def published(self) -> Iterator[RegionPublished]:
        """The messages that bring a new gateway up to date."""
        for region in self._active.values():
            yield region.published(0)
        yield from self.draining.published()

    async def register(
        self,
        name: str,
        key: str,
        offset: int,
        byte_size: int,
        peer: Peer,
        lessor: int = 0,
        pin: bool = False,
    ) -> dict[str, Any]:
        """Register [offset, offset + byte_size) of the object `key` as `name` for `peer`; returns
        {"memory_id"} when every gateway knows it.

        With a `lessor`, it lasts until that process says that it was abandoned, or ends. `pin`:
        workers on CUDA devices lock it.

        Registering the same extent of the same object again succeeds and changes nothing. A name
        whose object was unlinked by its owner (who died, and starts again) is taken over. Raises
        InvalidArgument, AlreadyExists, PermissionDenied, Internal or Unavailable.
        """
        if not name:
            raise InvalidArgument(
                "'region name' is necessary to register system shared memory region"
            )
        whole(offset, "offset")
        whole(byte_size, "byte_size")
        key = posix_shm.normal_key(name, key)
        async with self._turn:
            known = self._active.get(name)
            if known is not None and not known.owner.admits(peer):
                raise _taken(name)
            if known is not None and not known.orphaned:
                if known.pinned != pin:
                    raise _taken(name)
                self._refuse_unless_same(known, key, offset, byte_size)
                return {"memory_id": known.memory_id}
            region = await self._opener.open_object(name, key, offset, byte_size, peer, pin=pin)
            region.lessor = lessor
            if known is not None:
                logger.info("region replaced: the object behind its name was removed")
                await self._withdraw(known, "the object behind its name was removed")
            self._active[name] = region
            self._kept.add(region)
            self._publish_event(region.registered())
            await self._processes.publish(region.published, "gateway")
            return {"memory_id": region.memory_id}

    async def register_cuda(
        self,
        name: str,
        handle: CudaHandle,
        offset: int,
        byte_size: int,
        peer: Peer,
        exporter_pid: int = 0,
    ) -> None:
        """Register [offset, offset + byte_size) of what `handle` opens as `name` for `peer`;
        returns when every gateway knows it.

        `exporter_pid` 0: the exporter is not known. The same again succeeds and changes nothing.
        Raises InvalidArgument, AlreadyExists or Unavailable.
        """
        handles = self._opener.handles
        if handles is None:
            raise cuda_not_supported(name)
        memory_id = secrets.randbits(62)
        if not self._has_cuda(name, handle, offset, byte_size, peer):
            # Before our turn: workers may be busy, and nobody else waits for them.
            await handles.check(Memory.on_device(memory_id, offset + byte_size, handle))
        async with self._turn:
            if self._has_cuda(name, handle, offset, byte_size, peer):
                return
            known = self._active.get(name)
            region = self._opener.open_cuda(
                *(name, memory_id, handle, offset, byte_size, peer),
                exporter_pid,
                self._exporter_exited,
            )
            if known is not None:
                await self._withdraw(known, "the object behind its name was removed")
            self._active[name] = region
            self._publish_event(region.registered())
            await self._processes.publish(region.published, "gateway")

    def _has_cuda(
        self, name: str, handle: CudaHandle, offset: int, byte_size: int, peer: Peer
    ) -> bool:
        """Whether `name` is registered as just this. Raises AlreadyExists where `name` is taken."""
        known = self._active.get(name)
        if known is None or (known.orphaned and known.owner.admits(peer)):
            return False
        same = (known.cuda, known.offset, known.byte_size) == (handle, offset, byte_size)
        if not same or not known.owner.admits(peer):
            raise _taken(name)
        return True

    def _exporter_exited(self, region: OpenRegion) -> None:
        async def end() -> None:
            async with self._turn:
                if self._active.get(region.name) is region:
                    logger.warning("region '%s' ends with the process that owned it", region.name)
                    await self._withdraw(region, "the process that owned it has ended")

        in_background(end(), self._endings)

    @staticmethod
    def _refuse_unless_same(known: OpenRegion, key: str, offset: int, byte_size: int) -> None:
        taken = _taken(known.name)
        if known.shared is None or (known.key, known.offset, known.byte_size) != (
            key,
            offset,
            byte_size,
        ):
            raise taken
        now = posix_shm.open_object(key)
        os.close(now.fd)
        if (now.device, now.inode) != (known.shared.device, known.shared.inode):
            raise taken

    async def unregister(self, name: str, peer: Peer, cuda: bool = False) -> None:
        """Free a name (all names of `peer`, if empty) of system memory, or of CUDA memory; returns
        when no gateway accepts it any more.

        A name that is unknown, of the other kind, or not `peer`'s, is left as it is.
        """
        async with self._turn:
            regions = [self._active[name]] if name in self._active else []
            for region in regions if name else self.active():
                admitted = peer.uid == EVERYONE or region.owner.admits(peer)
                if admitted and (region.cuda is not None) == cuda:
                    await self._withdraw(region)

    async def abandoned(self, lessor: int, memory_id: int = 0) -> None:
        """Withdraw a leased region whose client has disconnected, or (without `memory_id`) all that
        were leased through a gateway."""
        async with self._turn:
            for region in self.active():
                if region.lessor == lessor and memory_id in (0, region.memory_id):
                    await self._withdraw(region)

    async def drop_shrunk(self) -> None:
        """Unregister the regions that can have lost a page: a worker died of one that is not there.

        Their clients are told by the next request that it is unknown.
        """
        async with self._turn:
            for region in self.active():
                if not region.owner.copied and region.shrank():
                    logger.error(
                        "shared memory region '%s' was truncated while a worker used it, and the "
                        "worker died: it is unregistered",
                        region.name,
                    )
                    reason = "it was truncated while a worker used it, and the worker died"
                    self._publish_event(RegionBlamed(region.name, reason))
                    await self._withdraw(region, reason)

    async def _withdraw(self, region: OpenRegion, reason: str = "") -> None:
        self._active.pop(region.name, None)
        self._kept.remove(region)
        self._publish_event(RegionUnregistered(region.name, reason))
        await self.draining.drain(region)

    def close(self) -> None:
        """Close every object."""
        for region in self._active.values():
            self._opener.close(region)
        self._active.clear()
        self.draining.close()


def _taken(name: str) -> AlreadyExists:
    return AlreadyExists(f"shared memory region '{name}' already in manager")
