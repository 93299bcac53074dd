"""What became of requests, cut into windows: when these agree, and what they come to (pure)."""

from __future__ import annotations

import itertools
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

AGREEING = 3  # windows in a row
PERCENTILES = (50, 90, 95, 99, 99.9)
# Student's t for 95 % on both sides, by degrees of freedom; the normal distribution's beyond.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL95 = 1.960

Values = np.ndarray[Any, np.dtype[np.int64]]


def _column() -> array[int]:
    return array("q")


@dataclass(slots=True)
class Records:
    """A row for each request that was answered well, in the order of their ends; times are
    nanoseconds of one clock. `began`: when it was to be sent; `late`: how much later it was;
    `first`: its first response; `gaps`: between two responses of any request."""

    began: array[int] = field(default_factory=_column)
    late: array[int] = field(default_factory=_column)
    first: array[int] = field(default_factory=_column)
    ended: array[int] = field(default_factory=_column)
    responses: array[int] = field(default_factory=_column)
    gaps: array[int] = field(default_factory=_column)
    errors: Counter[str] = field(default_factory=Counter)

    def failed(self) -> int:
        """How many requests ended with an error."""
        return sum(self.errors.values())


class Mark(NamedTuple):
    """A moment of a load, between two windows: how many rows there are, and what this process has
    used of a processor."""

    at_ns: int
    requests: int
    gaps: int
    failed: int
    cpu_s: float


def rates(marks: Sequence[Mark]) -> list[float]:
    """Requests a second in each window."""
    return [
        (after.requests - before.requests) * 1e9 / (after.at_ns - before.at_ns)
        for before, after in itertools.pairwise(marks)
    ]


def means(records: Records, marks: Sequence[Mark]) -> list[float]:
    """The mean latency in each window, nanoseconds; 0 where none ended."""
    found = []
    for before, after in itertools.pairwise(marks):
        taken = latencies(records, before, after)
        found.append(float(taken.mean()) if taken.size else 0.0)
    return found


def latencies(records: Records, before: Mark, after: Mark) -> Values:
    """From when each request that ended between two marks was to be sent, nanoseconds."""
    rows = slice(before.requests, after.requests)
    return np.array(records.ended[rows], np.int64) - np.array(records.began[rows], np.int64)


def agree(values: Sequence[float], within: float) -> bool:
    """Whether the last `AGREEING` values are all within this share of their mean."""
    last = values[-AGREEING:]
    if len(last) < AGREEING:
        return False
    mean = statistics.fmean(last)
    return all(abs(value - mean) <= within * mean for value in last)


def confidence(values: Sequence[float]) -> float:
    """Half the width of the 95 % confidence interval of the mean, by the method of batch means: the
    windows are taken for independent. Infinite for fewer than two."""
    degrees = len(values) - 1
    if degrees < 1:
        return math.inf
    t = _T95[degrees - 1] if degrees <= len(_T95) else _NORMAL95
    return t * statistics.stdev(values) / math.sqrt(len(values))


def percentile(ordered: Values, percent: float) -> int:
    """The smallest of these sorted values that so many percent of them do not exceed (nearest
    rank); 0 of none."""
    if not ordered.size:
        return 0
    rank = math.ceil(round(percent / 100 * ordered.size, 6))
    return int(ordered[max(rank, 1) - 1])


def spread(values: Values) -> dict[str, float]:
    """Mean, percentiles and maximum of nanoseconds, as milliseconds by name."""
    ordered = np.sort(values)
    found = {"mean": float(ordered.mean()) if ordered.size else 0.0}
    found |= {f"p{percent:g}": percentile(ordered, percent) for percent in PERCENTILES}
    found["max"] = int(ordered[-1]) if ordered.size else 0
    return {name: value / 1e6 for name, value in found.items()}
