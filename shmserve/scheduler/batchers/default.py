"""The default scheduler: one request an execution, in order (pure)."""

from __future__ import annotations

from collections.abc import Iterable

from shmserve.scheduler.batchers.base import Batch, Batcher, Closed, Pending

_ONE = Batch(1, Closed.IDLE)


class DefaultBatcher(Batcher):
    """A `Batcher` that never waits."""

    def decide(self, now_ns: int, pending: Iterable[Pending], reserve_ns: int) -> Batch | None:
        """As `Batcher` says."""
        return self.closed(pending)

    def closed(self, pending: Iterable[Pending]) -> Batch | None:
        """As `Batcher` says."""
        return next((_ONE for _ in pending), None)
