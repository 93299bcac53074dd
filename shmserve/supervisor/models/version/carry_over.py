"""Carry-over of counters: a scheduler's go to its successor, a version's to the one that replaces
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmserve.common.cumulative_counters import following
from shmserve.ipc.messages.supervision import CountsInherited


class CarryOver:
    """What one version has counted, and was given to count on from. `tell` reaches its
    scheduler."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell = tell
        self.kept: list[Any] = []  # of StatisticsKept, for a scheduler that takes over
        self._before: dict[str, Any] = {}
        self._successor: CarryOver | None = None

    def keep(self, statistics: dict[str, Any], metrics: list[list[Any]]) -> None:
        """The scheduler has counted so much; a key that is not there is as it was."""
        before = self.kept[0] if self.kept else {}
        self.kept = [{**before, **statistics}, metrics]
        self._pass_on()

    def hand_to(self, successor: CarryOver | None) -> None:
        """What this version has counted, and will while it finishes what it has, is
        `successor`'s."""
        self._successor = successor
        self._pass_on()

    def resume_from(self, statistics: dict[str, Any]) -> None:
        """Count on from what a version that this one replaces had counted."""
        self._before = statistics
        self._tell(CountsInherited(statistics))
        self._pass_on()

    def scheduler_started(self) -> None:
        """Another scheduler counts from now on; what this version counted it was started with."""
        if self._before:
            self._tell(CountsInherited(self._before))

    def _pass_on(self) -> None:
        # Our scheduler may have ended, and one before it be counting still.
        if self._successor is None:
            return
        counted = self.kept[0] if self.kept else self._before
        if self.kept and self._before:
            counted = following(counted, self._before)
        if counted:
            self._successor.resume_from(counted)
