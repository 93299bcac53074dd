"""Tables of counters with snapshot and restore (pure).

The tables are histograms, quantiles, executions, responses and generated text. A histogram counts
in fixed buckets since the start. Quantiles are read from a sketch of the last minute, whose bucket
bounds grow by a constant factor. Each quantile is thus known within a relative error of `ACCURACY`,
at the cost of one dictionary update per observation: C. Masson, J. E. Rim, H. K. Lee, "DDSketch: A
Fast and Fully-Mergeable Quantile Sketch with Relative-Error Guarantees", PVLDB 12(12), 2019.
(Triton's client library bounds the error of the rank instead, with CKMS, at the cost of a sorted
insertion for each of five windows.)

The window is as in Triton's library: 60 seconds in five parts. The oldest part expires as a
whole, so that quantiles cover the last 48 to 60 seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import repeat
from math import ceil, log
from typing import Any, Protocol

from shmserve.errors import Cancelled
from shmserve.ipc.messages.inference import ExecutionResponded, Reply
from shmserve.scheduler.batchers import CloseReason
from shmserve.scheduler.requests.scheduled import Timing

ACCURACY = 0.005  # maximum relative error of a quantile
NS_PER_S = 1_000_000_000
# The upper bounds of the buckets of a histogram of times, in seconds.
TIME_BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
# A request may have any number of responses; the responses from this index on share a row.
LAST_RESPONSE_INDEX = 1000
# The reason why a batch was closed (None: it was no batch), its size, and its phases.
Execution = tuple[CloseReason | None, int, Timing]

_WINDOW_NS = 60 * NS_PER_S
_WINDOW_PARTS = 5
_PART_NS = _WINDOW_NS // _WINDOW_PARTS
_GROWTH = (1 + ACCURACY) / (1 - ACCURACY)
_LOG_GROWTH = log(_GROWTH)
_SHORT_TIME_BOUNDS_S = (0.00001, 0.00005, *TIME_BOUNDS_S)
_TOKEN_BOUNDS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_BATCH_SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_RESPONSE_COLUMNS = (
    *("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel"),
)
# The index of each column's count in a row; the column's total ns follow it.
_INFER, _OUTPUT, _SUCCESS, _FAIL, _EMPTY, _CANCEL = range(0, 12, 2)


def duration(count: int, ns: int) -> dict[str, int]:
    """Return a count and the total time of the counted events, in Triton's form."""
    return {"count": count, "ns": ns}


class Histogram:
    """Counts of integer observations in fixed buckets.

    Reported bounds and sums are in a larger unit, which equals `scale` observed units.
    """

    __slots__ = ("_bounds", "_counts", "_reported_bounds", "_scale", "_sum")

    def __init__(self, reported_bounds: Sequence[float], scale: int = 1) -> None:
        self._reported_bounds = list(reported_bounds)
        self._scale = scale  # observed units per reported unit
        self._bounds = [round(bound * scale) for bound in reported_bounds]
        self._counts = [0] * (len(reported_bounds) + 1)
        self._sum = 0

    def observe(self, *values: int) -> None:
        """Count observations; a bucket includes its upper bound."""
        counts = self._counts
        for bucket in map(bisect_left, repeat(self._bounds), values):
            counts[bucket] += 1
        self._sum += sum(values)

    def restore(self, report: dict[str, Any]) -> None:
        """Continue from a report; raise ValueError if its buckets differ."""
        if report["buckets"] != self._reported_bounds or len(report["counts"]) != len(self._counts):
            raise ValueError("the buckets of the histogram have changed")
        self._counts = list(map(int, report["counts"]))
        self._sum = round(report["sum"] * self._scale)

    def report(self) -> dict[str, Any]:
        """Return the counts, as described in statistics.py."""
        return {
            "buckets": self._reported_bounds,
            "counts": list(self._counts),
            "sum": self._sum / self._scale if self._scale != 1 else self._sum,
            "count": sum(self._counts),
        }


