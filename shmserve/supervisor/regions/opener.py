"""Opens and closes the objects behind regions, within access policy and quotas.

Quotas are by user, in all, of pages that the server allocates, and of pinned memory. A page of a
shared memory object is charged to whoever touches it first. What a client did not allocate before
it registered is allocated by the server, and counts against a budget until the object is gone:
unregistering does not give the pages back, removing the object does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from shmserve.common import fd_limits
from shmserve.common.peers import (
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
from shmserve.supervisor.regions.region import ExporterWatch, OpenRegion

_FOLDER = "/dev/shm"
LENT_KEY = "memfd"  # what listings show where a POSIX object has its key


class RegionQuota:
    """The counts behind the limits of a policy. Sizes in bytes."""

    def __init__(self, policy: ShmPolicy) -> None:
        self.policy = policy
        self._regions: Counter[int] = Counter()  # by uid
        self._bytes: Counter[int] = Counter()
        self._held: Counter[tuple[int, int]] = Counter()  # regions by (device, inode)
        # (device, inode) -> key, bytes
        self._allocated: dict[tuple[int, int], tuple[str, int]] = {}

    def enter(self, uid: int, byte_size: int, file: tuple[int, int] | None = None) -> None:
        """A user's region of an object, `file` (device, inode), or of a device's memory.

        Raises InvalidArgument, and enters nothing, when it is one too many or its bytes are.
        """
        policy = self.policy
        for count, most, flag in (
            (self._regions[uid], policy.max_regions_per_uid, "--shm-max-regions-per-uid"),
            (self._regions.total(), policy.max_regions, "--shm-max-regions"),
        ):
            if count >= most:
                raise InvalidArgument(
                    f"at most {most} shared memory regions can be registered ({flag})"
                )
        for size, most, flag in (
            (self._bytes[uid], policy.max_byte_size_per_uid, "--shm-max-byte-size-per-uid"),
            (self._bytes.total(), policy.max_byte_size, "--shm-max-byte-size"),
        ):
            if byte_size > most - size:
                raise InvalidArgument(
                    f"a region of {byte_size} bytes is too large: {size} of the {most} bytes that "
                    f"can be registered are ({flag})"
                )
        self._regions[uid] += 1
        self._bytes[uid] += byte_size
        if file is not None:
            self._held[file] += 1

    def release(self, uid: int, byte_size: int, file: tuple[int, int] | None = None) -> None:
        """Count a region no more that was entered."""
        self._regions[uid] -= 1
        self._bytes[uid] -= byte_size
        if not self._regions[uid]:
            del self._regions[uid], self._bytes[uid]
        if file is not None:
            self._held[file] -= 1
            if not self._held[file]:
                del self._held[file]

    def charge(self, key: str, file: tuple[int, int], byte_size: int) -> None:
        """The server is about to allocate `byte_size` bytes of an object.

        Raises InvalidArgument when the budget does not reach.
        """
        most = self.policy.sparse_byte_size
        if byte_size > most - self._in_use():
            self._drop_removed()
        if byte_size > most - self._in_use():
            raise InvalidArgument(
                f"{byte_size} bytes of shared memory object '{key}' are not allocated, and "
                f"{self._in_use()} of the {most} bytes that the server allocates for clients are "
                "in use (--shm-sparse-byte-size): allocate it with posix_fallocate, or write to "
                "it, before it is registered"
            )
        if byte_size:
            _, before = self._allocated.get(file, (key, 0))
            self._allocated[file] = (key, before + byte_size)

    def refund(self, file: tuple[int, int], byte_size: int) -> None:
        """Return so much of what was charged last: it was not allocated."""
        key, charged = self._allocated.get(file, ("", 0))
        if charged > byte_size:
            self._allocated[file] = (key, charged - byte_size)
        else:
            self._allocated.pop(file, None)

    def _in_use(self) -> int:
        return sum(size for _, size in self._allocated.values())

    def _drop_removed(self) -> None:
        for file, (key, _) in list(self._allocated.items()):
            if file in self._held:
                continue
            try:
                status = os.stat(_FOLDER + key, follow_symlinks=False)
            except OSError:
                del self._allocated[file]
                continue
            if (status.st_dev, status.st_ino) != file:
                del self._allocated[file]


class PinnedQuota:
    """Bytes that are pinned; `cuda`: whether there is a device to pin for."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._taken = 0

    def take(self, byte_size: int, copied: bool) -> None:
        """Pin so much more; `copied`: of memory that is never mapped.

        Raises InvalidArgument, and pins nothing, when that cannot be.
        """
        if not self._cuda:
            raise InvalidArgument("memory is pinned for CUDA devices, and the server has none")
        if copied:
            raise InvalidArgument("memory that others may truncate is not mapped, nor pinned")
        most, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if most != resource.RLIM_INFINITY and byte_size > most - self._taken:
            raise InvalidArgument(
                f"{byte_size} bytes cannot be pinned: {self._taken} of the {most} bytes that a "
                "process may lock are (RLIMIT_MEMLOCK; ulimit -l, LimitMEMLOCK=)"
            )
        self._taken += byte_size

    def release(self, byte_size: int) -> None:
        """Pin so much less."""
        self._taken -= byte_size


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
