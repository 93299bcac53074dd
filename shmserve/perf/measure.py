"""Measurement of one load: warm-up, windows until these agree, statistics of the server."""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shmserve.perf.load import LoadGenerator, Mark, Records
from shmserve.protocols import TransportError

AGREEING_WINDOWS = 3  # number of consecutive windows that must agree
PERCENTILES = (50, 90, 95, 99, 99.9)
# The two-sided 95 % quantiles of Student's t for 1 to 10 degrees of freedom. For more degrees, the
# quantile of the normal distribution is used.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL95 = 1.960

Values = np.ndarray[Any, np.dtype[np.int64]]


def window_rates(marks: Sequence[Mark]) -> list[float]:
    """Return the requests per second in each window."""
    pairs = itertools.pairwise(marks)
    return [
        (end.requests - start.requests) * 1e9 / (end.at_ns - start.at_ns) for start, end in pairs
    ]


def window_means(records: Records, marks: Sequence[Mark]) -> list[float]:
    """Return the mean latency in each window in nanoseconds; 0 for a window without completions."""
    mean_values = []
    for start_mark, end_mark in itertools.pairwise(marks):
        window = latencies(records, start_mark, end_mark)
        mean_values.append(float(window.mean()) if window.size else 0.0)
    return mean_values


def latencies(records: Records, start_mark: Mark, end_mark: Mark) -> Values:
    """Return the latencies, in nanoseconds, of requests that completed between two marks."""
    row_slice = slice(start_mark.requests, end_mark.requests)
    ended_ns, scheduled_ns = records.ended_ns[row_slice], records.scheduled_ns[row_slice]
    return np.array(ended_ns, np.int64) - np.array(scheduled_ns, np.int64)


def agree(values: Sequence[float], max_ratio: float) -> bool:
    """Check whether the last values agree.

    Each of the last `AGREEING_WINDOWS` values may differ from their mean by at most `max_ratio`, a
    share of the mean.
    """
    last_values = values[-AGREEING_WINDOWS:]
    if len(last_values) < AGREEING_WINDOWS:
        return False
    mean = statistics.fmean(last_values)
    return all(abs(value - mean) <= max_ratio * mean for value in last_values)


def confidence(values: Sequence[float]) -> float | None:
    """Return half the width of the mean's 95 % confidence interval; None for less than two values.

    The method (batch means) assumes that the windows are independent.
    """
    degrees_of_freedom = len(values) - 1
    if degrees_of_freedom < 1:
        return None
    t_quantile = _T95[degrees_of_freedom - 1] if degrees_of_freedom <= len(_T95) else _NORMAL95
    return t_quantile * statistics.stdev(values) / math.sqrt(len(values))


def percentile(sorted_values: Values, percent: float) -> int:
    """Return a percentile of sorted values by the nearest-rank method; 0 if there are none."""
    if not sorted_values.size:
        return 0
    rank = math.ceil(round(percent / 100 * sorted_values.size, 6))
    return int(sorted_values[max(rank, 1) - 1])


def summarize(values: Values) -> dict[str, float]:
    """Return mean, percentiles and maximum, by name, in milliseconds; `values` are nanoseconds."""
    sorted_values = np.sort(values)
    figures = {"mean": float(sorted_values.mean()) if sorted_values.size else 0.0}
    figures |= {f"p{percent:g}": percentile(sorted_values, percent) for percent in PERCENTILES}
    figures["max"] = int(sorted_values[-1]) if sorted_values.size else 0
    return {name: value / 1e6 for name, value in figures.items()}


PHASES = ("queue", "compute_input", "compute_infer", "compute_output")

Statistics = Mapping[str, Any]


@dataclass(frozen=True)
class MeasurementPlan:
    """The parameters of a measurement, with durations in seconds.

    Windows agree if each differs from their mean by at most `tolerance`, a share of the mean.
    """

    warm_up_s: float = 1.0
    window_s: float = 2.0
    max_windows: int = 10
    tolerance: float = 0.1  # allowed deviation from the mean, as a share of the mean


@dataclass
class Point:
    """The result of one load. Times are in milliseconds, the server's times in microseconds.

    Attributes:
        kind: "concurrency" or "rate".
        value: The concurrency or the rate.
        requests: The number of successful requests.
        errors: The number of failed requests.
        error: The most frequent error.
        seconds: The duration of the measured windows.
        per_second: The successful requests per second.
        confidence: Half the width of the 95 % confidence interval of `per_second`; None for a
            single window.
        settled: Whether the last windows agreed.
        latency: Mean, percentiles and maximum of the latency.
        late: The same figures of the delay between the scheduled time and the sending.
        client_us: The CPU time of the load generator per request, in microseconds.
        client_busy: The CPU utilisation of the load generator; 1 is a whole core.
        load_average: The machine's load average of one minute.
        first: The statistics of the time to the first response of a stream.
        gap: The statistics of the time between consecutive responses of a stream.
        per_response: The statistics of the mean time between the responses of a request.
        responses_per_second: The responses per second.
        server: The statistics of the server by model.
        interrupted: Whether the user ended the measurement.
    """

    kind: str
    value: float
    requests: int
    errors: int
    error: str
    seconds: float
    per_second: float
    confidence: float | None
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
        """Return the kind and the value of the load, such as "concurrency 8"."""
        return f"{self.kind} {self.value:g}"


