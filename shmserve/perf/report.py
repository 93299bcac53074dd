"""Reports: a table, JSON, CSV, a chart, and a comparison with an older report.

A chart is SVG, drawn without a library. It shows latency over throughput for a sweep or a search,
and percentiles for a single load.
"""

from __future__ import annotations

import csv
import html
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from shmserve.errors import InvalidArgument, read_text
from shmserve.perf.measure import PHASES, Point
from shmserve.perf.search import Trial

FORMAT = 1
_BUSY_CLIENT = 0.9  # CPU utilisation above which the client limits the result
_WIDTH, _HEIGHT = 760, 460  # of a chart in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 40, 50  # the margins of a chart in pixels
_COLOURS = {"p50": "#2a6fbb", "p90": "#2e8b57", "p99": "#c0392b", "latency": "#2a6fbb"}
_COLOURS |= {"within": "#2e8b57", "above": "#c0392b", "target": "#777777"}
_TICK_DIGITS = (1, 2, 5)  # the leading digits of the labels of an axis


def format_table(points: Sequence[Point]) -> str:
    """Return a table with a row for each load, followed by notes."""
    lines = [
        f"{'load':<18}{'requests/s':>12}{'±':>8}{'mean ms':>9}{'p50':>9}{'p90':>9}{'p95':>9}"
        f"{'p99':>9}{'p99.9':>9}{'errors':>8}{'client µs':>11}{'busy':>6}"
    ]
    for point in points:
        figures = [point.latency[key] for key in ("mean", "p50", "p90", "p95", "p99", "p99.9")]
        lines.append(
            f"{point.name:<18}{point.per_second:>12,.1f}{_relative_confidence(point):>8}"
            f"{''.join(f'{figure:>9.3f}' for figure in figures)}"
            f"{point.errors:>8}{point.client_us:>11.1f}{point.client_busy:>6.0%}"
        )
    lines += _response_rows(points)
    lines += _server_rows(points)
    lines += [f"{point.name}: {note}" for point in points for note in notes(point)]
    return "\n".join(lines)


def _relative_confidence(point: Point) -> str:
    if point.confidence is None or not point.per_second:
        return "-"
    return f"{min(point.confidence / point.per_second, 9.99):.1%}"


def _response_rows(points: Sequence[Point]) -> Iterator[str]:
    stream_points = [point for point in points if point.first]
    if not stream_points:
        return
    yield ""
    yield (
        f"{'responses':<18}{'a second':>12}{'first ms: p50':>15}{'p99':>9}{'between: p50':>14}"
        f"{'p99':>9}{'each: p50':>11}{'p99':>9}"
    )
    for point in stream_points:
        first_ms, gap_ms, per_response = point.first, point.gap, point.per_response
        yield (
            f"{point.name:<18}{point.responses_per_second:>12,.1f}{first_ms['p50']:>15.3f}"
            f"{first_ms['p99']:>9.3f}{gap_ms['p50']:>14.3f}{gap_ms['p99']:>9.3f}{per_response['p50']:>11.3f}"
            f"{per_response['p99']:>9.3f}"
        )


def _server_rows(points: Sequence[Point]) -> Iterator[str]:
    rows = [(point, model, figures) for point in points for model, figures in point.server.items()]
    rows = [row for row in rows if row[2]]
    if not rows:
        return
    width = max(len(model) for _, model, _ in rows) + 2
    phases = "".join(f"{name.removeprefix('compute_'):>10}" for name in PHASES)
    yield ""
    yield f"{'in the server, µs':<18}  {'model':<{width}}{phases}{'rest':>10}{'rows a batch':>14}"
    for point, model, figures in rows:
        phases_us = [figures[key] for key in PHASES]
        rest_us = point.latency["mean"] * 1000 - sum(phases_us)
        yield (
            f"{point.name:<18}  {model:<{width}}{''.join(f'{value:>10.1f}' for value in phases_us)}"
            f"{rest_us:>10.1f}{figures['batch']:>14.2f}"
        )


