"""Everything that is counted of a model version, and the report of it: requests here."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from shmserve.common.cumulative_counters import total_counters
from shmserve.ipc.messages.inference import ExecutionResponded, Reply
from shmserve.scheduler.settings import Settings
from shmserve.scheduler.statistics.execution_stats import ExecutionStats
from shmserve.scheduler.statistics.histograms import Histogram, Quantiles
from shmserve.scheduler.statistics.response_stats import Counted, ResponseStats
from shmserve.scheduler.statistics.timing import NS_PER_S, SECONDS, Timing, duration, taken

_NS_PER_MS = 1_000_000
_NS_PER_US = 1_000
_SUMMARISED = ("request", "queue", "compute_input", "compute_infer", "compute_output")
_SUMMARISED_OF_CACHE = ("cache_hit", "cache_miss")


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
        self.executions = ExecutionStats()
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
        self._request_times = Histogram(SECONDS, NS_PER_S)
        self._queue_times = Histogram(SECONDS, NS_PER_S)
        self._decoupled = settings.decoupled
        self._first_responses = Histogram(settings.first_response_buckets_ms, _NS_PER_MS)
        self._responses = ResponseStats()
        self._shown_quantiles = settings.quantiles
        names = (*_SUMMARISED, *(_SUMMARISED_OF_CACHE if settings.cached else ()))
        self._quantiles = {name: Quantiles() for name in names} if settings.quantiles else {}
        self.workers_lost = 0
        self.retried = 0
        self.overruns = 0
        self._hits, self._hit_ns = 0, 0
        self._misses, self._miss_ns = 0, 0
        self._base: dict[str, Any] = {}

    def set_base(self, report: dict[str, Any]) -> None:
        """What this version replaces has reported this; raises KeyError or TypeError for what is
        no report."""
        self._base = total_counters(report)

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

    def hit(self, arrived_ns: int, queued: int, lookup_ns: int, now_ns: int) -> None:
        """A request has ended with a cached response, which was found in `lookup_ns`."""
        total = now_ns - arrived_ns + lookup_ns
        self._hits += 1
        self._hit_ns += lookup_ns
        self._succeeded += 1
        self._success_ns += total
        self._queue_ns += queued
        self._request_times.observe(total)
        self._queue_times.observe(queued)
        if self._quantiles:
            for name, ns in (("request", total), ("queue", queued), ("cache_hit", lookup_ns)):
                self._quantiles[name].observe(ns // _NS_PER_US, now_ns)

    def missed(self, lookup_ns: int, insert_ns: int, now_ns: int) -> None:
        """A request that is about to succeed was not in the cache; its response was inserted after
        `now_ns`."""
        self._misses += 1
        self._miss_ns += lookup_ns + insert_ns
        self._success_ns += insert_ns
        if self._quantiles:
            took_us = (lookup_ns + insert_ns) // _NS_PER_US
            self._quantiles["cache_miss"].observe(took_us, now_ns)

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
        """Count on from what a predecessor has reported.

        Raises KeyError, TypeError or ValueError for anything else, and may then be half done.
        """
        self.executions.restore(report, now_ns, wall_ns)
        self._inferences = int(report["inference_count"])
        parts = report["inference_stats"]
        self._succeeded, self._success_ns = taken(parts["success"])
        self._failed, self._fail_ns = taken(parts["fail"])
        _, self._queue_ns = taken(parts["queue"])
        _, self._input_ns = taken(parts["compute_input"])
        _, self._infer_ns = taken(parts["compute_infer"])
        _, self._output_ns = taken(parts["compute_output"])
        self._hits, self._hit_ns = taken(parts["cache_hit"])
        self._misses, self._miss_ns = taken(parts["cache_miss"])
        ours = report["shmserve"]
        self._failures.update({Reason(key): int(n) for key, n in ours["failures"].items()})
        self._request_times.restore(ours["histograms"]["request_seconds"])
        self._queue_times.restore(ours["histograms"]["queue_seconds"])
        self._responses.restore(report.get("response_stats", {}))
        if self._decoupled:
            self._first_responses.restore(ours["histograms"]["first_response_ms"])
        self.workers_lost = int(ours["workers_lost"])
        self.retried = int(ours["retried"])
        self.overruns = int(ours["overruns"])
        self._base = dict(ours["base"])

    def report(self, now_ns: int, wall_ns: int, gauges: dict[str, Any]) -> dict[str, Any]:
        """Everything as the package says; `gauges` are the `shmserve` keys that others know."""
        by_response = {"response_stats": self._responses.report()}
        return self._report(now_ns, wall_ns, gauges, by_response)

    def brief(self, now_ns: int, wall_ns: int, gauges: dict[str, Any]) -> dict[str, Any]:
        """`report` without `response_stats`, which may have a thousand rows."""
        return self._report(now_ns, wall_ns, gauges, {})

    def _report(
        self, now_ns: int, wall_ns: int, gauges: dict[str, Any], by_response: dict[str, Any]
    ) -> dict[str, Any]:
        executions = self.executions
        count = self._succeeded
        executed = count - self._hits
        return {
            "name": self._name,
            "version": self._version,
            "last_inference": executions.last_ms(now_ns, wall_ns),
            "inference_count": self._inferences,
            "execution_count": executions.count,
            "inference_stats": {
                "success": duration(count, self._success_ns),
                "fail": duration(self._failed, self._fail_ns),
                "queue": duration(count, self._queue_ns),
                "compute_input": duration(executed, self._input_ns),
                "compute_infer": duration(executed, self._infer_ns),
                "compute_output": duration(executed, self._output_ns),
                "cache_hit": duration(self._hits, self._hit_ns),
                "cache_miss": duration(self._misses, self._miss_ns),
            },
            **by_response,
            "batch_stats": executions.by_size(),
            "memory_usage": [],
            "shmserve": {
                "failures": {str(reason): n for reason, n in self._failures.items()},
                "batches_closed": executions.closed(),
                "histograms": self._histograms(),
                "quantiles": {
                    name: each.report(self._shown_quantiles, now_ns)
                    for name, each in self._quantiles.items()
                },
                "workers_lost": self.workers_lost,
                "retried": self.retried,
                "overruns": self.overruns,
                "copied_bytes": executions.copied_bytes(),
                "padding": executions.padding(),
                "base": self._base,
                **gauges,
            },
        }

    def _histograms(self) -> dict[str, Any]:
        histograms = {
            "request_seconds": self._request_times.report(),
            "queue_seconds": self._queue_times.report(),
            **self.executions.histograms(),
        }
        if self._decoupled:
            histograms["first_response_ms"] = self._first_responses.report()
        return histograms
