"""Workspace pools: their leases, and the memory of those on CUDA devices."""

import contextlib
import os
import random
import threading
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc import endpoints
from shmserve.ipc.messages import control_requests as m
from shmserve.ipc.messages.control_requests import LeaseWorkspace, ReturnWorkspace
from shmserve.ipc.messages.supervision import WorkspaceAllocated, WorkspaceStart, decode_start
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory, unpack_range
from shmserve.ipc.transport.router import Router
from shmserve.supervisor.kept import WorkspaceHolders
from shmserve.supervisor.resources.workspaces import GrantedLease, WorkspacePool, Workspaces, hold
from tests.rigs.arrivals import receive_arrived
from tests.rigs.fake_cuda import FakeCuda
from tests.rigs.process_rig import FakeChild, Processes, run_loop_turns
from tests.support.free_lists import check_integrity

MB = 1 << 20
DEVICE = "cuda:1"


def check_leases(pool: WorkspacePool) -> None:
    """Assert that leases and holes tile the pool, and that each lease has an owner."""
    check_integrity(pool._free_list)
    assert pool._free_list._block_sizes.keys() == pool._owners.keys()


def device_memory(number: int) -> Memory:
    handle = CudaHandle(number.to_bytes(64, "big"), 1, bytes(16))
    return Memory.on_device(number, 2 * MB, handle, number)


class SentMessages:
    def __init__(self) -> None:
        self.messages: list[tuple[int, Any]] = []

    def __call__(self, pid: int, message: Any) -> None:
        self.messages.append((pid, message))

    def take_granted(self) -> list[tuple[int, int, int, int]]:
        """Return the leases granted since the last call: pid, number, holder's pid, offset."""
        offsets = []
        for pid, message in self.messages:
            assert isinstance(message, m.Answered)
            memory_range = unpack_range(list(message.payload["place"]))
            assert memory_range.memory == device_memory(memory_range.memory.id)
            offsets.append((pid, message.id, memory_range.memory.id, memory_range.offset))
        self.messages.clear()
        return offsets


def lease_request(number: int, byte_size: int) -> LeaseWorkspace:
    return LeaseWorkspace(number, DEVICE, byte_size)


def test_a_request_for_a_workspace_waits_for_its_holder() -> None:
    sent_messages = SentMessages()
    workspaces = Workspaces({DEVICE: 2 * MB}, sent_messages)
    workspaces.handle(10, lease_request(1, MB))
    assert sent_messages.take_granted() == []
    workspaces.on_allocated(DEVICE, device_memory(77))
    workspaces.handle(11, lease_request(1, MB))
    workspaces.handle(12, lease_request(1, MB))
    assert sent_messages.take_granted() == [(10, 1, 77, 0), (11, 1, 77, MB)]
    workspaces.handle(10, ReturnWorkspace(DEVICE, 77, 0))
    assert sent_messages.take_granted() == [(12, 1, 77, 0)]
    workspaces.close()  # the workspaces hold no descriptor of it


def test_the_memory_of_a_lease_has_all_bytes_of_the_pool() -> None:
    """The size of a pool is rounded up to pages, and its last bytes can be leased, too."""
    sent_messages = SentMessages()
    workspaces = Workspaces({DEVICE: 5000}, sent_messages)
    workspaces.on_allocated(DEVICE, replace(device_memory(77), byte_size=5000))
    workspaces.handle(10, lease_request(1, 8192))
    ((_, message),) = sent_messages.messages
    assert unpack_range(list(message.payload["place"])).memory.byte_size == 8192


def test_leases_of_released_memory_are_dropped() -> None:
    sent_messages = SentMessages()
    workspaces = Workspaces({DEVICE: 2 * MB}, sent_messages)
    workspaces.on_allocated(DEVICE, device_memory(77))
    workspaces.handle(10, lease_request(1, 2 * MB))
    workspaces.handle(11, lease_request(1, 2 * MB))
    assert sent_messages.take_granted() == [(10, 1, 77, 0)]
    workspaces.holder_exited(DEVICE)
    workspaces.handle(12, lease_request(5, MB))
    assert sent_messages.take_granted() == []
    workspaces.on_allocated(DEVICE, device_memory(78))
    assert sent_messages.take_granted() == [(11, 1, 78, 0)]
    workspaces.handle(11, ReturnWorkspace(DEVICE, 77, 0))  # not of this memory
    assert sent_messages.take_granted() == []
    workspaces.process_exited(11)
    assert sent_messages.take_granted() == [(12, 5, 78, 0)]


