"""A worker's lease of its device's workspace, with a fake CUDA driver."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from shmserve.errors import Internal
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.control_requests import LeaseWorkspace, ReturnWorkspace
from shmserve.ipc.tensors.descriptors import Memory
from shmserve.ipc.transport.router import Router
from shmserve.ipc.transport.zmtp import Dealer
from shmserve.supervisor.resources.workspaces import Workspaces
from shmserve.workers.links import SupervisorLink
from shmserve.workers.memory.device_memory import DeviceLost
from shmserve.workers.memory.workspace import Workspace
from tests.rigs.arrivals import receive_arrived
from tests.rigs.fake_cuda import Exported, FakeCuda

MB = 1 << 20
NAME = b"worker.1.0.1"


@dataclass
class OnDevice:
    """A worker on a device with a pool of 2 MB; messages have the driver calls before them."""

    cuda: FakeCuda
    exported: Exported
    workspace: Workspace
    mappings: Mappings
    received: list[tuple[LeaseWorkspace | ReturnWorkspace, int]] = field(default_factory=list)

    def returned(self) -> list[int]:
        return [sent.offset for sent, _ in self.received if isinstance(sent, ReturnWorkspace)]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[OnDevice]:
    cuda = FakeCuda()
    exported_memory = cuda.export(2 * MB)
    memory = exported_memory.memory()
    router = Router(f"ipc://{tmp_path}/control")
    control = SupervisorLink(Dealer(f"ipc://{tmp_path}/control", NAME.decode()))
    control.send(m.WorkerStarted(1))
    assert receive_arrived(router)
    device_memory = cuda.device_memory()
    mappings = Mappings(device_memory.open)
    workspace = Workspace(control, mappings, "cuda:0", device_memory.synchronize)
    on_device = OnDevice(cuda, exported_memory, workspace, mappings)
    stopped = threading.Event()
    thread = threading.Thread(target=supervise, args=(router, on_device, memory, stopped))
    thread.start()
    yield on_device
    stopped.set()
    thread.join()
    mappings.unmap_all()
    control.close(0)
    router.close()


def supervise(router: Router, device: OnDevice, memory: Memory, stopped: threading.Event) -> None:
    pools = Workspaces({"cuda:0": 2 * MB}, lambda pid, message: router.post(NAME, message))
    pools.on_allocated("cuda:0", memory)
    while not stopped.is_set():
        for _, message in receive_arrived(router, 0.02):
            device.received.append((message, len(device.cuda.calls)))
            pools.handle(1, message)
        router.flush()
    pools.close()


def wait_settled(worker: OnDevice, count: int, kind: type = ReturnWorkspace) -> None:
    """Wait until `count` leases were returned, or requested."""
    for _ in range(500):
        if sum(isinstance(message, kind) for message, _ in worker.received) == count:
            return
        threading.Event().wait(0.01)
    raise AssertionError(worker.received)


def test_a_lease_is_a_tensor_and_is_returned_after_the_devices_work(worker: OnDevice) -> None:
    with worker.workspace.lease(MB) as buffer:
        assert buffer.dtype == torch.uint8 and buffer.shape == (MB,)
        buffer.fill_(7)
        assert not worker.returned()
    wait_settled(worker, 1)
    assert (worker.exported.content[:MB] == 7).all() and not worker.exported.content[MB:].any()
    _, call_count = worker.received[-1]
    assert worker.cuda.calls[:call_count] == [("open", 0), ("synchronize", 0)]


def test_leases_of_other_threads(worker: OnDevice) -> None:
    """The memory is opened once for all threads of a streaming model."""

    def use(number: int) -> bool:
        with worker.workspace.lease(MB) as buffer:
            buffer.fill_(number)
            return bool((buffer == number).all())

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(use, range(1, 21)))
    wait_settled(worker, 20)
    assert worker.cuda.opened == 1


def test_a_failed_device_ends_the_worker(worker: OnDevice) -> None:
    with pytest.raises(DeviceLost), worker.workspace.lease(MB):
        worker.cuda.is_broken = True


def test_a_lease_larger_than_the_pool_and_a_second_lease(worker: OnDevice) -> None:
    with pytest.raises(Internal, match="pool has 2097152"), worker.workspace.lease(3 * MB):
        pass
    with (
        worker.workspace.lease(64),
        pytest.raises(Internal, match="has a workspace already"),
        worker.workspace.lease(64),
    ):
        pass
    wait_settled(worker, 1)


async def test_coroutines_wait_side_by_side(worker: OnDevice) -> None:
    """Each has a lease of the whole 2 MB; waiting ones do not block others."""
    order: list[int] = []

    async def use(number: int) -> bool:
        async with worker.workspace.lease(MB) as buffer:
            buffer.fill_(number)
            order.append(number)
            await asyncio.sleep(0.01)
            return bool((buffer == number).all())

    assert (await asyncio.gather(*map(use, range(8)))) == [True] * 8
    wait_settled(worker, 8)
    assert sorted(order) == list(range(8))


async def test_a_lease_of_another_execution_cannot_be_entered(worker: OnDevice) -> None:
    lease = worker.workspace.lease(MB)
    holds_block, may_leave = asyncio.Event(), asyncio.Event()

    async def hold_lease() -> None:
        async with lease:
            holds_block.set()
            await may_leave.wait()

    task = asyncio.ensure_future(hold_lease())
    await holds_block.wait()
    with pytest.raises(Internal, match="is used by another execution"):
        async with lease:
            pass
    may_leave.set()
    await task
    with worker.workspace.lease(2 * MB):  # both were returned
        pass


async def test_a_coroutine_cancelled_while_it_waits_leaks_nothing(worker: OnDevice) -> None:
    holds_block = asyncio.Event()
    may_leave = asyncio.Event()

    async def hold_lease() -> None:
        async with worker.workspace.lease(2 * MB):
            holds_block.set()
            await may_leave.wait()

    async def use() -> None:
        async with worker.workspace.lease(2 * MB):
            raise AssertionError

    holding_task = asyncio.ensure_future(hold_lease())
    await holds_block.wait()
    waiting_task = asyncio.ensure_future(use())
    # The supervisor has received the lease request.
    await asyncio.to_thread(wait_settled, worker, 2, LeaseWorkspace)
    waiting_task.cancel()
    await asyncio.wait([waiting_task])
    assert waiting_task.cancelled()
    may_leave.set()
    await holding_task
    await asyncio.to_thread(wait_settled, worker, 2)
    with worker.workspace.lease(2 * MB):
        pass


def test_a_loop_that_is_closed_while_a_coroutine_waits_leaks_nothing(worker: OnDevice) -> None:
    """A model may run a loop of its own with a time limit."""

    async def use() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), worker.workspace.lease(2 * MB):
                raise AssertionError

    with worker.workspace.lease(2 * MB), ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, use()).result()
        wait_settled(worker, 2, LeaseWorkspace)
    wait_settled(worker, 2)


async def test_a_coroutine_that_would_block_the_loop_raises(worker: OnDevice) -> None:
    async def lease_outside_context() -> None:
        from contextvars import Context

        with pytest.raises(Internal, match="use 'async with'"):
            Context().run(worker.workspace.lease(64).__enter__)
        with pytest.raises(Internal, match="has a workspace already"):
            async with worker.workspace.lease(64):
                pass

    async with worker.workspace.lease(64):
        await asyncio.ensure_future(lease_outside_context())
    wait_settled(worker, 1)
