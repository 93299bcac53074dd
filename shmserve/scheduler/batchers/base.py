"""The interface of a batcher: for the queue and the time, a batch or a time to wait until.

It decides and does nothing else: the scheduler's core takes the requests out of the queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from enum import StrEnum
from typing import Protocol

from shmserve.ipc.transport.records import record


class Closed(StrEnum):
    """Why a batch took no further request."""

    FULL = "full"  # the next one would not fit the maximum
    PREFERRED = "preferred"  # a preferred size was reached
    DELAY = "delay"  # the oldest request had waited long enough
    SHAPE = "shape"  # the next one has other shapes
    TARGET = "target"  # waiting longer would have missed the latency target
    DEADLINE = "deadline"  # waiting longer would have missed a deadline
    IDLE = "idle"  # nothing to wait for
    RETRY = "retry"  # a request whose worker died runs alone


class Pending(Protocol):
    """The view of a queued request that a batcher has."""

    units: int
    shape_key: bytes
    enqueued_ns: int
    flush_by_ns: int


class PendingRequests(Sized, Iterable[Pending], Protocol):
    """What waits, in order."""


@record
class Batch:
    """Run the first `count` requests of the queue now."""

    count: int
    reason: Closed


@record
class WaitUntil:
    """Ask again at this time (monotonic ns), or when the queue changes."""

    ns: int


class Batcher(Protocol):
    """Asked only while an instance can take a batch. One that `learns` is told what happens."""

    learns: bool = False

    def decide(
        self, now_ns: int, pending: PendingRequests, reserve_ns: int
    ) -> Batch | WaitUntil | None:
        """The decision for `pending`, in its order; None when it is empty.

        `reserve_ns`: how long before a deadline a batch must start to be done in time.
        """

    def closed(self, pending: PendingRequests) -> Batch | None:
        """The batch at the front of `pending` that can take no further request, if there is one."""

    def flush(self) -> None:
        """Nothing more comes that would be worth waiting for."""
        return

    def arrived(self, now_ns: int, here: int) -> None:
        """A request was enqueued; `here` are not done now."""
        return

    def returned(
        self, now_ns: int, here: int, units: int, took_ns: int, latencies_ns: Sequence[int]
    ) -> None:
        """A batch of `units` has been executed, which took so long; `here` requests are not done
        now. Its requests are done after these times, from their arrival on."""
        return
