"""Counters that outlive their scheduler: a successor restores them, or adds them to its own."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.supervision import BaseCounters, ResizeCache
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models.scheduler_process import CarriedCounters
from shmserve.supervisor.resources.rate_limiter import CacheShares
from tests.rigs.process_rig import CONFIG, Processes, plan, run_loop_turns
from tests.support.waiting import until_async

_CACHED_SPEC = replace(plan(), config=ModelSpec.of({**CONFIG, "response_cache": {"enable": True}}))


class Scheduler:
    """A scheduler's side: the base that it received last."""

    def __init__(self) -> None:
        self.base: dict[str, Any] = {}
        self.counters = CarriedCounters(self.set_base)

    def set_base(self, message: BaseCounters) -> None:
        self.base, self.moved = message.statistics, message.moved_statistics

    def count(self, success: int, **rows: Any) -> None:
        self.counters.update({"success": success, "pending": 7, "base": self.base, **rows}, [])


def test_base_counts_are_passed_on_to_every_successor() -> None:
    first_scheduler, second_scheduler, third_scheduler = Scheduler(), Scheduler(), Scheduler()
    first_scheduler.counters.pass_to(second_scheduler.counters)
    assert second_scheduler.base == {}  # nothing was counted yet
    first_scheduler.count(2, responses=[[1] * 12])
    assert second_scheduler.base == {"success": 2}
    second_scheduler.counters.pass_to(third_scheduler.counters)
    assert third_scheduler.base == {"success": 2}  # the second has not reported anything yet
    second_scheduler.count(3)
    assert third_scheduler.base == {"success": 5}
    first_scheduler.count(4)  # the draining scheduler completes its requests
    assert (second_scheduler.base, third_scheduler.base) == ({"success": 4}, {"success": 7})


def test_a_former_successor_receives_no_counts() -> None:
    first_scheduler, second_scheduler = Scheduler(), Scheduler()
    first_scheduler.counters.pass_to(second_scheduler.counters)
    first_scheduler.count(1)
    first_scheduler.counters.pass_to(None)
    first_scheduler.count(2)
    assert second_scheduler.base == {"success": 1}


def test_the_scheduler_of_a_moved_version_receives_its_counts_once() -> None:
    first_scheduler, second_scheduler = Scheduler(), Scheduler()
    first_scheduler.count(2)
    first_scheduler.counters.pass_to(second_scheduler.counters)
    second_scheduler.counters.continue_version(first_scheduler.counters)
    first_scheduler.count(3)
    assert (second_scheduler.base, second_scheduler.moved["success"]) == ({}, 2)


def test_a_successor_restores_the_snapshot_and_receives_the_base() -> None:
    first_scheduler, second_scheduler = Scheduler(), Scheduler()
    first_scheduler.count(2)
    first_scheduler.counters.pass_to(second_scheduler.counters)
    second_scheduler.count(1, responses=[[1]])
    second_scheduler.count(3)
    statistics, _ = second_scheduler.counters.snapshot
    assert (statistics["success"], statistics["responses"]) == (3, [[1]])
    second_scheduler.base = {}
    second_scheduler.counters.send_base()
    assert second_scheduler.base == {"success": 2}


async def test_a_scheduler_receives_the_share_of_the_cache_that_changed_while_it_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Messages to a scheduler that is not ready are dropped."""
    sent_messages: list[Any] = []
    processes = Processes()
    processes.context = replace(processes.context, cache_shares=CacheShares(1000))
    shares, control = processes.context.cache_shares, processes.send

    def send(address: Any, message: Any) -> None:
        sent_messages.append(message)
        if isinstance(message, m.OpenScheduler):
            sent_messages.clear()
            shares.join(1, lambda share: None)
        control(address, message)

    monkeypatch.setattr(processes, "send", send)
    await processes.version(_CACHED_SPEC).start()
    await processes.end()
    assert [
        sent_message for sent_message in sent_messages if isinstance(sent_message, ResizeCache)
    ][-1:] == [ResizeCache(500)]


async def test_a_version_that_ends_before_the_restart_of_its_scheduler_has_no_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shmserve.supervisor.processes.children._PAUSES_S", (0.05,))
    processes = Processes()
    shares = CacheShares(1000)
    processes.context = replace(processes.context, cache_shares=shares)
    version = processes.version(_CACHED_SPEC)
    await version.start()
    version.scheduler.current.child.kill()
    await run_loop_turns()
    await version.stop()
    started_count = len(processes.children)
    await asyncio.sleep(0.1)
    assert len(processes.children) == started_count, "no scheduler starts any more"
    assert shares.join(1, lambda share: None) == 1000
    await processes.end()


async def test_the_next_scheduler_answers_a_request_for_statistics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The autoscaler sends no second request before the answer to the first one."""
    processes = Processes()
    version = processes.version(plan())
    await version.start()
    statistics = version.scheduler.snapshot()
    version.scheduler.current.child.kill()
    sent_messages: list[Any] = []
    deliver = processes.send

    def send(address: Any, message: Any) -> None:
        sent_messages.append((address, message))
        deliver(address, message)

    monkeypatch.setattr(processes, "send", send)
    await until_async(lambda: version.scheduler.number == 2)
    await run_loop_turns()
    assert not statistics.done() and version.scheduler.snapshot() is statistics
    assert (version.scheduler.current.address, m.SnapshotStatistics()) in sent_messages
    await version.kill()
    await processes.end()
