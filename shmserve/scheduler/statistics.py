"""The statistics of a model version (pure).

`Statistics.report` returns the entry of GET /v2/models/NAME/stats, with Triton's fields:

    name, version, last_inference, inference_count, execution_count, inference_stats,
    response_stats, batch_stats, memory_usage

and the key `shmserve` for metrics: the flat table plus the counts of the versions that this version
replaced (its base), and current values:

    inference_count, execution_count, success, fail, cache_hit, cache_miss, and times:
        success_ns, fail_ns, queue_ns, compute_input_ns, compute_infer_ns, compute_output_ns,
        cache_hit_ns, cache_miss_ns
    failures        {"REJECTED" | "CANCELED" | "BACKEND" | "OTHER": requests}
    batches_closed  {batchers.CloseReason: executions}; the steps of a generative model are
                    no batches
    request_seconds, queue_seconds (one observation per success), compute_seconds, batch_size (one
        per execution), first_response_ms (one per request; decoupled models only)
                    {"buckets": upper bounds, "counts": observations per bucket, not cumulative,
                    one more than bounds (+Inf), "sum", "count"}
    instance_changes {"more" | "fewer": how often an instance was added or removed between the
                    bounds of their number}
    workers_lost    instances whose process ended while they served, with requests or without
    retried         requests that ran again, alone, after their worker died
    overruns        executions that exceeded the limit
    malformed       frames and messages that were dropped
    copied_bytes    {"in" | "out": bytes of tensors that workers copied to and from the model;
                    tensors that are used in place are not counted}
    padding         {padded input: [elements, padding elements]}

    pending         requests in the queue
    executing       requests at workers
    live            requests that have not ended
    open_sequences  sequences that have begun and not ended
    queue_delay_ns  the longest time for which a request waits by configuration
    quantiles       {"request" | "queue" | "compute_input" | "compute_infer" | "compute_output":
                    [[quantile, µs or None], ...]} of the last minute, one observation per
                    success; empty unless they are configured
    instances       {"gone" | "expected" | "idle" | "busy" | "doomed": instances}
    is_ensemble     only in the report of an ensemble
    cache           {"bytes", "bound", "entries", "evicted", "lent_bytes"} of the response cache;
                    empty without a cache
    families        the model's own metrics, as model_metrics.to_lists returns them

`Statistics.snapshot` returns the table without the base, the base as "base", and the rows of this
version alone: batch_sizes, responses, last_ns (the last execution, monotonic).

A request is counted before its last response is sent, so that a client that queries the statistics
after this response finds the request counted. A decoupled model's request has failed if its
model raised or no process took its responses. An error that the model sends is a response, even as
the last one, and counts in `response_stats` alone.
"""

from __future__ import annotations

from enum import StrEnum
from operator import add, sub
from typing import Any

from shmserve.common.model_metrics import add_tables, sum_counters
from shmserve.ipc.messages.inference import ExecutionResponded, Reply
from shmserve.scheduler.batchers import CloseReason
from shmserve.scheduler.requests.scheduled import Timing
from shmserve.scheduler.settings import Settings
from shmserve.scheduler.tables import (
    NS_PER_S,
    TIME_BOUNDS_S,
    CountedRequest,
    Execution,
    ExecutionStats,
    GenerationStats,
    Histogram,
    Quantiles,
    ResponseStats,
    Table,
    duration,
)

# Ended requests and executions are recorded first, and counted together when the statistics are
# read, or when an execution ends and this many rows are recorded. This takes half the time and
# delays no request.
MAX_RECORDED_ROWS = 64

_NS_PER_MS = 1_000_000
_NS_PER_US = 1_000
# A success: the times of its end and its arrival, its rows, the time of its enqueueing, and the
# phases of its execution. The phases are None if the execution has not returned. Its return then
# records `_RecordedTimes`: the times of the return and of the enqueueing, and the phases.
_RecordedSuccess = tuple[int, int, int, int, Timing | None]
_RecordedTimes = tuple[int, int, Timing]
_QUANTILE_TIMES = ("request", "queue", "compute_input", "compute_infer", "compute_output")
_CACHE_QUANTILE_TIMES = ("cache_hit", "cache_miss")


class Reason(StrEnum):
    """The reason why a request failed: the label of the failure counter."""

    REJECTED = "REJECTED"  # not admitted, or expired in the queue
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"  # the model failed, or its process died
    OTHER = "OTHER"


