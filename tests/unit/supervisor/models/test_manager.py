"""Loads, unloads and polls in every order, and the publications of models."""

import asyncio
import errno
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from shmserve.errors import Internal, InvalidArgument, ShmserveError
from shmserve.ipc.messages.publications import (
    ModelOnDemand,
    ModelPublication,
    ModelPublished,
    ModelWithdrawn,
    ReadinessChanged,
)
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models import instance as instance_module
from shmserve.supervisor.models.load_planner import StepModel, VersionSpec
from shmserve.supervisor.models.manager import (
    Audience,
    LifecycleExecutor,
    ModelManager,
    ModelPublisher,
    Publication,
)
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.models.repository import ModelFolder
from shmserve.supervisor.reload import RepositoryPoller
from tests.rigs.process_rig import Processes, plan, run_loop_turns
from tests.support.waiting import until_async


class Repository:
    """A planner of the model "m"; `changes` counts the changes of its files."""

    def __init__(self) -> None:
        self.changes = 0
        self.reading: Callable[[], None] = lambda: None
        self.present = True
        self.planned = self.discarded = 0

    def scan(self) -> dict[str, ModelFolder]:
        return {"m": ModelFolder("m", Path("/m"))} if self.present else {}

    def count_repositories(self, name: str) -> int:
        return int(name in self.scan())

    def fingerprint(self, name: str) -> str:
        return f"{self.changes}"

    def steps(self, name: str) -> list[StepModel]:
        return []

    def plan(self, name: str, override: str, files: dict[str, bytes]) -> list[VersionSpec]:
        self.reading()
        self.planned += 1
        return [plan()]

    def finalise_config(self, spec: VersionSpec, reported_properties: dict[str, Any]) -> ModelSpec:
        return spec.config

    def discard(self, discarded: VersionSpec) -> None:
        self.discarded += 1

    def has_environments(self) -> bool:
        return False


def models(processes: Processes, repository: Repository) -> ModelManager:
    return server(processes, repository)[0]


def server(processes: Processes, repository: Repository) -> tuple[ModelManager, RepositoryPoller]:
    planner: Any = repository
    registry = ModelRegistry()
    parts = (processes.context, planner, registry, ModelPublisher())
    manager = ModelManager(LifecycleExecutor(*parts, []))
    return manager, RepositoryPoller(processes.context, planner, registry, manager)


@pytest.mark.parametrize("load_stage", ["reading", "waiting"])
async def test_an_unload_waits_for_the_load_that_runs(load_stage: str) -> None:
    """While the configuration is read, or a second load waits, which is cancelled."""
    processes, repository = Processes(), Repository()
    processes.loads_hang = True
    manager = models(processes, repository)
    loop, unloads = asyncio.get_running_loop(), []

    def unload() -> None:
        unloads.append(asyncio.ensure_future(manager.unload("m")))

    def unload_once() -> None:
        repository.reading = lambda: None
        loop.call_soon_threadsafe(unload)

    loads = [asyncio.ensure_future(manager.load("m"))]
    if load_stage == "reading":
        repository.reading = unload_once
    await until_async(lambda: processes._hanging_loads)
    if load_stage == "waiting":
        loads.append(asyncio.ensure_future(manager.load("m")))
        await run_loop_turns()
        unload()
    await run_loop_turns()
    assert not (loads[0].done() or unloads[0].done())
    processes.finish_hanging_loads()
    async with asyncio.timeout(10):
        outcomes = await asyncio.gather(*loads, *unloads, return_exceptions=True)
    await until_async(lambda: repository.discarded == repository.planned == 1)
    assert not any(child.alive for child in processes.children)
    await manager.load("m")
    assert [row["state"] for row in await manager.index(ready_only=False)] == ["READY"]
    await manager.stop()
    await processes.end()
    given_up = "failed to load 'm', no version is available"
    expected = [None, *([given_up] if load_stage == "waiting" else []), None]
    assert [getattr(result, "message", None) for result in outcomes] == expected


@pytest.mark.parametrize("is_reported", [True, False])
async def test_hanging_loads_are_left(monkeypatch: pytest.MonkeyPatch, is_reported: bool) -> None:
    """The unload arrives before the hang is reported, or after it."""
    monkeypatch.setattr(instance_module, "FIRST_REPORT_S", 0.05)
    processes = Processes()
    processes.loads_hang = True
    manager = models(processes, Repository())
    load = asyncio.ensure_future(manager.load("m"))
    await until_async(lambda: processes._hanging_loads)
    if is_reported:
        await asyncio.sleep(0.1)
        assert not load.done()
    await asyncio.wait_for(manager.unload("m"), 10)
    with pytest.raises(InvalidArgument, match="failed to load 'm', no version is available"):
        await load
    assert not any(child.alive for child in processes.children)
    await processes.end()


