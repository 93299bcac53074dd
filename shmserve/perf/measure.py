"""Measurement of one load: warm-up, windows until these agree, statistics of the server."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shmserve.perf.load import LoadGenerator, Mark, Records
from shmserve.protocols import TransportError

AGREEING = 3  # number of consecutive windows that must agree
PERCENTILES = (50, 90, 95, 99, 99.9)
# The two-sided 95 % quantiles of Student's t by degrees of freedom; beyond, the normal quantile.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL95 = 1.960

Values = np.ndarray[Any, np.dtype[np.int64]]


def rates(marks: Sequence[Mark]) -> list[float]:
    """Return the requests per second in each window."""
    return [
        (after.requests - before.requests) * 1e9 / (after.at_ns - before.at_ns)
        for before, after in itertools.pairwise(marks)
    ]


def means(records: Records, marks: Sequence[Mark]) -> list[float]:
    """Return the mean latency in each window in nanoseconds; 0 for a window without completions."""
    mean_values = []
    for before, after in itertools.pairwise(marks):
        window = latencies(records, before, after)
        mean_values.append(float(window.mean()) if window.size else 0.0)
    return mean_values


def latencies(records: Records, before: Mark, after: Mark) -> Values:
    """Return the latencies, in nanoseconds, of requests that completed between two marks."""
    rows = slice(before.requests, after.requests)
    return np.array(records.ended[rows], np.int64) - np.array(records.began[rows], np.int64)


def agree(values: Sequence[float], within: float) -> bool:
    """Check whether the last `AGREEING` values are all within this share of their mean."""
    last = values[-AGREEING:]
    if len(last) < AGREEING:
        return False
    mean = statistics.fmean(last)
    return all(abs(value - mean) <= within * mean for value in last)


def confidence(values: Sequence[float]) -> float:
    """Return half the width of the mean's 95 % confidence interval.

    Infinite for less than two values.

    The method is that of batch means: windows are assumed to be independent.
    """
    degrees = len(values) - 1
    if degrees < 1:
        return math.inf
    t = _T95[degrees - 1] if degrees <= len(_T95) else _NORMAL95
    return t * statistics.stdev(values) / math.sqrt(len(values))


def percentile(ordered: Values, percent: float) -> int:
    """Return a percentile of sorted values by the nearest-rank method; 0 if there are none."""
    if not ordered.size:
        return 0
    rank = math.ceil(round(percent / 100 * ordered.size, 6))
    return int(ordered[max(rank, 1) - 1])


def spread(values: Values) -> dict[str, float]:
    """Return mean, percentiles and maximum of nanoseconds, in milliseconds by name."""
    ordered = np.sort(values)
    figures = {"mean": float(ordered.mean()) if ordered.size else 0.0}
    figures |= {f"p{percent:g}": percentile(ordered, percent) for percent in PERCENTILES}
    figures["max"] = int(ordered[-1]) if ordered.size else 0
    return {name: value / 1e6 for name, value in figures.items()}


PARTS = ("queue", "compute_input", "compute_infer", "compute_output")

Statistics = Mapping[str, Any]


@dataclass(frozen=True)
class MeasurementPlan:
    """The parameters of a measurement, with durations in seconds.

    Windows agree if they differ from their mean by at most the share `within`.
    """

    warm_up_s: float = 1.0
    window_s: float = 2.0
    most_windows: int = 10
    within: float = 0.1


@dataclass
class Point:
    """The result of one load. Times are in milliseconds, those of the server in microseconds.

    Attributes:
        kind: "concurrency" or "rate".
        value: The concurrency or the rate.
        settled: Whether the last windows agreed.
        interrupted: Whether the user ended the measurement.
    """

    kind: str
    value: float
    requests: int
    errors: int
    error: str
    seconds: float
    per_second: float
    confidence: float
    settled: bool
    latency: dict[str, float]
    late: dict[str, float]
    client_us: float
    client_busy: float
    load_average: float
    first: dict[str, float] = field(default_factory=dict)
    gap: dict[str, float] = field(default_factory=dict)
    per_response: dict[str, float] = field(default_factory=dict)
    responses_per_second: float = 0.0
    server: dict[str, dict[str, float]] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def name(self) -> str:
        """Return the name of the load."""
        return f"{self.kind} {self.value:g}"


def measured(
    load: LoadGenerator,
    plan: MeasurementPlan,
    kind: str,
    value: float,
    streams: bool,
    statistics: Callable[[], dict[str, Statistics]],
) -> Point:
    """Run a load and return its result. Raises Unavailable if the server exits.

    KeyboardInterrupt ends the load: the result is that of the complete windows, or of the requests
    so far if there is no such window.
    """
    marks: list[Mark] = []
    asked: list[Future[dict[str, Statistics]]] = []
    with ThreadPoolExecutor(1) as asking:  # in a thread, so that queries do not delay the load

        def mark() -> None:
            asked.append(asking.submit(_quietly, statistics))
            marks.append(load.mark())

        settled = interrupted = False
        load.begin()
        mark()  # the start of the warm-up; deleted when the warm-up ends
        try:
            load.run(plan.warm_up_s)
            mark()
            del marks[0]
            while len(marks) <= plan.most_windows and not settled:
                load.run(plan.window_s)
                mark()
                figures = rates(marks), means(load.records, marks)
                settled = all(agree(each, plan.within) for each in figures)
            load.finish()
        except KeyboardInterrupt:
            interrupted = True
            if len(marks) < 2:
                mark()
        reports = [each.result() for each in (asked[-1 - min(AGREEING, len(marks) - 1)], asked[-1])]
    marks = marks[-1 - AGREEING :]
    point = _point(load.records, marks, kind, value, settled)
    point.interrupted = interrupted
    if streams:
        _add_responses(point, load.records, marks[0], marks[-1])
    point.server = {
        model: grown(reports[0].get(model, {}), now) for model, now in reports[1].items()
    }
    return point


def _quietly(statistics: Callable[[], dict[str, Statistics]]) -> dict[str, Statistics]:
    try:
        return statistics()
    except TransportError:
        return {}


def _point(records: Records, marks: Sequence[Mark], kind: str, value: float, ok: bool) -> Point:
    first, last = marks[0], marks[-1]
    count = last.requests - first.requests
    seconds = (last.at_ns - first.at_ns) / 1e9
    cpu_s = last.cpu_s - first.cpu_s
    failed = last.failed - first.failed
    ended = max(count + failed, 1)
    delays = np.array(records.delays_ns[first.requests : last.requests], np.int64)
    return Point(
        *(kind, value, count, failed),
        records.errors.most_common(1)[0][0] if failed else "",
        seconds,
        count / seconds,
        confidence(rates(marks)),
        ok,
        spread(latencies(records, first, last)),
        spread(delays),
        cpu_s / ended * 1e6,
        cpu_s / seconds,
        os.getloadavg()[0],
    )


def _add_responses(point: Point, records: Records, first: Mark, last: Mark) -> None:
    rows = slice(first.requests, last.requests)
    began, came, ended, responses = (
        np.array(column[rows], np.int64)
        for column in (records.began, records.first, records.ended, records.responses)
    )
    many = responses > 1
    point.first = spread(came - began)
    point.gap = spread(np.array(records.gaps[first.gaps : last.gaps], np.int64))
    point.per_response = spread((ended - came)[many] // (responses[many] - 1))
    point.responses_per_second = float(responses.sum()) / point.seconds


def grown(before: Statistics, after: Statistics) -> dict[str, float]:
    """Return the change between two statistics of a server, {} if there were no requests.

    The result has the mean microseconds per request of each part, and the rows per batch.
    """

    def count(found: Statistics, *path: str) -> int:
        value: Any = found
        for name in path:
            value = (value or {}).get(name)
        return int(value or 0)

    def more(*path: str) -> int:
        return count(after, *path) - count(before, *path)

    if not more("inference_stats", "success", "count"):
        return {}
    figures = {}
    for part in PARTS:
        times = more("inference_stats", part, "count")
        figures[part] = more("inference_stats", part, "ns") / 1000 / times if times else 0.0
    figures["batch"] = more("inference_count") / max(more("execution_count"), 1)
    figures["requests"] = more("inference_stats", "success", "count")
    return figures


def statistics_of(transport: Any, models: Sequence[str], version: str) -> dict[str, Statistics]:
    """Return the server's statistics of a model version and of its steps. Raises TransportError."""
    by_model: dict[str, Statistics] = {}
    for number, model in enumerate(models):
        rows = transport.stats(model, "" if number else version)
        if rows:  # the requests of clients use the latest version
            by_model[model] = max(rows, key=lambda row: int(row.get("version") or 0))
    return by_model


def now() -> str:
    """Return the current time as text, for a report."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
