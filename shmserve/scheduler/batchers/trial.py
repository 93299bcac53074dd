"""Whether something pays, by trying it: epochs with and without take turns (pure)."""

from __future__ import annotations

from collections.abc import Sequence

_EPOCH = 24  # batches
_SETTLING = 4  # of them, which still have to do with the epoch before
_TRIED = 10  # one in so many epochs goes the way that has not been better
_WEIGHT = 1 / 3  # of the newest epoch


class Trial:
    """Two ways, and which of them has made for the shorter latencies: a moving average for each.

    Of clients that wait for their responses, shorter latencies are more requests, too. One epoch in
    `_TRIED` goes the other way, because what pays changes with the load: what a wrong guess costs
    is bounded by that.
    """

    __slots__ = ("_batches", "_count", "_epochs", "_mean_ns", "_sum_ns", "on")

    def __init__(self) -> None:
        self.on = True
        self._mean_ns: dict[bool, float] = {}
        self._epochs = 0
        self._batches = 0
        self._count = 0
        self._sum_ns = 0

    def returned(self, latencies_ns: Sequence[int]) -> None:
        """A batch has ended, whose requests took so long."""
        self._batches += 1
        if self._batches > _SETTLING:
            self._count += len(latencies_ns)
            self._sum_ns += sum(latencies_ns)
        if self._batches >= _EPOCH:
            self._end_epoch()

    def _end_epoch(self) -> None:
        mean_ns = self._sum_ns / max(1, self._count)
        before_ns = self._mean_ns.get(self.on, mean_ns)
        self._mean_ns[self.on] = before_ns + (mean_ns - before_ns) * _WEIGHT
        self._batches = self._count = self._sum_ns = 0
        self._epochs += 1
        if len(self._mean_ns) < 2:
            self.on = not self.on
            return
        better = self._mean_ns[True] < self._mean_ns[False]
        self.on = better if self._epochs % _TRIED else not better
