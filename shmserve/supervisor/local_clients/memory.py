"""The memory that local clients share for their requests, identified by MACs."""

from __future__ import annotations

import fcntl
import itertools
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shmserve.common.peers import Peer
from shmserve.errors import InvalidArgument
from shmserve.ipc.endpoints import Capabilities
from shmserve.ipc.memory.cuda_ipc import HANDLE_SIZE
from shmserve.ipc.memory.posix_shm import SharedObject, described
from shmserve.ipc.messages.control_requests import ShareDeviceMemory
from shmserve.ipc.messages.publications import (
    MemoryDropped,
    RegionDrained,
    RegionPublished,
    RegionUnregistered,
)
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory, fits, whole
from shmserve.supervisor.local_clients.connections import LocalClient, is_memory
from shmserve.supervisor.regions.opener import RegionOpener
from shmserve.supervisor.regions.region import OpenRegion
from shmserve.supervisor.regions.registry import Processes

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LocalMemory:
    """The shared regions by memory id, each of which only its client can use.

    A region ends when it is released or its client disconnects; workers then unmap it. Gateways
    list the regions under names that no request can use. Methods that share memory return it as
    clients and workers encode it, and raise ShmserveError if it is rejected.
    """

    _capabilities: Capabilities
    _opener: RegionOpener
    _processes: Processes
    _publish_event: Callable[[Any], None]
    _names: itertools.count[int] = field(init=False, default_factory=partial(itertools.count, 1))
    _serials: itertools.count[int] = field(init=False, default_factory=partial(itertools.count, 1))
    _regions: dict[int, OpenRegion] = field(init=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self._regions)

    def all(self) -> list[OpenRegion]:
        """Return every region."""
        return list(self._regions.values())

    def published(self) -> Iterator[RegionPublished]:
        """Yield the messages that bring a new gateway up to date."""
        for region in self._regions.values():
            yield region.listed_only(0)

    def share(self, client: LocalClient, byte_size: int, pin: bool, fds: list[int]) -> bytes:
        """Share memory that a client has opened, and take its descriptor out of `fds`."""
        if len(fds) != 1:
            raise InvalidArgument("one descriptor must come with the memory to share")
        (fd,) = fds
        number, uid = client.number, client.uid
        shared = check_memory(fd, byte_size, trusted=uid in (0, os.geteuid()))
        sealed = is_sealed(fd)
        region = self._opener.take_lent(
            *(self._name(client), shared, byte_size, Peer(uid), number), pin=pin, sealed=sealed
        )
        rest = (os.getpid(), fd, shared.inode, byte_size, sealed, region.owner.copied, pin)
        region.memory_id = self._capabilities.memory_id(number, *rest)
        self._enter(region)
        fds.clear()
        return Memory(region.memory_id, *rest).packed

    async def share_device(self, client: LocalClient, asked: ShareDeviceMemory) -> bytes:
        """Share device memory by its handle, which a worker checks.

        The caller handles a disconnection of the client meanwhile.
        """
        handle = CudaHandle(asked.handle, asked.device_id, asked.device_uuid)
        if len(handle.raw) != HANDLE_SIZE or len(handle.uuid) not in (0, 16):
            raise InvalidArgument("a handle has 64 bytes, the UUID of a device 16 (or 0)")
        size = whole(asked.byte_size, "byte_size")
        if not size or handle.device < 0:
            raise InvalidArgument("'byte_size' must be positive, 'device_id' not negative")
        number, uid = client.number, client.uid
        memory_id = self._capabilities.device_memory_id(number, next(self._serials), size, handle)
        memory = Memory.on_device(memory_id, size, handle)
        name = self._name(client)
        self._enter(await self._opener.take_lent_cuda(name, memory, Peer(uid), number))
        return memory.packed

    def _name(self, client: LocalClient) -> str:
        return f"shmserve.client {client.pid}.{next(self._names)}"

    def _enter(self, region: OpenRegion) -> None:
        self._regions[region.memory_id] = region
        self._publish_event(region.registered())
        self._processes.broadcast(region.listed_only(0), "gateway")

    def release(self, number: int, memory_id: int = 0) -> None:
        """Release a memory of a local client, or all of a client that has disconnected."""
        reason = "" if memory_id else "its program has disconnected"
        for region in list(self._regions.values()):
            if region.lessor == number and memory_id in (0, region.memory_id):
                del self._regions[region.memory_id]
                self._processes.broadcast(MemoryDropped(region.memory_id), "worker")
                self._processes.broadcast(RegionDrained(region.memory_id, 0), "gateway")
                self._publish_event(RegionUnregistered(region.name, reason))
                self._opener.close(region)

    def drop_shrunk(self) -> None:
        """Release the regions that were truncated, since a worker died of a missing page."""
        for region in self.all():
            if not region.owner.copied and region.shrank():
                logger.error(
                    "shared memory of '%s' was truncated while a worker used it, and the worker "
                    "died: it is released",
                    region.name,
                )
                self.release(region.lessor, region.memory_id)

    def close(self) -> None:
        """Close every region."""
        for region in self._regions.values():
            self._opener.close(region)
        self._regions.clear()


def is_sealed(fd: int) -> bool:
    """Check whether memory cannot shrink."""
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)


def check_memory(fd: int, byte_size: int, trusted: bool = True) -> SharedObject:
    """Check that workers can use the first `byte_size` bytes of the memory `fd`.

    Raises:
        InvalidArgument: The descriptor is no shared memory, the memory is too small or not
            reserved, or a worker may not open it. Huge pages are allowed only for a `trusted` user.
    """
    if not is_memory(fd):
        raise InvalidArgument("shared memory must be a memfd or an object in /dev/shm")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL):
        raise InvalidArgument("a memfd that can be sealed must have the seal F_SEAL_SHRINK")
    shared = described(fd)
    status = os.fstat(fd)
    page = os.fstatvfs(fd).f_bsize
    if page != mmap.PAGESIZE and (not trusted or byte_size % page):
        raise InvalidArgument(
            "shared memory must be of ordinary pages, or, from the server's own user, of whole "
            "huge pages"
        )
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise InvalidArgument("shared memory must be open for reading and writing")
    if not byte_size > 0 or not fits(0, byte_size, shared.size):
        raise InvalidArgument(f"'byte_size' must be from 1 to {shared.size}, got {byte_size}")
    if status.st_blocks * 512 < byte_size:
        raise InvalidArgument("memory must be reserved (posix_fallocate) before it is shared")
    if not os.access(f"/proc/self/fd/{fd}", os.R_OK | os.W_OK, effective_ids=True):
        raise InvalidArgument(f"the server may not read and write memory of uid {shared.uid}")
    return shared
