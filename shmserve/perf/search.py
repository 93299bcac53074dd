"""The search for a configuration that answers most requests a second within a latency target, in
few runs (pure: `measure` runs one).

Coordinate descent (Wright, Coordinate descent algorithms, 2015): instances, then the ways to make
batches and to use threads, and once more where that gained anything. For each point of these it
finds the largest batch within the target by exponential and binary search (Bentley and Yao, An
almost optimal algorithm for unbounded searching, 1976): with as many requests in flight as batches
have room for, latency and throughput both grow with the batch. So a batch that is too slow and does
not answer more than the best that is known ends its search: smaller ones answer less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

_GAIN = 1.02  # what is less is noise
_NEAR = 1.04  # sizes of batches that need not be told apart
_FALL = 0.9  # of the throughput, after which larger batches are not tried
_SWEEPS = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration, and how it is loaded.

    `batch` 0: it does not batch; `strategy` "": what the model has; `threads` 0: as many as it has.
    `depth`: requests in flight for each row of a batch: 1 where a batch waits until it is full, 2
    where the next one is to fill while one is executed.
    """

    instances: int
    batch: int
    strategy: str = ""
    delay_us: int = 0
    threads: int = 0
    depth: int = 2

    @property
    def in_flight(self) -> int:
        """The requests that it is measured with."""
        return self.instances * max(self.batch, 1) * self.depth


class Trial(NamedTuple):
    """What a run came to."""

    candidate: Candidate
    per_second: float
    p99_ms: float
    errors: int = 0


@dataclass(frozen=True, slots=True)
class Space:
    """What may be tried: numbers of instances, ascending; ways to make batches, or to use threads,
    as fields of a candidate; and sizes of batches, up to the largest."""

    instances: Sequence[int]
    ways: Sequence[Mapping[str, Any]]
    largest_batch: int


class _Spent(Exception):
    """There have been as many runs as there may be."""


class Search:
    """One search. `trials` are its runs, in their order."""

    def __init__(
        self, measure: Callable[[Candidate], Trial], target_ms: float, space: Space, most_runs: int
    ) -> None:
        self.trials: dict[Candidate, Trial] = {}
        self._measure = measure
        self._target_ms = target_ms
        self._space = space
        self._most_runs = most_runs

    def holds(self, trial: Trial) -> bool:
        """Whether it is within the target."""
        return trial.p99_ms <= self._target_ms and not trial.errors

    @property
    def best(self) -> Trial | None:
        """What answers most within the target; None where nothing is."""
        within = filter(self.holds, self.trials.values())
        return max(within, key=lambda trial: trial.per_second, default=None)

    def run(self, start: Candidate) -> Trial | None:
        """Search from `start`, which is measured first; the best, measured once more. None: nothing
        that was tried is within the target."""
        try:
            self._largest_batch(start)
            for _ in range(_SWEEPS):
                before = self._reached
                self._sweep(start)
                if self._reached <= before * _GAIN:
                    break
        except _Spent:
            pass
        return self._confirmed()

    @property
    def _reached(self) -> float:
        return self.best.per_second if self.best else 0.0

    def _from(self, start: Candidate) -> Candidate:
        return self.best.candidate if self.best else start

    def _sweep(self, start: Candidate) -> None:
        here = self._from(start).instances
        more = [number for number in self._space.instances if number > here]
        fewer = [number for number in self._space.instances if number < here]
        if self.best and not self._climb(start, more):
            self._climb(start, fewer[::-1])
        for way in self._space.ways:
            self._largest_batch(replace(self._from(start), **way))

    def _climb(self, start: Candidate, ahead: Sequence[int]) -> bool:
        """Take these numbers of instances while that gains; whether it did."""
        for taken, number in enumerate(ahead):
            before = self._reached
            self._largest_batch(replace(self._from(start), instances=number))
            if self._reached <= before * _GAIN:
                return taken > 0
        return bool(ahead)

    def _largest_batch(self, at: Candidate) -> None:
        """Try batches, from that of `at`, for the largest within the target."""
        low, high, size, peak = 0, self._space.largest_batch + 1, at.batch, 0.0
        while True:
            trial, known = self._try(replace(at, batch=size)), self._reached
            if self.holds(trial):
                low, fell = size, trial.per_second < peak * _FALL
                peak = max(peak, trial.per_second)
                if fell:
                    return
            else:
                high = size
                if not trial.errors and trial.per_second <= known * _GAIN:
                    return
            size = self._between(low, high) if at.batch else 0
            if not size:
                return

    def _between(self, low: int, high: int) -> int:
        """The size to try next where `low` is within the target (0: none is known), and `high` is
        not, or more than may be; 0: none."""
        most = self._space.largest_batch
        if not low:
            return high // 2
        if high > most:
            return min(low * 2, most) if low < most else 0
        if high - low <= 1 or high <= low * _NEAR:
            return 0
        return min(max(round(math.sqrt(low * high)), low + 1), high - 1)

    def _try(self, candidate: Candidate) -> Trial:
        if candidate not in self.trials:
            if len(self.trials) >= self._most_runs:
                raise _Spent
            self.trials[candidate] = self._measure(candidate)
        return self.trials[candidate]

    def _confirmed(self) -> Trial | None:
        """The best that is within the target once more."""
        while (best := self.best) is not None:
            again = self.trials[best.candidate] = self._measure(best.candidate)
            if self.holds(again):
                return again
        return None
