"""The adaptive batcher: picks delay and size itself, to hold a latency target (pure).

It learns how long batches take (batch_time.py) and when requests come (arrivals.py):

1. What is there runs as soon as an instance is free, unless
2. a burst of requests is coming that should be over in half the time that a batch of its own would
   take on top (the setup of one more execution). Then it waits for the next request of the burst,
   and in all for no longer than that setup: so waiting never costs more than twice what is best,
   as with the ski-rental problem (Karlin et al., 1988). Whether it pays at all it tries (trial.py):
   where a machine is too busy to wake in time, it does not.
3. It never waits so long that the oldest request would miss the target if the batch took as long as
   it does but for one in a hundred; nor longer than the configured delay, if there is one.
4. Where all that waits would be late in one batch, and would not be in two, it runs as two.

The target is aimed at with feedback: what a request spends outside the scheduler's sight, or a
longer tail than the spread tells, moves the aim until one request in a hundred misses the target.
Preferred sizes do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shmserve.scheduler.batchers.arrivals import Arrivals
from shmserve.scheduler.batchers.base import Batch, Batcher, Closed, Pending, WaitUntil
from shmserve.scheduler.batchers.batch_time import BatchTime
from shmserve.scheduler.batchers.dynamic import Front, closed, gather
from shmserve.scheduler.batchers.trial import Trial
from shmserve.scheduler.settings import Batching

_STEP = 0.02  # by how much a miss lowers the aim, in parts of it
_ALLOWED = 0.01  # of the requests may miss the target
_LOWEST = 0.25  # of the target: the aim goes no lower


class AdaptiveBatcher(Batcher):
    """A `Batcher` by these rules."""

    learns = True

    def __init__(self, rules: Batching) -> None:
        self._rules = rules
        self._time = BatchTime()
        self._arrivals = Arrivals()
        self._waiting = Trial()
        self._aim_ns = float(rules.target_ns)
        # The first request of the batch that is being formed, and until when that may wait.
        self._first: Pending | None = None
        self._until_ns = 0
        self._draining = False

    # --- what it learns -----------------------------------------------------------------------

    def arrived(self, now_ns: int, here: int) -> None:
        """As `Batcher` says."""
        self._arrivals.arrived(now_ns, here, self._time.setup_ns)

    def returned(
        self, now_ns: int, here: int, units: int, took_ns: int, latencies_ns: Sequence[int]
    ) -> None:
        """As `Batcher` says."""
        self._arrivals.returned(now_ns, here, self._time.setup_ns)
        self._time.observe(units, took_ns)
        self._waiting.returned(latencies_ns)
        target = self._rules.target_ns
        for latency_ns in latencies_ns:
            missed = latency_ns > target
            self._aim_ns *= 1 - _STEP if missed else 1 + _STEP * _ALLOWED / (1 - _ALLOWED)
        self._aim_ns = min(max(self._aim_ns, _LOWEST * target), target)

    # --- what it decides ----------------------------------------------------------------------

    def hurry(self) -> None:
        """As `Batcher` says."""
        self._draining = True

    def decide(
        self, now_ns: int, pending: Iterable[Pending], reserve_ns: int
    ) -> Batch | WaitUntil | None:
        """As `Batcher` says."""
        front = gather(pending, self._rules)
        if front is None:
            return None
        # A batch that was decided on is not always taken: the instance may still wait for its
        # ticket. So what ends a wait is that its first request is gone, not the decision.
        if not any(request is self._first for request in front.requests):
            self._first, self._until_ns = front.requests[0], now_ns + int(self._time.setup_ns)
        return self._decide(now_ns, front, reserve_ns)

    def closed(self, pending: Iterable[Pending]) -> Batch | None:
        """As `Batcher` says."""
        return closed(gather(pending, self._rules))

    def _decide(self, now_ns: int, front: Front, reserve_ns: int) -> Batch | WaitUntil:
        count = len(front.requests)
        if front.full:
            return Batch(count, Closed.FULL)
        if front.other_shape:
            return Batch(count, Closed.SHAPE)
        if self._draining or not self._time.known or not self._waiting.on:
            return Batch(count, Closed.IDLE)
        ends_ns = self._start_by(front.oldest_ns, front.units)
        if ends_ns <= now_ns:
            return Batch(self._in_time(now_ns, front.requests) or count, Closed.TARGET)
        if front.hurry_ns - reserve_ns <= now_ns:
            return Batch(count, Closed.DEADLINE)
        if self._rules.delay_ns:
            ends_ns = min(ends_ns, front.oldest_ns + self._rules.delay_ns)
        room = self._rules.max_batch_size - front.units
        burst_ns = self._arrivals.burst_until(self._time.setup_ns, room)
        expected_ns = min(ends_ns, self._until_ns, burst_ns)
        if expected_ns <= now_ns:
            return Batch(count, Closed.IDLE)
        return WaitUntil(min(expected_ns, front.hurry_ns - reserve_ns))

    def _start_by(self, oldest_ns: int, units: int) -> int:
        """When a batch must start whose oldest request came then, to be in time."""
        return int(oldest_ns + self._aim_ns - self._time.most_ns(units))

    def _in_time(self, now_ns: int, requests: list[Pending]) -> int:
        """How many of the first requests to run at once so that all are in time, the others in a
        batch behind them; 0 where that cannot be."""
        units = sum(request.units for request in requests)
        later, later_oldest = 0, now_ns
        for count in range(len(requests) - 1, 0, -1):
            last = requests[count]
            later += last.units
            later_oldest = min(later_oldest, last.enqueued_ns)
            oldest = min(request.enqueued_ns for request in requests[:count])
            first = units - later
            if now_ns > self._start_by(oldest, first):
                continue
            if now_ns + self._time.most_ns(first) <= self._start_by(later_oldest, later):
                return count
        return 0
