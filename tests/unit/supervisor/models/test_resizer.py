"""Instances come and go while a version serves, as its load asks, and every change is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.publications import InstancesChanged
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models import resizer
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.orders import Order, OrderKind
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.models.resizer import Resizer
from shmserve.supervisor.models.room import Room
from shmserve.supervisor.models.sizing import Change, Sizing
from tests.rigs.process_rig import CONFIG, Made, Processes, plan, turns

STATISTICS: dict[str, Any] = {
    "success": 1,
    "cache_hit": 0,
    "failures": {"BACKEND": 0},
    "queue_ns": 0,
    "pending": 0,
    "compute_seconds": {"count": 1, "sum": 0.1},
    "executing": 0,
    "base": {},
    "instances": {"idle": 1, "busy": 0},
}


class Rig:
    """A version from one to three instances, which is to have `wanted`."""

    def __init__(self, processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
        parameters = {"max_instances": {"string_value": "3"}}
        config = ModelSpec.of(CONFIG | {"parameters": parameters})
        spec = replace(plan(), config=config)
        registry = ModelRegistry()
        self.wanted = 1
        self.told: list[Any] = []
        self.events: list[Any] = []
        self.processes = processes
        self.model = registry.model("m")
        self.version = processes.version(spec)
        self.model.serving["1"] = self.version
        self.resizer = Resizer(processes.context, registry)
        monkeypatch.setattr(processes.context.events, "publish", self.events.append)
        monkeypatch.setattr(self.version.scheduler, "tell", self.told.append)
        monkeypatch.setattr(Sizing, "look", lambda sizing, load, count: self._want(count))

    def _want(self, count: int) -> Change | None:
        step = (self.wanted > count) - (self.wanted < count)
        return Change(count + step, "it is wanted") if step else None

    async def look(self, answers: bool = True) -> int:
        """Look once, and have the scheduler answer; how many instances there are then."""
        self.resizer.look()
        asked = self.told.count(m.SnapshotStatistics())
        if answers and asked:
            self.version.scheduler._on_scheduler_message(
                self.version.scheduler.counts, m.StatisticsSnapshot(STATISTICS, [])
            )
        await turns()
        return self.version.instances.count

    def changes(self) -> list[Any]:
        """What the scheduler was told of the number of instances."""
        kinds = (m.RetireInstance, m.CountChange)
        return [message for message in self.told if isinstance(message, kinds)]


def played(
    monkeypatch: pytest.MonkeyPatch, play: Callable[[Rig], Awaitable[None]], *flags: str
) -> None:
    """A version that has started, and what comes then."""

    async def live() -> None:
        rig = Rig(Processes(*flags), monkeypatch)
        await rig.version.instances.complete_config()
        await rig.version.instances.load()
        rig.version.loaded = True
        monkeypatch.setattr(ModelVersion, "ready", True)
        await play(rig)
        await rig.processes.end()

    asyncio.run(live())


def test_one_at_a_time_and_every_change_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def play(rig: Rig) -> None:
        rig.wanted = 3
        assert [await rig.look() for _ in range(3)] == [2, 3, 3]
        rig.wanted = 2
        assert await rig.look() == 2
        assert rig.changes() == [
            *(m.CountChange(True), m.CountChange(True)),
            *(m.RetireInstance(2), m.CountChange(False)),
        ]
        assert rig.events == [
            InstancesChanged("m", "1", 1, 2, "it is wanted"),
            InstancesChanged("m", "1", 2, 3, "it is wanted"),
            InstancesChanged("m", "1", 3, 2, "it is wanted"),
        ]
        assert "model 'm' has 3 instances, was 2: it is wanted" in caplog.text

    played(monkeypatch, play)


def test_not_while_an_order_is_followed_or_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play(rig: Rig) -> None:
        rig.wanted = 3
        rig.model.orders.append(Order(rig.model, OrderKind.LOAD))
        assert await rig.look() == 1
        assert rig.told.count(m.SnapshotStatistics()) == 0
        rig.model.orders.clear()
        assert [await rig.look(answers=False) for _ in range(3)] == [1, 1, 1]
        assert rig.told.count(m.SnapshotStatistics()) == 1  # it is not asked again meanwhile
        rig.model.orders.append(Order(rig.model, OrderKind.LOAD))
        assert await rig.look() == 1
        rig.model.orders.clear()
        assert await rig.look() == 2

    played(monkeypatch, play)


def test_one_that_does_not_load_is_taken_back_and_not_tried_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(rig: Rig) -> None:
        rig.wanted = 2
        rig.processes.at_start = Made.kill
        assert await rig.look() == 1
        assert "model 'm' stays at 1 instances: the process of instance 'm_0_1'" in caplog.text
        rig.processes.at_start = lambda child: None
        started = len(rig.processes.started)
        assert await rig.look() == 1
        assert len(rig.processes.started) == started
        monkeypatch.setattr(resizer, "_AGAIN_S", 0)
        for watch in rig.resizer._watches.values():
            watch.not_before_s = 0
        assert await rig.look() == 2
        assert not [each for each in rig.events if each.count == each.before]

    played(monkeypatch, play)


def test_none_that_the_host_has_no_room_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(rig: Rig) -> None:
        rig.wanted = 2
        monkeypatch.setattr(Room, "lacks", lambda room, count: f"room for {count}")
        assert [await rig.look() for _ in range(3)] == [1, 1, 1]
        text = "model 'm' stays at 1 instances, though it is wanted: room for 2"
        assert caplog.text.count(text) == 1
        rig.wanted = 1
        assert not rig.events

    played(monkeypatch, play)


def test_a_load_again_begins_with_as_many_as_the_load_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play(rig: Rig) -> None:
        rig.wanted = 3
        await rig.look()
        await rig.look()
        instances, spec = rig.version.instances, rig.version.spec
        same = instances.update_to(spec, instances.config)
        assert (same.added, same.removed) == ([], [])
        (group,) = instances.config.instance_group
        two = replace(instances.config, instance_group=(replace(group, count=2),))
        other = instances.update_to(spec, two)
        assert (other.differs, other.added, other.removed) == (True, [], [])
        anew = rig.processes.version(spec)
        assert anew.instances.count == 1
        anew.instances.begin_like(instances)
        assert anew.instances.count == 3
        await anew.instances.complete_config()
        assert anew.instances.count == 3
        await anew.kill()

    played(monkeypatch, play)
