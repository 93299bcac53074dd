"""The processes of a model version in every order of events, and the steps of an ensemble."""

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.publications import ProcessExited, SchedulerLost
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models import instances
from shmserve.supervisor.models.instance import InstanceState
from shmserve.supervisor.models.load_planner import VersionSpec
from shmserve.supervisor.models.model_version import EnsembleInstances, ModelVersion
from shmserve.supervisor.models.scheduler_process import Lifetime
from shmserve.supervisor.processes.children import Child
from tests.rigs.process_rig import FakeChild, Processes, plan, run_loop_turns


async def start_version() -> tuple[Processes, ModelVersion]:
    processes = Processes()
    model = processes.version(plan())
    await model.start()
    return processes, model


async def test_a_worker_that_dies_as_soon_as_it_has_started() -> None:
    """Its first message and its exit are handled in one turn; a new worker starts."""
    processes, model = await start_version()

    def kill_once(child: FakeChild) -> None:
        processes.on_start = lambda child: None
        child.kill()

    processes.on_start = kill_once
    processes.children[0].kill()
    await run_loop_turns(1)
    assert not model.ready
    await asyncio.wait_for(model.until_ready(), 10)
    assert len(processes.children) == 4  # a worker, the scheduler, and two more workers
    states = model.instances.states()
    await processes.end()
    assert states == [InstanceState.READY]


async def test_a_worker_has_the_settings_of_its_backend_and_of_all_backends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ("python,a=1", "b=2", "pytorch,c=3")
    processes = Processes(*(f"--backend-config={flag}" for flag in flags))
    records: list[bytes] = []
    spawn = processes.spawn

    async def record(title: str, entry: str, start: bytes) -> Child:
        records.append(start)
        return await spawn(title, entry, start)

    monkeypatch.setattr(processes, "spawn", record)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(7))
    await processes.version(plan()).start()
    start = m.decode_start(m.WorkerStart, records[0])
    await processes.end()
    assert (start.backend_config, start.threads) == ({"a": "1", "b": "2"}, 7)


async def test_only_the_process_schedulers_name_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The named process may have exited already, and a successor may have been started."""
    killed_children: list[FakeChild] = []
    processes, model = await start_version()
    first_process = processes.children[0]
    first_process.kill()
    await run_loop_turns(1)
    await asyncio.wait_for(model.until_ready(), 10)
    second_process = processes.children[-1]
    monkeypatch.setattr(FakeChild, "kill", lambda child, *number: killed_children.append(child))
    for child in (first_process, second_process):
        model._on_message(m.KillInstance(child.pid, "it takes too long"))
    await run_loop_turns()
    await processes.end()
    assert killed_children == [second_process]


async def test_a_scheduler_is_notified_of_an_instance_with_its_process_or_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An instance that will not be restarted is reported as gone, too."""
    monkeypatch.setattr(instances, "_MAX_FAILED_LOADS", 1)
    processes = Processes()
    model = processes.version(plan())
    records: list[Any] = []
    monkeypatch.setattr(model.scheduler, "send", records.append)
    await model.start()
    first = processes.children[0]
    first.kill()
    await run_loop_turns(1)
    await asyncio.wait_for(model.until_ready(), 10)
    second = processes.children[-1]
    assert records == [m.InstanceExpected(0, first.pid)] * 2 + [m.InstanceExpected(0, second.pid)]
    records.clear()
    processes.on_start = lambda child: child.kill(signal.SIGABRT)
    second.kill()
    await run_loop_turns()
    text = "model 'm' failed: its instances are not restarted"
    assert records == [m.InstanceGone(0, text)] and model.instances.failure
    records.clear()
    model.instances.notify_new_scheduler([second.pid])
    assert records == [ProcessExited(second.pid, ""), m.InstanceGone(0, text)]
    await processes.end()


@pytest.mark.parametrize("serves", [False, True])
async def test_a_crash_loop_ends_an_instance(monkeypatch: pytest.MonkeyPatch, serves: bool) -> None:
    """An instance that has executed a request in between restarts after a longer backoff."""
    max_crashes = instances._MAX_CRASHES
    monkeypatch.setattr("shmserve.supervisor.processes.children._PAUSES_S", (0.0,))

    text = "its process ended 10 times in a row (signal 6), and it executed no request in between"
    processes, model = await start_version()
    for death in range(max_crashes):
        await asyncio.wait_for(model.until_ready(), 10)
        worker = processes.children[-1] if death else processes.children[0]
        if serves and death == max_crashes // 2:
            model._on_message(m.InstanceServed(worker.pid))
        worker.kill(signal.SIGABRT)
        await run_loop_turns(1)
    await run_loop_turns()
    await processes.end()
    assert (len(processes.children) - 1, model.problem) == (
        (max_crashes + 1, "") if serves else (max_crashes, text)
    )


@pytest.mark.parametrize("at_load", [False, True])
async def test_killed_workers_are_restarted(monkeypatch: pytest.MonkeyPatch, at_load: bool) -> None:
    """The pauses grow until a long run; a crash of the worker is no kill."""
    max_crashes, pauses = instances._MAX_CRASHES, list[float]()
    monkeypatch.setattr("shmserve.supervisor.processes.children._PAUSES_S", (0.0,))
    processes, model = await start_version()
    paused = instances.Instances._pause_s

    def note_pause(*row: Any) -> float:
        pauses.append(paused(*row))
        return 0.0

    monkeypatch.setattr(instances.Instances, "_pause_s", staticmethod(note_pause))
    processes.children[0].kill(signal.SIGABRT)
    await run_loop_turns(1)
    async with asyncio.timeout(10):
        if at_load:
            processes.on_start = lambda child: child.kill()
        while len(pauses) <= 2 * max_crashes:
            if not at_load:
                await model.until_ready()
                processes.children[-1].kill()
            await run_loop_turns(1)
    await processes.end()
    assert model.problem == ""
    assert pauses[: max_crashes - 1] == [0.0] * (max_crashes - 1)
    assert pauses[max_crashes - 1 : 2 * max_crashes] == [1, 2, 4, 8, 16, *[30.0] * 6]