def measure_load(
    load: LoadGenerator,
    plan: MeasurementPlan,
    kind: str,
    value: float,
    statistics: Callable[[], dict[str, Statistics]],
) -> Point:
    """Run a load and return its result, a `Point` with this `kind` and `value`.

    `statistics` is a function that queries the server's statistics. Raises Unavailable if the
    server exits.

    KeyboardInterrupt ends the load: the result covers the complete windows, or the requests so far
    if there is no such window.
    """
    marks: list[Mark] = []
    statistics_futures: list[Future[dict[str, Statistics]]] = []
    with ThreadPoolExecutor(1) as executor:  # in a thread, so that queries do not delay the load

        def mark() -> None:
            statistics_futures.append(executor.submit(_query_statistics, statistics))
            marks.append(load.mark())

        is_settled = was_interrupted = False
        load.begin()
        mark()  # the start of the warm-up; deleted when the warm-up ends
        try:
            load.run(plan.warm_up_s)
            mark()
            del marks[0]
            while len(marks) <= plan.max_windows and not is_settled:
                load.run(plan.window_s)
                mark()
                figures = window_rates(marks), window_means(load.records, marks)
                is_settled = all(agree(values, plan.tolerance) for values in figures)
            load.finish()
        except KeyboardInterrupt:
            was_interrupted = True
            if len(marks) < 2:
                mark()
        before, after = (
            statistics_futures[index].result()
            for index in (-1 - min(AGREEING_WINDOWS, len(marks) - 1), -1)
        )
    marks = marks[-1 - AGREEING_WINDOWS :]
    point = _point(load.records, marks, kind, value, is_settled)
    point.interrupted = was_interrupted
    if load.is_decoupled:
        _add_response_figures(point, load.records, marks[0], marks[-1])
    point.server = {m: statistics_change(before.get(m, {}), stats) for m, stats in after.items()}
    return point


def _query_statistics(statistics: Callable[[], dict[str, Statistics]]) -> dict[str, Statistics]:
    try:
        return statistics()
    except TransportError:
        return {}


def _point(records: Records, marks: list[Mark], kind: str, value: float, is_settled: bool) -> Point:
    start, end = marks[0], marks[-1]
    count = end.requests - start.requests
    seconds = (end.at_ns - start.at_ns) / 1e9
    cpu_s = end.cpu_s - start.cpu_s
    failed_count = end.failed_count - start.failed_count
    ended_count = max(count + failed_count, 1)
    delays_ns = np.array(records.delays_ns[start.requests : end.requests], np.int64)
    return Point(
        *(kind, value, count, failed_count),
        records.errors.most_common(1)[0][0] if failed_count else "",
        seconds,
        count / seconds,
        confidence(window_rates(marks)),
        is_settled,
        summarize(latencies(records, start, end)),
        summarize(delays_ns),
        cpu_s / ended_count * 1e6,
        cpu_s / seconds,
        os.getloadavg()[0],
    )


def _add_response_figures(point: Point, records: Records, start: Mark, end: Mark) -> None:
    rows = slice(start.requests, end.requests)
    scheduled_ns, first_ns, ended_ns, responses = (
        np.array(column[rows], np.int64)
        for column in (records.scheduled_ns, records.first_ns, records.ended_ns, records.responses)
    )
    is_stream = responses > 1
    point.first = summarize(first_ns - scheduled_ns)
    point.gap = summarize(np.array(records.gaps_ns[start.gaps : end.gaps], np.int64))
    point.per_response = summarize((ended_ns - first_ns)[is_stream] // (responses[is_stream] - 1))
    point.responses_per_second = float(responses.sum()) / point.seconds


def statistics_change(before: Statistics, after: Statistics) -> dict[str, float]:
    """Return the change between two statistics of a server; {} if there were no requests.

    The result has the mean microseconds per request of each phase, and the rows per batch.
    """

    def count(statistics: Statistics, *path: str) -> int:
        value: Any = statistics
        for name in path:
            value = (value or {}).get(name)
        return int(value or 0)

    def increase(*path: str) -> int:
        return count(after, *path) - count(before, *path)

    if not increase("inference_stats", "success", "count"):
        return {}
    figures = {}
    for phase in PHASES:
        runs = increase("inference_stats", phase, "count")
        figures[phase] = increase("inference_stats", phase, "ns") / 1000 / runs if runs else 0.0
    figures["batch"] = increase("inference_count") / max(increase("execution_count"), 1)
    figures["requests"] = increase("inference_stats", "success", "count")
    return figures


def statistics_of(transport: Any, models: Sequence[str], version: str) -> dict[str, Statistics]:
    """Return the server's statistics of a model version and of its steps, by model.

    Args:
        transport: The transport to the server.
        models: The model, followed by the models of its steps.
        version: The version of the first model; "" for the latest.

    Raises:
        TransportError: The server is unreachable or rejects the request.
    """
    statistics_by_model: dict[str, Statistics] = {}
    for index, model in enumerate(models):
        rows = transport.stats(model, "" if index else version)
        if rows:  # requests without a version use the latest one
            statistics_by_model[model] = max(rows, key=lambda row: int(row.get("version") or 0))
    return statistics_by_model
