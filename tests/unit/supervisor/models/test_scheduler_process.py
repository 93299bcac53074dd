"""Counters of a scheduler that outlive it: restored by one that takes over, the base of another."""

from __future__ import annotations

from typing import Any

from shmserve.ipc.messages.supervision import BaseCounters
from shmserve.supervisor.models.scheduler_process import CarryOver


class Scheduler:
    """A scheduler's end of it: the base that it was told last."""

    def __init__(self) -> None:
        self.base: dict[str, Any] = {}
        self.counts = CarryOver(self.tell)

    def tell(self, message: BaseCounters) -> None:
        """A message of the supervisor's."""
        self.base = message.statistics

    def count(self, success: int, **rows: Any) -> None:
        """It has counted so much."""
        self.counts.update({"success": success, "pending": 7, "base": self.base, **rows}, [])


def test_a_base_is_passed_on_through_all_that_follow() -> None:
    first, second, third = Scheduler(), Scheduler(), Scheduler()
    first.counts.be_base_of(second.counts)
    assert second.base == {}  # nothing was counted yet
    first.count(2, responses=[[1] * 12])
    assert second.base == {"success": 2}
    second.counts.be_base_of(third.counts)
    assert third.base == {"success": 2}  # the second has not reported anything yet
    second.count(3)
    assert third.base == {"success": 5}
    first.count(4)  # it finishes what it had
    assert (second.base, third.base) == ({"success": 4}, {"success": 7})


def test_who_is_no_successor_any_more_is_told_nothing() -> None:
    first, second = Scheduler(), Scheduler()
    first.counts.be_base_of(second.counts)
    first.count(1)
    first.counts.be_base_of(None)
    first.count(2)
    assert second.base == {"success": 1}


def test_one_that_takes_over_restores_the_snapshot_and_is_told_the_base() -> None:
    first, second = Scheduler(), Scheduler()
    first.count(2)
    first.counts.be_base_of(second.counts)
    second.count(1, responses=[[1]])
    second.count(3)
    statistics, _ = second.counts.snapshot
    assert (statistics["success"], statistics["responses"]) == (3, [[1]])
    second.base = {}
    second.counts.send_base()
    assert second.base == {"success": 2}