class HangingRepository(Repository):
    """A repository whose scans hang until `released` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.scan_count = 0
        self.released = threading.Event()

    def scan(self) -> dict[str, ModelFolder]:
        self.scan_count += 1
        self.released.wait(60)
        return super().scan()

    def aliases(self, name: str) -> list[str]:
        return [f"alias of {name}"]


async def test_a_scan_that_hangs_blocks_one_thread_and_no_request_by_an_alias() -> None:
    processes, repository = Processes(), HangingRepository()
    manager = models(processes, repository)
    manager.offer_on_demand("m")
    listings = [asyncio.ensure_future(manager.index(ready_only=False)) for _ in range(3)]
    try:
        await until_async(lambda: repository.scan_count)
        async with asyncio.timeout(10):
            assert await manager.list_generative_aliases() == {"m": ["alias of m"]}
        assert repository.scan_count == 1
    finally:
        repository.released.set()
    assert [len(rows) for rows in await asyncio.gather(*listings)] == [1, 1, 1]
    await processes.end()


async def test_a_file_that_changes_while_its_model_is_read() -> None:
    """The planner may have read the old file, so it reads it again."""
    processes, repository = Processes(), Repository()
    manager, poller = server(processes, repository)
    readings = []

    def read() -> None:
        readings.append(repository.changes)
        if len(readings) == 1:
            repository.changes += 1

    repository.reading = read
    for _ in range(3):
        await poller.update("m", is_present=True)
    await manager.stop()
    await processes.end()
    assert len(readings) == 2


async def test_a_model_that_hangs_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load is abandoned, and repeated when the files return."""
    monkeypatch.setattr(instance_module, "FIRST_REPORT_S", 0.01)
    processes, repository = Processes(), Repository()
    manager, poller = server(processes, repository)
    object.__setattr__(processes.context.config, "repository_poll_s", 0.001)

    async def await_states(*states: str) -> None:
        async with asyncio.timeout(10):
            while [row.get("state") for row in await manager.index(False)] != [*states]:
                pass

    processes.loads_hang = True
    polling = asyncio.ensure_future(poller.run())
    await until_async(lambda: len(processes.children) == 2)
    repository.present = False
    await until_async(lambda: not any(child.alive for child in processes.children))
    await await_states()
    processes.loads_hang = False
    repository.present = True
    await await_states("READY")
    polling.cancel()
    await manager.stop()
    await processes.end()
    assert not any(child.alive for child in processes.children)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (PermissionError(errno.EACCES, "Denied", "/r/m/1/x.pbtxt"), "'1/x.pbtxt': Denied"),
        (
            OSError(errno.ENOSPC, "Disk full"),
            "the model's files do not fit into --run-dir: Disk full",
        ),
        (KeyError("a fault of the planner"), "internal error; the server's log has the cause"),
    ],
)
async def test_a_model_that_cannot_be_read_fails_its_load(
    monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    processes, repository = Processes(), Repository()
    monkeypatch.setattr(repository, "plan", MagicMock(side_effect=error))
    with pytest.raises(ShmserveError, match=text):
        await asyncio.wait_for(models(processes, repository).load("m"), 5)
    await processes.end()


async def test_stopping_waits_for_no_load() -> None:
    """A hanging model ignores the stop and is killed."""
    processes = Processes()
    processes.loads_hang = True
    manager = models(processes, Repository())
    load_task = asyncio.ensure_future(manager.load("m"))
    await until_async(lambda: processes._hanging_loads)
    load_task.cancel()
    await asyncio.wait({load_task})
    await manager.stop()
    await processes.end()
    assert [await child.exit_future for child in processes.children] == ["signal 9", "signal 15"]


PUBLISHED = ModelPublished("m", "1", ModelSpec.of({}), {}, "a", True, True, 0.0, 0)
SECOND_VERSION = replace(PUBLISHED, version="2", endpoint="b")
WITHDRAWN = ModelWithdrawn("m", "1", 0)


class Gateway(Audience):
    """A gateway that stores publications and acknowledges those up to `acknowledged`."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.number = self.acknowledged = 0

    def announce(self, publication: Publication) -> int:
        self.number += 1
        self.sent.append(publication)
        return self.number

    def is_acknowledged(self, number: int) -> bool:
        return number <= self.acknowledged

    def publish_readiness(self, publication: ReadinessChanged) -> None:
        self.sent.append(publication)


def test_only_changed_publications_are_sent() -> None:
    gateway, publisher = Gateway(), ModelPublisher()

    def changes(published: list[ModelPublished], unpublished: set[str]) -> list[Any]:
        gateway.sent.clear()
        publisher.update(
            gateway,
            "m",
            {publication.version: publication for publication in published},
            unpublished,
        )
        return gateway.sent[:]

    assert changes([], {"1"}) == [WITHDRAWN]
    assert changes([], {"1"}) == []
    assert changes([PUBLISHED], set()) == [PUBLISHED]
    assert changes([PUBLISHED], set()) == []
    assert changes([replace(PUBLISHED, ready=False)], set()) == [ReadinessChanged("m", "1", False)]
    assert changes([PUBLISHED], set()) == [ReadinessChanged("m", "1", True)]
    old_publication = replace(PUBLISHED, latest=False)
    assert changes([SECOND_VERSION, old_publication], set()) == [SECOND_VERSION, old_publication]
    assert changes([SECOND_VERSION], set()) == [WITHDRAWN]
    assert list(publisher.snapshot()) == [WITHDRAWN, SECOND_VERSION]


def test_a_model_on_demand_is_published_until_it_is_removed() -> None:
    """Holds for all states of its versions."""
    gateway, publisher = Gateway(), ModelPublisher()
    asleep = ModelOnDemand("m", 0)
    sent_publications: list[dict[str, ModelPublication]] = [
        {"": asleep},
        {"": asleep, "1": PUBLISHED},
        {"": asleep},
        {},
    ]
    for published in sent_publications:
        publisher.update(gateway, "m", published, set())
    assert gateway.sent == [asleep, PUBLISHED, WITHDRAWN, ModelWithdrawn("m", "", 0)]


def test_a_model_is_acknowledged_with_its_last_publication() -> None:
    """Readiness is not waited for."""
    gateway, publisher = Gateway(), ModelPublisher()
    publisher.update(gateway, "m", {"1": PUBLISHED, "2": SECOND_VERSION}, set())
    gateway.acknowledged = 1
    assert not publisher.are_acknowledged(gateway, "m")
    gateway.acknowledged = 2
    unready_version = replace(SECOND_VERSION, ready=False)
    publisher.update(gateway, "m", {"1": PUBLISHED, "2": unready_version}, set())
    assert publisher.are_acknowledged(gateway, "m")
    publisher.update(gateway, "m", {"2": SECOND_VERSION}, set())
    assert not publisher.are_acknowledged(gateway, "m")
    assert publisher.are_acknowledged(gateway, "other")


async def test_a_load_fails_if_no_thread_can_read_its_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes = Processes()
    manager = models(processes, Repository())
    thread = MagicMock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(asyncio, "to_thread", thread)
    async with asyncio.timeout(10):
        with pytest.raises(Internal):
            await manager.load("m")
    await processes.end()


async def test_a_stop_does_not_wait_for_versions_that_need_one_another() -> None:
    """The version of "a" that uses "b" has drained since "b" was reloaded, which uses "a"."""

    class Version:
        has_loaded = True

        def __init__(self, name: str, step: str) -> None:
            self.spec, self._step = MagicMock(), step
            self.spec.name = name

        def uses(self, name: str) -> bool:
            return name == self._step

        async def stop(self) -> None:
            stopped.append(self.spec.name)

    registry, stopped = ModelRegistry(), list[str]()
    versions: Any = [Version("a", "b"), Version("b", "a"), Version("c", "b")]
    for version in versions:
        model = registry.model(version.spec.name)
        model.retiring, model.has_steps = [version], True
    await asyncio.wait_for(ModelManager(MagicMock(registry=registry)).stop(), 10)
    assert sorted(stopped) == ["a", "b", "c"] and stopped.index("c") < stopped.index("b")


async def test_an_unload_does_not_wait_for_an_ensemble_whose_step_hangs_in_its_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instance_module, "FIRST_REPORT_S", 0.05)
    processes, repository = Processes(), Repository()
    manager = models(processes, repository)
    await manager.load("m")
    processes.loads_hang = True
    (step,) = manager._registry.live_versions
    step.instances.children()[0].kill()
    await until_async(lambda: processes._hanging_loads)
    scheduling = {"step": [{"model_name": "m"}]}
    config = ModelSpec.of({"name": "e", "ensemble_scheduling": scheduling})
    spec = replace(plan(), name="e", config=config)
    monkeypatch.setattr(repository, "plan", lambda *_: [spec])
    load = asyncio.ensure_future(manager.load("e"))
    await until_async(lambda: len(manager._registry.live_versions) == 2)
    await asyncio.wait_for(manager.unload("e"), 10)
    with pytest.raises(InvalidArgument, match="no version is available"):
        await load
    await manager.kill()
    await processes.end()
