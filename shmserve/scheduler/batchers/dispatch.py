"""From the queue to the instances: retries alone, then the batches that the batcher forms."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shmserve.scheduler.batchers.adaptive import AdaptiveBatcher
from shmserve.scheduler.batchers.base import Batch, Batcher, Closed, Pending, WaitUntil
from shmserve.scheduler.batchers.dispatcher import Dispatcher, SequenceKey
from shmserve.scheduler.batchers.dynamic import DynamicBatcher
from shmserve.scheduler.requests.request import NEVER, ScheduledRequest
from shmserve.scheduler.settings import Settings

_ONE = Batch(1, Closed.IDLE)


class DefaultBatcher(Batcher):
    """The default batcher: one request an execution, in order, without a wait (pure)."""

    def decide(self, now_ns: int, pending: Iterable[Pending], reserve_ns: int) -> Batch | None:
        """As `Batcher` says."""
        return self.closed(pending)

    def closed(self, pending: Iterable[Pending]) -> Batch | None:
        """As `Batcher` says."""
        return next((_ONE for _ in pending), None)


@dataclass(eq=False)
class Dispatch(Dispatcher):
    """Starts what can run. An instance that is free gets a batch at once, one that is busy only
    what could not grow while it waits, and none where the queue has priorities or policies: what
    is sent ahead can be neither overtaken nor timed out."""

    _batcher: Batcher

    def __post_init__(self) -> None:
        self._sends_ahead = not self._settings.policies.limited and self._tickets is None

    def flush(self) -> None:
        """As `Dispatcher` says."""
        self._queue.release_hold()
        self._batcher.flush()

    def enqueued(self, request: ScheduledRequest, sequence_key: SequenceKey | None) -> None:
        """As `Dispatcher` says."""
        if self._batcher.learns:
            self._batcher.arrived(request.enqueued_ns, self._responses.live)

    def run(self, now_ns: int) -> int:
        """As `Dispatcher` says."""
        queue, tickets = self._queue, self._tickets
        if not len(queue) and tickets is None:
            return NEVER  # as most often
        executions, batcher, pool = self._executions, self._batcher, self._pool
        while len(queue):
            slot, ahead = None, not pool.free
            if ahead:
                depth = executions.service_time.pipeline_depth
                slot = pool.room(depth) if self._sends_ahead else None
                if slot is None:
                    break
            elif tickets is not None:
                slot = tickets.find(pool.free)
                if slot is None and self._would_run(now_ns):
                    tickets.ask(pool.free, len(queue))
                    break
            if queue.retries and not ahead:
                executions.start([queue.take_retry()], Closed.RETRY, now_ns, slot)
                continue
            # What must run alone waits for an instance that has nothing else.
            decision = batcher.closed(queue.waiting()) if ahead else self._decide(now_ns)
            if isinstance(decision, WaitUntil):
                if tickets is not None:
                    tickets.give_back()
                return decision.ns
            if decision is None:
                break
            executions.start(queue.take(decision.count), decision.reason, now_ns, slot)
        if tickets is not None:
            tickets.give_back()
        return NEVER

    def _would_run(self, now_ns: int) -> bool:
        """Whether a batch is there for an instance that is free."""
        return bool(self._queue.retries) or isinstance(self._decide(now_ns), Batch)

    def _decide(self, now_ns: int) -> Batch | WaitUntil | None:
        reserve_ns = self._executions.service_time.reserve_ns
        return self._batcher.decide(now_ns, self._queue.waiting(), reserve_ns)


def batcher_of(settings: Settings) -> Batcher:
    """The batcher of a model."""
    if settings.batching is None:
        return DefaultBatcher()
    if settings.batching.target_ns:
        return AdaptiveBatcher(settings.batching)
    return DynamicBatcher(settings.batching)
