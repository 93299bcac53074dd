"""Current figures for monitoring: rates, quantiles and problems, from schedulers' reports (pure).

The figures are differences between the reports of the last seconds, which are those of the metrics.
A row has totals since the model was loaded, current gauges and, in `recent`, the rates per second
and times in ms within the window. Models are ranked by `hurts`; `because` is the reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

WINDOW_S = 10.0
HISTORY_S = 600.0
HISTORY_EVERY_S = 5.0
DEATHS_S = 3600.0  # the time for which exited workers are shown
_QUANTILES = (0.5, 0.9, 0.99)
_TOTALS = (
    *("success", "fail", "inference_count", "execution_count", "workers_lost", "retried"),
    *("cache_hit", "cache_miss", "pending", "executing"),
)
_COUNTS = {"failures": "failures", "closed": "batches_closed", "instances": "instances"}
_PHASES = ("queue", "compute_input", "compute_infer", "compute_output")
_GENERATION_RATES = {"tokens_rate": "generated", "prefill_rate": "prefilled"}
_GENERATION_TIMES = {
    "first_token_ms": "first_token_seconds",
    "inter_token_ms": "inter_token_seconds",
}
# Ranks of models with exited workers; failing requests rank from 2000.
_DEATH, _EARLIER_DEATH = 3000, 1500
_LONG_MS = 1.0  # mean queueing time below which a model is healthy

Report = Mapping[str, Any]
Row = dict[str, Any]
Point = tuple[float | None, ...]
_IDLE: Point = (0, 0, None, None, 0, 0)


class Figures:
    """The rows of all model versions, by "NAME/VERSION".

    The rates of a row are the difference between the current report and that of `WINDOW_S` ago.
    """

    def __init__(self) -> None:
        self._snapshots: deque[tuple[float, dict[str, Report]]] = deque()
        # By model: the times and numbers of exited workers.
        self._exits: dict[str, deque[tuple[float, int]]] = {}

    def rows(self, reports: Iterable[Report], now_s: float) -> dict[str, Row]:
        """Return the row of each model version, given the schedulers' reports.

        Args:
            reports: The reports, as `management.collect` returns them.
            now_s: The time of the reports, in monotonic seconds.
        """
        report_by_version = {
            f"{each['name']}/{each['version']}": each["shmserve"] for each in reports
        }
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= now_s - WINDOW_S:
            self._snapshots.popleft()
        at_s, before = self._snapshots[0] if self._snapshots else (now_s, {})
        last = self._snapshots[-1][1] if self._snapshots else {}
        self._snapshots.append((now_s, report_by_version))
        for key, now in report_by_version.items():
            if key in last and (lost := now["workers_lost"] - last[key]["workers_lost"]) > 0:
                self._exits.setdefault(key, deque()).append((now_s, lost))
        return {
            key: row(now, before.get(key), now_s - at_s, self._recent_exits(key, now_s))
            for key, now in report_by_version.items()
        }

    def _recent_exits(self, key: str, now_s: float) -> int:
        deaths = self._exits.get(key, deque())
        while deaths and deaths[0][0] <= now_s - DEATHS_S:
            deaths.popleft()
        return sum(lost for _, lost in deaths)


class History:
    """The figures of the last ten minutes, for charts (pure).

    A point of a model has its rate, failures, p50, p99, and requests waiting and at workers.
    """

    def __init__(self) -> None:
        self._snapshots: deque[tuple[float, dict[str, Point]]] = deque()

    def add(self, at_s: float, rows: Mapping[str, Row]) -> None:
        """Record the rows at `at_s` (seconds since the epoch), unless the last rows are recent."""
        snapshots = self._snapshots
        if snapshots and 0 <= at_s - snapshots[-1][0] < HISTORY_EVERY_S * 0.9:
            return
        snapshots.append(
            (at_s, {key: _point(row) for key, row in rows.items() if "success" in row})
        )
        # Snapshots in the future are dropped, too, because the clock may be set back.
        while not at_s - HISTORY_S <= snapshots[0][0] <= at_s:
            snapshots.popleft()

    def shown(self) -> dict[str, Any]:
        """Return the times and, by model, a point for each time: None if unknown, 0 if idle."""
        keys = dict.fromkeys(key for _, points in self._snapshots for key in points)
        series = {
            key: [
                0 if points.get(key) == _IDLE else points.get(key) for _, points in self._snapshots
            ]
            for key in keys
        }
        return {"at": [at_s for at_s, _ in self._snapshots], "models": series}


def _point(row: Row) -> Point:
    recent = row.get("recent", {})
    ms = recent.get("ms") or (None, None, None)
    figures = (recent.get("rate", 0), recent.get("fail_rate", 0), ms[0], ms[2])
    point = (*figures, row["pending"], row["executing"])
    return _IDLE if point == _IDLE else point


def row(now: Report, before: Report | None, seconds: float, exits: int = 0) -> Row:
    """Return a model's row; without an earlier report it has no `recent`.

    Args:
        now: The current report.
        before: The report of `seconds` ago.
        seconds: The length of the interval.
        exits: The number of workers that died within an hour.
    """
    figures: Row = {name: now[name] for name in _TOTALS}
    figures |= {name: _but_zeros(now[key]) for name, key in _COUNTS.items()}
    figures["sequences"] = now["open_sequences"]
    if now.get("cache"):
        figures["cache"] = now["cache"]
    if "generated" in now:
        figures["generation"] = {**now["generation"], "generated": now["generated"]}
        figures["generation"]["preemptions"] = sum(now["preemptions"].values())
    if before is not None and seconds > 0:
        figures["recent"] = _recent(now, before, seconds)
    figures["hurts"], figures["because"] = _problem(figures, now)
    if exits:
        text = f"{exits} worker{'s' * (exits > 1)} died within an hour"
        figures["because"] = f"{figures['because']}; {text}".removeprefix("; ")
        just = before is not None and now["workers_lost"] > before["workers_lost"]
        figures["hurts"] = max(figures["hurts"], (_DEATH if just else _EARLIER_DEATH) + exits)
    return figures


def _recent(now: Report, before: Report, seconds: float) -> Row:
    grown = {
        name: max(0, now[name] - before.get(name, 0)) for name in now if type(now[name]) is int
    }
    sizes, batches = now["batch_size"], _added(now["batch_size"], before["batch_size"])
    reasons = before["batches_closed"]
    closed = {key: count - reasons.get(key, 0) for key, count in now["batches_closed"].items()}
    figures: Row = {
        "rate": _short(grown["success"] / seconds),
        "fail_rate": _short(grown["fail"] / seconds),
        "execution_rate": _short(grown["execution_count"] / seconds),
        "closed": _but_zeros(closed),
        "sizes": _but_zeros(dict(zip([*sizes["buckets"], "more"], batches, strict=True))),
        "ms": _request_ms(now, before),
        "phases": _phases(grown),
    }
    if sum(batches):
        figures["batch"] = _short((sizes["sum"] - before["batch_size"]["sum"]) / sum(batches))
    if "generated" in now:
        figures |= {name: _short(grown[key] / seconds) for name, key in _GENERATION_RATES.items()}
        figures |= {name: _ms(now[key], before[key]) for name, key in _GENERATION_TIMES.items()}
    return figures


def _phases(grown: Mapping[str, int]) -> Row:
    """Return the mean time of each phase of a request in ms."""
    executed = grown["success"] - grown["cache_hit"]
    counts = {phase: grown["success"] if phase == "queue" else executed for phase in _PHASES}
    return {
        phase.removeprefix("compute_"): _short(grown[f"{phase}_ns"] / count / 1e6)
        for phase, count in counts.items()
        if count > 0
    }


def _request_ms(now: Report, before: Report) -> list[float]:
    """Return the quantiles of request times.

    With summaries enabled they are those of the last minute, exact within 0.5 %; otherwise they are
    estimated from the histogram.
    """
    exact = dict(now["quantiles"].get("request", ()))
    quantiles_ms = [exact.get(quantile) for quantile in _QUANTILES]
    if None not in quantiles_ms:
        return [_short(value / 1000) for value in quantiles_ms if value is not None]
    return _ms(now["request_seconds"], before["request_seconds"])


def _ms(now: Report, before: Report) -> list[float]:
    counts = _added(now, before)
    return [_short(quantile(q, now["buckets"], counts) * 1000) for q in _QUANTILES if sum(counts)]


def _added(now: Report, before: Report) -> list[int]:
    return [max(0, a - b) for a, b in zip(now["counts"], before["counts"], strict=True)]


def quantile(q: float, bounds: Sequence[float], counts: Sequence[int]) -> float:
    """Return a quantile of a histogram, interpolated like Prometheus's histogram_quantile.

    Args:
        q: The quantile.
        bounds: The upper bounds of all buckets but the last, whose quantiles are the last bound.
        counts: The counts of the buckets.
    """
    rank, below = q * sum(counts), 0
    for at, reached in enumerate(accumulate(counts)):
        if reached >= rank and counts[at] and at < len(bounds):
            low = bounds[at - 1] if at else 0.0
            return min(low + (bounds[at] - low) * (rank - below) / counts[at], bounds[at])
        below = reached
    return bounds[-1]


def _problem(figures: Row, now: Report) -> tuple[float, str]:
    """Return the rank and the text of a model's problem: failures, then queueing.

    A configured queue delay, in which batches grow, is no problem.
    """
    recent = figures.get("recent", {})
    fail_rate, rate = recent.get("fail_rate", 0), recent.get("rate", 0)
    if fail_rate:
        share = fail_rate / (fail_rate + rate)
        return _short(2000 + 100 * share), f"{share:.0%} of requests fail"
    phases = recent.get("phases", {})
    delay_ms = now["queue_delay_ns"] / 1e6
    waited = max(0.0, phases.get("queue", 0) - delay_ms)
    total_ms = waited + sum(ms for phase, ms in phases.items() if phase != "queue")
    if waited >= max(_LONG_MS, delay_ms / 2) and waited > total_ms / 2:
        besides = f", besides the configured {delay_ms:.3g} ms" if delay_ms else ""
        text = f"{waited:.3g} of {total_ms:.3g} ms in the queue{besides}"
        return _short(1000 + 100 * waited / total_ms), text
    if recent and not rate and (inside := figures["pending"] + figures["executing"]):
        return 1000, f"{inside} requests in flight, but no responses"
    return max(recent.get("ms", ()), default=0), ""


def _but_zeros(counts: Mapping[Any, int]) -> dict[str, int]:
    return {str(name): count for name, count in counts.items() if count > 0}


def _short(number: float) -> float:
    return float(f"{number:.4g}")
