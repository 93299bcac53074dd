"""A picture, SVG without a library: latency over throughput of a sweep, percentiles of one load."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shmserve.perf.points import Point
from shmserve.perf.search import Trial

_WIDTH, _HEIGHT = 760, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 40, 50
_COLOURS = {"p50": "#2a6fbb", "p90": "#2e8b57", "p99": "#c0392b", "latency": "#2a6fbb"}
_COLOURS |= {"within": "#2e8b57", "above": "#c0392b", "target": "#777777"}
_STEPS = (1, 2, 5)


class Line(NamedTuple):
    """A line of points, each with a word beside it; or the points alone."""

    name: str
    points: list[tuple[float, float]]
    words: list[str]
    joined: bool = True


def draw(title: str, points: Sequence[Point]) -> str:
    """The picture."""
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
    """The picture of a search: p99 over throughput of each run, numbered in their order, and the
    target."""
    lines = []
    numbered = [(str(n + 1), trial) for n, trial in enumerate(trials) if trial.per_second]
    for name in ("within", "above"):
        mine = [each for each in numbered if (each[1].p99_ms <= target_ms) == (name == "within")]
        places = [(trial.per_second, trial.p99_ms) for _, trial in mine]
        lines.append(Line(name, places, [number for number, _ in mine], joined=False))
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
    places = [(across(x), up(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    if line.joined:
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for (x, y), word in zip(places, line.words, strict=True):
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
    """1, 2 and 5 times powers of ten between the two."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [
        step * 10.0**power for power in powers for step in _STEPS if low <= step * 10**power <= high
    ]


def _round_steps(right: float) -> list[float]:
    """About five round numbers up to there, from 0."""
    rough = right / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in (*_STEPS, 10) if each * power >= rough)
    return [step * number for number in range(int(right / step) + 1)]
