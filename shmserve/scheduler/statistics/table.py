"""A flat table of counters as an object, whose public attributes are the entries; histograms and
quantiles.

A histogram counts in fixed buckets since the start. Quantiles are those of a sketch of the last
minute, in buckets whose bounds grow by a constant factor, so that every one is known within a
relative error of `ACCURACY`, at the price of one dictionary entry an observation: C. Masson, J. E.
Rim, H. K. Lee, "DDSketch: A Fast and Fully-Mergeable Quantile Sketch with Relative-Error
Guarantees", PVLDB 12(12), 2019. (The client library that Triton uses bounds the error of the rank
instead, with CKMS; that costs a sorted insertion for each of five windows.)

The window is that library's: 60 seconds in five parts. The oldest part falls out as a whole, so
what is shown is of the last 48 to 60 seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import repeat
from math import ceil, log
from typing import Any

ACCURACY = 0.005
_WINDOW_NS = 60_000_000_000
_PARTS = 5
_PART_NS = _WINDOW_NS // _PARTS
_GROWTH = (1 + ACCURACY) / (1 - ACCURACY)
_LOG_GROWTH = log(_GROWTH)


class Histogram:
    """Observations in fixed buckets; reported bounds and sum are observations / `scale`."""

    __slots__ = ("_bounds", "_counts", "_scale", "_shown", "_sum")

    def __init__(self, shown: Sequence[float], scale: int = 1) -> None:
        self._shown = list(shown)
        self._scale = scale
        self._bounds = [round(bound * scale) for bound in shown]
        self._counts = [0] * (len(shown) + 1)
        self._sum = 0

    def observe(self, *values: int) -> None:
        """Count observations; a value equal to a bound lies within it."""
        counts = self._counts
        for bucket in map(bisect_left, repeat(self._bounds), values):
            counts[bucket] += 1
        self._sum += sum(values)

    def restore(self, report: dict[str, Any]) -> None:
        """Go on from there; raises ValueError for another histogram's."""
        if report["buckets"] != self._shown or len(report["counts"]) != len(self._counts):
            raise ValueError("these are other buckets")
        self._counts = list(map(int, report["counts"]))
        self._sum = round(report["sum"] * self._scale)

    def report(self) -> dict[str, Any]:
        """As the package says."""
        return {
            "buckets": self._shown,
            "counts": list(self._counts),
            "sum": self._sum / self._scale if self._scale != 1 else self._sum,
            "count": sum(self._counts),
        }


class Quantiles:
    """Quantiles of whole numbers that were observed within the last minute. Times are ns."""

    __slots__ = ("_ends_ns", "_newest", "_parts")

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}
        self._parts: deque[dict[int, int]] = deque([self._newest], maxlen=_PARTS)
        self._ends_ns = 0  # when the newest part does

    def observe(self, value: int, now_ns: int) -> None:
        """Count one observation; what is below 1 counts as 0."""
        if now_ns >= self._ends_ns:
            self._slide(now_ns)
        index = ceil(log(value) / _LOG_GROWTH) if value > 0 else -1
        newest = self._newest
        newest[index] = newest.get(index, 0) + 1

    def _slide(self, now_ns: int) -> None:
        if now_ns >= self._ends_ns + _WINDOW_NS:
            self._parts.clear()
            self._ends_ns = now_ns
        while now_ns >= self._ends_ns:
            self._newest = {}
            self._parts.append(self._newest)
            self._ends_ns += _PART_NS

    def report(self, quantiles: Sequence[float], now_ns: int) -> list[list[float | None]]:
        """[quantile, value] of each; no value where nothing was observed."""
        if now_ns >= self._ends_ns:
            self._slide(now_ns)
        counts: dict[int, int] = {}
        for part in self._parts:
            for index, count in part.items():
                counts[index] = counts.get(index, 0) + count
        return [[quantile, _at(quantile, counts)] for quantile in quantiles]


def _at(quantile: float, counts: dict[int, int]) -> float | None:
    """The middle of the bucket that holds this quantile."""
    rank = min(max(quantile, 0), 1) * (sum(counts.values()) - 1)
    below = 0
    for index in sorted(counts):
        below += counts[index]
        if below > rank:
            return 0.0 if index < 0 else 2 * _GROWTH**index / (_GROWTH + 1)
    return None


class Table:
    """A table whose entries are counted in place: attributes with numbers, lists of numbers, either
    of them by key, histograms, or tables whose entries are of this one too. One whose name begins
    with _ is no entry."""

    def table(self) -> dict[str, Any]:
        """The entries, as shmserve/common/counters.py has them."""
        entries: dict[str, Any] = {}
        for name, value in self._entries():
            entries |= value.table() if isinstance(value, Table) else {name: _plain(value)}
        return entries

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Count on from there. Raises AttributeError, KeyError, TypeError or ValueError where that
        is none, and may then be half done."""
        for name, value in self._entries():
            if isinstance(value, (Table, Histogram)):
                value.restore(snapshot if isinstance(value, Table) else snapshot[name])
            else:
                setattr(self, name, _restored(value, snapshot[name]))

    def _entries(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in vars(self).items() if name[0] != "_"]


def _plain(value: Any) -> Any:
    if isinstance(value, Histogram):
        return value.report()
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _restored(value: Any, found: Any) -> Any:
    if isinstance(value, dict):
        return value | {key: _numbers(each) for key, each in found.items()}
    return _numbers(found)


def _numbers(found: Any) -> Any:
    return [_numbers(each) for each in found] if isinstance(found, list) else int(found)
