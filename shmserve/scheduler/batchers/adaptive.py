"""The adaptive batcher: picks delay and size itself, to hold a latency target (pure).

It learns how long batches take by their size and when requests come (estimates.py):

1. The batch has the size that does most rows in a time, of those up to what waits: where execution
   time has a cliff, it stays below. Sizes that promise more and have not been tried are, where that
   can end in time even at worst, or the target is being missed anyway: seldom, and each but once.
2. What is there runs as soon as an instance is free, unless
3. more requests of a burst are to be expected so soon that waiting for them does more rows in the
   time that it takes than an average batch (the marginal value theorem: Charnov, 1976), and in all
   for no longer than the setup of one more execution: so waiting never costs more than twice what
   is best, as with the ski-rental problem (Karlin et al., 1988). Whether it pays at all it tries:
   where a machine is too busy to wake in time, it does not. It does so untried where the larger
   batch would end before the smaller one.
4. It never waits so long that the oldest request would miss the target if the batch took as long as
   it does but for one in a hundred; nor longer than the configured delay, if there is one.
5. Where all that waits would be late in one batch, and would not be in two, it runs as two.

The target is aimed at with feedback: what a request spends outside the scheduler's sight, or a
longer tail than the spread tells, moves the aim until one request in a hundred misses the target.
Where misses add up (a cumulative sum: Page, 1954), the target is out of reach for now, and it makes
for throughput. Preferred sizes do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shmserve.scheduler.batchers.base import Batch, Batcher, Closed, Pending, WaitUntil
from shmserve.scheduler.batchers.dynamic import QueueHead, closed, gather
from shmserve.scheduler.batchers.estimates import Arrivals, SizeTimes
from shmserve.scheduler.requests.request import NEVER
from shmserve.scheduler.settings import Batching

_STEP = 0.02  # by how much a miss lowers the aim, in parts of it
_ALLOWED = 0.01  # of the requests may miss the target
_LOWEST = 0.25  # of the target: the aim goes no lower
_MISSING = 0.75  # of the target: with a lower aim, it is being missed
_TOLERATED = 0.02  # of the requests: more misses add up
_OUT_OF_REACH, _MOST_MISSES = 30, 60  # misses that have added up
_RATE_GAIN = 1 / 64
_TRY_EVERY, _TRY_SOON = 16, 4  # batches
_CLEARLY = 0.1  # parts of a time by which another must be shorter

_EPOCH = 24  # batches
_SETTLING = 4  # of them, which still have to do with the epoch before
_EVERY, _UNCLEAR_EVERY, _MOST_EVERY = 2, 10, 160  # epochs from one try of the other way to the next
_CLEAR = 0.05  # parts by which one way is better: else it is tried often
_WEIGHT = 1 / 3  # of the newest epoch


class Trial:
    """Two ways, and which of them has made for the shorter latencies: a moving average for each.

    Of clients that wait for their responses, shorter latencies are more requests, too. Because what
    pays changes with the load, an epoch goes the other way at times: at first every other one, then
    more and more rarely as long as that confirms what is known, which bounds what it costs.
    """

    __slots__ = (
        "_batches",
        "_better",
        "_count",
        "_epochs",
        "_every",
        "_mean_ns",
        "_next",
        "_sum_ns",
        "on",
    )

    def __init__(self) -> None:
        self.on = True
        self._better = True
        self._every, self._next = _EVERY, 2 * _EVERY
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
        with_ns, without_ns = self._mean_ns[True], self._mean_ns[False]
        better = with_ns < without_ns
        if better is not self._better:
            self._better, self._every, self._next = better, _EVERY, self._epochs + _EVERY
        self.on = better
        if self._epochs >= self._next:
            self.on = not better
            clear = abs(with_ns - without_ns) > _CLEAR * min(with_ns, without_ns)
            self._every = min(self._every * 2, _MOST_EVERY if clear else _UNCLEAR_EVERY)
            self._next = self._epochs + self._every


class AdaptiveBatcher(Batcher):
    """A `Batcher` by these rules."""

    learns = True

    def __init__(self, rules: Batching) -> None:
        self._rules = rules
        self._time = SizeTimes(rules.max_batch_size)
        self._arrivals = Arrivals()
        self._waiting = Trial()
        self._aim_ns = float(rules.target_ns)
        self._misses = 0.0  # that have added up
        self._row_ns = 0.0  # from one row that is done to the next, on average
        self._returned_ns = 0
        self._batches = 0
        self._try_at = 0  # the batch from which on a size may be tried
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
        if self._batches:
            passed_ns = now_ns - self._returned_ns
            self._row_ns += (passed_ns - self._row_ns * units) * _RATE_GAIN
        self._returned_ns = now_ns
        self._batches += 1
        target = self._rules.target_ns
        for latency_ns in latencies_ns:
            if latency_ns > target:
                self._misses = min(self._misses + 1, _MOST_MISSES)
                self._aim_ns *= 1 - _STEP
            else:
                self._misses = max(self._misses - _TOLERATED, 0)
                self._aim_ns *= 1 + _STEP * _ALLOWED / (1 - _ALLOWED)
        self._aim_ns = min(max(self._aim_ns, _LOWEST * target), target)

    # --- what it decides ----------------------------------------------------------------------

    def flush(self) -> None:
        """As `Batcher` says."""
        self._draining = True

    def closed(self, pending: Iterable[Pending]) -> Batch | None:
        """As `Batcher` says."""
        head = gather(pending, self._rules)
        batch = closed(head)
        return batch if head is None or batch is None else self._sized(head, batch)

    def decide(
        self, now_ns: int, pending: Iterable[Pending], reserve_ns: int
    ) -> Batch | WaitUntil | None:
        """As `Batcher` says."""
        head = gather(pending, self._rules)
        if head is None:
            return None
        # A batch that was decided on is not always taken: the instance may still wait for its
        # ticket. So what ends a wait is that its first request is gone, not the decision.
        if not any(request is self._first for request in head.requests):
            self._first, self._until_ns = head.requests[0], now_ns + int(self._time.setup_ns)
        batch = closed(head)
        if self._draining or not self._time.known:
            return batch or Batch(len(head.requests), Closed.IDLE)
        tried = self._tried(now_ns, head)
        if tried:
            return Batch(tried, Closed.PREFERRED)
        if batch is not None:
            return self._sized(head, batch)
        if head.flush_by_ns - reserve_ns <= now_ns:
            return self._sized(head, Batch(len(head.requests), Closed.DEADLINE))
        return self._wait(now_ns, head, reserve_ns)

    def _wait(self, now_ns: int, head: QueueHead, reserve_ns: int) -> Batch | WaitUntil:
        """Wait for more, or run what is there."""
        count = len(head.requests)
        burst_ns, sooner = self._burst(head)
        ends_ns = self._start_by(head.oldest_ns, head.units)
        if sooner or self._misses > _OUT_OF_REACH:
            ends_ns = max(ends_ns, burst_ns)
        reason = Closed.IDLE
        if ends_ns <= now_ns:
            reason = Closed.TARGET
        elif self._rules.delay_ns:
            ends_ns = min(ends_ns, head.oldest_ns + self._rules.delay_ns)
        until_ns = min(ends_ns, self._until_ns, burst_ns)
        if until_ns > now_ns:
            return WaitUntil(min(until_ns, head.flush_by_ns - reserve_ns))
        batch = self._sized(head, Batch(count, reason))
        if batch.reason is Closed.TARGET:
            return Batch(self._in_time(now_ns, head.requests) or count, reason)
        return batch

    def _sized(self, head: QueueHead, batch: Batch) -> Batch:
        """The batch, or its first requests where these are done faster for their number."""
        best = self._time.best(head.units)
        if best >= head.units:
            return batch
        return Batch(_within(head.requests, best), Closed.PREFERRED)

    def _burst(self, head: QueueHead) -> tuple[int, bool]:
        """Until when the next request is to be expected of a burst that is worth waiting for (0:
        there is none), and whether the larger batch would even end sooner."""
        time, units, count = self._time, head.units, len(head.requests)
        best = time.best(units)
        now_ns = time.expected_ns(best)
        each = units / count
        room = int((self._rules.max_batch_size - units) / each)
        for requests, wait_ns in self._arrivals.burst(room):
            rows = units + requests * each
            longer_ns = wait_ns + time.expected_ns(round(rows)) - now_ns
            sooner = longer_ns < -_CLEARLY * now_ns
            if sooner or (self._waiting.on and longer_ns < (rows - best) * self._row_ns):
                return self._arrivals.next_by_ns, sooner
        return 0, False

    def _tried(self, now_ns: int, head: QueueHead) -> int:
        """The number of first requests to run to learn how long so many take; 0: none."""
        if self._batches < self._try_at:
            return 0
        missed = self._misses > _OUT_OF_REACH
        self._try_at = self._batches + (_TRY_SOON if missed else _TRY_EVERY)
        time = self._time
        size, worst = time.untried(head.units)
        if not size:
            return 0
        if self._aim_ns > _MISSING * self._rules.target_ns:
            ends_ns = now_ns + max(time.most_ns(size), time.most_ns(worst))
            if ends_ns > self._start_by(head.oldest_ns, head.units - size):
                return 0
        return _within(head.requests, size)

    def _start_by(self, oldest_ns: int, units: int) -> int:
        """When a batch must start whose oldest request came then, to be in time."""
        return int(oldest_ns + self._aim_ns - self._time.most_ns(units))

    def _in_time(self, now_ns: int, requests: list[Pending]) -> int:
        """The number of first requests to run at once so that all are in time, the others in a
        batch behind them; 0 where that cannot be."""
        first, oldest = 0, NEVER
        before: list[tuple[int, int]] = []  # size, and oldest request, of the first ones
        for request in requests:
            first, oldest = first + request.units, min(oldest, request.enqueued_ns)
            before.append((first, oldest))
        later, later_oldest = 0, NEVER
        for count in range(len(requests) - 1, 0, -1):
            later += requests[count].units
            later_oldest = min(later_oldest, requests[count].enqueued_ns)
            first, oldest = before[count - 1]
            if now_ns > self._start_by(oldest, first):
                continue
            if now_ns + self._time.most_ns(first) <= self._start_by(later_oldest, later):
                return count
        return 0


def _within(requests: list[Pending], units: int) -> int:
    """The number of first requests that fit in so many units; at least one."""
    for count, request in enumerate(requests):
        units -= request.units
        if units < 0:
            return max(count, 1)
    return len(requests)
