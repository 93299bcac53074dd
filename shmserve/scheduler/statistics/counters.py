"""Everything that is counted of a model version, and the report of it: requests here."""

from __future__ import annotations

from enum import StrEnum
from operator import sub
from typing import Any

from shmserve.common.counters import plus, total
from shmserve.ipc.messages.inference import ExecutionResponded, Reply
from shmserve.scheduler.settings import Settings
from shmserve.scheduler.statistics.execution_stats import MOST_NOTED, ExecutionStats
from shmserve.scheduler.statistics.generation_stats import GenerationStats
from shmserve.scheduler.statistics.histograms import Histogram, Quantiles
from shmserve.scheduler.statistics.response_stats import Counted, ResponseStats
from shmserve.scheduler.statistics.table import Table
from shmserve.scheduler.statistics.timing import NS_PER_S, SECONDS, Timing, duration

_NS_PER_MS = 1_000_000
_NS_PER_US = 1_000
# Of a request that has succeeded: when it ended and arrived, its units, when it was enqueued, and
# its execution's phases, once they are known. Of one whose phases are known later: when that is,
# when it was enqueued, and the phases.
_Noted = tuple[int, int, int, int, Timing | None]
_Timed = tuple[int, int, Timing]
_SUMMARISED = ("request", "queue", "compute_input", "compute_infer", "compute_output")
_SUMMARISED_OF_CACHE = ("cache_hit", "cache_miss")


class Reason(StrEnum):
    """Why a request failed, as the failure counter's label says it."""

    REJECTED = "REJECTED"  # not admitted, or its time was over in the queue
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"  # the model or its process
    OTHER = "OTHER"


