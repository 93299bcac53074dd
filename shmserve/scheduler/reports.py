"""Reports of a scheduler's counts: to clients that ask, to who starts its successor, and of
overload to the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shmserve.common import model_metrics
from shmserve.common.model_metrics import ModelMetrics
from shmserve.ipc.messages.inference import MetricsReported, StatisticsReported
from shmserve.ipc.messages.supervision import BaseCounters, StatisticsSnapshot
from shmserve.scheduler.outboxes import ControlLink
from shmserve.scheduler.requests.client import Client
from shmserve.scheduler.requests.request import NEVER
from shmserve.scheduler.statistics.counters import Statistics

logger = logging.getLogger(__name__)

# Of a snapshot, as it is this moment.
_NOW = ("pending", "executing", "open_sequences", "live", "instances")


@dataclass(eq=False)
class Reports:
    """The statistics with what others know of now (`gauges`), and the model's own metrics.

    `misplaced` counts messages that make no sense from their sender or now. `wall_clock` gives
    epoch ns.
    """

    _statistics: Statistics
    _control: ControlLink
    _wall_clock: Callable[[], int]
    _gauges: Callable[[], dict[str, Any]]
    _metrics: ModelMetrics = field(default_factory=ModelMetrics)
    misplaced: int = 0

    def report(self, now_ns: int) -> dict[str, Any]:
        """The statistics, as their package describes them."""
        gauges = self._count_malformed()
        gauges["families"] = model_metrics.plain(self._metrics.total())
        return self._statistics.report(now_ns, self._wall_clock(), gauges)

    def tell(self, client: Client[Any], number: int, now_ns: int) -> None:
        """A client asks, with this number."""
        report = self.report(now_ns)
        self.snapshot()
        client.post(StatisticsReported(number, report))

    def _count_malformed(self) -> dict[str, Any]:
        gauges = self._gauges()
        self._statistics.malformed = gauges.pop("malformed") + self.misplaced
        return gauges

    def snapshot(self, brief: bool = False) -> None:
        """Send what is counted to whoever starts our successor: no count that was shown may ever go
        back. `brief` as in `Statistics.snapshot`."""
        gauges = self._count_malformed()
        now = {name: gauges[name] for name in _NOW}
        statistics = {**self._statistics.snapshot(brief), **now}
        self._control.post(StatisticsSnapshot(statistics, self._metrics.snapshot()))

    def set_base(self, message: BaseCounters) -> None:
        """Take over the counts of what this version replaces."""
        try:
            self._statistics.set_base(message.statistics)
        except (AttributeError, KeyError, TypeError, ValueError):
            logger.exception("the statistics of what was here before cannot be read")
        self.snapshot()

    def restore(self, snapshot: list[Any], alive: list[int]) -> None:
        """As `Front.restore`."""
        statistics, metrics = snapshot
        try:
            self._statistics.restore(statistics)
            self._metrics.restore(metrics, alive)
            self.misplaced = self._statistics.malformed
        except (AttributeError, KeyError, TypeError, ValueError):
            logger.exception("a predecessor's statistics cannot be read")

    def metrics_reported(self, pid: int, message: MetricsReported) -> None:
        """An instance's model has metrics of its own."""
        try:
            families = model_metrics.parse(message.families)
        except ValueError:
            self.misplaced += 1
        else:
            self._metrics.report(pid, families)

    def exited(self, pid: int) -> None:
        """A process is gone; what its model has counted stays."""
        self._metrics.exited(pid)


_EVERY_NS = 60_000_000_000


class OverloadLog:
    """The rate-limited lines of one model; times are monotonic ns."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._refused = 0
        self._due_ns = 0

    def refuse(self) -> None:
        """Count a request."""
        self._refused += 1

    def tick(self, now_ns: int) -> int:
        """Write what was counted, if that is due; returns when it will be (NEVER: nothing was)."""
        if not self._refused:
            return NEVER
        if now_ns < self._due_ns:
            return self._due_ns
        self._due_ns = now_ns + _EVERY_NS
        self.write()
        return NEVER

    def write(self) -> None:
        """Write what was counted."""
        if self._refused:
            logger.warning(
                "model '%s' is overloaded: its queue is full, and refused %d more requests",
                self._model,
                self._refused,
            )
            self._refused = 0
