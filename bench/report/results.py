"""The results of a run: its figures with their targets, rows of raw samples, their JSON file."""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path


Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Target:
    """The target of a figure: for the ratio shmserve / Triton, or for shmserve's own value.

    `must` is the required value, `aim` the desired value.
    """

    of: Literal["ratio", "value", "nothing"] = "nothing"
    must: float | None = None
    aim: float | None = None


@dataclass(frozen=True)
class Figure:
    """One line of the report: what is measured, its unit and its target."""

    name: str
    title: str
    unit: str
    better: Better
    target: Target = Target()


# The keys of `Row.samples`: the measured server, or the machine for a figure without a server.
SHMSERVE, TRITON, MACHINE = "shmserve", "triton", "machine"


@dataclass(frozen=True)
class Spread:
    """A median between the smallest and the largest sample."""

    median: float
    low: float
    high: float


def spread(samples: list[float]) -> Spread | None:
    """Return the spread of samples, or None without samples."""
    if not samples:
        return None
    return Spread(statistics.median(samples), min(samples), max(samples))


@dataclass
class Row:
    """The raw samples of each server for one figure, in the order in which they were taken.

    `details` has the complete report of perf_analyzer for each sample.
    """

    figure: Figure
    samples: dict[str, list[float]]
    details: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def of(self, server: str) -> Spread | None:
        """Return median and spread of the samples of one server."""
        return spread(self.samples.get(server, []))

    def ratio(self) -> Spread | None:
        """Return the ratio shmserve / Triton of the medians, with the extremes of sample pairs."""
        own_spread, peer_spread = self.of(SHMSERVE), self.of(TRITON)
        if own_spread is None or peer_spread is None or peer_spread.median <= 0:
            return None
        pairs = zip(self.samples[SHMSERVE], self.samples[TRITON], strict=False)
        ratios = [a / b for a, b in pairs if b > 0]
        return (
            Spread(own_spread.median / peer_spread.median, min(ratios), max(ratios))
            if ratios
            else None
        )

    def verdict(self) -> str:
        """Return the name of the target reached, else `BELOW`; "" without target or measurement."""
        target = self.figure.target
        spread = self.ratio() if target.of == "ratio" else self.of(SHMSERVE)
        if target.of == "nothing" or spread is None:
            return ""
        sign = 1 if self.figure.better == "higher" else -1
        if target.aim is not None and sign * spread.median >= sign * target.aim:
            return "aim"
        reaches_must = target.must is not None and sign * spread.median >= sign * target.must
        return "must" if reaches_must else "BELOW"


@dataclass(frozen=True)
class NotRun:
    """A measurement that was not made; `failed` if its attempt failed."""

    what: str
    why: str
    failed: bool


@dataclass
class Results:
    """The results of one run of the benchmark."""

    date: str
    machine: dict[str, str | float]
    versions: dict[str, str]
    settings: dict[str, float]
    rows: list[Row] = field(default_factory=list)
    raw_delays_us: dict[str, list[float]] = field(default_factory=dict)
    not_run: list[NotRun] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the results as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n")


def load(path: Path) -> Results:
    """Read the results that `save` wrote. Raises OSError, or ValueError for another file."""
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        rows = [_row(row) for row in document.pop("rows")]
        not_run = [NotRun(**item) for item in document.pop("not_run")]
        return Results(**document, rows=rows, not_run=not_run)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a result of this benchmark: {error}") from error


def _row(fields: dict[str, Any]) -> Row:
    figure = fields.pop("figure")
    target = Target(**figure.pop("target"))
    return Row(Figure(**figure, target=target), **fields)
