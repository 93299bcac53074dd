"""Observations in fixed buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any


class Histogram:
    """Observations in fixed buckets; reported bounds and sum are observations / `scale`."""

    __slots__ = ("_bounds", "_counts", "_scale", "_shown", "_sum")

    def __init__(self, shown: Sequence[float], scale: int = 1) -> None:
        self._shown = list(shown)
        self._scale = scale
        self._bounds = [round(bound * scale) for bound in shown]
        self._counts = [0] * (len(shown) + 1)
        self._sum = 0

    def observe(self, value: int) -> None:
        """Count one observation; a value equal to a bound lies within it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

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
