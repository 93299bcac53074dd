"""Everything that is counted of a model version, and the report of it: requests, executions of
batches (how many of which size, what they cost, and why each was begun), responses.

Responses of a decoupled model are counted by their index within their request, as Triton does. The
time of one runs from the one before it (of the first, from the request's dispatch) until its
outputs were written: computing first, then writing. The end of a request that comes without a
response, and a cancellation, have an index of their own.

    success         compute_infer, compute_output, success
    error           compute_infer, fail; compute_output if it has outputs
    the end alone   compute_infer, empty_response
    cancelled       cancel; also where its model says so, by an error with that code
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from operator import sub
from typing import Any, Protocol

from shmserve.common.counters import plus, total
from shmserve.errors import Cancelled
from shmserve.ipc.messages.inference import ExecutionResponded, Reply
from shmserve.scheduler.batchers.base import Closed
from shmserve.scheduler.settings import Settings
from shmserve.scheduler.statistics.generation_stats import GenerationStats
from shmserve.scheduler.statistics.table import Histogram, Quantiles, Table
from shmserve.scheduler.statistics.timing import NS_PER_S, SECONDS, Timing, duration

# A request may have any number of responses, and what is reported has an end: those from this index
# on are counted together.
LAST_INDEX = 1000
# What is noted of executions, and of requests that have ended, is counted when somebody asks, or
# when an execution ends and so many units are noted: together it costs half, and no request waits
# for it.
MOST_NOTED = 64

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_NS_PER_MS = 1_000_000
_NS_PER_US = 1_000
# Of a request that has succeeded: when it ended and arrived, its units, when it was enqueued, and
# its execution's phases, once they are known. Of one whose phases are known later: when that is,
# when it was enqueued, and the phases.
_Noted = tuple[int, int, int, int, Timing | None]
_Execution = tuple[Closed, int, Timing]  # why it was begun, and the units of its requests
_Timed = tuple[int, int, Timing]
_SUMMARISED = ("request", "queue", "compute_input", "compute_infer", "compute_output")
_SUMMARISED_OF_CACHE = ("cache_hit", "cache_miss")


class Counted(Protocol):
    """The counted attributes of a model's or an ensemble's request; times are monotonic ns. It
    counts for `units` in a batch, has had so many `responses`, and since `responded_ns` the model
    has been at the next one; `untimed`: it succeeded before its execution returned."""

    arrived_ns: int
    enqueued_ns: int
    responded_ns: int
    responses: int
    units: int
    untimed: bool


_NAMES = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
_INFER, _OUTPUT, _SUCCESS, _FAIL, _EMPTY, _CANCEL = range(0, 12, 2)


class ResponseStats(Table):
    """Counts and times (ns) of responses, a row an index."""

    def __init__(self) -> None:
        self.responses: list[list[int]] = []  # count and ns of each name

    def responded(
        self, request: Counted, response: ExecutionResponded | Reply, now_ns: int
    ) -> None:
        """A request had its response number `request.responses`, or its end without one. Times
        count as far as they can be true."""
        if response.code == Cancelled.code:
            self.cancelled(request, now_ns)
            request.responded_ns = now_ns
            return
        row = self._row(request.responses)
        began_ns = request.responded_ns
        given_ns = written_ns = now_ns
        if type(response) is ExecutionResponded:
            given_ns, written_ns = response.given_ns, response.written_ns
            if not began_ns <= given_ns <= written_ns <= now_ns:
                written_ns = min(max(written_ns, began_ns), now_ns)
                given_ns = min(max(given_ns, began_ns), written_ns)
        request.responded_ns = written_ns
        if response.schema:
            row[_OUTPUT] += 1
            row[_OUTPUT + 1] += written_ns - given_ns
        else:
            given_ns = written_ns
        row[_INFER] += 1
        row[_INFER + 1] += given_ns - began_ns
        kind = _FAIL if response.code else _SUCCESS if response.schema else _EMPTY
        row[kind] += 1
        row[kind + 1] += written_ns - began_ns

    def cancelled(self, request: Counted, now_ns: int) -> None:
        """A request ended that nobody waited for any more."""
        row = self._row(request.responses)
        row[_CANCEL] += 1
        row[_CANCEL + 1] += max(now_ns - request.responded_ns, 0)

    def _row(self, index: int) -> list[int]:
        rows = self.responses
        if index >= len(rows):
            index = min(index, LAST_INDEX)
            while len(rows) <= index:
                rows.append([0] * 12)
        return rows[index]

    def report(self) -> dict[str, Any]:
        """By index, as `response_stats` of GET /v2/models/NAME/stats."""
        return {
            str(index): {
                name: {"count": row[2 * at], "ns": row[2 * at + 1]}
                for at, name in enumerate(_NAMES)
            }
            for index, row in enumerate(self.responses)
        }


class ExecutionStats(Table):
    """Counters of executions since the version was loaded; times in ns."""

    def __init__(self) -> None:
        self.execution_count = 0
        self.last_ns = 0
        self.batch_sizes: dict[int, list[int]] = {}  # count, and ns of the three phases
        self.batches_closed = dict.fromkeys(Closed, 0)
        self.compute_seconds = Histogram(SECONDS, NS_PER_S)
        self.batch_size = Histogram(_SIZES)
        self._copied = [0, 0]
        self.padding: dict[str, list[int]] = {}  # by input: elements, and of these padding

    def count(self, noted: list[_Execution]) -> None:
        """Count executions."""
        reasons, units, timings = zip(*noted, strict=True)
        _, *phases, _, _, _ = zip(*timings, strict=True)
        self.execution_count += len(noted)
        for reason, count in Counter(reasons).items():
            self.batches_closed[reason] += count
        for size, input_ns, infer_ns, output_ns in zip(units, *phases, strict=True):
            row = self.batch_sizes.get(size)
            if row is None:
                row = self.batch_sizes[size] = [0, 0, 0, 0]
            row[0] += 1
            row[1] += input_ns
            row[2] += infer_ns
            row[3] += output_ns
        self.compute_seconds.observe(*map(sum, zip(*phases, strict=True)))
        self.batch_size.observe(*units)

    def copied(self, into: int, out: int) -> None:
        """So many bytes of tensors were copied by a worker."""
        self._copied[0] += into
        self._copied[1] += out

    def padded(self, elements: Mapping[str, tuple[int, int]]) -> None:
        """A batch was sent whose padded inputs have (elements, of these padding), by name."""
        for name, counts in elements.items():
            before = self.padding.get(name, (0, 0))
            self.padding[name] = [a + b for a, b in zip(before, counts, strict=True)]

    def table(self) -> dict[str, Any]:
        """The entries; rows by batch size are [size, executions, ns of the three phases]."""
        rows = [[size, *row] for size, row in self.batch_sizes.items()]
        copied = dict(zip(("in", "out"), self._copied, strict=True))
        return {**super().table(), "batch_sizes": rows, "copied_bytes": copied}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """As `Table.restore`."""
        rows = {int(size): [int(n) for n in row] for size, *row in snapshot["batch_sizes"]}
        super().restore({**snapshot, "batch_sizes": {}})
        self.batch_sizes = rows
        self._copied = [int(snapshot["copied_bytes"][direction]) for direction in ("in", "out")]

    def last_ms(self, now_ns: int, wall_ns: int) -> int:
        """When the last one came back, ms since the epoch; 0: there was none."""
        return (wall_ns - (now_ns - self.last_ns)) // 1_000_000 if self.last_ns else 0

    def by_size(self) -> list[dict[str, Any]]:
        """`batch_stats` of the report."""
        return [
            {
                "batch_size": size,
                "compute_input": duration(row[0], row[1]),
                "compute_infer": duration(row[0], row[2]),
                "compute_output": duration(row[0], row[3]),
            }
            for size, row in sorted(self.batch_sizes.items())
        ]


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
        self._noted_executions: list[_Execution] = []
        self._noted_units = 0
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

    def executed(self, reason: Closed, units: int, timing: Timing, now_ns: int) -> None:
        """An execution of requests that sum up to `units` came back, and these are about to end."""
        self._noted_units += units or 1
        if self._noted_units > MOST_NOTED:
            self._count()
            self._noted_units = units
        self.executions.last_ns = now_ns
        self._noted_executions.append((reason, units, timing))

    def succeeded(self, request: Counted, timing: Timing | None, now_ns: int) -> None:
        """A request has ended with its result. Where its execution has not returned yet there is
        no `timing`, and `timed` follows."""
        if timing is None:
            request.untimed = True
        self._noted.append((now_ns, request.arrived_ns, request.units, request.enqueued_ns, timing))

    def timed(self, request: Counted, timing: Timing, now_ns: int) -> None:
        """The execution of a request that succeeded took this long."""
        self._noted_late.append((now_ns, request.enqueued_ns, timing))

    def _count(self) -> None:
        """Count what was noted, before anything is read here."""
        executions, self._noted_executions = self._noted_executions, []
        if executions:
            self.executions.count(executions)
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
        if not request.responses and (response.schema or response.code):
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
