"""The order of messages of a load, of exits and of a move."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from shmserve.ipc.messages import supervision as m
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.scheduler_process import Group
from shmserve.supervisor.processes.control_socket import Address, SchedulerAddress
from tests.rigs.process_rig import SINGLE_MODEL_GROUP, Processes, plan, run_loop_turns

ENSEMBLE = Group("ensemble e", frozenset({"e", "m"}))


class TracedProcesses(Processes):
    """Processes that record messages: "Drain to s2" goes to scheduler 2, "from worker" back."""

    def __init__(self) -> None:
        super().__init__()
        self.message_log: list[str] = []

    def _describe_address(self, address: Address) -> str:
        if isinstance(address, SchedulerAddress):
            return f"s{address.number}"
        titles = {child.pid: child.title.split()[0] for child in self.children}
        return "host" if titles[address] == "scheduler" else titles[address]

    def send(self, address: Address, message: Any) -> None:
        """Record a message unless it is about log settings."""
        if type(message).__name__ != "SetLogging":
            self.message_log.append(
                f"{type(message).__name__} to {self._describe_address(address)}"
            )
        super().send(address, message)

    def _dispatch(self, address: Address, message: Any) -> None:
        self.message_log.append(f"{type(message).__name__} from {self._describe_address(address)}")
        super()._dispatch(address, message)

    def broadcast(self, message: Any, *roles: str) -> None:
        if roles:
            self.message_log.append(f"{type(message).__name__} to all")


async def load(processes: TracedProcesses, model: ModelVersion) -> None:
    await model.start()


async def end(processes: TracedProcesses, model: ModelVersion) -> None:
    await model.stop()


async def kill_worker(processes: TracedProcesses, model: ModelVersion) -> None:
    processes.children[0].kill()
    await run_loop_turns()


async def kill_scheduler(processes: TracedProcesses, model: ModelVersion) -> None:
    processes.children[1].kill()
    await run_loop_turns(40)


async def move(processes: TracedProcesses, model: ModelVersion) -> None:
    async def publish() -> None:
        processes.message_log.append("published")

    await processes.version(plan("2"), ENSEMBLE).start()
    processes.message_log.clear()
    await model.regroup(ENSEMBLE, publish)


SCENARIOS: list[
    tuple[Callable[[TracedProcesses, ModelVersion], Coroutine[Any, Any, None]], list[str]]
] = [
    (load, ["WorkerStarted from worker", "CompleteConfig to worker", "ConfigCompleted from worker",
     "Started from host", "OpenScheduler to host", "SchedulerReady from s1",
     "InstanceExpected to s1", "InstanceExpected to s1", "LoadInstance to worker",
     "InstanceLoaded from worker"]),
    (kill_worker, ["WorkerStarted from worker", "InstanceExpected to s1", "LoadInstance to worker",
     "InstanceLoaded from worker"]),
    (kill_scheduler, ["Started from host", "OpenScheduler to host", "SchedulerReady from s2",
     "InstanceExpected to s2", "Attach to worker", "SchedulerLost to all"]),
    (move, ["OpenScheduler to ensemble", "SchedulerReady from s3", "published", "Drain to s1",
     "Drained from s1", "InstanceExpected to s3", "SchedulerLost to all", "published",
     "Drain to s1", "Drained from s1", "Attach to worker", "Stop to s1",
     "SchedulerClosed from host", "Stop to host"]),
    (end, ["Drain to s1", "Drained from s1", "Stop to worker", "Stop to s1",
     "SchedulerClosed from host", "Stop to host"]),
]  # fmt: skip


@pytest.mark.parametrize(("scenario", "message_log"), SCENARIOS)
async def test_the_order_of_messages(
    scenario: Callable[[TracedProcesses, ModelVersion], Coroutine[Any, Any, None]],
    message_log: list[str],
) -> None:
    processes = TracedProcesses()
    model = processes.version(plan(), SINGLE_MODEL_GROUP)
    if scenario is not load:
        await model.start()
        await run_loop_turns()
        processes.message_log.clear()
    await scenario(processes, model)
    sent_messages = list(processes.message_log)
    await processes.end()
    assert sent_messages == message_log


async def start_move(processes: TracedProcesses) -> asyncio.Task[None]:
    """Start to move a model whose second instance loads, and whose scheduler has requests."""
    model = processes.version(plan(instances=2), SINGLE_MODEL_GROUP)
    await model.start()
    await processes.version(plan("2"), ENSEMBLE).start()
    processes.loads_hang, processes.drains_finish = True, False
    next(child for child in processes.children if child.title.startswith("worker m.1")).kill()
    await run_loop_turns()
    assert processes.message_log[-1] == "LoadInstance to worker"

    async def publish() -> None:
        processes.message_log.append("published")

    processes.message_log.clear()
    moving = asyncio.create_task(model.regroup(ENSEMBLE, publish))
    await run_loop_turns()
    assert processes.message_log[-1] == "Drain to s1"
    processes.message_log.clear()
    return moving


async def test_a_move_ends_when_all_instances_with_requests_have_exited() -> None:
    """An instance that loads does not execute the requests of the scheduler that drains."""
    processes = TracedProcesses()
    moving = await start_move(processes)
    processes.children[0].kill()
    async with asyncio.timeout(10):
        await moving
    assert "SchedulerLost to all" in processes.message_log
    await processes.end()


async def test_an_instance_that_loads_during_a_move_attaches_with_the_others() -> None:
    """The instance may execute requests of the scheduler that drains."""
    processes = TracedProcesses()
    moving = await start_move(processes)
    processes.finish_hanging_loads()
    await run_loop_turns()
    assert processes.message_log == ["InstanceLoaded from worker"]
    for _ in range(2):
        processes._dispatch(SchedulerAddress(processes.children[1].pid, 1), m.Drained())
        await run_loop_turns()
    await moving
    assert processes.message_log.count("Attach to worker") == 2
    await processes.end()
