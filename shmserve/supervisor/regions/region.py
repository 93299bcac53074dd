"""Regions (generations of a shared memory name), and their registrations outside of the server.

The service manager keeps registrations (FDSTORE, sd_pid_notify_with_fds(3)) as two descriptors: the
object, and a sealed memfd with its description. The service manager passes them to the next server,
even if this server is killed. During a handover, the two servers send each other their
registrations. Device memory cannot be kept, since its handles belong to processes. Memory that is
released when its client disconnects is not kept, since the client shares it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shmserve.common.host import CUDA_REJECTION
from shmserve.common.peers import Ownership
from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.ipc.memory import posix_shm
from shmserve.ipc.messages.publications import RegionBlamed, RegionPublished, RegionRegistered
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory, Range, pack_range
from shmserve.supervisor.host.handover_link import HandoverLink
from shmserve.supervisor.host.service_manager import ServiceManager

logger = logging.getLogger(__name__)

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_MAX_DESCRIPTION_BYTES = 1 << 20
KEEP, DROP = "keep", "drop"  # changes of registrations that a server sends its successor
_DESCRIBED_FIELDS = ("name", "key", "offset", "byte_size", "pinned")


class ExporterWatch:
    """A watch on the process that owns a region's memory; calls `on_exit` when it exits."""

    def __init__(self, pid: int, on_exit: Callable[[], None]) -> None:
        try:
            self._fd = os.pidfd_open(pid)
        except OSError as error:
            text = f"{CUDA_REJECTION} (the process that exported it has exited)"
            raise InvalidArgument(text) from error
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._on_exit, on_exit)

    def _on_exit(self, on_exit: Callable[[], None]) -> None:
        self._loop.remove_reader(self._fd)
        on_exit()

    def close(self) -> None:
        """Stop watching."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.remove_reader(self._fd)
        os.close(self._fd)


@dataclass(slots=True, eq=False)
class OpenRegion:
    """One generation of a region's name: the bytes [offset, offset + byte_size) of an object.

    System memory has a `key` and is open as `shared`. CUDA memory has a handle.
    """

    name: str
    key: str  # the POSIX name of its object, MEMFD_KEY, or "" (CUDA)
    memory_id: int
    shared: posix_shm.SharedObject | None
    offset: int
    byte_size: int
    owner: Ownership
    user_pids: set[int] = field(default_factory=set)  # gateways that use the retired region
    is_retired: bool = False  # whether every gateway has acknowledged that the region is retired
    is_listed: bool = False  # whether gateways show the withdrawn region in listings
    blocks: int = 0  # allocated blocks of the object at registration
    lease_holder: int = 0  # the process with a lease, or the owning local client, or 0
    cuda: CudaHandle | None = None
    exporter: ExporterWatch | None = None
    pinned: bool = False
    kept_name: str = ""  # the name by which its registration outlives the server

    def has_shrunk(self) -> bool:
        """Return whether pages of the object were freed, even if its size is unchanged."""
        if self.shared is None:
            return False
        status = os.fstat(self.shared.fd)
        return status.st_size < self.offset + self.byte_size or status.st_blocks < self.blocks

    def report_truncation(self) -> RegionBlamed:
        """Log that the object was truncated, which has killed a worker; return the event."""
        text = "was truncated while a worker used it, and the worker died"
        logger.error("shared memory region '%s' %s; the server unregisters it", self.name, text)
        return RegionBlamed(self.name, f"it {text}")

    def publication(self, ack_number: int) -> RegionPublished:
        """Return the message that publishes the region to gateways."""
        packed_range = list(pack_range(Range(self._memory(), self.offset, self.byte_size)))
        owner = self.owner
        return RegionPublished(
            self.name, self.key, packed_range, owner.uid, owner.group, ack_number
        )

    def listing(self, ack_number: int) -> RegionPublished:
        """Return the message for a region that gateways list, but that no request can name."""
        return replace(self.publication(ack_number), draining=True)

    def _memory(self) -> Memory:
        shared, end = self.shared, self.offset + self.byte_size
        if self.cuda is not None:
            return Memory.on_device(self.memory_id, end, self.cuda)
        assert shared is not None
        fields = (self.memory_id, os.getpid(), shared.fd, shared.inode, min(shared.size, end))
        return Memory(*fields, sealed=False, copied=self.owner.copied, pinned=self.pinned)

    def registration_event(self) -> RegionRegistered:
        """Return the event that reports the region's registration."""
        device = -1 if self.cuda is None else self.cuda.device
        fields = (self.name, self.key, self.offset, self.byte_size, self.owner.uid)
        return RegionRegistered(*fields, device)

    @property
    def is_orphaned(self) -> bool:
        """Return whether the object was unlinked, so that its name can be taken over."""
        return self.shared is not None and os.fstat(self.shared.fd).st_nlink == 0

    def close(self) -> None:
        """Close the object, and end the watch on its exporter."""
        if self.shared is not None:
            os.close(self.shared.fd)
        if self.exporter is not None:
            self.exporter.close()


