"""The registry of clients' shared memory regions: one name space for every listener, held by the
supervisor.

A region is a numbered generation of a name:

    register --> ACTIVE --unregister--> DRAINING --last release--> closed
                                        (the name is free, requests in flight go on; it is listed
                                        while there are some)

The object is opened once, here; workers map that very object through the supervisor's descriptor,
so a key that is unlinked and made again is never confused with what was registered. Gateways count
the requests that use a generation. Who may register and unregister what is decided by
shmserve.common.shm_access, how much by shmserve.supervisor.regions.quota.

What a local client shares (local_clients/server.py) is a region without a name: no gateway hears
of it, and it is the local client's alone until the local client gives it back, or is gone.

CUDA memory is registered by a handle that workers alone open. Where the process is known that
exported it, its death unregisters the region.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from shmserve.common.cuda_errors import not_supported
from shmserve.common.shm_access import (
    EVERYONE,
    NO_GROUP,
    SHM_DISABLED,
    Ownership,
    Peer,
    ShmPolicy,
    ownership,
)
from shmserve.common.tasks import in_background
from shmserve.errors import AlreadyExists, InvalidArgument, Unsupported
from shmserve.ipc.memory import posix_shm
from shmserve.ipc.messages import (
    MemoryDropped,
    RegionBlamed,
    RegionDrained,
    RegionPublished,
    RegionRegistered,
    RegionUnregistered,
    RegionWithdrawn,
)
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory
from shmserve.ipc.tensors.ranges import whole
from shmserve.supervisor.regions.cuda_handles import Exporter, HandleCheck
from shmserve.supervisor.regions.pinned_quota import PinnedQuota
from shmserve.supervisor.regions.quota import RegionQuota

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Region:
    """One generation. `offset` and `byte_size` are the registered extent in the object, in
    bytes.

    System memory has a `key` and is open as `shared`; CUDA memory has a handle.
    """

    name: str
    key: str
    memory_id: int
    shared: posix_shm.SharedObject | None
    offset: int
    byte_size: int
    owner: Ownership
    users: set[int] = field(default_factory=set)  # gateways with requests of a withdrawn one
    listed: bool = False  # in every gateway, while requests use the withdrawn one
    blocks: int = 0  # of the object, when its pages had been taken
    lessor: int = 0  # the process through which it is leased, or the local client it is of, or 0
    cuda: CudaHandle | None = None
    exporter: Exporter | None = None
    pinned: bool = False

    def shrank(self) -> bool:
        """Whether pages of the object have been given back since (it may be as long as before)."""
        if self.shared is None:
            return False
        status = os.fstat(self.shared.fd)
        return status.st_size < self.offset + self.byte_size or status.st_blocks < self.blocks

    def published(self, acknowledge: int) -> RegionPublished:
        """What gateways are told."""
        shared, handle, end = self.shared, self.cuda, self.offset + self.byte_size
        told = RegionPublished(
            name=self.name,
            key=self.key,
            memory_id=self.memory_id,
            pid=0,
            fd=-1,
            inode=0,
            object_size=end,
            offset=self.offset,
            byte_size=self.byte_size,
            uid=self.owner.uid,
            group=self.owner.group,
            copied=self.owner.copied,
            acknowledge=acknowledge,
            pinned=self.pinned,
        )
        if handle is not None:
            return replace(
                told, handle=handle.raw, device_id=handle.device, device_uuid=handle.uuid
            )
        assert shared is not None
        size = min(shared.size, end)
        return replace(told, pid=os.getpid(), fd=shared.fd, inode=shared.inode, object_size=size)

    def registered(self) -> RegionRegistered:
        """What who listens to events is told."""
        device = -1 if self.cuda is None else self.cuda.device
        return RegionRegistered(
            self.name, self.key, self.offset, self.byte_size, self.owner.uid, device
        )

    @property
    def orphaned(self) -> bool:
        """Whether the owner of the object removed it: a name for it can be taken over."""
        return self.shared is not None and os.fstat(self.shared.fd).st_nlink == 0

    def close(self) -> None:
        """Let go of the object and of its owner."""
        if self.shared is not None:
            os.close(self.shared.fd)
        if self.exporter is not None:
            self.exporter.close()


# Sends what the function makes of an acknowledgement number to every gateway; returns once it
# holds in all of them.
Publish = Callable[[Callable[[int], Any]], Awaitable[None]]


class RegionRegistry:
    """Registers and unregisters; `publish` reaches every gateway (pids: `gateways`),
    `tell_workers` every worker, `tell` who listens to events. Without a `handles` check there is
    no CUDA memory."""

    def __init__(
        self,
        publish: Publish,
        gateways: Callable[[], Iterable[int]],
        tell_workers: Callable[[Any], None],
        policy: ShmPolicy,
        handles: HandleCheck | None = None,
        tell: Callable[[Any], None] = lambda event: None,
    ) -> None:
        self._publish = publish
        self._tell = tell
        self._gateways = gateways
        self._tell_workers = tell_workers
        self._policy = policy
        self._quota = RegionQuota(policy)
        self._handles = handles
        self._pins = PinnedQuota(handles is not None)
        self._endings: set[asyncio.Task[None]] = set()
        self._active: dict[str, Region] = {}
        self._draining: dict[int, Region] = {}
        self._lent: dict[int, Region] = {}  # without a name
        # Registrations and unregistrations take effect one after the other, everywhere.
        self._turn = asyncio.Lock()

    def active(self) -> list[Region]:
        """Every region that has a name."""
        return list(self._active.values())

    def published(self) -> Iterator[RegionPublished]:
        """What a new gateway must know."""
        for region in self._active.values():
            yield region.published(0)
        for region in self._draining.values():
            if region.listed:
                yield replace(region.published(0), draining=True)

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
            region = await self._open(name, key, offset, byte_size, peer)
            try:
                self._pin(region, pin, region.owner.copied)
            except InvalidArgument:
                self._close(region)
                raise
            region.lessor = lessor
            if known is not None:
                logger.info("region replaced: the object behind its name was removed")
                await self._withdraw(known, "the object behind its name was removed")
            self._active[name] = region
            self._tell(region.registered())
            await self._publish(region.published)
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
        if self._handles is None:
            raise not_supported(name)
        memory_id = secrets.randbits(62)
        if not self._has_cuda(name, handle, offset, byte_size, peer):
            # Before our turn: workers may be busy, and nobody else waits for them.
            await self._handles.check(Memory.on_device(memory_id, offset + byte_size, handle))
        async with self._turn:
            if self._has_cuda(name, handle, offset, byte_size, peer):
                return
            known = self._active.get(name)
            # Whoever has a handle may use the memory; nobody can truncate it.
            owner = Ownership(peer.uid, NO_GROUP, copied=False)
            region = Region(name, "", memory_id, None, offset, byte_size, owner, cuda=handle)
            self._quota.enter(peer.uid, byte_size)
            try:
                if exporter_pid:
                    region.exporter = Exporter(exporter_pid, lambda: self._exporter_exited(region))
            except BaseException:
                self._close(region)
                raise
            if known is not None:
                await self._withdraw(known, "the object behind its name was removed")
            self._active[name] = region
            self._tell(region.registered())
            await self._publish(region.published)

    def _has_cuda(
        self, name: str, handle: CudaHandle, offset: int, byte_size: int, peer: Peer
    ) -> bool:
        """Whether it is registered as just this. Raises AlreadyExists where `name` is taken."""
        known = self._active.get(name)
        if known is None or (known.orphaned and known.owner.admits(peer)):
            return False
        same = (known.cuda, known.offset, known.byte_size) == (handle, offset, byte_size)
        if not same or not known.owner.admits(peer):
            raise _taken(name)
        return True

    def _exporter_exited(self, region: Region) -> None:
        async def end() -> None:
            async with self._turn:
                if self._active.get(region.name) is region:
                    logger.warning("region '%s' ends with the process that owned it", region.name)
                    await self._withdraw(region, "the process that owned it has ended")

        in_background(end(), self._endings)

    @staticmethod
    def _refuse_unless_same(known: Region, key: str, offset: int, byte_size: int) -> None:
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

    async def _open(self, name: str, key: str, offset: int, byte_size: int, peer: Peer) -> Region:
        shared = posix_shm.open_object(key)
        try:
            owner = ownership(peer, key, shared.uid, shared.gid, shared.mode, self._policy.group)
            posix_shm.check_range(name, shared, offset, byte_size)
            self._quota.enter(peer.uid, byte_size, shared.file)
            try:
                await self._reserve(name, key, shared, offset, byte_size)
            except BaseException:
                self._quota.leave(peer.uid, byte_size, shared.file)
                raise
        except BaseException:
            os.close(shared.fd)
            raise
        blocks = os.fstat(shared.fd).st_blocks
        number = secrets.randbits(62)
        return Region(name, key, number, shared, offset, byte_size, owner, blocks=blocks)

    async def _reserve(
        self, name: str, key: str, shared: posix_shm.SharedObject, offset: int, byte_size: int
    ) -> None:
        missing = posix_shm.unallocated(shared, byte_size)
        self._quota.pay(key, shared.file, missing)
        taken = 0
        try:
            # Taking the pages of a large object takes a while, and the loop must go on.
            taken = await asyncio.to_thread(posix_shm.reserve, name, shared, offset, byte_size)
        finally:
            self._quota.refund(shared.file, missing - min(taken, missing))

    def _pin(self, region: Region, pin: bool, copied: bool) -> None:
        if pin:
            self._pins.take(region.offset + region.byte_size, copied)
            region.pinned = True

    def _close(self, region: Region) -> None:
        if region.pinned:
            self._pins.give(region.offset + region.byte_size)
        file = None if region.shared is None else region.shared.file
        self._quota.leave(region.owner.uid, region.byte_size, file)
        region.close()

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
        """The client of a leased region is gone, or (without `memory_id`) all of a gateway's."""
        async with self._turn:
            for region in self.active():
                if region.lessor == lessor and memory_id in (0, region.memory_id):
                    await self._withdraw(region)

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
        then on.

        Raises Unsupported, PermissionDenied or InvalidArgument, as the policy has it.
        """
        if self._policy.allow is False:
            raise Unsupported(SHM_DISABLED)
        owner = ownership(peer, "memfd", shared.uid, shared.gid, shared.mode, self._policy.group)
        region = Region("", "", memory_id, shared, 0, byte_size, owner, lessor=local_client)
        self._pin(region, pin, copied=False)  # sealed, so it is mapped
        try:
            self._quota.enter(peer.uid, byte_size, shared.file)
        except InvalidArgument:
            self._pins.give(byte_size if pin else 0)
            raise
        self._lent[memory_id] = region

    async def lend_cuda(self, memory: Memory, peer: Peer, local_client: int) -> None:
        """Keep a local client's device memory until `give_back`. A local client that leaves
        meanwhile is the caller's to look after.

        Raises Unsupported, InvalidArgument or Unavailable.
        """
        if self._policy.allow is False:
            raise Unsupported(SHM_DISABLED)
        if self._handles is None:
            raise InvalidArgument("the server has no CUDA device whose memory could be shared")
        size = memory.byte_size
        self._quota.enter(peer.uid, size)
        try:
            await self._handles.check(memory)
        except BaseException:
            self._quota.leave(peer.uid, size)
            raise
        owner = Ownership(peer.uid, NO_GROUP, copied=False)
        self._lent[memory.id] = Region(
            "", "", memory.id, None, 0, size, owner, lessor=local_client, cuda=memory.cuda
        )

    def give_back(self, local_client: int, memory_id: int = 0) -> None:
        """A local client needs a memory no more, or (without `memory_id`) is gone."""
        for region in list(self._lent.values()):
            if region.lessor == local_client and memory_id in (0, region.memory_id):
                del self._lent[region.memory_id]
                self._tell_workers(MemoryDropped(region.memory_id))
                self._close(region)

    async def drop_shrunk(self) -> None:
        """A worker died of a page that is not there: unregister the regions that can have lost it.

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
                    self._tell(RegionBlamed(region.name, reason))
                    await self._withdraw(region, reason)

    async def _withdraw(self, region: Region, reason: str = "") -> None:
        self._active.pop(region.name, None)
        self._tell(RegionUnregistered(region.name, reason))
        self._draining[region.memory_id] = region
        region.users = set(self._gateways())
        await self._publish(lambda number: RegionWithdrawn(region.name, region.memory_id, number))
        self.released(0, region.memory_id)
        if region.memory_id in self._draining:
            region.listed = True
            await self._publish(lambda n: replace(region.published(n), draining=True))

    def released(self, pid: int, memory_id: int) -> None:
        """Gateway `pid` uses the generation no more."""
        region = self._draining.get(memory_id)
        if region is None:
            return
        region.users.discard(pid)
        if not region.users:
            del self._draining[memory_id]
            self._tell_workers(MemoryDropped(memory_id))
            self._close(region)
            if region.listed:
                in_background(self._unlist(memory_id), self._endings)

    async def _unlist(self, memory_id: int) -> None:
        await self._publish(lambda number: RegionDrained(memory_id, number))

    def gateway_exited(self, pid: int) -> None:
        """A gateway is gone, and so are the requests it counted."""
        for memory_id in list(self._draining):
            self.released(pid, memory_id)

    def close(self) -> None:
        """Close every object."""
        for regions in (self._active, self._draining, self._lent):
            for region in regions.values():
                self._close(region)
            regions.clear()


def _taken(name: str) -> AlreadyExists:
    return AlreadyExists(f"shared memory region '{name}' already in manager")
