"""The dynamic batcher: (now, queue, rules) -> run these now, or wait until then (pure).

Called only while an instance can take a batch. The rules are those of Triton's dynamic batcher,
with the order of the queue kept and a request never split:

1. Requests are taken in order while their sizes fit `max_batch_size` and their shapes equal the
   first one's.
2. The largest preferred size reached on the way runs at once, exactly, unless the delay is over.
   Where the next request would pass the largest preferred size and none was reached, what is there
   counts as preferred.
3. A batch that cannot grow, or has reached the largest preferred size, runs at once.
4. The delay counts from the enqueue of the oldest request taken. When it is over, or when there is
   none, everything taken runs.
5. A deadline that would pass during the delay ends the wait while there is still time to run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shmserve.scheduler.batchers.base import Batch, Closed, Pending, WaitUntil
from shmserve.scheduler.requests.request import NEVER
from shmserve.scheduler.settings import Batching


class DynamicBatcher:
    """A `Batcher` by these rules."""

    grows = True

    def __init__(self, rules: Batching) -> None:
        self._rules = rules

    def decide(
        self, now_ns: int, pending: Iterable[Pending], reserve_ns: int
    ) -> Batch | WaitUntil | None:
        """As `Batcher` says."""
        return decide(now_ns, pending, self._rules, reserve_ns)

    def hurry(self) -> None:
        """As `Batcher` says."""
        self._rules = replace(self._rules, delay_ns=0)


def decide(
    now_ns: int, pending: Iterable[Pending], rules: Batching, reserve_ns: int
) -> Batch | WaitUntil | None:
    """What to do with `pending`, in its order; None when it is empty.

    `reserve_ns`: how long before a deadline a batch must start to be done in time.
    """
    largest, most, preferred = rules.largest_preferred, rules.max_batch_size, rules.preferred
    count = total = best = 0
    full = other_shape = False
    shape_key = b""
    oldest = hurry = NEVER
    for request in pending:
        grown = total + request.units
        if count:
            if grown > largest and not best:
                best = count
            if grown > most:
                full = True
                break
            if request.shape_key != shape_key:
                other_shape = True
                break
        else:
            shape_key = request.shape_key
        total = grown
        count += 1
        oldest = min(oldest, request.enqueued_ns)
        hurry = min(hurry, request.hurry_ns)
        if total in preferred:
            best = count
        if total >= most:
            full = True
            break
    if not count:
        return None
    delay = rules.delay_ns
    waited_enough = 0 < delay <= now_ns - oldest
    if best and not waited_enough:
        return Batch(best, Closed.FULL if full and best == count else Closed.PREFERRED)
    if full:
        return Batch(count, Closed.FULL)
    if other_shape:
        return Batch(count, Closed.SHAPE)
    if waited_enough:
        return Batch(count, Closed.DELAY)
    if total >= largest:
        return Batch(count, Closed.PREFERRED)
    if not delay:
        return Batch(count, Closed.IDLE)
    if hurry - reserve_ns <= now_ns:
        return Batch(count, Closed.DEADLINE)
    return WaitUntil(min(oldest + delay, hurry - reserve_ns))
