"""The opener of the objects behind regions, within the access policy and quotas.

The quotas limit regions per user and in total, pages that the server allocates, and pinned memory.
A page of a shared memory object is charged to the process that touches it first. The server
allocates the pages that the client did not allocate before the registration. These pages count
against a budget until the object is removed, since unregistering does not free them.

The supervisor opens no device. A worker that already uses the device checks a CUDA handle at its
registration. If no worker uses the device, or all are busy, the first request reports an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import resource
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from shmserve.common import fd_limits
from shmserve.common.host import CUDA_REJECTION
from shmserve.common.peers import NO_GROUP, SHM_DISABLED, Ownership, Peer, ShmPolicy, ownership
from shmserve.errors import InvalidArgument, Unavailable, Unsupported, from_code
from shmserve.ipc.memory import posix_shm
from shmserve.ipc.messages.supervision import CheckMemory, MemoryChecked
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory
from shmserve.supervisor.regions.region import ExporterWatch, OpenRegion

_SHM_DIR = "/dev/shm"
MEMFD_KEY = "memfd"  # the key of a local client's memory in listings

logger = logging.getLogger(__name__)

_CHECK_TIMEOUT_S = 2.0
# A check in progress: the workers that have not responded, and the future of the result.
_OpenCheck = tuple[list[int], asyncio.Future[MemoryChecked]]


class RegionQuota:
    """A counter of the memory use that a policy limits; without `has_cuda`, it rejects pinning."""

    def __init__(self, policy: ShmPolicy, has_cuda: bool = False) -> None:
        self.policy = policy
        self._has_cuda = has_cuda
        self._pinned_bytes = 0
        self._regions_by_uid: Counter[int] = Counter()  # number of regions by user id
        self._bytes_by_uid: Counter[int] = Counter()  # bytes of regions by user id
        # Number of regions by (device, inode) of their object.
        self._regions_by_file: Counter[tuple[int, int]] = Counter()
        # Key and allocated bytes of objects by (device, inode).
        self._allocated_objects: dict[tuple[int, int], tuple[str, int]] = {}

    def count(self, uid: int, byte_size: int, file: tuple[int, int] | None = None) -> None:
        """Count a region of a user; `file` is the (device, inode) of its object, if it has one.

        Raises:
            InvalidArgument: The region exceeds a limit. It is not counted.
        """
        policy = self.policy
        for count, limit, flag in (
            (self._regions_by_uid[uid], policy.max_regions_per_uid, "--shm-max-regions-per-uid"),
            (self._regions_by_uid.total(), policy.max_regions, "--shm-max-regions"),
        ):
            if count >= limit:
                text = f"at most {limit} shared memory regions can be registered ({flag})"
                raise InvalidArgument(text)
        for used_amount, limit, flag in (
            (self._bytes_by_uid[uid], policy.max_byte_size_per_uid, "--shm-max-byte-size-per-uid"),
            (self._bytes_by_uid.total(), policy.max_byte_size, "--shm-max-byte-size"),
        ):
            if byte_size > limit - used_amount:
                raise InvalidArgument(
                    f"a region of {byte_size} bytes is too large: {used_amount} of the {limit} "
                    f"bytes that can be registered are in use ({flag})"
                )
        self._regions_by_uid[uid] += 1
        self._bytes_by_uid[uid] += byte_size
        if file is not None:
            self._regions_by_file[file] += 1

    def release(self, uid: int, byte_size: int, file: tuple[int, int] | None = None) -> None:
        """Remove a region, which `count` has counted, from the counts."""
        self._regions_by_uid[uid] -= 1
        self._bytes_by_uid[uid] -= byte_size
        if not self._regions_by_uid[uid]:
            del self._regions_by_uid[uid], self._bytes_by_uid[uid]
        if file is not None:
            self._regions_by_file[file] -= 1
            if not self._regions_by_file[file]:
                del self._regions_by_file[file]

    def charge(self, key: str, file: tuple[int, int], byte_size: int) -> None:
        """Charge the budget with `byte_size` bytes that the server is about to allocate.

        Raises:
            InvalidArgument: The budget is exceeded.
        """
        limit = self.policy.sparse_byte_size
        if byte_size > limit - self._charged_bytes():
            self._refund_removed()
        if byte_size > limit - self._charged_bytes():
            raise InvalidArgument(
                f"{byte_size} bytes of shared memory object '{key}' are not allocated, and "
                f"{self._charged_bytes()} of the {limit} bytes that the server allocates for "
                "clients are in use (--shm-sparse-byte-size): allocate it with posix_fallocate, or "
                "write to it, before it is registered"
            )
        if byte_size:
            _, charged_bytes = self._allocated_objects.get(file, (key, 0))
            self._allocated_objects[file] = (key, charged_bytes + byte_size)

    def refund(self, file: tuple[int, int], byte_size: int) -> None:
        """Refund bytes that were charged but not allocated."""
        key, charged_bytes = self._allocated_objects.get(file, ("", 0))
        if charged_bytes > byte_size:
            self._allocated_objects[file] = (key, charged_bytes - byte_size)
        else:
            self._allocated_objects.pop(file, None)

    def _charged_bytes(self) -> int:
        return sum(size for _, size in self._allocated_objects.values())

    def _refund_removed(self) -> None:
        for file, (key, _) in list(self._allocated_objects.items()):
            if file in self._regions_by_file:
                continue
            try:
                status = os.stat(_SHM_DIR + key, follow_symlinks=False)
            except OSError:
                del self._allocated_objects[file]
                continue
            if (status.st_dev, status.st_ino) != file:
                del self._allocated_objects[file]

    def pin(self, byte_size: int, copied: bool) -> None:
        """Count pinned bytes; memory that is `copied` by system calls, not mapped, is rejected.

        Raises:
            InvalidArgument: The bytes cannot be pinned. They are not counted.
        """
        if not self._has_cuda:
            raise InvalidArgument("memory can be pinned for CUDA devices only; the server has none")
        if copied:
            text = "memory that other processes may truncate is neither mapped nor pinned"
            raise InvalidArgument(text)
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if limit != resource.RLIM_INFINITY and byte_size > limit - self._pinned_bytes:
            raise InvalidArgument(
                f"{byte_size} bytes cannot be pinned: {self._pinned_bytes} of the {limit} bytes "
                "that a process may lock are in use (RLIMIT_MEMLOCK; ulimit -l, LimitMEMLOCK=)"
            )
        self._pinned_bytes += byte_size

    def unpin(self, byte_size: int) -> None:
        """Remove pinned bytes from the count."""
        self._pinned_bytes -= byte_size


@dataclass(eq=False)
class HandleCheck:
    """The check of CUDA handles by a device's workers, which `_find_workers(device_id)` returns."""

    device_count: int
    _find_workers: Callable[[int], list[int]]
    _send: Callable[[int, Any], None]
    _check_numbers: itertools.count[int] = field(init=False, default_factory=itertools.count)
    _open_checks: dict[int, _OpenCheck] = field(init=False, default_factory=dict)

    async def check(self, memory: Memory) -> None:
        """Check device memory by opening it in the device's workers, unless none is free.

        Raises:
            InvalidArgument: A worker cannot open the memory.
            Unavailable: No worker can open any memory.
        """
        handle = memory.cuda
        assert handle is not None
        if handle.device >= self.device_count:
            text = f"{CUDA_REJECTION} (the server has {self.device_count} CUDA devices)"
            raise InvalidArgument(text)
        worker_pids = list(self._find_workers(handle.device))
        if not worker_pids:
            return
        number = next(self._check_numbers)
        future: asyncio.Future[MemoryChecked] = asyncio.get_running_loop().create_future()
        self._open_checks[number] = worker_pids, future
        size = memory.byte_size
        for pid in worker_pids:
            self._send(pid, CheckMemory(number, handle.raw, handle.device, handle.uuid, size))
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                response = await future
        except TimeoutError:
            logger.info("no worker is free to check a CUDA handle: its first use will check it")
            return
        finally:
            del self._open_checks[number]
        if response.code == InvalidArgument.code:
            raise InvalidArgument(f"{CUDA_REJECTION} ({response.message})")
        if response.code:
            raise from_code(response.code, response.message)

    def handle_response(self, pid: int, message: MemoryChecked) -> None:
        """Handle the response of worker `pid`.

        The result of a check is the first response of a worker that can use the device, or else the
        last response.
        """
        worker_pids, future = self._open_checks.get(message.id, ([], None))
        if future is None or pid not in worker_pids or future.done():
            return
        worker_pids.remove(pid)
        if message.code != Unavailable.code or not worker_pids:
            future.set_result(message)


