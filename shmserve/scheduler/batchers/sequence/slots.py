"""A sequence, the slots of an instance, and Triton's two strategies to form batches (pure).

Direct: a batch has a row for each slot, and a sequence keeps its row.

1. A batch has the rows from slot 0 to the highest slot with a request. Lower slots without a
   request, or whose request has other shapes, get null rows. Higher slots have no row, even if
   their sequence is idle: a lone request in slot 0 is READY [1], as in Triton, whereas the example
   in Triton's documentation shows READY [1, 0].
2. The request that has waited for longest determines the shapes of the batch.
3. If a delay and a minimum utilization are both set, a batch waits until the utilization is
   reached, its oldest request has waited that long, or a deadline would pass.

Oldest: a dynamic batcher over the first request of each slot. A sequence has at most one request
that may run. The next one may run after that has returned, and then follows those of the other
sequences. A batch therefore never has two requests of a sequence, and no sequence starves.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import islice

from shmserve.ipc.tensors.inference import SEQUENCE_START
from shmserve.ipc.transport.records import record
from shmserve.scheduler.batchers import dynamic
from shmserve.scheduler.batchers.dynamic import (
    Batch,
    Closed,
    WaitUntil,
)
from shmserve.scheduler.requests.request import Client, ScheduledRequest
from shmserve.scheduler.settings import Batching, Sequencing

# The submitter of a sequence: a client of the scheduler, and the source that the client names.
Owner = tuple[Client[ScheduledRequest], int]


class WaitingRequests:
    """A FIFO queue of the requests of a sequence, in runs.

    A run begins with a START; its requests cannot run without the request at its front. Every
    operation takes constant time for each request that it removes.
    """

    def __init__(self) -> None:
        self._runs: deque[OrderedDict[int, ScheduledRequest]] = (
            deque()
        )  # empty ones only in the middle
        self._run_of: dict[int, OrderedDict[int, ScheduledRequest]] = {}  # by the key of a request

    def __len__(self) -> int:
        return len(self._run_of)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return (request for run in self._runs for request in run.values())

    @property
    def first(self) -> ScheduledRequest:
        """Return the request that arrived first."""
        return next(iter(self._runs[0].values()))

    def append(self, request: ScheduledRequest) -> None:
        """Add a request at the back."""
        if not self._runs or request.flags & SEQUENCE_START:
            self._runs.append(OrderedDict())
        run = self._run_of[request.key] = self._runs[-1]
        run[request.key] = request

    def put_back(self, request: ScheduledRequest) -> None:
        """Add a request at the front; the requests up to the next START belong to its run."""
        if not self._runs or self.first.flags & SEQUENCE_START:
            self._runs.appendleft(OrderedDict())
        run = self._run_of[request.key] = self._runs[0]
        run[request.key] = request
        run.move_to_end(request.key, last=False)

    def take(self) -> ScheduledRequest:
        """Remove and return the request that arrived first."""
        key, request = self._runs[0].popitem(last=False)
        del self._run_of[key]
        self._trim()
        return request

    def is_in_last_run(self, request: ScheduledRequest) -> bool:
        """Check whether removing a request would remove every request behind it."""
        return bool(self._runs) and request.key in self._runs[-1]

    def remove(self, request: ScheduledRequest) -> list[ScheduledRequest]:
        """Remove a request and those behind it up to a START.

        Return them, or [] if it was removed before.
        """
        removed: list[ScheduledRequest] = []
        run = self._run_of.get(request.key)
        while run is not None and request.key in run:
            key, last = run.popitem()
            del self._run_of[key]
            removed.append(last)
        self._trim()
        removed.reverse()
        return removed

    def _trim(self) -> None:
        while self._runs and not self._runs[0]:
            self._runs.popleft()
        while self._runs and not self._runs[-1]:
            self._runs.pop()


class StatefulSequence:
    """The requests with one correlation id from a START to an END, in the order of their arrival.

    A sequence has a slot (`slot` of its `home`), or waits in the backlog (no `home`). At most one
    of its requests runs at a time. `owner` is its submitter. `ended`: no further request can come.
    `begun`: its instance has state of it.
    """

    __slots__ = ("begun", "ended", "home", "id", "owner", "running", "slot", "waiting")

    def __init__(self, correlation_id: int | str, owner: Owner) -> None:
        self.id = correlation_id
        self.owner = owner
        self.waiting = WaitingRequests()
        self.running: ScheduledRequest | None = None
        self.home: InstanceSlots | None = None
        self.slot = 0
        self.ended = False
        self.begun = False


@record
class Rows:
    """A decision to run these sequences now, each in its slot; None is a null row."""

    rows: list[tuple[int, StatefulSequence | None]]
    reason: Closed


class InstanceSlots:
    """The slots of the instance at `peer`.

    Each slot has at most one of the `sequences`; some of them are `running`. `order` decides whose
    slots are taken first.
    """

    def __init__(self, peer: bytes, order: tuple[int, int], slots: int) -> None:
        self.peer = peer
        self.order = order
        self.sequences: list[StatefulSequence | None] = [None] * slots
        self.running: list[StatefulSequence] = []
        self.closed = False  # to new sequences
        self.ready: OrderedDict[int, StatefulSequence] = OrderedDict()  # by slot, in order of offer

    @property
    def empty(self) -> bool:
        """Return whether the instance has no sequence and runs none."""
        return not self.running and not any(self.sequences)

    def offer(self, sequence: StatefulSequence) -> None:
        """Mark a sequence as ready: its first waiting request may run."""
        self.ready[sequence.slot] = sequence

    def withdraw(self, sequence: StatefulSequence) -> None:
        """Mark a sequence as not ready."""
        if self.ready.get(sequence.slot) is sequence:
            del self.ready[sequence.slot]


def decide(
    now_ns: int, slots: InstanceSlots, rules: Sequencing, reserve_ns: int
) -> Rows | WaitUntil | None:
    """Return the rows that an idle instance runs now, or the time to wait until.

    Args:
        now_ns: The time.
        slots: The slots of the instance.
        rules: The rules of the sequence batcher.
        reserve_ns: How long before a deadline a batch must start in order to meet it.

    Returns:
        None if no sequence is ready.
    """
    if not slots.ready:
        return None
    if rules.oldest is None:
        return _direct(now_ns, slots, rules, reserve_ns)
    return _oldest(now_ns, slots, rules.oldest, reserve_ns)


def _direct(
    now_ns: int, slots: InstanceSlots, rules: Sequencing, reserve_ns: int
) -> Rows | WaitUntil:
    ready = sorted(slots.ready)
    heads = {slot: slots.ready[slot].waiting.first for slot in ready}
    oldest = min(ready, key=lambda slot: (heads[slot].enqueued_ns, slot))
    reason = Closed.FULL if len(ready) == rules.slots else Closed.IDLE
    if rules.delay_ns and len(ready) < rules.spec.minimum_slot_utilization * rules.slots:
        # Triton requires more than the delay to have passed.
        until = heads[oldest].enqueued_ns + rules.delay_ns + 1
        flush_by = min(head.flush_by_ns for head in heads.values()) - reserve_ns
        if now_ns < min(until, flush_by):
            return WaitUntil(min(until, flush_by))
        reason = Closed.DELAY if until <= now_ns else Closed.DEADLINE
    shape_key = heads[oldest].shape_key
    rows: list[tuple[int, StatefulSequence | None]] = [
        (slot, None) for slot in range(ready[-1] + 1)
    ]
    for slot in ready:
        if heads[slot].shape_key == shape_key:
            rows[slot] = slot, slots.ready[slot]
        else:
            reason = Closed.SHAPE
    return Rows(rows, reason)


def _oldest(
    now_ns: int, slots: InstanceSlots, rules: Batching, reserve_ns: int
) -> Rows | WaitUntil | None:
    heads = (sequence.waiting.first for sequence in slots.ready.values())
    decision = dynamic.decide(now_ns, heads, rules, reserve_ns)
    if isinstance(decision, Batch):
        return Rows(list(islice(slots.ready.items(), decision.count)), decision.reason)
    return decision
