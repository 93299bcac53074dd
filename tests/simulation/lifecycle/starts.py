"""The rule of restarts: increasing pauses, and an end after five failed loads."""

from collections.abc import Callable
from dataclasses import dataclass

from shmserve.supervisor.models.instances import Instance

_PAUSES_S = (0.0, 0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8)
_HEALTHY_S = 30.0
_MAX_FAILED = 5
_ROUNDED_S = 1e-6


@dataclass(slots=True)
class _Row:
    """The consecutive starts of one instance, and the time at which it became ready."""

    deaths: int = 0
    failed: int = 0
    ready_at: float | None = None
    ended_at: float = 0.0


class Starts:
    """The starts of each instance and their results. Violations are passed to `complain`."""

    def __init__(self, clock: Callable[[], float], complain: Callable[[str], None]) -> None:
        self._clock = clock
        self._complain = complain
        self._rows: dict[Instance | None, _Row] = {}

    def begin(self, instance: Instance) -> None:
        row = self._rows.get(instance)
        if row is None:
            self._rows[instance] = _Row()
            return
        early_s = row.ended_at + _PAUSES_S[min(row.deaths, len(_PAUSES_S)) - 1] - self._clock()
        if row.failed >= _MAX_FAILED:
            self._complain(f"11: {instance} starts after {row.failed} that did not load")
        elif early_s > _ROUNDED_S:
            self._complain(f"11: {instance} starts {early_s:.3f} s too early")
        row.ready_at = None

    def ready(self, instance: Instance | None) -> None:
        if instance in self._rows:
            self._rows[instance].ready_at = self._clock()
            self._rows[instance].failed = 0

    def ended(self, instance: Instance | None) -> None:
        if instance not in self._rows:
            return
        row, now = self._rows[instance], self._clock()
        healthy = row.ready_at is not None and now - row.ready_at > _HEALTHY_S
        row.deaths = 1 if healthy else row.deaths + 1
        row.failed += row.ready_at is None
        row.ended_at = now
