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
from pathlib import Path
from typing import Any, NamedTuple

from shmserve.errors import InvalidArgument, refused
from shmserve.perf.measure import PARTS, Point
from shmserve.perf.search import Trial

FORMAT = 1
_BUSY = 0.9  # CPU utilisation above which the client limits the result
_WIDTH, _HEIGHT = 760, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 40, 50
_COLOURS = {"p50": "#2a6fbb", "p90": "#2e8b57", "p99": "#c0392b", "latency": "#2a6fbb"}
_COLOURS |= {"within": "#2e8b57", "above": "#c0392b", "target": "#777777"}
_STEPS = (1, 2, 5)


def table(points: Sequence[Point]) -> str:
    """Return a row for each load, followed by notes."""
    lines = [
        f"{'load':<18}{'requests/s':>12}{'±':>8}{'mean ms':>9}{'p50':>9}{'p90':>9}{'p95':>9}"
        f"{'p99':>9}{'p99.9':>9}{'errors':>8}{'client µs':>11}{'busy':>6}"
    ]
    for point in points:
        times = [point.latency[key] for key in ("mean", "p50", "p90", "p95", "p99", "p99.9")]
        lines.append(
            f"{point.name:<18}{point.per_second:>12,.1f}{_share(point):>8}"
            f"{''.join(f'{each:>9.3f}' for each in times)}"
            f"{point.errors:>8}{point.client_us:>11.1f}{point.client_busy:>6.0%}"
        )
    lines += _responses(points)
    lines += _servers(points)
    lines += [f"{point.name}: {note}" for point in points for note in notes(point)]
    return "\n".join(lines)


def _share(point: Point) -> str:
    return f"{min(point.confidence / point.per_second, 9.99):.1%}" if point.per_second else "-"


def _responses(points: Sequence[Point]) -> Iterator[str]:
    streams = [point for point in points if point.first]
    if not streams:
        return
    yield ""
    yield (
        f"{'responses':<18}{'a second':>12}{'first ms: p50':>15}{'p99':>9}{'between: p50':>14}"
        f"{'p99':>9}{'each: p50':>11}{'p99':>9}"
    )
    for point in streams:
        first, gap, each = point.first, point.gap, point.per_response
        yield (
            f"{point.name:<18}{point.responses_per_second:>12,.1f}{first['p50']:>15.3f}"
            f"{first['p99']:>9.3f}{gap['p50']:>14.3f}{gap['p99']:>9.3f}{each['p50']:>11.3f}"
            f"{each['p99']:>9.3f}"
        )


def _servers(points: Sequence[Point]) -> Iterator[str]:
    rows = [(point, model, figures) for point in points for model, figures in point.server.items()]
    rows = [row for row in rows if row[2]]
    if not rows:
        return
    wide = max(len(model) for _, model, _ in rows) + 2
    head = "".join(f"{name.removeprefix('compute_'):>10}" for name in PARTS)
    yield ""
    yield f"{'in the server, µs':<18}  {'model':<{wide}}{head}{'rest':>10}{'rows a batch':>14}"
    for point, model, figures in rows:
        parts = [figures[key] for key in PARTS]
        rest = point.latency["mean"] * 1000 - sum(parts)
        yield (
            f"{point.name:<18}  {model:<{wide}}{''.join(f'{each:>10.1f}' for each in parts)}"
            f"{rest:>10.1f}{figures['batch']:>14.2f}"
        )


def notes(point: Point) -> list[str]:
    """Return warnings about a point's figures: errors, windows that differ, a busy client."""
    warnings = []
    if point.interrupted:
        warnings.append(f"interrupted after {point.seconds:.1f} s of measurement")
    elif not point.settled:
        warnings.append(
            "the last windows differ: measure for longer, or on a machine with less other load"
        )
    if point.errors:
        warnings.append(f"{point.errors} requests failed; mostly: {point.error}")
    if point.client_busy > _BUSY:
        warnings.append("the load generator was CPU-bound: the server may be faster than measured")
    missing = point.value * point.seconds - point.requests - point.errors
    # Random arrivals cannot explain more, since the standard deviation is the root of their number.
    if point.kind == "rate" and missing > 3 * math.sqrt(point.value * point.seconds):
        warnings.append("the server did not keep up: latencies increased during the measurement")
    return warnings


def document(about: Mapping[str, Any], points: Sequence[Point]) -> str:
    """Return the report as JSON."""
    report = {"format": FORMAT, **about, "points": [asdict(point) for point in points]}
    return json.dumps(report, indent=1, default=str)