class Statistics(Table):
    """All counters since the version was loaded; times in ns."""

    def __init__(self, settings: Settings) -> None:
        self._model = settings.name, settings.version
        self.executions = ExecutionStats()
        self.inference_count = 0
        self.success = 0
        self.success_ns = 0
        self.queue_ns = 0
        self.compute_input_ns = 0
        self.compute_infer_ns = 0
        self.compute_output_ns = 0
        self.fail = 0
        self.fail_ns = 0
        self.failures = dict.fromkeys(Reason, 0)
        self.request_seconds = Histogram(SECONDS, NS_PER_S)
        self.queue_seconds = Histogram(SECONDS, NS_PER_S)
        self._first_responses = Histogram(settings.first_response_buckets_ms, _NS_PER_MS)
        if settings.decoupled:
            self.first_response_ms = self._first_responses
        if settings.engine is not None:
            self.generation = GenerationStats()
        self._responses = ResponseStats()
        self._shown_quantiles = settings.quantiles
        names = (*_SUMMARISED, *(_SUMMARISED_OF_CACHE if settings.cached else ()))
        self._quantiles = {name: Quantiles() for name in names} if settings.quantiles else {}
        self.instance_changes = {"more": 0, "fewer": 0}
        self.workers_lost = 0
        self.retried = 0
        self.overruns = 0
        self.malformed = 0
        self.cache_hit, self.cache_hit_ns = 0, 0
        self.cache_miss, self.cache_miss_ns = 0, 0
        self._base: dict[str, Any] = {}
        self._noted: list[_Noted] = []
        self._noted_late: list[_Timed] = []

    @property
    def model(self) -> tuple[str, str]:
        """The name and the version of what it counts for."""
        return self._model

    def set_base(self, base: dict[str, Any]) -> None:
        """Set the base: the counts of the version that this one replaces; raises KeyError,
        AttributeError, TypeError or ValueError for what is no table."""
        for name in ("success", "execution_count"):  # every table has them
            int(base[name])
        plus(self.table(), base)
        self._base = base

    def succeeded(self, request: Counted, timing: Timing | None, now_ns: int) -> None:
        """A request has ended with its result. Where its execution has not returned yet there is
        no `timing`, and `timed` follows."""
        if len(self._noted) >= MOST_NOTED:
            self._count()
        if timing is None:
            request.untimed = True
        self._noted.append((now_ns, request.arrived_ns, request.units, request.enqueued_ns, timing))

    def timed(self, request: Counted, timing: Timing, now_ns: int) -> None:
        """The execution of a request that succeeded took this long."""
        self._noted_late.append((now_ns, request.enqueued_ns, timing))

    def _count(self) -> None:
        """Count what was noted, before anything is read here."""
        self.executions.count()
        noted, self._noted = self._noted, []
        late, self._noted_late = self._noted_late, []
        if noted:
            ended, arrived, units, _, _ = zip(*noted, strict=True)
            totals = list(map(sub, ended, arrived))
            self.success += len(noted)
            self.success_ns += sum(totals)
            self.inference_count += sum(units)
            self.request_seconds.observe(*totals)
        timed = [(now_ns, at_ns, each) for now_ns, _, _, at_ns, each in noted if each is not None]
        timed += late
        if timed:
            _, enqueued, timings = zip(*timed, strict=True)
            starts, inputs, infers, outputs, *_ = zip(*timings, strict=True)
            queued = list(map(sub, starts, enqueued))
            self.queue_ns += sum(queued)
            self.compute_input_ns += sum(inputs)
            self.compute_infer_ns += sum(infers)
            self.compute_output_ns += sum(outputs)
            self.queue_seconds.observe(*queued)
        if self._quantiles:
            self._summarise(noted, timed)

    def _summarise(self, noted: list[_Noted], timed: list[_Timed]) -> None:
        quantiles = self._quantiles
        for now_ns, arrived_ns, *_ in noted:
            quantiles["request"].observe((now_ns - arrived_ns) // _NS_PER_US, now_ns)
        for now_ns, at_ns, timing in timed:
            queued = timing.compute_start_ns - at_ns
            for name, ns in zip(_SUMMARISED[1:], (queued, *timing[1:4]), strict=True):
                quantiles[name].observe(ns // _NS_PER_US, now_ns)

    def hit(self, arrived_ns: int, queued: int, lookup_ns: int, now_ns: int) -> None:
        """A request has ended with a cached response, which was found in `lookup_ns`."""
        total = now_ns - arrived_ns + lookup_ns
        self.cache_hit += 1
        self.cache_hit_ns += lookup_ns
        self.success += 1
        self.success_ns += total
        self.queue_ns += queued
        self.request_seconds.observe(total)
        self.queue_seconds.observe(queued)
        if self._quantiles:
            for name, ns in (("request", total), ("queue", queued), ("cache_hit", lookup_ns)):
                self._quantiles[name].observe(ns // _NS_PER_US, now_ns)

    def missed(self, lookup_ns: int, insert_ns: int, now_ns: int) -> None:
        """A request that is about to succeed was not in the cache; its response was inserted after
        `now_ns`."""
        self.cache_miss += 1
        self.cache_miss_ns += lookup_ns + insert_ns
        self.success_ns += insert_ns
        if self._quantiles:
            took_us = (lookup_ns + insert_ns) // _NS_PER_US
            self._quantiles["cache_miss"].observe(took_us, now_ns)

    def responded(
        self, request: Counted, response: ExecutionResponded | Reply, now_ns: int
    ) -> None:
        """A decoupled model has given a response, or the end of them."""
        if not request.responses and (response.body or response.code):
            whole_ms = (now_ns - request.arrived_ns) // _NS_PER_MS  # as Triton observes them
            self._first_responses.observe(whole_ms * _NS_PER_MS)
        self._responses.responded(request, response, now_ns)

    def cancelled(self, request: Counted, now_ns: int) -> None:
        """A decoupled model has ended a request that nobody waited for."""
        self._responses.cancelled(request, now_ns)

    def failed(self, arrived_ns: int, reason: Reason, now_ns: int) -> None:
        """A request has ended with an error."""
        self.fail += 1
        self.fail_ns += max(now_ns - arrived_ns, 0)
        self.failures[reason] += 1

    def table(self) -> dict[str, Any]:
        """As `Table.table`."""
        self._count()
        return super().table()

    def snapshot(self, brief: bool = False) -> dict[str, Any]:
        """The table for whoever counts on from here; `brief`: without the rows of responses, of
        which there may be a thousand."""
        responses = {} if brief else self._responses.table()
        return {**self.table(), **responses, "base": self._base}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """As `Table.restore`, of a predecessor's snapshot."""
        super().restore(snapshot)
        self._responses.restore({"responses": [], **snapshot})
        self._base = dict(snapshot["base"])

    def report(self, now_ns: int, wall_ns: int, gauges: dict[str, Any]) -> dict[str, Any]:
        """Everything as the package says; `gauges` are the `shmserve` keys that others know."""
        self._count()
        executions = self.executions
        count, executed = self.success, self.success - self.cache_hit
        return {
            "name": self._model[0],
            "version": self._model[1],
            "last_inference": executions.last_ms(now_ns, wall_ns),
            "inference_count": self.inference_count,
            "execution_count": executions.execution_count,
            "inference_stats": {
                "success": duration(count, self.success_ns),
                "fail": duration(self.fail, self.fail_ns),
                "queue": duration(count, self.queue_ns),
                "compute_input": duration(executed, self.compute_input_ns),
                "compute_infer": duration(executed, self.compute_infer_ns),
                "compute_output": duration(executed, self.compute_output_ns),
                "cache_hit": duration(self.cache_hit, self.cache_hit_ns),
                "cache_miss": duration(self.cache_miss, self.cache_miss_ns),
            },
            "response_stats": self._responses.report(),
            "batch_stats": executions.by_size(),
            "memory_usage": [],
            "shmserve": {
                **total(self.snapshot(brief=True)),
                "quantiles": {
                    name: each.report(self._shown_quantiles, now_ns)
                    for name, each in self._quantiles.items()
                },
                **gauges,
            },
        }
