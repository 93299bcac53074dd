"""The workspaces: one pool of memory a device, which the models on it lease execution by execution.

    worker ── LeaseWorkspace ──> its device's pool grants it ── Answered(where) ──> worker
           ── ReturnWorkspace ─> who waits is granted next

The pool of host memory is a nameless, sealed memory file of its whole size; a CUDA device's is an
allocation of a holder, a process that does nothing else (`run`; workspace_holders.py starts it).
Workers map it, or open it, and the supervisor never does. What a process had that is gone is free
again once its death is known.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import signal
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shmserve import logs
from shmserve.errors import InvalidArgument, ShmserveError, Unavailable
from shmserve.ipc import endpoints, processes
from shmserve.ipc.memory.arena import FreeList
from shmserve.ipc.memory.cuda_ipc import DeviceAllocation, Driver, Exporting
from shmserve.ipc.messages.control_requests import (
    Answered,
    LeaseWorkspace,
    Refused,
    ReturnWorkspace,
)
from shmserve.ipc.messages.supervision import (
    SetLogging,
    Stop,
    WorkspaceAllocated,
    WorkspaceStart,
    decode_start,
)
from shmserve.ipc.tensors.descriptors import Memory, Place, pack_place
from shmserve.ipc.transport.dealer import Dealer


class GrantedLease(NamedTuple):
    """The lease that `owner` has asked for as `ticket`: its bytes begin at `offset`."""

    owner: int
    ticket: int
    offset: int


class _Waiting(NamedTuple):
    owner: int
    ticket: int
    byte_size: int


class WorkspacePool:
    """A stretch of a device's memory, leased for the time of an execution: `capacity` bytes, a
    multiple of 64. Whatever changes it returns who is granted then; while it is closed, as it is at
    first, that is nobody (pure).

        ask ──> granted at once, if it fits and nobody waits ──> release ──> its bytes join the
           └──> waits in the order of asking ──────────────────────┘         free ones beside them;
                                                                  who waits is granted what fits

    Who waits is granted in order and nobody overtakes, so that the largest lease comes after those
    before it have ended, however many small ones are asked for meanwhile; and as every lease ends
    with an execution, what is cut into pieces is whole again whenever the first in the queue needs
    all.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._open = False
        self._free = FreeList(capacity)
        self._owners: dict[int, int] = {}  # offset -> owner
        self._waiting: deque[_Waiting] = deque()

    @property
    def used(self) -> int:
        """Bytes that are leased now."""
        return self._free.used

    @property
    def waiting(self) -> int:
        """The number of leases asked for and not granted."""
        return len(self._waiting)

    def open(self) -> list[GrantedLease]:
        """Its memory is there."""
        self._open = True
        return self._grant()

    def close(self) -> None:
        """Its memory is gone, and all leases with it; who waits goes on waiting."""
        self._open = False
        self._free = FreeList(self.capacity)
        self._owners.clear()

    def ask(self, owner: int, ticket: int, byte_size: int) -> list[GrantedLease]:
        """Lease `byte_size` bytes, now or later. Raises InvalidArgument when the pool can never
        have as many."""
        if byte_size > self.capacity:
            raise InvalidArgument(
                f"a workspace of {byte_size} bytes was asked for, and the device's pool has "
                f"{self.capacity}"
            )
        self._waiting.append(_Waiting(owner, ticket, byte_size))
        return self._grant()

    def release(self, owner: int, offset: int) -> list[GrantedLease]:
        """End a lease; one that `owner` does not have is ignored."""
        if self._owners.get(offset) != owner:
            return []
        del self._owners[offset]
        self._free.free(offset)
        return self._grant()

    def drop(self, owner: int) -> list[GrantedLease]:
        """End all that a process has, or waits for, that is gone."""
        for offset in [at for at, who in self._owners.items() if who == owner]:
            del self._owners[offset]
            self._free.free(offset)
        self._waiting = deque(each for each in self._waiting if each.owner != owner)
        return self._grant()

    def _grant(self) -> list[GrantedLease]:
        granted: list[GrantedLease] = []
        while self._waiting and self._open:
            first = self._waiting[0]
            offset = self._free.allocate(first.byte_size)
            if offset is None:
                break
            self._waiting.popleft()
            self._owners[offset] = first.owner
            granted.append(GrantedLease(first.owner, first.ticket, offset))
        return granted

    def check_integrity(self) -> None:
        """Assert that leases and holes tile the pool, and that each lease has an owner; for
        tests."""
        self._free.check_integrity()
        assert self._free.offsets() == self._owners.keys()