def notes(point: Point) -> list[str]:
    """Return warnings about a point's figures: errors, windows that differ, a busy client."""
    warnings = []
    if point.interrupted:
        warnings.append(f"interrupted after {point.seconds:.1f} s of measurement")
    elif not point.settled:
        text = "the last windows differ: measure for longer, or on a machine with less other load"
        warnings.append(text)
    if point.errors:
        warnings.append(f"{point.errors} requests failed; mostly: {point.error}")
    if point.client_busy > _BUSY_CLIENT:
        warnings.append("the load generator was CPU-bound: the server may be faster than measured")
    missing_requests = point.value * point.seconds - point.requests - point.errors
    # The threshold is three standard deviations of the number of random arrivals (its square root).
    if point.kind == "rate" and missing_requests > 3 * math.sqrt(point.value * point.seconds):
        warnings.append("the server did not keep up: latencies increased during the measurement")
    return warnings


def as_json(metadata: Mapping[str, Any], points: Sequence[Point]) -> str:
    """Return the report as JSON."""
    report = {"format": FORMAT, **metadata, "points": [asdict(point) for point in points]}
    return json.dumps(report, indent=1, default=str)


def as_csv(points: Sequence[Point]) -> str:
    """Return the report as CSV: a line for each load; nested figures are named by their path."""
    rows = [dict(_flatten(asdict(point))) for point in points]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flatten(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def read_report(path: str) -> list[Point]:
    """Return the points of a JSON report; raise InvalidArgument if the file is not a report."""
    text = read_text("--compare", path)
    try:
        report = json.loads(text)
        if report["format"] != FORMAT:
            raise InvalidArgument(f"--compare: '{path}' has format {report['format']}, not 1")
        return [Point(**row) for row in report["points"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"--compare: '{path}' was not written with --json: {error}") from None


def comparison(old_points: Sequence[Point], new_points: Sequence[Point]) -> str:
    """Return the ratios of new to old figures for loads in both reports.

    "~" marks overlapping confidence intervals of the throughput.
    """
    old_by_name = {point.name: point for point in old_points}
    matched_points = [(old_by_name[p.name], p) for p in new_points if p.name in old_by_name]
    if not matched_points:
        return "nothing to compare: the older report has none of these loads"
    lines = [f"{'new / old':<18}{'requests/s':>12}{'p50':>9}{'p99':>9}{'client':>9}"]
    for old, new in matched_points:
        figure_pairs = (
            *((old.per_second, new.per_second), (old.latency["p50"], new.latency["p50"])),
            *((old.latency["p99"], new.latency["p99"]), (old.client_us, new.client_us)),
        )
        ratio, *other_ratios = [f"{after / old:.3f}" if old else "-" for old, after in figure_pairs]
        margins = [p.confidence for p in (old, new) if p.confidence is not None]
        within_error = len(margins) < 2 or abs(new.per_second - old.per_second) <= sum(margins)
        ratio = f"~{ratio}" if within_error else ratio
        lines.append(f"{new.name:<18}{ratio:>12}{''.join(f'{other:>9}' for other in other_ratios)}")
    return "\n".join(lines)


class ChartLine(NamedTuple):
    """A series of labelled points in a chart, joined by a line if `is_joined`."""

    name: str
    points: list[tuple[float, float]]
    labels: list[str]
    is_joined: bool = True


def draw(title: str, points: Sequence[Point]) -> str:
    """Return the chart of a sweep or of a load."""
    if len(points) > 1:
        labels = [f"{point.value:g}" for point in points]
        lines = [
            ChartLine(key, [(point.per_second, point.latency[key]) for point in points], labels)
            for key in ("p50", "p90", "p99")
        ]
        return _svg(title, "requests a second", lines)
    keys = [key for key in points[0].latency if key.startswith("p")]
    line = ChartLine("latency", [(i + 1, points[0].latency[k]) for i, k in enumerate(keys)], keys)
    return _svg(f"{title}, {points[0].name}", "percentile", [line], has_ticks=False)


def draw_trials(title: str, trials: Sequence[Trial], target_ms: float) -> str:
    """Return the chart of a search: p99 over throughput of each numbered run, and the target."""
    lines = []
    numbered_trials = [(str(n + 1), trial) for n, trial in enumerate(trials) if trial.per_second]
    for name in ("within", "above"):
        is_within = name == "within"
        series = [pair for pair in numbered_trials if (pair[1].p99_ms <= target_ms) == is_within]
        points = [(trial.per_second, trial.p99_ms) for _, trial in series]
        lines.append(ChartLine(name, points, [number for number, _ in series], is_joined=False))
    max_rate = max((trial.per_second for _, trial in numbered_trials), default=1.0)
    lines.append(ChartLine("target", [(0.0, target_ms), (max_rate, target_ms)], ["", ""]))
    return _svg(title, "requests a second", lines)


def _svg(title: str, x_label: str, lines: Sequence[ChartLine], *, has_ticks: bool = True) -> str:
    all_x = [x for line in lines for x, _ in line.points]
    all_y = [y for line in lines for _, y in line.points if y > 0] or [1.0]
    max_x = max(all_x) * 1.08 or 1.0
    min_y, max_y = min(all_y) / 1.3, max(all_y) * 1.3

    def pixel_x(x: float) -> float:
        return _LEFT + x / max_x * (_WIDTH - _LEFT - _RIGHT)

    def pixel_y(y: float) -> float:
        share = math.log(max(y, min_y) / min_y) / math.log(max_y / min_y)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{html.escape(title)}</text>',
        _text(_WIDTH / 2, _HEIGHT - 12, x_label, "middle"),
        _text(10, _TOP - 8, "ms", "start"),
    ]
    ticks = _log_ticks(min_y, max_y)
    parts += [_grid(_LEFT, pixel_y(y), _WIDTH - _RIGHT, pixel_y(y)) for y in ticks]
    parts += [_text(_LEFT - 6, pixel_y(y) + 4, f"{y:g}", "end") for y in ticks]
    if has_ticks:
        for x in _linear_ticks(max_x):
            parts.append(_grid(pixel_x(x), _TOP, pixel_x(x), _HEIGHT - _BOTTOM))
            parts.append(_text(pixel_x(x), _HEIGHT - _BOTTOM + 16, f"{x:,.6g}", "middle"))
    for number, line in enumerate(lines):
        parts += _line(line, pixel_x, pixel_y)
        if len(lines) > 1:
            parts.append(_text(_LEFT + 10, _TOP + 16 * (number + 1), line.name, "start", line.name))
    return "\n".join([*parts, "</svg>\n"])


def _line(
    line: ChartLine, pixel_x: Callable[[float], float], pixel_y: Callable[[float], float]
) -> Iterator[str]:
    colour = _COLOURS[line.name]
    points = [(pixel_x(x), pixel_y(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    if line.is_joined:
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for (x, y), label in zip(points, line.labels, strict=True):
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
        yield _text(x, y - 7, label, "middle", line.name)


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(x: float, y: float, text: str, anchor: str, series: str = "") -> str:
    colour = _COLOURS.get(series, "#333333")
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{html.escape(text)}</text>"
    )


def _log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between `low` and `high`."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [s * 10.0**exp for exp in exponents for s in _TICK_DIGITS if low <= s * 10**exp <= high]


def _linear_ticks(maximum: float) -> list[float]:
    """Return about five round numbers from 0 to `maximum`."""
    min_step = maximum / 5
    magnitude = 10.0 ** math.floor(math.log10(min_step))
    step = next(tick * magnitude for tick in (*_TICK_DIGITS, 10) if tick * magnitude >= min_step)
    return [step * number for number in range(int(maximum / step) + 1)]
