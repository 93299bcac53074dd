"""The registry of clients' shared memory regions, with one name space for all listeners.

A region is a numbered generation of a name:

    register --> ACTIVE --unregister--> RETIRED --unused--> DRAINING --last release--> closed

Requests may use a retired region, whose name is free for another registration. A region that was
lost (its owner exited, its object shrank) drains at once: requests in flight continue, and the
region is listed meanwhile.

The object is opened once. Workers map this object through the supervisor's descriptor, so a key
that is unlinked and created again is a different object. Access rights are defined in
shmserve.common.peers, quotas in shmserve.supervisor.regions.opener. Registrations of
system memory outlive the server if a service manager keeps them (`KeptRegions`).

CUDA memory is registered by a handle that only workers open. If the exporting process is known, its
exit unregisters the region.
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
from shmserve.errors import AlreadyExists, InvalidArgument, Unavailable
from shmserve.ipc.memory import posix_shm
from shmserve.ipc.messages.publications import (
    MemoryDropped,
    RegionDrained,
    RegionPublished,
    RegionRetired,
    RegionUnregistered,
    RegionWithdrawn,
)
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory, require_integer
from shmserve.supervisor.regions.opener import RegionOpener
from shmserve.supervisor.regions.region import DROP, KEEP, KeptRegions, OpenRegion

logger = logging.getLogger(__name__)

_OBJECT_REMOVED = "its shared memory object was removed"


class Processes(Protocol):
    """The part of the control socket by which gateways and workers are reached."""

    def publish(self, make_message: Callable[[int], Any], *roles: str) -> Awaitable[None]:
        """Send `make_message(number)`, and wait until each live process has acknowledged it."""

    def broadcast(self, message: Any, *roles: str) -> None:
        """Send a message to each process with one of these roles."""

    def pids(self, *roles: str) -> list[int]:
        """Return the pids of the connected processes with one of these roles."""


@dataclass(slots=True, eq=False)
class DrainingRegions:
    """The unregistered regions that requests in flight still use.

    A retired region is withdrawn when no gateway has a request that uses it. Gateways count the
    requests that use a generation of a name. After its withdrawal, each gateway releases the
    generation when its last request ends. Then workers unmap it, and it is closed.
    """

    _processes: Processes
    _opener: RegionOpener
    retired_regions: dict[int, OpenRegion] = field(init=False, default_factory=dict)
    _regions: dict[int, OpenRegion] = field(init=False, default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    def publications(self) -> Iterator[RegionPublished | RegionRetired]:
        """Yield the messages that bring a new gateway up to date."""
        for region in self.retired_regions.values():
            yield region.publication(0)
            yield RegionRetired(region.memory_id, 0)
        for region in self._regions.values():
            if region.is_listed:
                yield region.listing(0)

    async def retire(self, region: OpenRegion) -> None:
        """Withdraw a region at once if no request uses it, otherwise as soon as none does."""
        self.retired_regions[region.memory_id] = region
        await self._processes.publish(partial(RegionRetired, region.memory_id), "gateway")
        region.is_retired = True
        if not region.user_pids:
            await self.drain(region)

    def record_use(self, pid: int, memory_id: int, is_used: bool) -> None:
        """Record whether requests of gateway `pid` use a retired region."""
        region = self.retired_regions.get(memory_id)
        if region is None:
            return
        (region.user_pids.add if is_used else region.user_pids.discard)(pid)
        if region.is_retired and not region.user_pids:
            in_background(self.drain(region), self._tasks)

    async def drain(self, region: OpenRegion) -> None:
        """Withdraw a region, and wait until no gateway accepts its name any more."""
        self.retired_regions.pop(region.memory_id, None)
        self._regions[region.memory_id] = region
        region.user_pids = set(self._processes.pids("gateway"))
        make_withdrawn = partial(RegionWithdrawn, region.name, region.memory_id)
        await self._processes.publish(make_withdrawn, "gateway")
        self._close_unused(region)
        if region.memory_id in self._regions:
            region.is_listed = True
            await self._processes.publish(region.listing, "gateway")

    def record_release(self, pid: int, memory_id: int) -> None:
        """Record that no request of gateway `pid` uses the region any more."""
        region = self._regions.get(memory_id)
        if region is not None:
            region.user_pids.discard(pid)
            self._close_unused(region)

    def gateway_exited(self, pid: int) -> None:
        """Release the regions of a gateway that has exited."""
        for memory_id in list(self.retired_regions):
            self.record_use(pid, memory_id, False)
        for memory_id in list(self._regions):
            self.record_release(pid, memory_id)

    def _close_unused(self, region: OpenRegion) -> None:
        if region.user_pids or self._regions.pop(region.memory_id, None) is None:
            return
        self._processes.broadcast(MemoryDropped(region.memory_id), "worker")
        self._opener.close(region)
        if region.is_listed:
            in_background(self._unlist(region.memory_id), self._tasks)

    async def _unlist(self, memory_id: int) -> None:
        await self._processes.publish(partial(RegionDrained, memory_id), "gateway")

    def close(self) -> None:
        """Close the objects of all retired and draining regions."""
        for regions in (self.retired_regions, self._regions):
            for region in regions.values():
                self._opener.close(region)
            regions.clear()


@dataclass(slots=True, eq=False)
class RegionRegistry:
    """The active regions by name.

    `_publish_event` publishes an event to the subscribers of events.
    """

    _processes: Processes
    _opener: RegionOpener
    _publish_event: Callable[[Any], None]
    _kept_regions: KeptRegions
    draining: DrainingRegions = field(init=False)
    _tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    _active_regions: dict[str, OpenRegion] = field(init=False, default_factory=dict)
    # Held during each change, so that every process receives the changes in the same order.
    _lock: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.draining = DrainingRegions(self._processes, self._opener)

    def restore(self, registrations: dict[str, list[int]]) -> None:
        """Restore the registrations of a previous server, before gateways start."""
        for region in self._kept_regions.restore(registrations, self._opener.readmit):
            self._active_regions[region.name] = region
        if registrations:
            logger.info(
                "%d registered regions were taken over from the previous server",
                len(self._active_regions),
            )

    async def apply(self, verb: str, kept_name: str, fds: list[int]) -> None:
        """Apply a change, KEEP or DROP, that the other server of a handover has sent.

        If both servers register a name at the same time, each keeps the region that it has opened.
        """
        async with self._lock:
            if verb == DROP:
                for region in self.active_regions():
                    if region.kept_name == kept_name:
                        await self._withdraw(region, retire=True)
            elif verb == KEEP:
                for region in self._kept_regions.restore({kept_name: fds}, self._opener.readmit):
                    if existing_region := self._active_regions.get(region.name):
                        # Both servers of the handover choose the larger name, hence the same one.
                        existing_region.kept_name = max(existing_region.kept_name, kept_name)
                        self._opener.close(region)
                    else:
                        await self._activate(region)

    async def _activate(self, region: OpenRegion) -> None:
        """Publish a region, and wait until every gateway has it."""
        self._active_regions[region.name] = region
        self._publish_event(region.registration_event())
        await self._processes.publish(region.publication, "gateway")

    def active_regions(self) -> list[OpenRegion]:
        """Return every region that requests may use by its name."""
        return list(self._active_regions.values())

    def publications(self) -> Iterator[RegionPublished | RegionRetired]:
        """Yield the messages that bring a new gateway up to date."""
        for region in self._active_regions.values():
            yield region.publication(0)
        yield from self.draining.publications()

    async def register(
        self,
        name: str,
        key: str,
        offset: int,
        byte_size: int,
        peer: Peer,
        lease_holder: int = 0,
        pin: bool = False,
    ) -> dict[str, Any]:
        """Register [offset, offset + byte_size) of the object `key` as `name` for `peer`.

        Registering the same range of the same object again changes nothing. A name whose object was
        unlinked (by an owner that restarts) is taken over.

        Args:
            name: The name of the region.
            key: The key of the POSIX object.
            offset: The offset in bytes.
            byte_size: The size in bytes.
            peer: The user who registers.
            lease_holder: The process that leases the region, or 0. The region is unregistered when
                the process ends the lease or exits.
            pin: Whether workers on CUDA devices lock its pages.

        Returns:
            {"memory_id"}, after every gateway has the region.

        Raises:
            ShmserveError: The registration is rejected: with InvalidArgument, AlreadyExists,
                PermissionDenied, Internal or Unavailable.
        """
        if not name:
            text = "'region name' is necessary to register system shared memory region"
            raise InvalidArgument(text)
        require_integer(offset, "offset")
        require_integer(byte_size, "byte_size")
        key = posix_shm.normalize_key(name, key)
        async with self._lock:
            existing_region = self._active_regions.get(name)
            if existing_region is not None:
                if not existing_region.owner.admits(peer):
                    raise _name_in_use(name)
                if not existing_region.is_orphaned:
                    if not _is_same(existing_region, key, offset, byte_size, pin):
                        raise _name_in_use(name)
                    return {"memory_id": existing_region.memory_id}
            region = await self._opener.open_object(name, key, offset, byte_size, peer, pin=pin)
            region.lease_holder = lease_holder
            try:
                self._kept_regions.add(region)
            except OSError as error:  # no descriptor is free
                self._kept_regions.remove(region)
                self._opener.close(region)
                text = f"shared memory region '{name}' cannot be registered: {error.strerror}"
                raise Unavailable(text) from None
            if existing_region is not None:
                logger.info("region '%s' was replaced: its shared memory object was removed", name)
                await self._withdraw(existing_region, _OBJECT_REMOVED)
            await self._activate(region)
            return {"memory_id": region.memory_id}

    async def register_cuda(
        self,
        name: str,
        handle: CudaHandle,
        offset: int,
        size: int,
        peer: Peer,
        exporter_pid: int = 0,
    ) -> None:
        """Register [offset, offset + size) of the allocation of `handle` as `name` for `peer`.

        The call returns after every gateway has the region. Registering the same range again
        changes nothing. `exporter_pid` is 0 if the exporter is unknown.

        Raises:
            ShmserveError: The registration is rejected: with InvalidArgument, AlreadyExists or
                Unavailable.
        """
        handle_check = self._opener.handles
        if handle_check is None:
            raise cuda_not_supported(name)
        memory_id = secrets.randbits(62)
        if not self._has_cuda(name, handle, offset, size, peer):
            # The check does not hold the lock, since workers may be busy.
            await handle_check.check(Memory.on_device(memory_id, offset + size, handle))
        async with self._lock:
            if self._has_cuda(name, handle, offset, size, peer):
                return
            existing_region = self._active_regions.get(name)
            properties = (name, memory_id, handle, offset, size, peer, exporter_pid)
            region = self._opener.open_cuda(*properties, self._exporter_exited)
            if existing_region is not None:
                await self._withdraw(existing_region, _OBJECT_REMOVED)
            await self._activate(region)

    def _has_cuda(self, name: str, handle: CudaHandle, offset: int, size: int, peer: Peer) -> bool:
        """Return whether `name` is registered with these properties and accessible to `peer`.

        Raises:
            AlreadyExists: The name is in use for another region.
        """
        region = self._active_regions.get(name)
        if region is None or (region.is_orphaned and region.owner.admits(peer)):
            return False
        is_same = (region.cuda, region.offset, region.byte_size) == (handle, offset, size)
        if not is_same or not region.owner.admits(peer):
            raise _name_in_use(name)
        return True

    def _exporter_exited(self, region: OpenRegion) -> None:
        async def withdraw() -> None:
            async with self._lock:
                if region in (
                    self._active_regions.get(region.name),
                    *self.draining.retired_regions.values(),
                ):
                    logger.warning(
                        "region '%s' is unregistered because its owner has exited", region.name
                    )
                    await self._withdraw(region, "its owner has exited")

        in_background(withdraw(), self._tasks)

    async def unregister(self, name: str, peer: Peer, is_cuda: bool = False) -> None:
        """Unregister a name of system or CUDA memory, or if it is "", all names of `peer`.

        While requests use a region, it stays usable, also for new requests. If no request uses it,
        the call returns when no gateway accepts the name any more. A name is ignored if it is
        unknown, if another user owns it, or if its memory is of the other kind.
        """
        async with self._lock:
            regions = [self._active_regions[name]] if name in self._active_regions else []
            for region in regions if name else self.active_regions():
                is_admitted = peer.uid == EVERYONE or region.owner.admits(peer)
                if is_admitted and (region.cuda is not None) == is_cuda:
                    await self._withdraw(region, retire=True)

    async def withdraw_leased(self, lease_holder: int, memory_id: int = 0) -> None:
        """Withdraw a leased region, or with `memory_id` 0 all regions with this lease holder."""
        async with self._lock:
            for region in self.active_regions():
                if region.lease_holder == lease_holder and memory_id in (0, region.memory_id):
                    await self._withdraw(region)

    async def unregister_shrunk(self) -> None:
        """Unregister regions that lost pages, since a worker has accessed a missing page (SIGBUS).

        The next request that names such a region fails, since the name is unknown.
        """
        async with self._lock:
            for region in [*self.active_regions(), *self.draining.retired_regions.values()]:
                if not region.owner.copied and region.has_shrunk():
                    event = region.report_truncation()
                    self._publish_event(event)
                    await self._withdraw(region, event.reason)

    async def _withdraw(self, region: OpenRegion, reason: str = "", retire: bool = False) -> None:
        if self._active_regions.get(region.name) is region:
            del self._active_regions[region.name]
        self._kept_regions.remove(region)
        self._publish_event(RegionUnregistered(region.name, reason))
        await (self.draining.retire if retire else self.draining.drain)(region)

    def close(self) -> None:
        """Close the objects of all regions."""
        for region in self._active_regions.values():
            self._opener.close(region)
        self._active_regions.clear()
        self.draining.close()


def _is_same(region: OpenRegion, key: str, offset: int, byte_size: int, pin: bool) -> bool:
    registered_properties = (region.key, region.offset, region.byte_size, region.pinned)
    if region.shared is None or registered_properties != (key, offset, byte_size, pin):
        return False
    current_object = posix_shm.open_object(key)
    os.close(current_object.fd)
    return current_object.file == region.shared.file


def _name_in_use(name: str) -> AlreadyExists:
    return AlreadyExists(f"shared memory region '{name}' already in manager")