class Quantiles:
    """Quantiles of the integers observed within the last minute. Times are in ns."""

    __slots__ = ("_ends_ns", "_newest_counts", "_parts")

    def __init__(self) -> None:
        self._newest_counts: dict[int, int] = {}
        self._parts: deque[dict[int, int]] = deque([self._newest_counts], maxlen=_WINDOW_PARTS)
        self._ends_ns = 0  # when the newest part of the window ends

    def observe(self, value: int, now_ns: int) -> None:
        """Count an observation; values below 1 count as 0."""
        if now_ns >= self._ends_ns:
            self._slide(now_ns)
        index = ceil(log(value) / _LOG_GROWTH) if value > 0 else -1
        newest_counts = self._newest_counts
        newest_counts[index] = newest_counts.get(index, 0) + 1

    def _slide(self, now_ns: int) -> None:
        if now_ns >= self._ends_ns + _WINDOW_NS:
            self._parts.clear()
            self._ends_ns = now_ns
        while now_ns >= self._ends_ns:
            self._newest_counts = {}
            self._parts.append(self._newest_counts)
            self._ends_ns += _PART_NS

    def report(self, quantiles: Sequence[float], now_ns: int) -> list[list[float | None]]:
        """Return [quantile, value] pairs; the value is None without observations."""
        if now_ns >= self._ends_ns:
            self._slide(now_ns)
        counts: dict[int, int] = {}
        for part_counts in self._parts:
            for index, count in part_counts.items():
                counts[index] = counts.get(index, 0) + count
        return [[quantile, _quantile_value(quantile, counts)] for quantile in quantiles]


def _quantile_value(quantile: float, counts: dict[int, int]) -> float | None:
    """Return the middle of the bucket that contains this quantile, or None without counts."""
    rank = min(max(quantile, 0), 1) * (sum(counts.values()) - 1)
    count_so_far = 0
    for index in sorted(counts):
        count_so_far += counts[index]
        if count_so_far > rank:
            return 0.0 if index < 0 else 2 * _GROWTH**index / (_GROWTH + 1)
    return None