class Statistics(Table):
    """All counters since the version was loaded; times in ns."""

    def __init__(self, settings: Settings) -> None:
        self._model_key = settings.name, settings.version
        self._queue_delay_ns = settings.queue_delay_ns
        self.executions = ExecutionStats()
        self.inference_count = 0  # rows of successful requests
        self.success = 0  # number of requests
        self.success_ns = 0  # sum of their latencies
        self.queue_ns = 0
        self.compute_input_ns = 0
        self.compute_infer_ns = 0
        self.compute_output_ns = 0
        self.fail = 0  # number of requests
        self.fail_ns = 0  # sum of their latencies
        self.failures = dict.fromkeys(Reason, 0)
        self.request_seconds = Histogram(TIME_BOUNDS_S, NS_PER_S)
        self.queue_seconds = Histogram(TIME_BOUNDS_S, NS_PER_S)
        self._first_responses = Histogram(settings.first_response_buckets_ms, _NS_PER_MS)
        if settings.decoupled:
            self.first_response_ms = self._first_responses
        if settings.engine is not None:
            self.generation = GenerationStats()
        self._responses = ResponseStats()
        self._reported_quantiles = settings.quantiles
        names = (*_QUANTILE_TIMES, *(_CACHE_QUANTILE_TIMES if settings.caches_responses else ()))
        self._quantiles = {name: Quantiles() for name in names} if settings.quantiles else {}
        self.instance_changes = {"more": 0, "fewer": 0}
        self.workers_lost = 0
        self.retried = 0  # requests that ran again after their worker had died
        self.overruns = 0  # executions that exceeded the time limit
        self.malformed = 0  # messages
        self.cache_hit, self.cache_hit_ns = 0, 0  # requests, and the duration of their lookups
        self.cache_miss, self.cache_miss_ns = 0, 0
        self._base: dict[str, Any] = {}  # the counts of the replaced version
        self._successes: list[_RecordedSuccess] = []
        self._recorded_executions: list[Execution] = []
        self._recorded_rows = 0
        self._late_times: list[_RecordedTimes] = []

    @property
    def model_key(self) -> tuple[str, str]:
        """Return the name and the version of the model."""
        return self._model_key

    def set_base(self, base: dict[str, Any]) -> None:
        """Set the counts of the version that this version replaces, which are added to reports.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: The base is no table.
        """
        for name in ("success", "execution_count"):  # these keys are in every table
            int(base[name])
        add_tables(self.table(), base)
        self._base = base

    def add_moved(self, snapshot: dict[str, Any]) -> None:
        """Continue the counts and the base of the scheduler from which this version was moved."""
        counts = sum_counters({**self.table(), "base": snapshot})
        executions = self.executions
        own_sizes, own_last_ns = executions.batch_sizes, executions.last_ns
        self.restore({**snapshot, **counts})
        executions.last_ns = max(executions.last_ns, own_last_ns)
        for size, row in own_sizes.items():
            moved_row = executions.batch_sizes.get(size, [0] * len(row))
            executions.batch_sizes[size] = list(map(add, moved_row, row))

    def count_execution(
        self, reason: CloseReason | None, rows: int, timing: Timing, now_ns: int
    ) -> None:
        """Count an execution whose requests are about to end; `rows` is their total batch size."""
        self._recorded_rows += rows or 1
        if self._recorded_rows > MAX_RECORDED_ROWS:
            self._count_recorded()
            self._recorded_rows = rows
        self.executions.last_ns = now_ns
        self._recorded_executions.append((reason, rows, timing))

    def count_success(self, request: CountedRequest, timing: Timing | None, now_ns: int) -> None:
        """Count a success; if `timing` is None, `count_times` is called after its execution."""
        if timing is None:
            request.succeeded_early = True
        self._successes.append(
            (now_ns, request.arrived_ns, request.rows, request.enqueued_ns, timing)
        )

    def count_times(self, request: CountedRequest, timing: Timing, now_ns: int) -> None:
        """Count the times of a request that succeeded before its execution returned."""
        self._late_times.append((now_ns, request.enqueued_ns, timing))

    def _count_recorded(self) -> None:
        """Count the recorded requests and executions; called before every read."""
        executions, self._recorded_executions = self._recorded_executions, []
        if executions:
            self.executions.count(executions)
        successes, self._successes = self._successes, []
        late_times, self._late_times = self._late_times, []
        if successes:
            end_times, arrival_times, rows, _, _ = zip(*successes, strict=True)
            latencies_ns = list(map(sub, end_times, arrival_times))
            self.success += len(successes)
            self.success_ns += sum(latencies_ns)
            self.inference_count += sum(rows)
            self.request_seconds.observe(*latencies_ns)
        times = [(ns, enqueued_ns, t) for ns, _, _, enqueued_ns, t in successes if t is not None]
        times += late_times
        if times:
            _, enqueue_times, timings = zip(*times, strict=True)
            starts, inputs, infers, outputs, *_ = zip(*timings, strict=True)
            queue_times = list(map(sub, starts, enqueue_times))
            self.queue_ns += sum(queue_times)
            self.compute_input_ns += sum(inputs)
            self.compute_infer_ns += sum(infers)
            self.compute_output_ns += sum(outputs)
            self.queue_seconds.observe(*queue_times)
        if self._quantiles:
            self._observe(successes, times)

    def _observe(self, successes: list[_RecordedSuccess], times: list[_RecordedTimes]) -> None:
        """Add the latencies and the times of executions to the quantiles."""
        quantiles = self._quantiles
        for now_ns, arrived_ns, *_ in successes:
            quantiles["request"].observe((now_ns - arrived_ns) // _NS_PER_US, now_ns)
        for now_ns, enqueued_ns, timing in times:
            queue_ns = timing.compute_start_ns - enqueued_ns
            for name, ns in zip(_QUANTILE_TIMES[1:], (queue_ns, *timing[1:4]), strict=True):
                quantiles[name].observe(ns // _NS_PER_US, now_ns)

    def count_hit(self, arrived_ns: int, queue_ns: int, lookup_ns: int, now_ns: int) -> None:
        """Count a success with a cached response, whose lookup took `lookup_ns`."""
        total_ns = now_ns - arrived_ns + lookup_ns
        self.cache_hit += 1
        self.cache_hit_ns += lookup_ns
        self.success += 1
        self.success_ns += total_ns
        self.queue_ns += queue_ns
        self.request_seconds.observe(total_ns)
        self.queue_seconds.observe(queue_ns)
        if self._quantiles:
            for name, ns in (("request", total_ns), ("queue", queue_ns), ("cache_hit", lookup_ns)):
                self._quantiles[name].observe(ns // _NS_PER_US, now_ns)

    def count_miss(self, lookup_ns: int, insert_ns: int, now_ns: int) -> None:
        """Count a cache miss of a request that is about to succeed."""
        self.cache_miss += 1
        self.cache_miss_ns += lookup_ns + insert_ns
        self.success_ns += insert_ns
        if self._quantiles:
            self._quantiles["cache_miss"].observe((lookup_ns + insert_ns) // _NS_PER_US, now_ns)

    def count_response(
        self, request: CountedRequest, response: ExecutionResponded | Reply, now_ns: int
    ) -> None:
        """Count a response of a decoupled model, or the end of its responses."""
        if not request.response_count and (response.schema or response.code):
            # The first-response time in whole ms, as Triton observes it.
            whole_ms = (now_ns - request.arrived_ns) // _NS_PER_MS
            self._first_responses.observe(whole_ms * _NS_PER_MS)
        self._responses.count_response(request, response, now_ns)

    def count_cancelled(self, request: CountedRequest, now_ns: int) -> None:
        """Count a cancelled request that a decoupled model has ended."""
        self._responses.count_cancelled(request, now_ns)

    def count_failure(self, arrived_ns: int, reason: Reason, now_ns: int) -> None:
        """Count a failed request."""
        self.fail += 1
        self.fail_ns += max(now_ns - arrived_ns, 0)
        self.failures[reason] += 1

    def table(self) -> dict[str, Any]:
        self._count_recorded()
        return super().table()

    def snapshot(self, omits_responses: bool = False) -> dict[str, Any]:
        """Return the table for a successor; `omits_responses` saves up to 1,000 rows."""
        responses = {} if omits_responses else self._responses.table()
        return {**self.table(), **responses, "base": self._base}

    def restore(self, snapshot: dict[str, Any]) -> None:
        super().restore(snapshot)
        self._responses.restore({"responses": [], **snapshot})
        self._base = dict(snapshot["base"])

    def report(self, now_ns: int, wall_ns: int, gauges: dict[str, Any]) -> dict[str, Any]:
        """Return the complete report; `gauges` are added to its member `shmserve`."""
        self._count_recorded()
        executions = self.executions
        success_count, executed_count = self.success, self.success - self.cache_hit
        return {
            "name": self._model_key[0],
            "version": self._model_key[1],
            "last_inference": executions.last_ms(now_ns, wall_ns),
            "inference_count": self.inference_count,
            "execution_count": executions.execution_count,
            "inference_stats": {
                "success": duration(success_count, self.success_ns),
                "fail": duration(self.fail, self.fail_ns),
                "queue": duration(success_count, self.queue_ns),
                "compute_input": duration(executed_count, self.compute_input_ns),
                "compute_infer": duration(executed_count, self.compute_infer_ns),
                "compute_output": duration(executed_count, self.compute_output_ns),
                "cache_hit": duration(self.cache_hit, self.cache_hit_ns),
                "cache_miss": duration(self.cache_miss, self.cache_miss_ns),
            },
            "response_stats": self._responses.report(),
            "batch_stats": executions.by_size(),
            "memory_usage": [],
            "shmserve": {
                **sum_counters(self.snapshot(omits_responses=True)),
                "quantiles": {
                    name: quantiles.report(self._reported_quantiles, now_ns)
                    for name, quantiles in self._quantiles.items()
                },
                "queue_delay_ns": self._queue_delay_ns,
                **gauges,
            },
        }
