"""Everything that is counted of a model version, and the report of it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from shmserve.common.cumulative_counters import lasting
from shmserve.ipc.messages import ExecutionResponded, Reply
from shmserve.scheduler.batchers.base import Closed
from shmserve.scheduler.settings import Settings
from shmserve.scheduler.statistics.histogram import Histogram
from shmserve.scheduler.statistics.quantiles import Quantiles
from shmserve.scheduler.statistics.response_stats import Counted, ResponseStats
from shmserve.scheduler.statistics.timing import Timing

_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000
_NS_PER_US = 1_000
_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


_SUMMARISED = ("request", "queue", "compute_input", "compute_infer", "compute_output")


class Reason(StrEnum):
    """Why a request failed, as the failure counter's label says it."""

    REJECTED = "REJECTED"  # not admitted, or its time was over in the queue
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"  # the model or its process
    OTHER = "OTHER"


class Statistics:
    """All counters since the version was loaded; times in ns."""

    def __init__(self, settings: Settings) -> None:
        self._name = settings.name
        self._version = settings.version
        self._last_execution_ns = 0
        self._executions = 0
        self._inferences = 0
        self._succeeded = 0
        self._success_ns = 0
        self._queue_ns = 0
        self._input_ns = 0
        self._infer_ns = 0
        self._output_ns = 0
        self._failed = 0
        self._fail_ns = 0
        self._failures = dict.fromkeys(Reason, 0)
        self._by_size: dict[int, list[int]] = {}
        self._closed = dict.fromkeys(Closed, 0)
        self._request_times = Histogram(_SECONDS, _NS_PER_S)
        self._queue_times = Histogram(_SECONDS, _NS_PER_S)
        self._compute_times = Histogram(_SECONDS, _NS_PER_S)
        self._sizes = Histogram(_SIZES)
        self._decoupled = settings.decoupled
        self._first_responses = Histogram(settings.first_response_buckets_ms, _NS_PER_MS)
        self._responses = ResponseStats()
        self._shown_quantiles = settings.quantiles
        self._quantiles = {name: Quantiles() for name in _SUMMARISED} if settings.quantiles else {}
        self.workers_lost = 0
        self.retried = 0
        self.overruns = 0
        self._copied = [0, 0]
        self._earlier: dict[str, Any] = {}

    def inherit(self, report: dict[str, Any]) -> None:
        """What this version replaces has reported this; raises KeyError or TypeError for what is
        no report."""
        self._earlier = lasting(report)

    def copied(self, into: int, out: int) -> None:
        """So many bytes of tensors were copied by a worker."""
        self._copied[0] += into
        self._copied[1] += out

    def executed(self, reason: Closed, units: int, timing: Timing, now_ns: int) -> None:
        """An execution of requests that sum up to `units` came back."""
        self._executions += 1
        self._last_execution_ns = now_ns
        self._closed[reason] += 1
        _, input_ns, infer_ns, output_ns = timing
        row = self._by_size.get(units)
        if row is None:
            row = self._by_size[units] = [0, 0, 0, 0]
        row[0] += 1
        row[1] += input_ns
        row[2] += infer_ns
        row[3] += output_ns
        self._compute_times.observe(input_ns + infer_ns + output_ns)
        self._sizes.observe(units)

    def succeeded(self, request: Counted, timing: Timing | None, now_ns: int) -> None:
        """A request has ended with its result. Where its execution has not returned yet there is
        no `timing`, and `timed` follows."""
        total = now_ns - request.arrived_ns
        self._succeeded += 1
        self._inferences += request.units
        self._success_ns += total
        self._request_times.observe(total)
        if self._quantiles:
            self._quantiles["request"].observe(total // _NS_PER_US, now_ns)
        if timing is None:
            request.untimed = True
        else:
            self.timed(request, timing, now_ns)

    def timed(self, request: Counted, timing: Timing, now_ns: int) -> None:
        """The execution of a request that succeeded took this long."""
        start_ns, input_ns, infer_ns, output_ns = timing
        queued = start_ns - request.enqueued_ns
        self._queue_ns += queued
        self._input_ns += input_ns
        self._infer_ns += infer_ns
        self._output_ns += output_ns
        self._queue_times.observe(queued)
        if self._quantiles:
            for name, ns in zip(_SUMMARISED[1:], (queued, *timing[1:]), strict=True):
                self._quantiles[name].observe(ns // _NS_PER_US, now_ns)

    def responded(
        self, request: Counted, response: ExecutionResponded | Reply, now_ns: int
    ) -> None:
        """A decoupled model has given a response, or the end of them."""
        if not request.responses and (response.body or response.code):
            self._first_responses.observe(now_ns - request.arrived_ns)
        self._responses.responded(request, response, now_ns)

    def cancelled(self, request: Counted, now_ns: int) -> None:
        """A decoupled model has ended a request that nobody waited for."""
        self._responses.cancelled(request, now_ns)

    def failed(self, arrived_ns: int, reason: Reason, now_ns: int) -> None:
        """A request has ended with an error."""
        self._failed += 1
        self._fail_ns += max(now_ns - arrived_ns, 0)
        self._failures[reason] += 1

    def restore(self, report: dict[str, Any], now_ns: int, wall_ns: int) -> None:
        """Go on from what a predecessor has reported.

        Raises KeyError, TypeError or ValueError for anything else, and may then be half done.
        """
        last_ms = int(report["last_inference"])
        self._last_execution_ns = now_ns - (wall_ns - last_ms * 1_000_000) if last_ms else 0
        self._executions = int(report["execution_count"])
        self._inferences = int(report["inference_count"])
        parts = report["inference_stats"]
        self._succeeded, self._success_ns = _taken(parts["success"])
        self._failed, self._fail_ns = _taken(parts["fail"])
        _, self._queue_ns = _taken(parts["queue"])
        _, self._input_ns = _taken(parts["compute_input"])
        _, self._infer_ns = _taken(parts["compute_infer"])
        _, self._output_ns = _taken(parts["compute_output"])
        for row in report["batch_stats"]:
            count, input_ns = _taken(row["compute_input"])
            _, infer_ns = _taken(row["compute_infer"])
            _, output_ns = _taken(row["compute_output"])
            self._by_size[int(row["batch_size"])] = [count, input_ns, infer_ns, output_ns]
        ours = report["shmserve"]
        self._failures.update({Reason(key): int(n) for key, n in ours["failures"].items()})
        self._closed.update({Closed(key): int(n) for key, n in ours["batches_closed"].items()})
        self._request_times.restore(ours["histograms"]["request_seconds"])
        self._queue_times.restore(ours["histograms"]["queue_seconds"])
        self._compute_times.restore(ours["histograms"]["compute_seconds"])
        self._sizes.restore(ours["histograms"]["batch_size"])
        self._responses.restore(report["response_stats"])
        if self._decoupled:
            self._first_responses.restore(ours["histograms"]["first_response_ms"])
        self.workers_lost = int(ours["workers_lost"])
        self.retried = int(ours["retried"])
        self.overruns = int(ours["overruns"])
        self._copied = [int(ours["copied_bytes"][direction]) for direction in ("in", "out")]
        self._earlier = dict(ours["earlier"])

    def report(self, now_ns: int, wall_ns: int, gauges: dict[str, Any]) -> dict[str, Any]:
        """Everything as the module says; `gauges` are the `shmserve` keys that others know."""
        last = self._last_execution_ns
        count = self._succeeded
        return {
            "name": self._name,
            "version": self._version,
            "last_inference": (wall_ns - (now_ns - last)) // 1_000_000 if last else 0,
            "inference_count": self._inferences,
            "execution_count": self._executions,
            "inference_stats": {
                "success": _duration(count, self._success_ns),
                "fail": _duration(self._failed, self._fail_ns),
                "queue": _duration(count, self._queue_ns),
                "compute_input": _duration(count, self._input_ns),
                "compute_infer": _duration(count, self._infer_ns),
                "compute_output": _duration(count, self._output_ns),
                "cache_hit": _duration(0, 0),
                "cache_miss": _duration(0, 0),
            },
            "response_stats": self._responses.report(),
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": _duration(row[0], row[1]),
                    "compute_infer": _duration(row[0], row[2]),
                    "compute_output": _duration(row[0], row[3]),
                }
                for size, row in sorted(self._by_size.items())
            ],
            "memory_usage": [],
            "shmserve": {
                "failures": {str(reason): n for reason, n in self._failures.items()},
                "batches_closed": {str(reason): n for reason, n in self._closed.items()},
                "histograms": self._histograms(),
                "quantiles": {
                    name: each.report(self._shown_quantiles, now_ns)
                    for name, each in self._quantiles.items()
                },
                "workers_lost": self.workers_lost,
                "retried": self.retried,
                "overruns": self.overruns,
                "copied_bytes": {"in": self._copied[0], "out": self._copied[1]},
                "earlier": self._earlier,
                **gauges,
            },
        }

    def _histograms(self) -> dict[str, Any]:
        histograms = {
            "request_seconds": self._request_times,
            "queue_seconds": self._queue_times,
            "compute_seconds": self._compute_times,
            "batch_size": self._sizes,
        }
        if self._decoupled:
            histograms["first_response_ms"] = self._first_responses
        return {name: each.report() for name, each in histograms.items()}


def _taken(duration: dict[str, int]) -> tuple[int, int]:
    return int(duration["count"]), int(duration["ns"])


def _duration(count: int, ns: int) -> dict[str, int]:
    return {"count": count, "ns": ns}