class RegionOpener:
    """The factory of regions. CUDA memory is supported only with `handles`, which checks handles.

    Methods that fail raise Unsupported, PermissionDenied, InvalidArgument, Internal or Unavailable.
    They then release all that they have opened or counted.
    """

    def __init__(self, policy: ShmPolicy, handle_check: HandleCheck | None = None) -> None:
        self.handles = handle_check
        self._quota = RegionQuota(policy, handle_check is not None)
        self.set_limits(policy)

    def set_limits(self, policy: ShmPolicy) -> None:
        """Change the limits for later regions."""
        # Regions must leave free descriptors, which the server needs to start processes.
        max_regions = min(policy.max_regions, fd_limits.regions_share(fd_limits.limit()))
        self._quota.policy = replace(policy, max_regions=max_regions)

    async def open_object(
        self, name: str, key: str, offset: int, byte_size: int, peer: Peer, *, pin: bool
    ) -> OpenRegion:
        """Open [offset, offset + byte_size) of the POSIX object `key`, and reserve its pages."""
        shared_object = posix_shm.open_object(key)
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(os.close, shared_object.fd)
            owner = self._owner(peer, key, shared_object)
            memory_id = secrets.randbits(62)
            region = OpenRegion(
                name, key, memory_id, shared_object, offset, byte_size, owner, pinned=pin
            )
            self._admit(region, shared_object)
            cleanup.callback(self._release_quota, region)
            await self._reserve_pages(region, shared_object)
            region.blocks = os.fstat(shared_object.fd).st_blocks
            cleanup.pop_all()
        return region

    def readmit(self, region: OpenRegion, shared_object: posix_shm.SharedObject) -> None:
        """Count a region that a previous server registered, whose object is open."""
        self._refuse_if_disabled()
        self._admit(region, shared_object)

    def _owner(self, peer: Peer, key: str, shared: posix_shm.SharedObject) -> Ownership:
        return ownership(peer, key, shared.uid, shared.gid, shared.mode, self._quota.policy.group)

    def _admit(self, region: OpenRegion, shared_object: posix_shm.SharedObject) -> None:
        posix_shm.check_range(region.name, shared_object, region.offset, region.byte_size)
        self._reserve_quota(region, copied=region.owner.copied)

    def _reserve_quota(self, region: OpenRegion, *, copied: bool = False) -> None:
        """Count a region. Raises InvalidArgument, and counts nothing, if it exceeds a quota."""
        file = None if region.shared is None else region.shared.file
        self._quota.count(region.owner.uid, region.byte_size, file)
        if region.pinned:
            try:
                self._quota.pin(region.offset + region.byte_size, copied)
            except InvalidArgument:
                self._quota.release(region.owner.uid, region.byte_size, file)
                raise

    def _release_quota(self, region: OpenRegion) -> None:
        if region.pinned:
            self._quota.unpin(region.offset + region.byte_size)
        file = None if region.shared is None else region.shared.file
        self._quota.release(region.owner.uid, region.byte_size, file)

    async def _reserve_pages(self, region: OpenRegion, shared: posix_shm.SharedObject) -> None:
        charged_bytes = posix_shm.unallocated_bytes(shared, region.byte_size)
        self._quota.charge(region.key, shared.file, charged_bytes)
        allocated_bytes = 0
        try:
            # Reserving the pages of a large object takes long, and must not block the loop.
            allocated_bytes = await asyncio.to_thread(
                posix_shm.allocate_pages, region.name, shared, region.offset, region.byte_size
            )
        finally:
            self._quota.refund(shared.file, charged_bytes - min(allocated_bytes, charged_bytes))

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
        """Return the region [offset, offset + byte_size) of the allocation of a checked handle.

        `on_exporter_exit(region)` is called when the process `exporter_pid` exits (0: unknown).
        """
        # Any process with the handle may use the memory, and device memory cannot be truncated.
        owner = Ownership(peer.uid, NO_GROUP, copied=False)
        region = OpenRegion(name, "", memory_id, None, offset, byte_size, owner, cuda=handle)
        self._reserve_quota(region)
        try:
            if exporter_pid:
                region.exporter = ExporterWatch(exporter_pid, partial(on_exporter_exit, region))
        except BaseException:
            self.close(region)
            raise
        return region

    def adopt_memory(
        self,
        name: str,
        shared: posix_shm.SharedObject,
        size: int,
        peer: Peer,
        client_number: int,
        *,
        pin: bool,
        is_sealed: bool,
    ) -> OpenRegion:
        """Return the region of a local client's memory; the region owns the descriptor.

        The caller sets the `memory_id` of the region.
        """
        self._refuse_if_disabled()
        owner = self._owner(peer, MEMFD_KEY, shared)
        if is_sealed:  # the memory cannot be truncated, so it is mapped
            owner = replace(owner, copied=False)
        blocks = 0 if is_sealed else os.fstat(shared.fd).st_blocks
        region = OpenRegion(name, MEMFD_KEY, 0, shared, 0, size, owner, blocks=blocks, pinned=pin)
        region.lease_holder = client_number
        self._reserve_quota(region, copied=owner.copied)
        return region

    async def adopt_cuda(self, name: str, memory: Memory, peer: Peer, holder: int) -> OpenRegion:
        """Return the region of a local client's device memory, after a worker has checked it."""
        self._refuse_if_disabled()
        if self.handles is None:
            raise InvalidArgument("the server has no CUDA device whose memory could be shared")
        owner = Ownership(peer.uid, NO_GROUP, copied=False)
        region = OpenRegion(name, "", memory.id, None, 0, memory.byte_size, owner, cuda=memory.cuda)
        region.lease_holder = holder
        self._reserve_quota(region)
        try:
            await self.handles.check(memory)
        except BaseException:
            self._release_quota(region)
            raise
        return region

    def _refuse_if_disabled(self) -> None:
        if self._quota.policy.allow is False:
            raise Unsupported(SHM_DISABLED)

    def close(self, region: OpenRegion) -> None:
        """Close a region, and release its quotas."""
        self._release_quota(region)
        region.close()
