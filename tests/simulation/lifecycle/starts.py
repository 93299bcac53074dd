"""The rule of restarts: increasing pauses, and an end after five failed loads."""

from collections.abc import Callable
from dataclasses import dataclass

from shmserve.supervisor.models.instance import Instance

_PAUSES_S = (0.0, 0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8)
_HEALTHY_LIFETIME_S = 30.0
_MAX_FAILED_LOADS = 5
_TOLERANCE_S = 1e-6


@dataclass(slots=True)
class _InstanceStarts:
    """The consecutive starts of one instance, and the time at which it became ready."""

    exit_count: int = 0
    failed_loads: int = 0
    ready_at_s: float | None = None
    ended_at_s: float = 0.0


class Starts:
    """The starts of each instance and their results; violations go to `report_violation`."""

    def __init__(self, clock: Callable[[], float], report_violation: Callable[[str], None]) -> None:
        self._clock = clock
        self._report_violation = report_violation
        self._rows: dict[Instance | None, _InstanceStarts] = {}

    def instance_starts(self, instance: Instance) -> None:
        row = self._rows.get(instance)
        if row is None:
            self._rows[instance] = _InstanceStarts()
            return
        early = row.ended_at_s + _PAUSES_S[min(row.exit_count, len(_PAUSES_S)) - 1] - self._clock()
        if row.failed_loads >= _MAX_FAILED_LOADS:
            self._report_violation(
                f"11: {instance} starts after {row.failed_loads} that did not load"
            )
        elif early > _TOLERANCE_S:
            self._report_violation(f"11: {instance} starts {early:.3f} s too early")
        row.ready_at_s = None

    def instance_ready(self, instance: Instance | None) -> None:
        if instance in self._rows:
            self._rows[instance].ready_at_s = self._clock()
            self._rows[instance].failed_loads = 0

    def instance_ended(self, instance: Instance | None) -> None:
        if instance not in self._rows:
            return
        row, now_s = self._rows[instance], self._clock()
        was_healthy = row.ready_at_s is not None and now_s - row.ready_at_s > _HEALTHY_LIFETIME_S
        row.exit_count = 1 if was_healthy else row.exit_count + 1
        row.failed_loads += row.ready_at_s is None
        row.ended_at_s = now_s
