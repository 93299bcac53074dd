"""Workspace pools on CUDA devices: the memory is a process's, and comes and goes with it."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc import endpoints
from shmserve.ipc.messages import control_requests as m
from shmserve.ipc.messages.control_requests import LeaseWorkspace, ReturnWorkspace
from shmserve.ipc.messages.supervision import Stop, WorkspaceAllocated, WorkspaceStart, decode_start
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory, unpack_place
from shmserve.ipc.transport.router import Router
from shmserve.supervisor.kept import WorkspaceHolders
from shmserve.supervisor.resources.workspaces import Workspaces, hold
from tests.rigs.arrivals import arrived
from tests.rigs.fake_cuda import FakeCuda
from tests.rigs.process_rig import Made, Processes, turns

MB = 1 << 20
DEVICE = "cuda:1"


def memory_of(number: int) -> Memory:
    """What the holder with this number as its pid has."""
    handle = CudaHandle(number.to_bytes(64, "big"), 1, bytes(16))
    return Memory.on_device(number, 2 * MB, handle, number)


class Told:
    """What processes were told."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, Any]] = []

    def __call__(self, pid: int, message: Any) -> None:
        self.messages.append((pid, message))

    def granted(self) -> list[tuple[int, int, int, int]]:
        """The leases since the last time: pid, number, the holder's and the offset."""
        found = []
        for pid, message in self.messages:
            assert isinstance(message, m.Answered)
            place = unpack_place(list(message.payload["place"]))
            assert place.memory == memory_of(place.memory.id)
            found.append((pid, message.id, place.memory.id, place.offset))
        self.messages.clear()
        return found


def ask(number: int, byte_size: int) -> LeaseWorkspace:
    return LeaseWorkspace(number, DEVICE, byte_size)


def test_who_asks_waits_for_the_holder() -> None:
    told = Told()
    workspaces = Workspaces({DEVICE: 2 * MB}, told)
    workspaces.handle(10, ask(1, MB))
    assert told.granted() == []
    workspaces.allocated(DEVICE, memory_of(77))
    workspaces.handle(11, ask(1, MB))
    workspaces.handle(12, ask(1, MB))
    assert told.granted() == [(10, 1, 77, 0), (11, 1, 77, MB)]
    workspaces.handle(10, ReturnWorkspace(DEVICE, 77, 0))
    assert told.granted() == [(12, 1, 77, 0)]
    workspaces.close()  # of which no descriptor is ours


def test_leases_of_memory_that_is_gone_come_back_to_nobody() -> None:
    told = Told()
    workspaces = Workspaces({DEVICE: 2 * MB}, told)
    workspaces.allocated(DEVICE, memory_of(77))
    workspaces.handle(10, ask(1, 2 * MB))
    workspaces.handle(11, ask(1, 2 * MB))
    assert told.granted() == [(10, 1, 77, 0)]
    workspaces.lost(DEVICE)
    workspaces.handle(12, ask(5, MB))
    assert told.granted() == []
    workspaces.allocated(DEVICE, memory_of(78))
    assert told.granted() == [(11, 1, 78, 0)]
    workspaces.handle(11, ReturnWorkspace(DEVICE, 77, 0))  # not of this memory
    assert told.granted() == []
    workspaces.process_exited(11)
    assert told.granted() == [(12, 5, 78, 0)]


def live(test: Callable[[Processes, WorkspaceHolders], Any], *flags: str) -> Any:
    """Run a test in an event loop, on processes that it makes up."""

    async def run() -> Any:
        processes = Processes(*flags)
        holders = WorkspaceHolders(processes.context)
        try:
            return await test(processes, holders)
        finally:
            await processes.end()

    return asyncio.run(run())


def test_a_holder_that_dies_is_started_again() -> None:
    def allocates(processes: Processes, child: Made) -> None:
        processes._dispatch(child.pid, WorkspaceAllocated(bytes(64), bytes(16)))

    async def test(processes: Processes, holders: WorkspaceHolders) -> None:
        told = Told()
        processes.context.workspaces._send = told
        processes.at_start = lambda child: allocates(processes, child)
        await holders.start()
        assert [child.title for child in processes.started] == ["workspace cuda:1"]
        processes.started[0].kill()
        await turns(1)
        processes.context.workspaces.handle(10, ask(1, MB))
        assert told.messages == []
        await turns()
        first, second = processes.started
        ((_, message),) = told.messages
        place = unpack_place(list(message.payload["place"]))
        assert place.memory.pid == second.pid != first.pid
        assert place.memory.cuda == CudaHandle(bytes(64), 1, bytes(16))
        holders.retire()
        second.kill()
        await turns()
        assert len(processes.started) == 2

    live(test, f"--workspace-byte-size={DEVICE}={4 * MB}")


def test_a_device_that_has_not_so_much_ends_the_start() -> None:
    async def test(processes: Processes, holders: WorkspaceHolders) -> None:
        processes.at_start = lambda child: child.kill()
        with pytest.raises(Unavailable, match="workspace cuda:1 ended at its start"):
            await holders.start()

    live(test, f"--workspace-byte-size={DEVICE}={4 * MB}")


def test_host_memory_has_no_holder() -> None:
    async def test(processes: Processes, holders: WorkspaceHolders) -> None:
        await holders.start()
        assert processes.started == []
        processes.context.workspaces.close()

    live(test, f"--workspace-byte-size=cpu={4 * MB}")


def test_a_holder_allocates_says_where_and_ends_when_told(tmp_path: Path) -> None:
    cuda = FakeCuda()
    exporting = cuda.exporting()
    start = WorkspaceStart(1, 5 * MB, tmp_path)
    router = Router(endpoints.control(tmp_path))
    try:
        thread = threading.Thread(target=hold, args=(start, exporting))
        thread.start()
        ((peer, message),) = arrived(router)
        assert peer == f"workspace.{os.getpid()}".encode()
        pointer = cuda.open(message.handle, 1)
        assert message.device_uuid == cuda.uuid(1)
        assert cuda.extent(pointer, 1)[1] >= 5 * MB
        cuda.close(pointer, 1)
        router.post(peer, Stop())
        router.flush()
        thread.join(10)
        assert not thread.is_alive() and not exporting.allocated
    finally:
        router.close()


def test_a_holder_without_memory_says_so(tmp_path: Path) -> None:
    exporting = FakeCuda().exporting()
    exporting.most = MB
    with pytest.raises(Unavailable, match=r"5242880 bytes .* cannot be had on 'cuda:1'"):
        hold(WorkspaceStart(1, 5 * MB, tmp_path), exporting)
    with pytest.raises(InvalidArgument, match="sees no device 'cuda:7'"):
        hold(WorkspaceStart(7, 5 * MB, tmp_path), exporting)


def test_a_start_record_comes_through(tmp_path: Path) -> None:
    from shmserve.ipc.messages.supervision import encode_start

    start = WorkspaceStart(1, 5 * MB, tmp_path)
    assert decode_start(WorkspaceStart, encode_start(start)) == start
