"""Batchers: each decides from the queue and the time what runs now, or how long to wait (pure).

A batcher is called only while an instance can take a batch. The batcher does not change the queue:
the dispatchers in instances/dispatch.py take the requests out of it. This module has the interface:
`Batcher`, the attributes of requests that a batcher reads, and its decisions. The sequence batcher
has the same decisions, but forms a batch for one instance from the sequences in its slots.

The dynamic batcher is here, too. Unlike Triton's, it keeps the order of the queue and never splits
a request. Its rules are:

1. Requests are taken in order while their sizes fit `max_batch_size` and their shapes equal the
   first request's, or can be padded to be equal.
2. The largest preferred size reached on the way runs immediately and exactly, unless the delay has
   expired. If the next request would exceed the largest preferred size and no preferred size was
   reached, the requests taken so far count as preferred.
3. A batch that cannot grow, or has reached the largest preferred size, runs immediately.
4. The delay counts from the enqueueing of the oldest request taken. When it has expired, or if
   there is no delay, all requests taken so far run.
5. If a deadline would pass during the delay, the wait ends while there is still time to run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Protocol, final

from shmserve.ipc.tensors.padding import PaddedBatch
from shmserve.ipc.transport.frames import Record
from shmserve.scheduler.requests.scheduled import NEVER
from shmserve.scheduler.settings import Batching


class CloseReason(StrEnum):
    """The reason why a batch took no further request."""

    FULL = "full"  # the next request would exceed the maximum size
    PREFERRED = "preferred"  # a preferred size was reached
    DELAY = "delay"  # the oldest request had waited for the maximum delay
    SHAPE = "shape"  # the next request has other shapes
    TARGET = "target"  # waiting longer would have missed the latency target
    DEADLINE = "deadline"  # waiting longer would have missed a deadline
    IDLE = "idle"  # no further request, and no delay
    RETRY = "retry"  # a request whose worker died runs alone


class PendingRequest(Protocol):
    """The attributes of a queued request by which a batcher decides."""

    rows: int  # the request's batch size
    shape_key: bytes  # equal for requests that can share a batch
    enqueued_ns: int
    flush_by_ns: int  # the time before which a batch should run rather than wait


class Batch(Record):
    """A batcher's decision to run the first `count` requests of the queue now.

    `reason` is why the batch takes no further request.
    """

    count: int  # number of requests
    reason: CloseReason


@final
class WaitUntil(Record):
    """A batcher's decision to wait until `end_ns` (monotonic), or until the queue changes."""

    end_ns: int


class Batcher:
    """The base class of batchers, which itself runs one request at a time, without waiting.

    A batcher with `is_learning` is notified of arrivals and executions.
    """

    is_learning: bool = False  # whether the batcher is notified of arrivals and executions

    def decide(
        self, now_ns: int, pending: Iterable[PendingRequest], reserve_ns: int
    ) -> Batch | WaitUntil | None:
        """Return the decision for the queue; None if there is nothing to run or to wait for.

        Args:
            now_ns: The time.
            pending: The queued requests in order, at least one.
            reserve_ns: How long before a deadline a batch must start in order to meet it.
        """
        return _SINGLE_REQUEST

    def closed_batch(self, pending: Iterable[PendingRequest]) -> Batch | None:
        """Return the batch at the front of the queue if it can take no further request, or None."""
        return _SINGLE_REQUEST

    def flush(self) -> None:
        """Stop waiting: no further request is expected."""

    def record_arrival(self, now_ns: int, in_flight: int) -> None:
        """Record the arrival of a request.

        Args:
            now_ns: The time.
            in_flight: The number of requests that are not completed.
        """

    def record_batch(
        self, now_ns: int, in_flight: int, rows: int, took_ns: int, latencies_ns: Sequence[int]
    ) -> None:
        """Record the execution of a batch.

        Args:
            now_ns: The time.
            in_flight: The number of requests that are not completed.
            rows: The size of the batch.
            took_ns: The duration of the execution.
            latencies_ns: The times from the arrival of each of its requests to now.
        """


_SINGLE_REQUEST = Batch(1, CloseReason.IDLE)


class DynamicBatcher(Batcher):
    """The dynamic batcher, with the rules of this module's docstring."""

    def __init__(self, rules: Batching) -> None:
        self._rules = rules

    def decide(
        self, now_ns: int, pending: Iterable[PendingRequest], reserve_ns: int
    ) -> Batch | WaitUntil | None:
        return decide(now_ns, pending, self._rules, reserve_ns)

    def closed_batch(self, pending: Iterable[PendingRequest]) -> Batch | None:
        return closed_batch(gather(pending, self._rules))

    def flush(self) -> None:
        self._rules = replace(self._rules, delay_ns=0)


