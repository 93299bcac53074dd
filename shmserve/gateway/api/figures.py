"""Current figures for monitoring: rates, quantiles and problems, from schedulers' reports (pure).

The figures are differences between the current report and an earlier report. The metrics page uses
the same reports. A model's row has totals since its load, current gauges and, in `recent`, rates
per second and times in ms within the last `WINDOW_S`. `hurts` ranks the models by their problems,
and `because` is the text of a model's problem.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

WINDOW_S = 10.0  # the interval over which rates are computed
HISTORY_S = 600.0
HISTORY_INTERVAL_S = 5.0  # the time between two points of a chart
EXIT_RETENTION_S = 3600.0  # the time for which exited workers are shown
_QUANTILES = (0.5, 0.9, 0.99)
# The figures of a row that are copied from a scheduler's report, where they have the same names.
_COPIED_FIGURES = (
    *("success", "fail", "inference_count", "execution_count", "workers_lost", "retried"),
    *("cache_hit", "cache_miss", "pending", "executing"),
)
# Figures that are counts by label: the name in a row, and the name in a scheduler's report.
_COUNTS_BY_LABEL = {"failures": "failures", "closed": "batches_closed", "instances": "instances"}
_PHASES = ("queue", "compute_input", "compute_infer", "compute_output")
_GENERATION_RATES = {"tokens_rate": "generated", "prefill_rate": "prefilled"}
_TOKEN_TIMES = {"first_token_ms": "first_token_seconds", "inter_token_ms": "inter_token_seconds"}
# The rank (`hurts`) of a model with failing requests is from 2000 to 2100. A model ranks above that
# if a worker died within the last `WINDOW_S`, and below that if a worker died earlier.
_NEW_EXIT_RANK, _EARLIER_EXIT_RANK = 3000, 1500
_LONG_QUEUE_MS = 1.0  # a model with a shorter mean queueing time has no problem

Report = Mapping[str, Any]  # a scheduler's statistics of one model version
Row = dict[str, Any]  # the figures of one model version, as the dashboard shows them
Point = tuple[float | None, ...]  # the values of the charts at one time
_IDLE_POINT: Point = (0, 0, None, None, 0, 0)


class Figures:
    """The dashboard's rows of all model versions, by "NAME/VERSION".

    The rates of a row are the difference between the current report and that of `WINDOW_S` ago.
    """

    def __init__(self) -> None:
        self._snapshots: deque[tuple[float, dict[str, Report]]] = deque()
        # By "NAME/VERSION": the last count of exited workers, and (time, number) of recent exits.
        self._lost_counts: dict[str, int] = {}
        self._exits: dict[str, deque[tuple[float, int]]] = {}  # (seconds, number of exits)

    def build_rows(self, reports: Iterable[Report], now_s: float) -> dict[str, Row]:
        """Return the row of each model version, given the schedulers' reports.

        Args:
            reports: The reports, as `management.collect_reports` returns them.
            now_s: The time of the reports, in monotonic seconds.
        """
        by_version = {f"{r['name']}/{r['version']}": r["shmserve"] for r in reports}
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= now_s - WINDOW_S:
            self._snapshots.popleft()
        earlier_s, earlier_reports = self._snapshots[0] if self._snapshots else (now_s, {})
        self._snapshots.append((now_s, by_version))
        for key, report in by_version.items():
            # The first report counts, too: a worker may have died before it.
            new_exits = report["workers_lost"] - self._lost_counts.get(key, 0)
            self._lost_counts[key] = report["workers_lost"]
            if new_exits > 0:
                self._exits.setdefault(key, deque()).append((now_s, new_exits))
        elapsed_s = now_s - earlier_s
        return {
            key: build_row(
                report, earlier_reports.get(key), elapsed_s, self._count_recent_exits(key, now_s)
            )
            for key, report in by_version.items()
        }

    def _count_recent_exits(self, key: str, now_s: float) -> int:
        exits_by_time = self._exits.get(key, deque())
        while exits_by_time and exits_by_time[0][0] <= now_s - EXIT_RETENTION_S:
            exits_by_time.popleft()
        return sum(count for _, count in exits_by_time)


class History:
    """The figures of the last ten minutes, for charts (pure).

    A point has a model's requests and failures per second, p50 and p99 in ms, and the numbers of
    waiting and of executing requests.
    """

    def __init__(self) -> None:
        self._snapshots: deque[tuple[float, dict[str, Point]]] = deque()

    def add(self, time_s: float, rows: Mapping[str, Row]) -> None:
        """Record the rows of time `time_s` (s since the epoch), once per `HISTORY_INTERVAL_S`."""
        snapshots = self._snapshots
        if snapshots and 0 <= time_s - snapshots[-1][0] < HISTORY_INTERVAL_S * 0.9:
            return
        points = {key: _build_point(row) for key, row in rows.items() if "success" in row}
        snapshots.append((time_s, points))
        # After the clock was set back, earlier snapshots lie in the future and are dropped, too.
        while not time_s - HISTORY_S <= snapshots[0][0] <= time_s:
            snapshots.popleft()

    def as_series(self) -> dict[str, Any]:
        """Return {"at": the times, "models": {model: its point at each time}}.

        At times without a report of a model, its entry is None; while it is idle, the entry is 0.
        """
        keys = dict.fromkeys(key for _, points in self._snapshots for key in points)
        series = {
            key: [
                0 if points.get(key) == _IDLE_POINT else points.get(key)
                for _, points in self._snapshots
            ]
            for key in keys
        }
        return {"at": [time_s for time_s, _ in self._snapshots], "models": series}


def _build_point(row: Row) -> Point:
    recent = row.get("recent", {})  # the figures of the last `WINDOW_S`
    quantiles_ms = recent.get("ms") or (None, None, None)
    figures = (recent.get("rate", 0), recent.get("fail_rate", 0), quantiles_ms[0], quantiles_ms[2])
    point = (*figures, row["pending"], row["executing"])
    return _IDLE_POINT if point == _IDLE_POINT else point


def build_row(
    report: Report, earlier_report: Report | None, elapsed_s: float, exit_count: int = 0
) -> Row:
    """Return a model's row, which has no `recent` if there is no earlier report.

    Args:
        report: The current report.
        earlier_report: The report of `elapsed_s` seconds ago, or None.
        elapsed_s: The time between the reports.
        exit_count: The number of workers that died within an hour.
    """
    figures: Row = {name: report[name] for name in _COPIED_FIGURES}
    figures |= {name: _without_zeros(report[key]) for name, key in _COUNTS_BY_LABEL.items()}
    figures["sequences"] = report["open_sequences"]
    if report.get("cache"):
        figures["cache"] = report["cache"]
    if "generated" in report:
        figures["generation"] = {**report["generation"], "generated": report["generated"]}
        figures["generation"]["preemptions"] = sum(report["preemptions"].values())
    if earlier_report is not None and elapsed_s > 0:
        figures["recent"] = _recent_figures(report, earlier_report, elapsed_s)
    figures["hurts"], figures["because"] = _find_problem(figures, report)
    if exit_count:
        exits_text = f"{exit_count} worker{'s' * (exit_count > 1)} died within an hour"
        figures["because"] = f"{figures['because']}; {exits_text}".removeprefix("; ")
        has_new_exits = report["workers_lost"] > (earlier_report or report)["workers_lost"]
        rank = _NEW_EXIT_RANK if has_new_exits else _EARLIER_EXIT_RANK
        figures["hurts"] = max(figures["hurts"], rank + exit_count)
    return figures


def _recent_figures(report: Report, earlier_report: Report, elapsed_s: float) -> Row:
    counter_names = (name for name in report if type(report[name]) is int)
    increases = {name: max(0, report[name] - earlier_report.get(name, 0)) for name in counter_names}
    batch_sizes, earlier_sizes = report["batch_size"], earlier_report["batch_size"]
    batch_counts = _bucket_increases(batch_sizes, earlier_sizes)
    counts, earlier_counts = report["batches_closed"], earlier_report["batches_closed"]
    closed_by_reason = {key: counts[key] - earlier_counts.get(key, 0) for key in counts}
    batches_by_size = dict(zip([*batch_sizes["buckets"], "more"], batch_counts, strict=True))
    figures: Row = {
        "rate": _four_digits(increases["success"] / elapsed_s),
        "fail_rate": _four_digits(increases["fail"] / elapsed_s),
        "execution_rate": _four_digits(increases["execution_count"] / elapsed_s),
        "closed": _without_zeros(closed_by_reason),
        "sizes": _without_zeros(batches_by_size),
        "ms": _request_quantiles_ms(report, earlier_report),
        "phases": _mean_phase_ms(increases),
    }
    if sum(batch_counts):
        rows = batch_sizes["sum"] - earlier_sizes["sum"]
        figures["batch"] = _four_digits(rows / sum(batch_counts))
    if "generated" in report and "generated" in earlier_report:
        figures |= {
            n: _four_digits(increases[key] / elapsed_s) for n, key in _GENERATION_RATES.items()
        }
        figures |= {n: _quantiles_ms(report[k], earlier_report[k]) for n, k in _TOKEN_TIMES.items()}
    return figures


def _mean_phase_ms(increases: Mapping[str, int]) -> Row:
    """Return the mean time of each phase of a request in ms."""
    executed_count = increases["success"] - increases["cache_hit"]
    counts = dict.fromkeys(_PHASES, executed_count) | {"queue": increases["success"]}
    return {
        phase.removeprefix("compute_"): _four_digits(increases[f"{phase}_ns"] / count / 1e6)
        for phase, count in counts.items()
        if count > 0
    }


def _request_quantiles_ms(report: Report, earlier_report: Report) -> list[float]:
    """Return the quantiles of request times.

    If summaries are enabled, the quantiles are those of the last minute, with an error of up to
    0.5 %. Otherwise they are estimated from the histogram.
    """
    exact_us = dict(report["quantiles"].get("request", ()))  # by quantile
    quantiles_ms = [exact_us.get(quantile) for quantile in _QUANTILES]
    if None not in quantiles_ms:
        return [_four_digits(value / 1000) for value in quantiles_ms if value is not None]
    return _quantiles_ms(report["request_seconds"], earlier_report["request_seconds"])


def _quantiles_ms(histogram: Report, earlier_histogram: Report) -> list[float]:
    counts = _bucket_increases(histogram, earlier_histogram)
    return [
        _four_digits(quantile(fraction, histogram["buckets"], counts) * 1000)
        for fraction in _QUANTILES
        if sum(counts)
    ]


def _bucket_increases(histogram: Report, earlier_histogram: Report) -> list[int]:
    pairs = zip(histogram["counts"], earlier_histogram["counts"], strict=True)
    return [max(0, count - earlier_count) for count, earlier_count in pairs]


def quantile(fraction: float, bounds: Sequence[float], counts: Sequence[int]) -> float:
    """Return a quantile of a histogram, interpolated like Prometheus's histogram_quantile.

    Args:
        fraction: The quantile.
        bounds: The upper bounds of all buckets but the last. A quantile in the last bucket, which
            has no upper bound, is reported as the highest of these bounds.
        counts: The counts of the buckets.
    """
    rank, count_below = fraction * sum(counts), 0
    for index, cumulative_count in enumerate(accumulate(counts)):
        if cumulative_count >= rank and counts[index] and index < len(bounds):
            lower_bound = bounds[index - 1] if index else 0.0
            return min(
                lower_bound + (bounds[index] - lower_bound) * (rank - count_below) / counts[index],
                bounds[index],
            )
        count_below = cumulative_count
    return bounds[-1]


def _find_problem(figures: Row, report: Report) -> tuple[float, str]:
    """Return the rank and the text of a model's problem; failures rank above queueing.

    The configured queue delay, which lets batches grow, is subtracted from the time in the queue.
    """
    recent = figures.get("recent", {})
    fail_rate, rate = recent.get("fail_rate", 0), recent.get("rate", 0)
    if fail_rate:
        failed_share = fail_rate / (fail_rate + rate)
        return _four_digits(2000 + 100 * failed_share), f"{failed_share:.0%} of requests fail"
    phases = recent.get("phases", {})
    configured_ms = report["queue_delay_ns"] / 1e6
    queue_ms = max(0.0, phases.get("queue", 0) - configured_ms)
    total_ms = queue_ms + sum(mean_ms for phase, mean_ms in phases.items() if phase != "queue")
    if queue_ms >= max(_LONG_QUEUE_MS, configured_ms / 2) and queue_ms > total_ms / 2:
        delay_text = f", besides the configured {configured_ms:.3g} ms" if configured_ms else ""
        queue_text = f"{queue_ms:.3g} of {total_ms:.3g} ms in the queue{delay_text}"
        return _four_digits(1000 + 100 * queue_ms / total_ms), queue_text
    if recent and not rate and (inflight := figures["pending"] + figures["executing"]):
        return 1000, f"{inflight} requests in flight, but no responses"
    return max(recent.get("ms", ()), default=0), ""


def _without_zeros(counts: Mapping[Any, int]) -> dict[str, int]:
    return {str(name): count for name, count in counts.items() if count > 0}


def _four_digits(number: float) -> float:
    return float(f"{number:.4g}")
