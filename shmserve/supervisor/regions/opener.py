"""Opens and closes the objects behind regions, within access policy and quotas."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from shmserve.common import fd_limits
from shmserve.common.access.shm_access import (
    NO_GROUP,
    SHM_DISABLED,
    Ownership,
    Peer,
    ShmPolicy,
    ownership,
)
from shmserve.errors import InvalidArgument, Unsupported
from shmserve.ipc.memory import posix_shm
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory
from shmserve.supervisor.regions.cuda_handles import HandleCheck
from shmserve.supervisor.regions.quota import PinnedQuota, RegionQuota
from shmserve.supervisor.regions.region import ExporterWatch, OpenRegion

LENT_KEY = "memfd"  # what listings show where a POSIX object has its key


class RegionOpener:
    """Makes regions, and takes them back. Without a `handles` check there is no CUDA memory.

    Its methods raise Unsupported, PermissionDenied, InvalidArgument, Internal or Unavailable, and
    keep nothing then.
    """

    def __init__(self, policy: ShmPolicy, handles: HandleCheck | None = None) -> None:
        self.handles = handles
        self._quota = RegionQuota(policy)
        self.limit(policy)
        self._pins = PinnedQuota(handles is not None)

    def limit(self, policy: ShmPolicy) -> None:
        """Have other limits, for what is opened from now on."""
        # A server that has no descriptor left could start no process again.
        most = min(policy.max_regions, fd_limits.for_regions(fd_limits.limit()))
        self._policy = self._quota.policy = replace(policy, max_regions=most)

    async def open_object(
        self, name: str, key: str, offset: int, byte_size: int, peer: Peer, *, pin: bool
    ) -> OpenRegion:
        """[offset, offset + byte_size) of the POSIX object `key`, its pages reserved."""
        shared = posix_shm.open_object(key)
        with contextlib.ExitStack() as undone:
            undone.callback(os.close, shared.fd)
            owner = ownership(peer, key, shared.uid, shared.gid, shared.mode, self._policy.group)
            posix_shm.check_range(name, shared, offset, byte_size)
            self._quota.enter(peer.uid, byte_size, shared.file)
            undone.callback(self._quota.release, peer.uid, byte_size, shared.file)
            await self._reserve(name, key, shared, offset, byte_size)
            blocks = os.fstat(shared.fd).st_blocks
            number = secrets.randbits(62)
            region = OpenRegion(name, key, number, shared, offset, byte_size, owner, blocks=blocks)
            self._pin(region, pin, copied=owner.copied)
            undone.pop_all()
        return region

    def reopen(
        self,
        fd: int,
        owner: Ownership,
        *,
        name: str,
        key: str,
        offset: int,
        byte_size: int,
        pinned: bool,
    ) -> OpenRegion:
        """One that a server before has opened; its descriptor is the region's from then on."""
        self._refuse_if_disabled()
        shared = posix_shm.described(fd)
        posix_shm.check_range(name, shared, offset, byte_size)
        blocks = os.fstat(fd).st_blocks
        number = secrets.randbits(62)
        region = OpenRegion(name, key, number, shared, offset, byte_size, owner, blocks=blocks)
        self._pin(region, pinned, copied=owner.copied)
        try:
            self._quota.enter(owner.uid, byte_size, shared.file)
        except InvalidArgument:
            self._pins.release(offset + byte_size if pinned else 0)
            raise
        return region

    async def _reserve(
        self, name: str, key: str, shared: posix_shm.SharedObject, offset: int, byte_size: int
    ) -> None:
        missing = posix_shm.unallocated(shared, byte_size)
        self._quota.charge(key, shared.file, missing)
        taken = 0
        try:
            # Taking the pages of a large object takes a while, and the loop must go on.
            taken = await asyncio.to_thread(posix_shm.reserve, name, shared, offset, byte_size)
        finally:
            self._quota.refund(shared.file, missing - min(taken, missing))

    def open_cuda(
        self,
        name: str,
        memory_id: int,
        handle: CudaHandle,
        offset: int,
        byte_size: int,
        peer: Peer,
        exporter_pid: int,
        on_exporter_exit: Callable[[OpenRegion], None],
    ) -> OpenRegion:
        """[offset, offset + byte_size) of what a handle opens, which was looked at already.

        `on_exporter_exit(region)` is called when the process `exporter_pid` ends (0: it is not
        known).
        """
        # Whoever has a handle may use the memory; nobody can truncate it.
        owner = Ownership(peer.uid, NO_GROUP, copied=False)
        region = OpenRegion(name, "", memory_id, None, offset, byte_size, owner, cuda=handle)
        self._quota.enter(peer.uid, byte_size)
        try:
            if exporter_pid:
                region.exporter = ExporterWatch(exporter_pid, partial(on_exporter_exit, region))
        except BaseException:
            self.close(region)
            raise
        return region

    def take_lent(
        self,
        name: str,
        memory_id: int,
        shared: posix_shm.SharedObject,
        byte_size: int,
        peer: Peer,
        local_client: int,
        *,
        pin: bool,
    ) -> OpenRegion:
        """A sealed object of a local client's, listed by this name; its descriptor is the region's
        from then on."""
        self._refuse_if_disabled()
        owner = ownership(peer, LENT_KEY, shared.uid, shared.gid, shared.mode, self._policy.group)
        region = OpenRegion(name, LENT_KEY, memory_id, shared, 0, byte_size, owner)
        region.lessor = local_client
        self._pin(region, pin, copied=False)  # sealed, so it is mapped
        try:
            self._quota.enter(peer.uid, byte_size, shared.file)
        except InvalidArgument:
            self._pins.release(byte_size if pin else 0)
            raise
        return region

    async def take_lent_cuda(
        self, name: str, memory: Memory, peer: Peer, local_client: int
    ) -> OpenRegion:
        """A local client's device memory, once a worker has looked at it."""
        self._refuse_if_disabled()
        if self.handles is None:
            raise InvalidArgument("the server has no CUDA device whose memory could be shared")
        size = memory.byte_size
        self._quota.enter(peer.uid, size)
        try:
            await self.handles.check(memory)
        except BaseException:
            self._quota.release(peer.uid, size)
            raise
        owner = Ownership(peer.uid, NO_GROUP, copied=False)
        return OpenRegion(
            name, "", memory.id, None, 0, size, owner, lessor=local_client, cuda=memory.cuda
        )

    def _refuse_if_disabled(self) -> None:
        if self._policy.allow is False:
            raise Unsupported(SHM_DISABLED)

    def _pin(self, region: OpenRegion, pin: bool, *, copied: bool) -> None:
        if pin:
            self._pins.take(region.offset + region.byte_size, copied)
            region.pinned = True

    def close(self, region: OpenRegion) -> None:
        """Close a region, and release what counts for it."""
        if region.pinned:
            self._pins.release(region.offset + region.byte_size)
        file = None if region.shared is None else region.shared.file
        self._quota.release(region.owner.uid, region.byte_size, file)
        region.close()