class QueueHead(Record):
    """The first requests of the queue that may run together.

    Attributes:
        rows: Their total size.
        preferred_count: The number of first requests that reach the last preferred size on the way.
            If the largest preferred size is exceeded before any is reached, the number of requests
            before that. Otherwise 0.
        is_full: Whether the batch is full, or the next request does not fit.
        has_other_shape: Whether the next request has other shapes.
        oldest_ns: The time at which the oldest request was enqueued.
    """

    requests: list[PendingRequest]
    rows: int
    preferred_count: int  # number of first requests that reach a preferred size; 0: none
    is_full: bool
    has_other_shape: bool  # whether the next request cannot join
    oldest_ns: int
    flush_by_ns: int  # the earliest `flush_by_ns` of the requests


def gather(pending: Iterable[PendingRequest], rules: Batching) -> QueueHead | None:
    """Return the requests at the queue's head that may run together; None for an empty queue.

    The iteration ends at the first request that does not fit.
    """
    largest_preferred_size = rules.largest_preferred_size
    max_size = rules.max_batch_size
    preferred_sizes = rules.preferred_sizes
    requests: list[PendingRequest] = []
    rows = preferred_count = 0
    is_full = has_other_shape = False
    shape_key = b""
    padded_batch = None if rules.padding is None else PaddedBatch(rules.padding)
    oldest_ns = flush_ns = NEVER
    for request in pending:
        new_rows = rows + request.rows
        if requests:
            if new_rows > largest_preferred_size and not preferred_count:
                preferred_count = len(requests)
            if new_rows > max_size:
                is_full = True
                break
            if (
                request.shape_key != shape_key
                if padded_batch is None
                else not padded_batch.try_join(request.shape_key, request.rows)
            ):
                has_other_shape = True
                break
        else:
            shape_key = request.shape_key
            if padded_batch is not None:
                padded_batch.try_join(shape_key, request.rows)
        rows = new_rows
        requests.append(request)
        if request.enqueued_ns < oldest_ns:
            oldest_ns = request.enqueued_ns
        if request.flush_by_ns < flush_ns:
            flush_ns = request.flush_by_ns
        if rows in preferred_sizes:
            preferred_count = len(requests)
        if rows >= max_size:
            is_full = True
            break
    if not requests:
        return None
    return QueueHead(requests, rows, preferred_count, is_full, has_other_shape, oldest_ns, flush_ns)


def closed_batch(head: QueueHead | None) -> Batch | None:
    """Return the batch at the head of a queue if it can take no further request, or None."""
    if head is None or 0 < head.preferred_count < len(head.requests):
        return None
    if head.is_full:
        return Batch(len(head.requests), CloseReason.FULL)
    if head.has_other_shape and not head.preferred_count:
        return Batch(len(head.requests), CloseReason.SHAPE)
    return None


def decide(
    now_ns: int, pending: Iterable[PendingRequest], rules: Batching, reserve_ns: int
) -> Batch | WaitUntil | None:
    """Return the dynamic batcher's decision for a queue; see `Batcher.decide`."""
    head = gather(pending, rules)
    if head is None:
        return None
    count, preferred_count, delay_ns = len(head.requests), head.preferred_count, rules.delay_ns
    delay_has_passed = 0 < delay_ns <= now_ns - head.oldest_ns
    if preferred_count and not delay_has_passed:
        return Batch(
            preferred_count,
            CloseReason.FULL
            if head.is_full and preferred_count == count
            else CloseReason.PREFERRED,
        )
    if head.is_full:
        return Batch(count, CloseReason.FULL)
    if head.has_other_shape:
        return Batch(count, CloseReason.SHAPE)
    if delay_has_passed:
        return Batch(count, CloseReason.DELAY)
    if head.rows >= rules.largest_preferred_size:
        return Batch(count, CloseReason.PREFERRED)
    if not delay_ns:
        return Batch(count, CloseReason.IDLE)
    if head.flush_by_ns - reserve_ns <= now_ns:
        return Batch(count, CloseReason.DEADLINE)
    return WaitUntil(min(head.oldest_ns + delay_ns, head.flush_by_ns - reserve_ns))
