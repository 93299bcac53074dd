"""What a scheduler tells of its counts: to clients that ask, and to who starts its successor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from shmserve.common import model_metrics
from shmserve.common.model_metrics import ModelMetrics
from shmserve.ipc.messages.inference import MetricsReported, StatisticsReported
from shmserve.ipc.messages.supervision import BaseCounters, StatisticsSnapshot
from shmserve.scheduler.outboxes import ControlLink, Peers
from shmserve.scheduler.statistics.counters import Statistics

logger = logging.getLogger(__name__)


class Reports:
    """The statistics with what others know of now (`gauges`), and the model's own metrics.

    `misplaced` counts messages that make no sense from their sender or now. `wall_clock` gives
    epoch ns.
    """

    def __init__(
        self,
        statistics: Statistics,
        clients: Peers,
        control: ControlLink,
        wall_clock: Callable[[], int],
        gauges: Callable[[], dict[str, Any]],
    ) -> None:
        self._statistics = statistics
        self._clients = clients
        self._control = control
        self._wall_clock = wall_clock
        self._gauges = gauges
        self._metrics = ModelMetrics()
        self.misplaced = 0

    def report(self, now_ns: int) -> dict[str, Any]:
        """The statistics, as their package describes them."""
        return self._statistics.report(now_ns, self._wall_clock(), self._all_gauges())

    def _all_gauges(self) -> dict[str, Any]:
        gauges = self._gauges()
        gauges["malformed"] += self.misplaced
        gauges["families"] = model_metrics.plain(self._metrics.total())
        return gauges

    def tell(self, peer: bytes, number: int, now_ns: int) -> None:
        """A client asks, with this number."""
        report = self.report(now_ns)
        self._post(report)
        self._clients.post(peer, StatisticsReported(number, report))

    def snapshot(self, now_ns: int) -> None:
        """Tell whoever starts our successor: no count that was shown may ever go back."""
        self._post(self.report(now_ns))

    def snapshot_brief(self, now_ns: int) -> None:
        """`snapshot`, but for what is counted by response: this is asked for once a second."""
        self._post(self._statistics.brief(now_ns, self._wall_clock(), self._all_gauges()))

    def _post(self, report: dict[str, Any]) -> None:
        self._control.post(StatisticsSnapshot(report, self._metrics.snapshot()))

    def set_base(self, message: BaseCounters, now_ns: int) -> None:
        """What this version replaces has counted this."""
        try:
            self._statistics.set_base(message.statistics)
        except (KeyError, TypeError, ValueError):
            logger.exception("the statistics of what was here before cannot be read")
        self.snapshot(now_ns)

    def restore(self, snapshot: list[Any], alive: list[int], now_ns: int) -> None:
        """As `Front.restore`."""
        statistics, metrics = snapshot
        try:
            self._statistics.restore(statistics, now_ns, self._wall_clock())
            self._metrics.restore(metrics, alive)
            self.misplaced = int(statistics["shmserve"]["malformed"])
        except (KeyError, TypeError, ValueError):
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
