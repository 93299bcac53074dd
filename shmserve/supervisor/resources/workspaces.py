"""Workspaces: one memory pool for each device, which its models lease for single executions.

    worker ── LeaseWorkspace ──> the pool of its device ── Answered(range) ──> worker
           ── ReturnWorkspace ─> the pool grants the next waiting lease

The pool of host memory is a nameless sealed memfd. The pool of a CUDA device is an allocation of a
holder, a process without another task (`run`; kept.py starts it). Workers map or open the memory;
the supervisor never does. The leases of a process end when its death is reported.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from shmserve.errors import InvalidArgument, ShmserveError, Unavailable
from shmserve.ipc import endpoints, processes
from shmserve.ipc.memory.arena import FIXED_SIZE_SEALS, FreeList
from shmserve.ipc.memory.cuda_ipc import CudaExporter, DeviceAllocation, Driver
from shmserve.ipc.messages.control_requests import (
    Answered,
    LeaseWorkspace,
    Refused,
    ReturnWorkspace,
)
from shmserve.ipc.messages.supervision import WorkspaceAllocated, WorkspaceStart, decode_start
from shmserve.ipc.tensors.descriptors import Memory, Range, pack_range
from shmserve.ipc.transport.zmtp import Dealer


class GrantedLease(NamedTuple):
    """A granted lease of memory at `offset`; `ticket` is the number of the owner's request."""

    owner_pid: int
    ticket: int
    offset: int


class _LeaseRequest(NamedTuple):
    owner_pid: int
    ticket: int
    byte_size: int