class Table:
    """A flat table of counters whose entries are its public attributes.

    An entry is a number, a list of numbers, a dictionary of these, a histogram, or a table whose
    entries are added to this one.
    """

    def table(self) -> dict[str, Any]:
        """Return the entries, in the form of shmserve/common/model_metrics.py."""
        entries: dict[str, Any] = {}
        for name, value in self._entries():
            entries |= value.table() if isinstance(value, Table) else {name: _to_plain(value)}
        return entries

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a snapshot.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: The snapshot has another form; some
                entries may have been restored.
        """
        for name, value in self._entries():
            if isinstance(value, (Table, Histogram)):
                value.restore(snapshot if isinstance(value, Table) else snapshot[name])
            else:
                setattr(self, name, _restore_entry(value, snapshot[name]))

    def _entries(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in vars(self).items() if name[0] != "_"]


def _to_plain(value: Any) -> Any:
    if isinstance(value, Histogram):
        return value.report()
    if isinstance(value, dict):
        return {str(key): _to_plain(item) for key, item in value.items()}
    return [_to_plain(item) for item in value] if isinstance(value, list) else value


def _restore_entry(value: Any, stored_value: Any) -> Any:
    if isinstance(value, dict):
        return value | {key: _to_integers(item) for key, item in stored_value.items()}
    return _to_integers(stored_value)


def _to_integers(stored_value: Any) -> Any:
    if isinstance(stored_value, list):
        return [_to_integers(item) for item in stored_value]
    return int(stored_value)


class CountedRequest(Protocol):
    """The counted attributes of a request of a model or an ensemble; times are monotonic ns.

    `rows` is its batch size, `response_count` the number of responses so far, `responded_ns` the
    time of the last one. `succeeded_early` is true if the request succeeded before its execution
    returned.
    """

    arrived_ns: int
    enqueued_ns: int
    responded_ns: int
    response_count: int
    rows: int
    succeeded_early: bool


class ResponseStats(Table):
    """Counts and times (ns) of the responses of a decoupled model, one row for each index.

    The time of a response begins at the previous response, or at the dispatch, and ends when its
    outputs were written. The inference counts first, then the output. An end without a response and
    a cancellation have an index of their own.

        success         compute_infer, compute_output, success
        error           compute_infer, fail; compute_output if it has outputs
        the end alone   compute_infer, empty_response
        cancelled       cancel; also an error with that code, sent by the model
    """

    def __init__(self) -> None:
        self.responses: list[list[int]] = []  # the count and the total ns of each column

    def count_response(
        self, request: CountedRequest, response: ExecutionResponded | Reply, now_ns: int
    ) -> None:
        """Count the response with index `request.response_count`, or the end without a response.

        Times are clamped to the possible range.
        """
        if response.code == Cancelled.code:
            self.count_cancelled(request, now_ns)
            request.responded_ns = now_ns
            return
        row = self._row(request.response_count)
        began_ns = request.responded_ns
        computed_ns = written_ns = now_ns
        if type(response) is ExecutionResponded:
            computed_ns, written_ns = response.computed_ns, response.written_ns
            if not began_ns <= computed_ns <= written_ns <= now_ns:
                written_ns = min(max(written_ns, began_ns), now_ns)
                computed_ns = min(max(computed_ns, began_ns), written_ns)
        request.responded_ns = written_ns
        if response.schema:
            row[_OUTPUT] += 1
            row[_OUTPUT + 1] += written_ns - computed_ns
        else:
            computed_ns = written_ns
        row[_INFER] += 1
        row[_INFER + 1] += computed_ns - began_ns
        column = _FAIL if response.code else _SUCCESS if response.schema else _EMPTY
        row[column] += 1
        row[column + 1] += written_ns - began_ns

    def count_cancelled(self, request: CountedRequest, now_ns: int) -> None:
        """Count the end of a cancelled request."""
        row = self._row(request.response_count)
        row[_CANCEL] += 1
        row[_CANCEL + 1] += max(now_ns - request.responded_ns, 0)

    def _row(self, response_index: int) -> list[int]:
        rows = self.responses
        if response_index >= len(rows):
            response_index = min(response_index, LAST_RESPONSE_INDEX)
            while len(rows) <= response_index:
                rows.append([0] * 12)
        return rows[response_index]

    def report(self) -> dict[str, Any]:
        """Return the rows by index, as `response_stats` of GET /v2/models/NAME/stats."""
        return {
            str(index): {
                name: {"count": row[2 * column], "ns": row[2 * column + 1]}
                for column, name in enumerate(_RESPONSE_COLUMNS)
            }
            for index, row in enumerate(self.responses)
        }


class ExecutionStats(Table):
    """Counters of executions since the version was loaded; times in ns."""

    def __init__(self) -> None:
        self.execution_count = 0
        self.last_ns = 0  # the time of the last execution
        # The number of executions and the total ns of their three phases, by batch size.
        self.batch_sizes: dict[int, list[int]] = {}
        self.batches_closed = dict.fromkeys(CloseReason, 0)
        self.compute_seconds = Histogram(TIME_BOUNDS_S, NS_PER_S)
        self.batch_size = Histogram(_BATCH_SIZE_BOUNDS)
        self._copied_bytes = [0, 0]
        self.padding: dict[str, list[int]] = {}  # by input name: elements and padding elements

    def count(self, executions: list[Execution]) -> None:
        """Add executions, which `Statistics` has recorded, to the counters."""
        reasons, rows, timings = zip(*executions, strict=True)
        _, *phases, _, _, _ = zip(*timings, strict=True)
        self.execution_count += len(executions)
        for reason, count in Counter(reasons).items():
            if reason is not None:
                self.batches_closed[reason] += count
        for size, input_ns, infer_ns, output_ns in zip(rows, *phases, strict=True):
            row = self.batch_sizes.get(size)
            if row is None:
                row = self.batch_sizes[size] = [0, 0, 0, 0]
            row[0] += 1
            row[1] += input_ns
            row[2] += infer_ns
            row[3] += output_ns
        self.compute_seconds.observe(*map(sum, zip(*phases, strict=True)))
        self.batch_size.observe(*rows)

    def count_copied(self, in_bytes: int, out_bytes: int) -> None:
        """Count the bytes of tensors that a worker copied into and out of the model."""
        self._copied_bytes[0] += in_bytes
        self._copied_bytes[1] += out_bytes

    def count_padding(self, elements: Mapping[str, tuple[int, int]]) -> None:
        """Count the (elements, padding elements) of a batch's padded inputs, by name."""
        for name, counts in elements.items():
            previous_counts = self.padding.get(name, (0, 0))
            self.padding[name] = [a + b for a, b in zip(previous_counts, counts, strict=True)]

    def table(self) -> dict[str, Any]:
        """Return the entries; `batch_sizes` has rows [size, executions, ns of the three phases]."""
        rows = [[size, *row] for size, row in self.batch_sizes.items()]
        copied_bytes = dict(zip(("in", "out"), self._copied_bytes, strict=True))
        return {**super().table(), "batch_sizes": rows, "copied_bytes": copied_bytes}

    def restore(self, snapshot: dict[str, Any]) -> None:
        rows = {int(size): [int(n) for n in row] for size, *row in snapshot["batch_sizes"]}
        super().restore({**snapshot, "batch_sizes": {}})
        self.batch_sizes = rows
        copied_bytes = snapshot["copied_bytes"]
        self._copied_bytes = [int(copied_bytes[direction]) for direction in ("in", "out")]

    def last_ms(self, now_ns: int, wall_ns: int) -> int:
        """Return the time of the last execution in ms since the epoch, or 0."""
        return (wall_ns - (now_ns - self.last_ns)) // 1_000_000 if self.last_ns else 0

    def by_size(self) -> list[dict[str, Any]]:
        """Return the statistics by batch size, as `batch_stats` of the report."""
        return [
            {
                "batch_size": size,
                "compute_input": duration(row[0], row[1]),
                "compute_infer": duration(row[0], row[2]),
                "compute_output": duration(row[0], row[3]),
            }
            for size, row in sorted(self.batch_sizes.items())
        ]


