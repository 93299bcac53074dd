"""What was measured, as a table, JSON and CSV, and beside an older report."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shmserve.errors import InvalidArgument, refused
from shmserve.perf.points import Point

FORMAT = 1
_BUSY = 0.9  # of a processor: from there on one measures the client
_PARTS = {
    "queue": "queue",
    "compute_input": "input",
    "compute_infer": "infer",
    "compute_output": "output",
}


def table(points: Sequence[Point]) -> str:
    """A row for each load, and what is to be known beside it."""
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
    rows = [(point, model, found) for point in points for model, found in point.server.items()]
    rows = [row for row in rows if row[2]]
    if not rows:
        return
    wide = max(len(model) for _, model, _ in rows) + 2
    head = "".join(f"{name:>10}" for name in _PARTS.values())
    yield ""
    yield f"{'in the server, µs':<18}  {'model':<{wide}}{head}{'rest':>10}{'rows a batch':>14}"
    for point, model, found in rows:
        parts = [found[key] for key in _PARTS]
        rest = point.latency["mean"] * 1000 - sum(parts)
        yield (
            f"{point.name:<18}  {model:<{wide}}{''.join(f'{each:>10.1f}' for each in parts)}"
            f"{rest:>10.1f}{found['batch']:>14.2f}"
        )


def notes(point: Point) -> list[str]:
    """What makes a point's figures doubtful."""
    found = []
    if not point.settled:
        found.append("the last windows do not agree: measure longer, or with less beside it")
    if point.errors:
        found.append(f"{point.errors} requests failed; mostly: {point.error}")
    if point.client_busy > _BUSY:
        found.append("the client itself was busy all the time: the server may do more")
    missing = point.value * point.seconds - point.requests - point.errors
    # More than random arrivals explain, whose number has its root as standard deviation.
    if point.kind == "rate" and missing > 3 * math.sqrt(point.value * point.seconds):
        found.append("the server did not keep up: the latencies grow with the time measured")
    return found


def document(about: Mapping[str, Any], points: Sequence[Point]) -> str:
    """The report as JSON."""
    made = {"format": FORMAT, **about, "points": [asdict(point) for point in points]}
    return json.dumps(made, indent=1, default=str)


def rows(points: Sequence[Point]) -> str:
    """The report as CSV: a line for each load; a nested figure is named by its path."""
    flat = [dict(_flat(asdict(point))) for point in points]
    names = list(dict.fromkeys(name for row in flat for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def older(path: str) -> list[Point]:
    """The points of a report in JSON. Raises InvalidArgument for a file that is none."""
    with refused(f"--compare: cannot read '{path}'", "not text"):
        text = Path(path).read_text()
    try:
        found = json.loads(text)
        if found["format"] != FORMAT:
            raise InvalidArgument(f"--compare: '{path}' is of format {found['format']}, not 1")
        return [Point(**row) for row in found["points"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"--compare: '{path}' is no report of --json: {error}") from None


def comparison(old: Sequence[Point], new: Sequence[Point]) -> str:
    """New figures over old ones, of the loads that both have; "~" where the intervals of confidence
    of the throughput overlap."""
    before = {point.name: point for point in old}
    both = [(before[point.name], point) for point in new if point.name in before]
    if not both:
        return "nothing to compare: the older report has none of these loads"
    lines = [f"{'new / old':<18}{'requests/s':>12}{'p50':>9}{'p99':>9}{'client':>9}"]
    for was, now in both:
        pairs = (
            *((was.per_second, now.per_second), (was.latency["p50"], now.latency["p50"])),
            *((was.latency["p99"], now.latency["p99"]), (was.client_us, now.client_us)),
        )
        ratio, *others = [f"{after / before:.3f}" if before else "-" for before, after in pairs]
        alike = abs(now.per_second - was.per_second) <= now.confidence + was.confidence
        ratio = f"~{ratio}" if alike else ratio
        lines.append(f"{now.name:<18}{ratio:>12}{''.join(f'{each:>9}' for each in others)}")
    return "\n".join(lines)