Admission = Callable[[OpenRegion, posix_shm.SharedObject], None]


class KeptRegions:
    """The record of registrations that outlives this server.

    The service manager holds the regions' descriptors for the next server (systemd's file
    descriptor store). During a handover, the other server holds them, too.
    """

    def __init__(self, service_manager: ServiceManager) -> None:
        self._service_manager = service_manager
        self._other_server: HandoverLink | None = None

    def mirror_to(self, other_server: HandoverLink | None) -> None:
        """Set the other server, to which changes of registrations are sent during a handover."""
        self._other_server = other_server

    def add(self, region: OpenRegion) -> None:
        """Store the registration of a new region with the service manager and the other server."""
        if region.shared is None or region.lease_holder:
            return
        region.kept_name = secrets.token_hex(8)
        with _description_memfd(region) as description_fd:
            self._service_manager.keep(region.kept_name, [region.shared.fd, description_fd])
        self.send_to_other_server(region)

    def send_to_other_server(self, region: OpenRegion) -> None:
        """Send the registration of a region to the other server of a handover, if there is one."""
        if self._other_server is not None and region.shared is not None and region.kept_name:
            with _description_memfd(region) as description:
                self._other_server.ask(KEEP, region.kept_name, [region.shared.fd, description])

    def remove(self, region: OpenRegion) -> None:
        """Remove a region that has been unregistered from the kept registrations."""
        if region.kept_name:
            self._service_manager.remove_stored(region.kept_name)
            if self._other_server is not None:
                self._other_server.ask(DROP, region.kept_name)
            region.kept_name = ""

    async def flush(self) -> None:
        """Wait until the service manager, and the other server of a handover, have all changes."""
        await self._service_manager.wait_until_flushed()
        if self._other_server is not None:
            await self._other_server.until_done()

    def restore(self, records: dict[str, list[int]], admit: Admission) -> Iterator[OpenRegion]:
        """Open and yield the regions of kept registrations. Invalid registrations are dropped.

        Args:
            records: The two descriptors of each registration.
            admit: `RegionOpener.readmit`.
        """
        for name, fds in records.items():
            try:
                region = _reopen(fds, admit)
            except (ShmserveError, OSError, ValueError, TypeError, KeyError) as error:
                text = "a region of the previous server is lost; clients must register it again: %s"
                logger.warning(text, error)
                for fd in fds:
                    os.close(fd)
                self._service_manager.remove_stored(name)
            else:
                region.kept_name = name
                yield region


@contextlib.contextmanager
def _description_memfd(region: OpenRegion) -> Iterator[int]:
    fd = os.memfd_create("region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fields: dict[str, Any] = {name: getattr(region, name) for name in _DESCRIBED_FIELDS}
        os.write(fd, json.dumps({**fields, "owner": asdict(region.owner)}).encode())
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        yield fd
    finally:
        os.close(fd)


def _reopen(fds: list[int], admit: Admission) -> OpenRegion:
    are_sealed = [fcntl.fcntl(fd, fcntl.F_GET_SEALS) == _SEALS for fd in fds]
    if sorted(are_sealed) != [False, True]:
        found_text = f"got {len(fds)}, {sum(are_sealed)} of them sealed"
        raise ValueError(f"a region needs 2 descriptors, one of them sealed; {found_text}")
    description_fd = fds[are_sealed.index(True)]
    shared = posix_shm.describe_object(fds[are_sealed.index(False)])
    fields = json.loads(os.pread(description_fd, _MAX_DESCRIPTION_BYTES, 0))
    owner, blocks = Ownership(**fields.pop("owner")), os.fstat(shared.fd).st_blocks
    memory_id = secrets.randbits(62)
    region = OpenRegion(memory_id=memory_id, shared=shared, owner=owner, blocks=blocks, **fields)
    admit(region, shared)
    os.close(description_fd)
    return region
