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

    def flush(self) -> None:
        """As `Batcher` says."""
        self._rules = replace(self._rules, delay_ns=0)


@record
class QueueHead:
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
    flush_by_ns: int


def gather(pending: Iterable[Pending], rules: Batching) -> QueueHead | None:
    """The head of the queue that may run together; None where it is empty. Looks at no more
    requests than fit a batch, and one."""
    largest, most, preferred = rules.largest_preferred, rules.max_batch_size, rules.preferred
    requests: list[Pending] = []
    total = best = 0
    full = other_shape = False
    shape_key = b""
    padded = None if rules.padding is None else rules.padding.batch()
    oldest = flush_by = NEVER
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
                else not padded.may_join(request.shape_key, request.units)
            ):
                other_shape = True
                break
        else:
            shape_key = request.shape_key
            if padded is not None:
                padded.may_join(shape_key, request.units)
        total = grown
        requests.append(request)
        if request.enqueued_ns < oldest:
            oldest = request.enqueued_ns
        if request.flush_by_ns < flush_by:
            flush_by = request.flush_by_ns
        if total in preferred:
            best = len(requests)
        if total >= most:
            full = True
            break
    if not requests:
        return None
    return QueueHead(requests, total, best, full, other_shape, oldest, flush_by)


def closed(head: QueueHead | None) -> Batch | None:
    """The batch of the first requests of a queue, if it can take no further one."""
    if head is None or 0 < head.best < len(head.requests):
        return None
    if head.full:
        return Batch(len(head.requests), Closed.FULL)
    if head.other_shape and not head.best:
        return Batch(len(head.requests), Closed.SHAPE)
    return None


def decide(
    now_ns: int, pending: Iterable[Pending], rules: Batching, reserve_ns: int
) -> Batch | WaitUntil | None:
    """The decision for `pending`, in its order; None when it is empty.

    `reserve_ns`: how long before a deadline a batch must start to be done in time.
    """
    head = gather(pending, rules)
    if head is None:
        return None
    count, best, delay = len(head.requests), head.best, rules.delay_ns
    waited_enough = 0 < delay <= now_ns - head.oldest_ns
    if best and not waited_enough:
        return Batch(best, Closed.FULL if head.full and best == count else Closed.PREFERRED)
    if head.full:
        return Batch(count, Closed.FULL)
    if head.other_shape:
        return Batch(count, Closed.SHAPE)
    if waited_enough:
        return Batch(count, Closed.DELAY)
    if head.units >= rules.largest_preferred:
        return Batch(count, Closed.PREFERRED)
    if not delay:
        return Batch(count, Closed.IDLE)
    if head.flush_by_ns - reserve_ns <= now_ns:
        return Batch(count, Closed.DEADLINE)
    return WaitUntil(min(head.oldest_ns + delay, head.flush_by_ns - reserve_ns))