def rows(points: Sequence[Point]) -> str:
    """Return the report as CSV: a line for each load; nested figures are named by their path."""
    flat = [dict(_flat(asdict(point))) for point in points]
    names = list(dict.fromkeys(name for row in flat for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def older(path: str) -> list[Point]:
    """Return the points of a JSON report; raise InvalidArgument if the file is not a report."""
    with refused(f"--compare: cannot read '{path}'", "not text"):
        text = Path(path).read_text()
    try:
        report = json.loads(text)
        if report["format"] != FORMAT:
            raise InvalidArgument(f"--compare: '{path}' is of format {report['format']}, not 1")
        return [Point(**row) for row in report["points"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"--compare: '{path}' is not a report of --json: {error}") from None


def comparison(old: Sequence[Point], new: Sequence[Point]) -> str:
    """Return the ratios of new to old figures for loads in both reports.

    "~" marks overlapping confidence intervals of the throughput.
    """
    before = {point.name: point for point in old}
    matched = [(before[point.name], point) for point in new if point.name in before]
    if not matched:
        return "nothing to compare: the older report has none of these loads"
    lines = [f"{'new / old':<18}{'requests/s':>12}{'p50':>9}{'p99':>9}{'client':>9}"]
    for was, now in matched:
        pairs = (
            *((was.per_second, now.per_second), (was.latency["p50"], now.latency["p50"])),
            *((was.latency["p99"], now.latency["p99"]), (was.client_us, now.client_us)),
        )
        ratio, *other_ratios = [
            f"{after / before:.3f}" if before else "-" for before, after in pairs
        ]
        within_error = abs(now.per_second - was.per_second) <= now.confidence + was.confidence
        ratio = f"~{ratio}" if within_error else ratio
        lines.append(f"{now.name:<18}{ratio:>12}{''.join(f'{each:>9}' for each in other_ratios)}")
    return "\n".join(lines)


class Line(NamedTuple):
    """A series of labelled points in a chart, joined by a line or not."""

    name: str
    points: list[tuple[float, float]]
    words: list[str]
    joined: bool = True


def draw(title: str, points: Sequence[Point]) -> str:
    """Return the chart of a sweep or of a load."""
    if len(points) > 1:
        lines = [
            Line(
                key,
                [(point.per_second, point.latency[key]) for point in points],
                [f"{point.value:g}" for point in points],
            )
            for key in ("p50", "p90", "p99")
        ]
        return _svg(title, "requests a second", lines)
    keys = [key for key in points[0].latency if key.startswith("p")]
    line = Line("latency", [(i + 1, points[0].latency[k]) for i, k in enumerate(keys)], keys)
    return _svg(f"{title}, {points[0].name}", "percentile", [line], ticked=False)


def draw_trials(title: str, trials: Sequence[Trial], target_ms: float) -> str:
    """Return the chart of a search: p99 over throughput of each numbered run, and the target."""
    lines = []
    numbered = [(str(n + 1), trial) for n, trial in enumerate(trials) if trial.per_second]
    for name in ("within", "above"):
        series = [each for each in numbered if (each[1].p99_ms <= target_ms) == (name == "within")]
        points = [(trial.per_second, trial.p99_ms) for _, trial in series]
        lines.append(Line(name, points, [number for number, _ in series], joined=False))
    right = max((trial.per_second for _, trial in numbered), default=1.0)
    lines.append(Line("target", [(0.0, target_ms), (right, target_ms)], ["", ""]))
    return _svg(title, "requests a second", lines)


def _svg(title: str, below: str, lines: Sequence[Line], *, ticked: bool = True) -> str:
    all_x = [x for line in lines for x, _ in line.points]
    all_y = [y for line in lines for _, y in line.points if y > 0] or [1.0]
    right = max(all_x) * 1.08 or 1.0
    low, high = min(all_y) / 1.3, max(all_y) * 1.3

    def across(x: float) -> float:
        return _LEFT + x / right * (_WIDTH - _LEFT - _RIGHT)

    def up(y: float) -> float:
        share = math.log(max(y, low) / low) / math.log(high / low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{html.escape(title)}</text>',
        _text(_WIDTH / 2, _HEIGHT - 12, below, "middle"),
        _text(10, _TOP - 8, "ms", "start"),
    ]
    parts += [_grid(_LEFT, up(y), _WIDTH - _RIGHT, up(y)) for y in _decades(low, high)]
    parts += [_text(_LEFT - 6, up(y) + 4, f"{y:g}", "end") for y in _decades(low, high)]
    if ticked:
        for x in _round_steps(right):
            parts.append(_grid(across(x), _TOP, across(x), _HEIGHT - _BOTTOM))
            parts.append(_text(across(x), _HEIGHT - _BOTTOM + 16, f"{x:,.6g}", "middle"))
    for number, line in enumerate(lines):
        parts += _line(line, across, up)
        if len(lines) > 1:
            parts.append(_text(_LEFT + 10, _TOP + 16 * (number + 1), line.name, "start", line.name))
    return "\n".join([*parts, "</svg>\n"])


def _line(
    line: Line, across: Callable[[float], float], up: Callable[[float], float]
) -> Iterator[str]:
    colour = _COLOURS[line.name]
    points = [(across(x), up(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    if line.joined:
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for (x, y), word in zip(points, line.words, strict=True):
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
        yield _text(x, y - 7, word, "middle", line.name)


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(x: float, y: float, text: str, anchor: str, line: str = "") -> str:
    colour = _COLOURS.get(line, "#333333")
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{html.escape(text)}</text>"
    )


def _decades(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between the two numbers."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [
        step * 10.0**power for power in powers for step in _STEPS if low <= step * 10**power <= high
    ]


def _round_steps(right: float) -> list[float]:
    """Return about five round numbers from 0 to `right`."""
    rough = right / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in (*_STEPS, 10) if each * power >= rough)
    return [step * number for number in range(int(right / step) + 1)]
