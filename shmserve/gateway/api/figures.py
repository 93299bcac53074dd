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
_LONG_MS = 1.0  # mean queueing time below which a model is healthy

Report = Mapping[str, Any]
Row = dict[str, Any]


class Figures:
    """Rows by "NAME/VERSION", from the difference between a report and that of a window ago."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, dict[str, Report]]] = deque()

    def rows(self, reports: Iterable[Report], now_s: float) -> dict[str, Row]:
        """Return the rows of the schedulers' reports at `now_s` (monotonic)."""
        found = {f"{each['name']}/{each['version']}": each["shmserve"] for each in reports}
        while len(self._looks) > 1 and self._looks[1][0] <= now_s - WINDOW_S:
            self._looks.popleft()
        at_s, before = self._looks[0] if self._looks else (now_s, {})
        self._looks.append((now_s, found))
        return {key: row(now, before.get(key), now_s - at_s) for key, now in found.items()}


def row(now: Report, before: Report | None, seconds: float) -> Row:
    """Return a model's row; without an earlier report it has no `recent`."""
    made: Row = {name: now[name] for name in _TOTALS}
    made |= {name: _but_zeros(now[key]) for name, key in _COUNTS.items()}
    made["sequences"] = now["open_sequences"]
    if now.get("cache"):
        made["cache"] = now["cache"]
    if "generated" in now:
        made["generation"] = {**now["generation"], "generated": now["generated"]}
        made["generation"]["preemptions"] = sum(now["preemptions"].values())
    if before is not None and seconds > 0:
        made["recent"] = _recent(now, before, seconds)
    made["hurts"], made["because"] = _pain(made, now, before)
    return made


def _recent(now: Report, before: Report, seconds: float) -> Row:
    grown = {
        name: max(0, now[name] - before.get(name, 0)) for name in now if type(now[name]) is int
    }
    sizes, batches = now["batch_size"], _added(now["batch_size"], before["batch_size"])
    reasons = before["batches_closed"]
    closed = {key: count - reasons.get(key, 0) for key, count in now["batches_closed"].items()}
    made: Row = {
        "rate": _short(grown["success"] / seconds),
        "fail_rate": _short(grown["fail"] / seconds),
        "execution_rate": _short(grown["execution_count"] / seconds),
        "closed": _but_zeros(closed),
        "sizes": _but_zeros(dict(zip([*sizes["buckets"], "more"], batches, strict=True))),
        "ms": _request_ms(now, before),
        "phases": _phases(grown),
    }
    if sum(batches):
        made["batch"] = _short((sizes["sum"] - before["batch_size"]["sum"]) / sum(batches))
    if "generated" in now:
        made |= {name: _short(grown[key] / seconds) for name, key in _GENERATION_RATES.items()}
        made |= {name: _ms(now[key], before[key]) for name, key in _GENERATION_TIMES.items()}
    return made


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
    found = [exact.get(quantile) for quantile in _QUANTILES]
    if None not in found:
        return [_short(value / 1000) for value in found if value is not None]
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


def _pain(made: Row, now: Report, before: Report | None) -> tuple[float, str]:
    """Return the rank and the problem of a model: dead workers, then failures, then queueing."""
    recent = made.get("recent", {})
    lost = now["workers_lost"] - before["workers_lost"] if before else 0
    fail_rate, rate = recent.get("fail_rate", 0), recent.get("rate", 0)
    if lost > 0:
        return 3000 + lost, f"{lost} worker{'s' * (lost > 1)} died"
    if fail_rate:
        share = fail_rate / (fail_rate + rate)
        return _short(2000 + 100 * share), f"{share:.0%} of requests fail"
    phases = recent.get("phases", {})
    waited, whole = phases.get("queue", 0), sum(phases.values())
    if waited >= _LONG_MS and waited > whole / 2:
        return _short(1000 + 100 * waited / whole), f"{waited:.3g} of {whole:.3g} ms in the queue"
    if recent and not rate and (inside := made["pending"] + made["executing"]):
        return 1000, f"{inside} inside, and none is answered"
    return max(recent.get("ms", ()), default=0), ""


def _but_zeros(counts: Mapping[Any, int]) -> dict[str, int]:
    return {str(name): count for name, count in counts.items() if count > 0}


def _short(number: float) -> float:
    return float(f"{number:.4g}")