class GenerationStats(Table):
    """Counters and histograms of a generative model since it was loaded.

    The counters are tokens, steps and blocks. The histograms are the durations of steps, the
    latencies of the tokens of each text, and numbers of tokens. `prefilled` counts computed tokens
    of prompts, and `decoded` counts tokens computed one at a time.
    """

    def __init__(self) -> None:
        self.generated = 0  # tokens of texts
        self.prefilled = 0  # tokens of prompts
        self.decoded = 0  # tokens computed one at a time
        self.finished = {"stop": 0, "length": 0}  # sequences by finish reason
        self.preemptions = {"swap": 0, "recompute": 0}
        self.recomputed = 0  # tokens
        self.swapped_in = 0  # blocks
        self.swapped_out = 0  # blocks
        self.copied_on_write = 0  # blocks
        self.prefix_queries = 0  # tokens looked up in the prefix cache
        self.prefix_hits = 0  # tokens found in it
        # The total ns of each phase of the steps, and of the text processing beside the steps.
        self.phases = dict.fromkeys(("schedule", "gather", "forward", "sample", "draft", "text"), 0)
        self.drafted = 0  # draft tokens
        self.accepted = 0  # draft tokens
        self.speculative_steps = 0  # rows of steps that contained draft tokens
        self.iteration_seconds = Histogram(TIME_BOUNDS_S, NS_PER_S)
        self.scheduler_seconds = Histogram(_SHORT_TIME_BOUNDS_S, NS_PER_S)
        self.batch_tokens = Histogram(_TOKEN_BOUNDS)
        self.first_token_seconds = Histogram(TIME_BOUNDS_S, NS_PER_S)
        self.inter_token_seconds = Histogram(TIME_BOUNDS_S, NS_PER_S)
        self.prompt_tokens = Histogram(_TOKEN_BOUNDS)
        self.generation_tokens = Histogram(_TOKEN_BOUNDS)
