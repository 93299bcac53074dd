"""One load of a sweep, measured: warmed up, in windows until these agree, with what the server
counted meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shmserve.perf import measure
from shmserve.perf.load import LoadGenerator
from shmserve.perf.measure import AGREEING, Mark, Records, spread
from shmserve.protocols import TransportError

_PARTS = ("queue", "compute_input", "compute_infer", "compute_output")

Statistics = Mapping[str, Any]


@dataclass(frozen=True)
class MeasurementPlan:
    """How a load is measured; seconds. `within`: a share of the mean."""

    warm_up_s: float = 1.0
    window_s: float = 2.0
    most_windows: int = 10
    within: float = 0.1


@dataclass
class Point:
    """What one load came to; times are milliseconds, those of the server microseconds.

    `kind`: "concurrency" or "rate"; `value`: which; `settled`: the last windows agreed."""

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

    @property
    def name(self) -> str:
        """Of the load."""
        return f"{self.kind} {self.value:g}"


def measured(
    load: LoadGenerator,
    plan: MeasurementPlan,
    kind: str,
    value: float,
    streams: bool,
    statistics: Callable[[], dict[str, Statistics]],
) -> Point:
    """Run a load, and say what it came to. Raises Unavailable when the server is gone."""
    marks: list[Mark] = []
    asked: list[Future[dict[str, Statistics]]] = []
    with ThreadPoolExecutor(1) as asking:  # beside the load, which must not wait for it

        def mark() -> None:
            marks.append(load.mark())
            asked.append(asking.submit(_quietly, statistics))

        load.begin()
        load.run(plan.warm_up_s)
        mark()
        settled = False
        while len(marks) <= plan.most_windows and not settled:
            load.run(plan.window_s)
            mark()
            rates, means = measure.rates(marks), measure.means(load.records, marks)
            settled = all(measure.agree(each, plan.within) for each in (rates, means))
        load.finish()
        found = [each.result() for each in (asked[-1 - min(AGREEING, len(marks) - 1)], asked[-1])]
    marks = marks[-1 - AGREEING :]
    point = _point(load.records, marks, kind, value, settled)
    if streams:
        _add_responses(point, load.records, marks[0], marks[-1])
    point.server = {model: grown(found[0].get(model, {}), now) for model, now in found[1].items()}
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
    late = np.array(records.late[first.requests : last.requests], np.int64)
    return Point(
        *(kind, value, count, failed),
        records.errors.most_common(1)[0][0] if failed else "",
        seconds,
        count / seconds,
        measure.confidence(measure.rates(marks)),
        ok,
        spread(measure.latencies(records, first, last)),
        spread(late),
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
    """What a server counted between two answers of its statistics: mean microseconds a request of
    each part, and rows a batch. {} where nothing was."""

    def count(found: Statistics, *path: str) -> int:
        value: Any = found
        for name in path:
            value = (value or {}).get(name)
        return int(value or 0)

    def more(*path: str) -> int:
        return count(after, *path) - count(before, *path)

    if not more("inference_stats", "success", "count"):
        return {}
    made = {}
    for part in _PARTS:
        times = more("inference_stats", part, "count")
        made[part] = more("inference_stats", part, "ns") / 1000 / times if times else 0.0
    made["batch"] = more("inference_count") / max(more("execution_count"), 1)
    made["requests"] = more("inference_stats", "success", "count")
    return made


def statistics_of(transport: Any, models: Sequence[str], version: str) -> dict[str, Statistics]:
    """What the server counts of a model, its version, and of its steps. Raises TransportError."""
    found: dict[str, Statistics] = {}
    for number, model in enumerate(models):
        rows = transport.stats(model, "" if number else version)
        if rows:  # of several versions the latest serves
            found[model] = max(rows, key=lambda row: int(row.get("version") or 0))
    return found


def now() -> str:
    """The time, for a report."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
