"""Batchers: each decides from the queue and the time what runs now, or how long to wait (pure).

A batcher is called only while an instance can take a batch. It changes nothing: the dispatchers in
instances/dispatch.py take the requests out of the queue. This module has the interface: `Batcher`,
the attributes of requests that it reads, and its decisions. The sequence batcher has the same
decisions, but forms a batch for one instance from the sequences in the instance's slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Protocol, final

from shmserve.ipc.transport.frames import Record


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
    """A batcher's decision to wait until this time (monotonic ns), or until the queue changes."""

    ns: int  # the end of the wait


class Batcher:
    """The base class of batchers, which itself runs one request at a time, without waiting.

    A batcher with `is_learning` is notified of arrivals and executions.
    """

    is_learning: bool = False  # whether it is notified of arrivals and executions

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
