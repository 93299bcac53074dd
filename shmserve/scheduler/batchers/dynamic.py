"""The dynamic batcher: (now, queue, rules) -> run these now, or wait until then (pure).

Called only while an instance can take a batch. The rules are those of Triton's dynamic batcher,
with the order of the queue kept and a request never split:

1. Requests are taken in order while their sizes fit `max_batch_size` and their shapes equal the
   first one's, or may be padded to be equal.
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

from shmserve.ipc.transport.records import record
from shmserve.scheduler.batchers.base import Batch, Batcher, Closed, Pending, WaitUntil
from shmserve.scheduler.requests.request import NEVER
from shmserve.scheduler.settings import Batching


class DynamicBatcher(Batcher):
    """A `Batcher` by these rules."""

    def __init__(self, rules: Batching) -> None:
        self._rules = rules

    def decide(
        self, now_ns: int, pending: Iterable[Pending], reserve_ns: int
    ) -> Batch | WaitUntil | None:
        """As `Batcher` says."""
        return decide(now_ns, pending, self._rules, reserve_ns)

    def closed(self, pending: Iterable[Pending]) -> Batch | None:
        """As `Batcher` says."""
        return closed(gather(pending, self._rules))

    def hurry(self) -> None:
        """As `Batcher` says."""
        self._rules = replace(self._rules, delay_ns=0)


@record
class Front:
    """The first requests of the queue that may run together, `units` in all.

    `best` of them (0: none) reach the largest preferred size, or come as near as they can. The next
    one does not fit (`full`) or has other shapes; neither: there is none.
    """

    requests: list[Pending]
    units: int
    best: int
    full: bool
    other_shape: bool
    oldest_ns: int
    hurry_ns: int


def gather(pending: Iterable[Pending], rules: Batching) -> Front | None:
    """How far the queue may run together; None where it is empty. Looks at no more requests than
    fit a batch, and one."""
    largest, most, preferred = rules.largest_preferred, rules.max_batch_size, rules.preferred
    requests: list[Pending] = []
    total = best = 0
    full = other_shape = False
    shape_key = b""
    padded = None if rules.padding is None else rules.padding.batch()
    oldest = hurry = NEVER
    for request in pending:
        grown = total + request.units
        if requests:
            if grown > largest and not best:
                best = len(requests)
            if grown > most:
                full = True
                break
            if (
                request.shape_key != shape_key
                if padded is None
                else not padded.admits(request.shape_key, request.units)
            ):
                other_shape = True
                break
        else:
            shape_key = request.shape_key
            if padded is not None:
                padded.admits(shape_key, request.units)
        total = grown
        requests.append(request)
        if request.enqueued_ns < oldest:
            oldest = request.enqueued_ns
        if request.hurry_ns < hurry:
            hurry = request.hurry_ns
        if total in preferred:
            best = len(requests)
        if total >= most:
            full = True
            break
    if not requests:
        return None
    return Front(requests, total, best, full, other_shape, oldest, hurry)


def closed(front: Front | None) -> Batch | None:
    """The batch of the first requests of a queue, if it can take no further one."""
    if front is None or 0 < front.best < len(front.requests):
        return None
    if front.full:
        return Batch(len(front.requests), Closed.FULL)
    if front.other_shape and not front.best:
        return Batch(len(front.requests), Closed.SHAPE)
    return None


def decide(
    now_ns: int, pending: Iterable[Pending], rules: Batching, reserve_ns: int
) -> Batch | WaitUntil | None:
    """What to do with `pending`, in its order; None when it is empty.

    `reserve_ns`: how long before a deadline a batch must start to be done in time.
    """
    front = gather(pending, rules)
    if front is None:
        return None
    count, best, delay = len(front.requests), front.best, rules.delay_ns
    waited_enough = 0 < delay <= now_ns - front.oldest_ns
    if best and not waited_enough:
        return Batch(best, Closed.FULL if front.full and best == count else Closed.PREFERRED)
    if front.full:
        return Batch(count, Closed.FULL)
    if front.other_shape:
        return Batch(count, Closed.SHAPE)
    if waited_enough:
        return Batch(count, Closed.DELAY)
    if front.units >= rules.largest_preferred:
        return Batch(count, Closed.PREFERRED)
    if not delay:
        return Batch(count, Closed.IDLE)
    if front.hurry_ns - reserve_ns <= now_ns:
        return Batch(count, Closed.DEADLINE)
    return WaitUntil(min(front.oldest_ns + delay, front.hurry_ns - reserve_ns))