@contextlib.asynccontextmanager
async def workspace_holders(*flags: str) -> AsyncIterator[tuple[Processes, WorkspaceHolders]]:
    processes = Processes(*flags)
    try:
        yield processes, WorkspaceHolders(processes.context)
    finally:
        await processes.end()


async def test_a_holder_that_dies_is_started_again() -> None:
    def allocate_memory(processes: Processes, child: FakeChild) -> None:
        processes._dispatch(child.pid, WorkspaceAllocated(bytes(64), bytes(16)))

    async with workspace_holders(f"--workspace-byte-size={DEVICE}={4 * MB}") as (
        processes,
        holders,
    ):
        sent_messages = SentMessages()
        processes.context.workspaces._send = sent_messages
        processes.on_start = lambda child: allocate_memory(processes, child)
        await holders.start()
        assert [child.title for child in processes.children] == ["workspace cuda:1"]
        processes.children[0].kill()
        await run_loop_turns(1)
        processes.context.workspaces.handle(10, lease_request(1, MB))
        assert sent_messages.messages == []
        await run_loop_turns()
        first_process, second_process = processes.children
        ((_, message),) = sent_messages.messages
        memory_range = unpack_range(list(message.payload["place"]))
        assert memory_range.memory.pid == second_process.pid != first_process.pid
        assert memory_range.memory.cuda == CudaHandle(bytes(64), 1, bytes(16))
        holders.retire()
        second_process.kill()
        await run_loop_turns()
        assert len(processes.children) == 2


async def test_a_device_without_enough_memory_fails_the_start() -> None:
    async with workspace_holders(f"--workspace-byte-size={DEVICE}={4 * MB}") as (
        processes,
        holders,
    ):
        processes.on_start = lambda child: child.kill()
        with pytest.raises(Unavailable, match="workspace cuda:1 ended during its start"):
            await holders.start()


async def test_host_memory_has_no_holder() -> None:
    async with workspace_holders(f"--workspace-byte-size=cpu={4 * MB}") as (processes, holders):
        await holders.start()
        assert processes.children == []
        processes.context.workspaces.close()


def test_a_holder_allocates_reports_and_ends_with_the_supervisor(tmp_path: Path) -> None:
    cuda = FakeCuda()
    exporting = cuda.exporting()
    start = WorkspaceStart(1, 5 * MB, tmp_path)
    with contextlib.closing(Router(endpoints.control(tmp_path))) as router:
        thread = threading.Thread(target=hold, args=(start, exporting))
        thread.start()
        ((peer, message),) = receive_arrived(router)
        assert peer == f"workspace.{os.getpid()}".encode()
        pointer = cuda.open(message.handle, 1)
        assert message.device_uuid == cuda.uuid(1)
        assert cuda.extent(pointer, 1)[1] >= 5 * MB
        cuda.close(pointer, 1)
        assert exporting.allocated
    thread.join(10)
    assert not thread.is_alive() and not exporting.allocated


def test_a_holder_without_memory_reports_it(tmp_path: Path) -> None:
    exporting = FakeCuda().exporting()
    exporting.byte_limit = MB
    with pytest.raises(Unavailable, match=r"5242880 bytes .* cannot be allocated on 'cuda:1'"):
        hold(WorkspaceStart(1, 5 * MB, tmp_path), exporting)
    with pytest.raises(InvalidArgument, match="has no device 'cuda:7'"):
        hold(WorkspaceStart(7, 5 * MB, tmp_path), exporting)


def test_a_start_record_is_encoded_and_decoded(tmp_path: Path) -> None:
    from shmserve.ipc.messages.supervision import encode_start

    start = WorkspaceStart(1, 5 * MB, tmp_path)
    assert decode_start(WorkspaceStart, encode_start(start)) == start


POOL_SIZE = 64 * 64

Step = tuple[str, int, int]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 5), st.integers(1, POOL_SIZE)),
        st.tuples(st.just("release"), st.integers(0, 10), st.just(0)),
        st.tuples(st.just("drop"), st.integers(1, 5), st.just(0)),
    ),
    max_size=60,
)


def open_pool() -> WorkspacePool:
    pool = WorkspacePool(POOL_SIZE)
    assert pool.open(device_memory(1)) == []
    return pool