class WorkspacePool:
    """The leases of a device's pool of `capacity` bytes, a multiple of 64 (no I/O).

    Each method that changes the pool returns the leases that it has granted. The pool is closed
    initially, and a closed pool has no `memory` and grants no leases.

    Leases are granted in the order of requests, without overtaking. Later small requests therefore
    cannot delay a large one. Fragmentation cannot block it either, because all earlier leases end
    with their executions.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.memory: Memory | None = None
        self._free_list = FreeList(capacity)
        self._owners: dict[int, int] = {}  # the owner of each lease by the lease's offset
        self._requests: deque[_LeaseRequest] = deque()

    def open(self, memory: Memory) -> list[GrantedLease]:
        """Open the pool, because its memory has been allocated."""
        self.memory = memory
        return self._grant()

    def close(self) -> None:
        """End all leases, because the memory is lost. Requests keep waiting."""
        self.memory = None
        self._free_list = FreeList(self.capacity)
        self._owners.clear()

    def ask(self, owner_pid: int, ticket: int, byte_size: int) -> list[GrantedLease]:
        """Request a lease of `byte_size` bytes.

        Raises:
            InvalidArgument: The size is negative, or larger than the pool.
        """
        if not 0 <= byte_size <= self.capacity:
            raise InvalidArgument(
                f"a workspace of {byte_size} bytes was requested; allowed are 0 or more bytes, and "
                f"the device's pool has {self.capacity}"
            )
        self._requests.append(_LeaseRequest(owner_pid, ticket, byte_size))
        return self._grant()

    def release(self, owner_pid: int, offset: int) -> list[GrantedLease]:
        """End a lease; a lease that this process does not have is ignored."""
        if self._owners.get(offset) != owner_pid:
            return []
        del self._owners[offset]
        self._free_list.free(offset)
        return self._grant()

    def end_leases(self, pid: int) -> list[GrantedLease]:
        """End all leases and lease requests of a process that has exited."""
        for offset in [offset for offset, lease_pid in self._owners.items() if lease_pid == pid]:
            del self._owners[offset]
            self._free_list.free(offset)
        self._requests = deque(request for request in self._requests if request.owner_pid != pid)
        return self._grant()

    def _grant(self) -> list[GrantedLease]:
        granted_leases: list[GrantedLease] = []
        while self._requests and self.memory is not None:
            request = self._requests[0]
            offset = self._free_list.allocate(request.byte_size)
            if offset is None:
                break
            self._requests.popleft()
            self._owners[offset] = request.owner_pid
            granted_leases.append(GrantedLease(request.owner_pid, request.ticket, offset))
        return granted_leases


def _round_to_pages(byte_size: int) -> int:
    return -(-byte_size // mmap.PAGESIZE) * mmap.PAGESIZE


def _allocate_host_memory(byte_size: int) -> Memory:
    fd = os.memfd_create("shmserve-workspace", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, byte_size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, FIXED_SIZE_SEALS)
    except OSError as error:
        os.close(fd)
        text = f"no memory for a workspace of {byte_size} bytes: {error.strerror}"
        raise Unavailable(text) from None
    inode = os.fstat(fd).st_ino
    return Memory(secrets.randbits(62), os.getpid(), fd, inode, byte_size, sealed=True)


class Workspaces:
    """The workspace pools of the server, by device; `send(pid, message)` queues messages.

    Raises:
        Unavailable: The host has less memory than the pool of host memory.
    """

    def __init__(self, byte_sizes: Mapping[str, int], send: Callable[[int, Any], None]) -> None:
        self._pools = {
            device: WorkspacePool(_round_to_pages(size)) for device, size in byte_sizes.items()
        }
        self._send = send
        if "cpu" in self._pools:
            self.on_allocated("cpu", _allocate_host_memory(self._pools["cpu"].capacity))

    def on_allocated(self, device: str, memory: Memory) -> None:
        """Open a device's pool, and grant the waiting requests."""
        pool = self._pools[device]
        # The holder's allocation has at least the capacity, which `_round_to_pages` has rounded.
        self._send_granted(pool, pool.open(replace(memory, byte_size=pool.capacity)))

    def holder_exited(self, device: str) -> None:
        """Close a device's pool, whose holder has died, until `on_allocated` is called again."""
        self._pools[device].close()

    def handle(self, pid: int, message: LeaseWorkspace | ReturnWorkspace) -> None:
        """Handle a worker's message that requests or returns a lease.

        The call must not be deferred, since the messages of a process must be handled before its
        exit.
        """
        pool = self._pools.get(message.device)
        match message:
            case ReturnWorkspace(memory_id=memory_id, offset=offset):
                if pool is not None and pool.memory is not None and pool.memory.id == memory_id:
                    self._send_granted(pool, pool.release(pid, offset))
            case LeaseWorkspace(id=number, byte_size=size):
                try:
                    if pool is None:
                        raise Unavailable(
                            f"there is no workspace for device '{message.device}': the server was "
                            f"started without --workspace-byte-size={message.device}=BYTES"
                        )
                    granted_range = pool.ask(pid, number, size)
                except ShmserveError as error:
                    self._send(pid, Refused.of(number, error))
                else:
                    self._send_granted(pool, granted_range)

    def process_exited(self, pid: int) -> None:
        """End the leases and requests of a process that has exited."""
        for pool in self._pools.values():
            self._send_granted(pool, pool.end_leases(pid))

    def close(self) -> None:
        """Release the memory. Mappings of a worker live on until the worker exits."""
        for pool in self._pools.values():
            if pool.memory is not None and pool.memory.cuda is None:
                os.close(pool.memory.fd)
        self._pools.clear()

    def _send_granted(self, pool: WorkspacePool, granted_leases: list[GrantedLease]) -> None:
        for owner_pid, ticket, offset in granted_leases:
            assert pool.memory is not None
            packed_range = pack_range(Range(pool.memory, offset, 0))
            self._send(owner_pid, Answered(ticket, {"place": packed_range}))


def run(start_record: bytes) -> None:
    """Run a holder: export the memory of a CUDA device's pool, and hold it.

    Raises:
        InvalidArgument: The device does not exist.
        Unavailable: There is no CUDA, or the device has too little memory.
    """
    start = decode_start(WorkspaceStart, start_record)
    title = f"workspace cuda:{start.device_id}"
    processes.set_up(title, title, start.log)
    hold(start, Driver())


def hold(start: WorkspaceStart, cuda: CudaExporter) -> None:
    """Allocate the memory, report it to the supervisor, and wait for the supervisor's exit."""
    allocation = DeviceAllocation(cuda, start.device_id, start.byte_size)
    control = Dealer(endpoints.control(start.run_dir), f"workspace.{os.getpid()}")
    with contextlib.closing(control):
        control.send(WorkspaceAllocated(allocation.handle.raw, allocation.handle.uuid))
        while control.connected:
            control.wait(None)
            control.receive()