_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class _Pool:
    """One device's: the memory, once it is there, and who has what of it."""

    def __init__(self, capacity: int) -> None:
        self.byte_size = -(-capacity // mmap.PAGESIZE) * mmap.PAGESIZE
        self.leases = WorkspacePool(self.byte_size)
        self.memory: Memory | None = None

    def place(self, offset: int) -> Place:
        """The place at an offset."""
        assert self.memory is not None
        return Place(self.memory, offset, 0)


def _host_memory(byte_size: int) -> Memory:
    fd = os.memfd_create("shmserve-workspace", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, byte_size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        text = f"no memory for a workspace of {byte_size} bytes: {error.strerror}"
        raise Unavailable(text) from None
    inode = os.fstat(fd).st_ino
    return Memory(secrets.randbits(62), os.getpid(), fd, inode, byte_size, sealed=True)


class Workspaces:
    """The pools of the server; `send(pid, message)` is the way to a process.

    Raises Unavailable where the host has not as much memory as `byte_sizes` (by device) says.
    """

    def __init__(self, byte_sizes: Mapping[str, int], send: Callable[[int, Any], None]) -> None:
        self._pools = {device: _Pool(size) for device, size in byte_sizes.items()}
        self._send = send
        if "cpu" in self._pools:
            self.allocated("cpu", _host_memory(self._pools["cpu"].byte_size))

    def allocated(self, device: str, memory: Memory) -> None:
        """Open a device's pool, whose memory is there: what waits for it is granted."""
        pool = self._pools[device]
        pool.memory = memory
        self._tell(pool, pool.leases.open())

    def lost(self, device: str) -> None:
        """Close a device's pool, whose holder has died, until it is `allocated` again."""
        self._pools[device].leases.close()

    def handle(self, pid: int, message: LeaseWorkspace | ReturnWorkspace) -> None:
        """Handle a worker's request for a lease, or its return.

        Not in the background: what a process has sent is handled before its death is.
        """
        pool = self._pools.get(message.device)
        match message:
            case ReturnWorkspace(memory_id=memory_id, offset=offset):
                if pool is not None and pool.memory is not None and pool.memory.id == memory_id:
                    self._tell(pool, pool.leases.release(pid, offset))
            case LeaseWorkspace(id=number, byte_size=size):
                try:
                    if pool is None:
                        raise Unavailable(
                            f"there is no workspace for device '{message.device}': the server was "
                            f"started without --workspace-byte-size={message.device}=BYTES"
                        )
                    granted = pool.leases.ask(pid, number, size)
                except ShmserveError as error:
                    self._send(pid, Refused(number, error.code, error.message))
                else:
                    self._tell(pool, granted)

    def process_exited(self, pid: int) -> None:
        """Take back all that a process had."""
        for pool in self._pools.values():
            self._tell(pool, pool.leases.drop(pid))

    def close(self) -> None:
        """Give the memory back; what is mapped of it lives on until its process ends."""
        for pool in self._pools.values():
            if pool.memory is not None and pool.memory.cuda is None:
                os.close(pool.memory.fd)
        self._pools.clear()

    def _tell(self, pool: _Pool, granted: list[GrantedLease]) -> None:
        for owner, ticket, offset in granted:
            self._send(owner, Answered(ticket, {"place": pack_place(pool.place(offset))}))


def run(data: bytes, cuda: Callable[[], Exporting] = Driver) -> None:
    """The entry point of a holder: allocate and export the memory of a CUDA device's pool, and hold
    it until told to stop; `data` is an encoded `WorkspaceStart`.

    Raises InvalidArgument for a device that is not there, Unavailable where there is no CUDA, or
    the device has not so much memory.
    """
    start = decode_start(WorkspaceStart, data)
    title = f"workspace cuda:{start.device_id}"
    logs.configure(title, start.log)
    processes.name_process(title)
    # When it ends is the supervisor's decision: a terminal's Ctrl-C reaches every process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hold(start, cuda())


def hold(start: WorkspaceStart, cuda: Exporting) -> None:
    """Allocate, tell the supervisor, and wait."""
    allocation = DeviceAllocation(cuda, start.device_id, start.byte_size)
    control = Dealer(endpoints.control(start.run_dir), f"workspace.{os.getpid()}")
    control.send(WorkspaceAllocated(allocation.handle.raw, allocation.handle.uuid))
    try:
        while control.connected:
            control.wait(None)
            for message in control.receive():
                match message:
                    case Stop():
                        return
                    case SetLogging(settings):
                        logs.apply(logs.LogSettings(**settings))
    finally:
        control.close()