@given(STEPS)
def test_leases_are_disjoint_ordered_and_all_released(steps: list[Step]) -> None:
    pool = open_pool()
    waiting_requests: deque[tuple[int, int, int]] = deque()
    leases: dict[int, tuple[int, int]] = {}  # offset -> owner, size

    def take(granted_leases: list[GrantedLease]) -> None:
        for owner, ticket, offset in granted_leases:
            first_waiting = waiting_requests.popleft()
            assert (owner, ticket) == first_waiting[:2]  # no request overtakes an earlier one
            for leased_offset, (_, size) in leases.items():
                assert offset + first_waiting[2] <= leased_offset or leased_offset + size <= offset
            assert offset + first_waiting[2] <= POOL_SIZE
            leases[offset] = owner, first_waiting[2]

    for number, (action, worker, size) in enumerate(steps):
        if action == "ask":
            waiting_requests.append((worker, number, size))
            take(pool.ask(worker, number, size))
        elif action == "release" and leases:
            offset = sorted(leases)[worker % len(leases)]
            owner, _ = leases.pop(offset)
            take(pool.release(owner, offset))
        elif action == "drop":
            leases = {
                leased_offset: lease
                for leased_offset, lease in leases.items()
                if lease[0] != worker
            }
            waiting_requests = deque(lease for lease in waiting_requests if lease[0] != worker)
            take(pool.end_leases(worker))
        check_leases(pool)
        assert len(pool._requests) == len(waiting_requests)
        assert leases or not waiting_requests  # if nothing is leased, no request waits
    while leases:
        offset, (owner, _) = leases.popitem()
        take(pool.release(owner, offset))
    assert not waiting_requests and not pool._owners
    assert pool.ask(9, 0, POOL_SIZE) == [GrantedLease(9, 0, 0)]  # the pool is one free range again


def test_many_leases_of_mixed_sizes_leave_no_fragments() -> None:
    """Each of many leases is granted, and the pool is one free range again."""
    rng = random.Random(17)
    pool = open_pool()
    sizes: dict[int, int] = {}
    leased_ranges: list[tuple[int, int]] = []
    granted_count = 0
    for ticket in range(100_000):
        sizes[ticket] = min(POOL_SIZE, int(2 ** rng.uniform(0, 12.1)))
        granted_leases = pool.ask(ticket, ticket, sizes[ticket])
        while granted_leases or len(pool._requests) > 8:
            leased_ranges += [(owner, offset) for owner, _, offset in granted_leases]
            granted_count += len(granted_leases)
            granted_leases = []
            if len(pool._requests) > 8:
                granted_leases = pool.release(*leased_ranges.pop(rng.randrange(len(leased_ranges))))
    while leased_ranges:
        granted_leases = pool.release(*leased_ranges.pop())
        granted_count += len(granted_leases)
        leased_ranges += [(owner, offset) for owner, _, offset in granted_leases]
    check_leases(pool)
    assert granted_count == 100_000 and not pool._owners
    assert pool.ask(1, 1, POOL_SIZE)


@pytest.mark.parametrize("byte_size", [8192, -64])
def test_a_lease_of_a_size_that_the_pool_cannot_have_is_refused(byte_size: int) -> None:
    pool = open_pool()
    text = rf"{byte_size} bytes was requested; allowed are 0 or more bytes, .* pool has 4096"
    with pytest.raises(InvalidArgument, match=text):
        pool.ask(1, 1, byte_size)
    assert pool.ask(1, 2, POOL_SIZE) == [GrantedLease(1, 2, 0)]


def test_a_lease_without_a_pool_is_refused() -> None:
    sent = SentMessages()
    Workspaces({}, sent).handle(1, LeaseWorkspace(7, "cpu", 64))
    ((_, refusal),) = sent.messages
    assert "without --workspace-byte-size=cpu=BYTES" in refusal.message


def test_only_the_owner_ends_a_lease() -> None:
    pool = open_pool()
    assert pool.ask(1, 7, POOL_SIZE) == [GrantedLease(1, 7, 0)]
    assert pool.ask(2, 8, 64) == [] and pool.release(2, 0) == []
    assert pool.release(1, 64) == [] and pool.end_leases(1) == [GrantedLease(2, 8, 0)]


def test_a_request_for_a_workspace_waits_for_its_allocation() -> None:
    """Leases end with lost memory; requests are granted in order after the allocation."""
    pool = WorkspacePool(POOL_SIZE)
    assert pool.ask(1, 7, POOL_SIZE) == []
    assert pool.open(device_memory(1)) == [GrantedLease(1, 7, 0)]
    assert pool.ask(2, 8, 64) == pool.ask(3, 9, 64) == []
    pool.close()
    assert not pool._owners and len(pool._requests) == 2
    assert pool.release(1, 0) == pool.end_leases(2) == []
    check_leases(pool)
    assert pool.open(device_memory(2)) == [GrantedLease(3, 9, 0)]