@pytest.mark.parametrize("serves", [False, True])
async def test_a_scheduler_that_executed_a_request_restarts_without_backoff(
    monkeypatch: pytest.MonkeyPatch, serves: bool
) -> None:
    """A scheduler that only crashes has a growing backoff."""
    monkeypatch.setattr("shmserve.supervisor.processes.children._PAUSES_S", (0.0,) * 5 + (60.0,))
    processes, model = await start_version()
    for _ in range(8):
        if serves:
            model._on_message(m.InstanceServed(processes.children[0].pid))
        model.scheduler.current.child.kill()
        await run_loop_turns(40)
    is_ready = model.ready
    await processes.end()
    assert is_ready is serves


async def test_a_crash_after_a_long_life_is_no_crash_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rare exits of a model without requests are no crash loop, either."""
    monkeypatch.setattr("shmserve.supervisor.processes.children._HEALTHY_S", -1.0)
    processes, model = await start_version()
    for death in range(instances._MAX_CRASHES + 1):
        await asyncio.wait_for(model.until_ready(), 10)
        (processes.children[-1] if death else processes.children[0]).kill()
        await run_loop_turns(1)
    await run_loop_turns()
    await processes.end()
    assert model.problem == ""


async def test_a_new_scheduler_knows_its_instances_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Local clients' own sockets are not delayed to a turn of the loop."""
    processes, model = await start_version()
    order: list[Any] = []
    monkeypatch.setattr(model.scheduler, "send", order.append)
    monkeypatch.setattr(processes, "flush", lambda: order.append("flushed"))
    monkeypatch.setattr(processes.context.local_clients, "broadcast", order.append)
    lost_endpoint = model.endpoint
    model.scheduler.current.child.kill()
    await run_loop_turns(40)
    await processes.end()
    expected = m.InstanceExpected(0, processes.children[0].pid)
    assert order == [expected, "flushed", SchedulerLost(lost_endpoint, model.endpoint)]


async def test_a_cancelled_wait_for_an_end_does_not_affect_other_waits() -> None:
    """The other waiters receive the result all the same."""
    processes, model = await start_version()
    worker = processes.children[0]
    waiting_ends: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(worker.end(0)) for _ in range(2)
    ]
    worker.kill = lambda signal_number=9: None  # type: ignore[method-assign]
    waiting_ends += [asyncio.ensure_future(model.kill())]
    await asyncio.sleep(0.001)
    for waiter in waiting_ends:
        waiter.cancel()
    await asyncio.wait(waiting_ends)
    worker.exit_future.set_result("signal 9")
    await processes.end()
    assert (await worker.exit_future) == "signal 9"


async def test_a_worker_that_does_not_stop_is_killed_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    processes, model = await start_version()
    monkeypatch.setattr(type(processes.children[0]), "end", AsyncMock(return_value=False))
    await model.stop()
    await processes.end()
    assert "instance 'm_0_0' is killed: its `unload`" in caplog.text
    assert "exceeds 30 s" in caplog.text, "as long as the whole server has for its end"


async def test_an_unload_does_not_wait_for_an_instance_that_hangs_in_its_restart() -> None:
    processes, model = await start_version()
    processes.loads_hang = True
    processes.children[0].kill()
    await run_loop_turns()
    await model.stop()
    await processes.end()
    assert processes.children[-1].reason == "signal 9", "it has nothing to finalize"


async def test_a_cancelled_load_leaves_no_processes() -> None:
    processes = Processes()
    processes.loads_hang = True
    starting_task = asyncio.ensure_future(processes.version(plan()).start())
    await run_loop_turns()
    assert len(processes.children) == 2  # a worker, and the scheduler
    starting_task.cancel()
    await asyncio.wait({starting_task})
    await processes.end()
    await asyncio.sleep(0)
    assert {task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}} == set()


CONFIG: dict[str, Any] = {
    "name": "e",
    "output": [{"name": "Z"}, {"name": "W"}],
    "ensemble_scheduling": {"step": [{"model_name": "a", "output_map": {"Y": "middle"}},
        {"model_name": "b", "output_map": {"Y": "Z", "V": "W"}}]},
}  # fmt: skip


def ensemble_steps(*ready: str, labels: dict[str, list[str]] | None = None) -> EnsembleInstances:
    """Return an ensemble over "a" and "b" with labelled outputs Y; some models are ready."""

    def find(name: str, version: str) -> Any:
        instances = SimpleNamespace(labels={"Y": [name]})
        return SimpleNamespace(instances=instances, problem="", ready=name in ready)

    folder, unused = Path("/tmp"), MagicMock()
    spec = VersionSpec("e", "1", folder, ModelSpec.of(CONFIG), labels or {})
    parts = (unused, spec, unused, Lifetime(), unused, lambda spec, completed: spec.config)
    return EnsembleInstances(*parts, find=find)


@pytest.mark.parametrize(("own_labels", "label"), [({}, "b"), ({"Z": ["own"]}, "own")])
def test_outputs_have_the_labels_of_a_model(own_labels: dict[str, list[str]], label: str) -> None:
    steps = ensemble_steps("a", "b", labels=own_labels)
    asyncio.run(steps.complete_config())
    assert steps.labels == {"Z": [label]}


def test_an_ensemble_is_ready_while_all_its_models_are() -> None:
    assert ensemble_steps("a", "b").can_serve
    assert not ensemble_steps("a").can_serve
