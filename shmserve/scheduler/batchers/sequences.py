"""The sequence batcher: the table of sequences, slots, the backlog, and the strategies (pure).

    START ──> a free slot, the lowest of all instances' ──> END, put into a batch: the slot is free
          └─> the backlog, first come first served ──┘  └─> idle for too long: the slot is free,
                                                            without a message to the model

Clients choose the id of a sequence, and equal ids denote the same sequence, whichever client sends
them. A number and a text are never equal. END removes the id immediately: a START after it begins
another sequence, which may run elsewhere while the first one still runs. A START with an open id
restarts the sequence in the same slot.

The time of an operation does not depend on the number of sequences, requests and slots, except for
the logarithm of a heap (amortised). Slots of removed instances stay in the heap of free slots until
they outnumber the others.

Triton's two strategies form the batches of an instance. Direct: a batch has a row for each slot,
and a sequence keeps its row.

1. A batch has the rows from slot 0 to the highest slot with a request. Lower slots without a
   request, or whose request has other shapes, get null rows. Higher slots have no row, even if
   their sequence is idle. A lone request in slot 0 thus has the control READY [1], as in Triton.
   The example in Triton's documentation shows READY [1, 0].
2. The request that has waited for longest determines the shapes of the batch.
3. If a delay and a minimum utilization are both set, a batch waits for the utilization. The wait
   ends when the oldest request has waited for the delay, or when a deadline would pass.

Oldest: a dynamic batcher over the first request of each slot. A sequence has at most one request
that may run. Its next request may run once that request has returned, and is then queued behind the
requests of other sequences. A batch therefore never has two requests of a sequence, and no sequence
starves.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

from shmserve.errors import InvalidArgument, QueueFull
from shmserve.ipc.tensors.schemas import SEQUENCE_END, SEQUENCE_START
from shmserve.ipc.transport.frames import Record
from shmserve.scheduler import batchers
from shmserve.scheduler.batchers import Batch, CloseReason, WaitUntil
from shmserve.scheduler.requests.scheduled import NEVER, Client, ScheduledRequest
from shmserve.scheduler.settings import Batching, Sequencing

# The submitter of a sequence: a client of the scheduler, and the source that the client names.
Owner = tuple[Client[ScheduledRequest], int]


class WaitingRequests:
    """A FIFO queue of the requests of a sequence, divided into segments.

    A segment begins at each request with START. Requests depend on the earlier requests of their
    segment and are removed with them. Every operation takes constant time for each request that
    it removes.
    """

    def __init__(self) -> None:
        # The first and the last segment are never empty; segments between them may be.
        self._segments: deque[OrderedDict[int, ScheduledRequest]] = deque()
        # The segment of each request, by the request's key.
        self._segments_by_key: dict[int, OrderedDict[int, ScheduledRequest]] = {}

    def __len__(self) -> int:
        return len(self._segments_by_key)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return (request for segment in self._segments for request in segment.values())

    @property
    def first(self) -> ScheduledRequest:
        """Return the request that arrived first."""
        return next(iter(self._segments[0].values()))

    def append(self, request: ScheduledRequest) -> None:
        """Queue a request at the back."""
        if not self._segments or request.flags & SEQUENCE_START:
            self._segments.append(OrderedDict())
        segment = self._segments_by_key[request.key] = self._segments[-1]
        segment[request.key] = request

    def put_back(self, request: ScheduledRequest) -> None:
        """Queue a request at the front; the requests up to the next START belong to its segment."""
        if not self._segments or self.first.flags & SEQUENCE_START:
            self._segments.appendleft(OrderedDict())
        segment = self._segments_by_key[request.key] = self._segments[0]
        segment[request.key] = request
        segment.move_to_end(request.key, last=False)

    def pop_first(self) -> ScheduledRequest:
        """Remove and return the request that arrived first."""
        key, request = self._segments[0].popitem(last=False)
        del self._segments_by_key[key]
        self._remove_empty_segments()
        return request

    def is_in_last_segment(self, request: ScheduledRequest) -> bool:
        """Check whether removing a request would remove every request behind it."""
        return bool(self._segments) and request.key in self._segments[-1]

    def remove(self, request: ScheduledRequest) -> list[ScheduledRequest]:
        """Remove and return a request and the later ones of its segment; [] if it is not queued."""
        removed_requests: list[ScheduledRequest] = []
        segment = self._segments_by_key.get(request.key)
        while segment is not None and request.key in segment:
            key, removed_request = segment.popitem()
            del self._segments_by_key[key]
            removed_requests.append(removed_request)
        self._remove_empty_segments()
        removed_requests.reverse()
        return removed_requests

    def _remove_empty_segments(self) -> None:
        while self._segments and not self._segments[0]:
            self._segments.popleft()
        while self._segments and not self._segments[-1]:
            self._segments.pop()


@dataclass(slots=True, eq=False)
class StatefulSequence:
    """The requests with one correlation id from a START to an END, in the order of their arrival.

    At most one of its requests runs at a time.

    Attributes:
        owner: The submitter of its requests.
        instance_slots: The slots of its instance, or None while it waits in the backlog.
        has_ended: Whether no further request can come.
    """

    id: int | str  # the correlation id
    owner: Owner
    waiting: WaitingRequests = field(default_factory=WaitingRequests)
    running_request: ScheduledRequest | None = None
    instance_slots: InstanceSlots | None = None
    slot: int = 0  # the number of its slot, if it has one
    has_ended: bool = False
    has_state: bool = False  # whether its instance stores state of this sequence


class SequenceBatch(Record):
    """A decision of the sequence batcher to run these sequences now.

    Each sequence has the row of its slot. None stands for a null row, which has no request.
    """

    rows: list[tuple[int, StatefulSequence | None]]  # (slot, sequence; None: a null request)
    reason: CloseReason


class InstanceSlots:
    """The sequence slots of the instance at the address `peer`.

    Each slot has at most one of the `sequences`; some of them are `running_sequences`. `fill_order`
    decides which instance's slots are taken first.
    """

    def __init__(self, peer: bytes, fill_order: tuple[int, int], slot_count: int) -> None:
        self.peer = peer
        self.fill_order = fill_order
        self.sequences: list[StatefulSequence | None] = [None] * slot_count
        self.running_sequences: list[StatefulSequence] = []
        self.is_closed = False  # whether new sequences are rejected
        # Sequences that may run, by slot, in the order in which they became ready.
        self.ready_sequences: OrderedDict[int, StatefulSequence] = OrderedDict()

    @property
    def is_empty(self) -> bool:
        """Return whether the instance has no sequence and runs none."""
        return not self.running_sequences and not any(self.sequences)

    def mark_ready(self, sequence: StatefulSequence) -> None:
        """Mark a sequence as ready: its first waiting request may run."""
        self.ready_sequences[sequence.slot] = sequence

    def mark_not_ready(self, sequence: StatefulSequence) -> None:
        """Mark a sequence as not ready."""
        if self.ready_sequences.get(sequence.slot) is sequence:
            del self.ready_sequences[sequence.slot]


def decide(
    now_ns: int, slots: InstanceSlots, rules: Sequencing, reserve_ns: int
) -> SequenceBatch | WaitUntil | None:
    """Return the rows that an idle instance runs now, or the time at which its wait ends.

    Args:
        now_ns: The time.
        slots: The slots of the instance.
        rules: The rules of the sequence batcher.
        reserve_ns: How long before a deadline a batch must start in order to meet it.

    Returns:
        None if no sequence is ready.
    """
    if not slots.ready_sequences:
        return None
    if rules.oldest_rules is None:
        return _decide_direct(now_ns, slots, rules, reserve_ns)
    return _decide_oldest(now_ns, slots, rules.oldest_rules, reserve_ns)


def _decide_direct(
    now_ns: int, slots: InstanceSlots, rules: Sequencing, reserve_ns: int
) -> SequenceBatch | WaitUntil:
    ready_slots = sorted(slots.ready_sequences)
    heads = {slot: slots.ready_sequences[slot].waiting.first for slot in ready_slots}
    oldest_slot = min(ready_slots, key=lambda slot: (heads[slot].enqueued_ns, slot))
    reason = CloseReason.FULL if len(ready_slots) == rules.slots else CloseReason.IDLE
    if rules.delay_ns and len(ready_slots) < rules.spec.minimum_slot_utilization * rules.slots:
        # Triton requires more than the delay to have passed.
        delay_end_ns = heads[oldest_slot].enqueued_ns + rules.delay_ns + 1
        flush_by_ns = min(head.flush_by_ns for head in heads.values()) - reserve_ns
        if now_ns < min(delay_end_ns, flush_by_ns):
            return WaitUntil(min(delay_end_ns, flush_by_ns))
        reason = CloseReason.DELAY if delay_end_ns <= now_ns else CloseReason.DEADLINE
    shape_key = heads[oldest_slot].shape_key
    rows: list[tuple[int, StatefulSequence | None]] = [
        (slot, None) for slot in range(ready_slots[-1] + 1)
    ]
    for slot in ready_slots:
        if heads[slot].shape_key == shape_key:
            rows[slot] = slot, slots.ready_sequences[slot]
        else:
            reason = CloseReason.SHAPE
    return SequenceBatch(rows, reason)


def _decide_oldest(
    now_ns: int, slots: InstanceSlots, rules: Batching, reserve_ns: int
) -> SequenceBatch | WaitUntil | None:
    heads = (sequence.waiting.first for sequence in slots.ready_sequences.values())
    decision = batchers.decide(now_ns, heads, rules, reserve_ns)
    if isinstance(decision, Batch):
        rows = islice(slots.ready_sequences.items(), decision.count)
        return SequenceBatch(list(rows), decision.reason)
    return decision


_MAX_LOST_IDS = 4096  # remembered ids of sequences whose state was lost


class Backlog:
    """The sequences that wait for a slot, in the order of their arrival, by owner.

    Owners take turns, so that a client that opens a million sequences and ends none delays only its
    own. Each connection of a gateway is an owner.
    """

    def __init__(self) -> None:
        self._sequences_by_owner: OrderedDict[Hashable, OrderedDict[StatefulSequence, None]] = (
            OrderedDict()
        )

    def __bool__(self) -> bool:
        return bool(self._sequences_by_owner)

    def __iter__(self) -> Iterator[StatefulSequence]:
        return (s for sequences in self._sequences_by_owner.values() for s in sequences)

    def count(self, owner: Hashable) -> int:
        """Return the number of an owner's waiting sequences."""
        return len(self._sequences_by_owner.get(owner, ()))

    def append(self, sequence: StatefulSequence) -> None:
        """Queue a sequence after all others of its owner."""
        self._sequences_by_owner.setdefault(sequence.owner, OrderedDict())[sequence] = None

    def put_back(self, sequence: StatefulSequence) -> None:
        """Queue a sequence before all others."""
        self.append(sequence)
        self._sequences_by_owner[sequence.owner].move_to_end(sequence, last=False)
        self._sequences_by_owner.move_to_end(sequence.owner, last=False)

    def pop(self) -> StatefulSequence:
        """Remove and return the next sequence; its owner's next turn comes after all others'."""
        owner, sequences = next(iter(self._sequences_by_owner.items()))
        sequence, _ = sequences.popitem(last=False)
        self._sequences_by_owner.move_to_end(owner)
        self._remove_owner_if_empty(owner)
        return sequence

    def discard(self, sequence: StatefulSequence) -> None:
        """Remove a sequence if it waits in the backlog."""
        sequences = self._sequences_by_owner.get(sequence.owner)
        if sequences is not None:
            sequences.pop(sequence, None)
            self._remove_owner_if_empty(sequence.owner)

    def _remove_owner_if_empty(self, owner: Hashable) -> None:
        if not self._sequences_by_owner[owner]:
            del self._sequences_by_owner[owner]


class Sequences:
    """The open sequences of a model.

    An iterative sequence has a single request, which its model may reschedule. The sequence ends
    with that request.
    """

    def __init__(self, model: str, rules: Sequencing) -> None:
        self._model = model
        self._rules = rules
        self._is_iterative = rules.spec.iterative_sequence
        self._open_sequences: dict[int | str, StatefulSequence] = {}
        # A heap of the free slots, which may contain the stale slots of closed instances.
        self._free_slots: list[tuple[int, tuple[int, int], InstanceSlots]] = []
        self._stale_count = 0  # number of stale slots in the heap
        self.backlog = Backlog()
        # The time since which each idle sequence is idle (monotonic ns), oldest first.
        self._idle_sequences: OrderedDict[StatefulSequence, int] = OrderedDict()
        self._early_ended_slots: dict[InstanceSlots, list[int]] = {}
        self._lost_ids: OrderedDict[int | str, None] = OrderedDict()  # of sequences with lost state

    @property
    def open_count(self) -> int:
        """Return the number of sequences that have begun and not ended."""
        return len(self._open_sequences)

    def is_open(self, correlation_id: int | str) -> bool:
        """Check whether a sequence with this id is open."""
        return correlation_id in self._open_sequences

    # --- instances --------------------------------------------------------------------------------

    def join(self, slots: InstanceSlots) -> None:
        """Register an instance, whose slots are free."""
        for slot in range(len(slots.sequences)):
            heapq.heappush(self._free_slots, (slot, slots.fill_order, slots))
        self._fill()

    def remove_instance(self, slots: InstanceSlots) -> list[StatefulSequence]:
        """Remove an instance; return its sequences, which have ended because their state is lost.

        Sequences that have not begun wait for another slot, as in `close`.
        """
        self.close(slots)
        lost_sequences = [sequence for sequence in slots.sequences if sequence is not None]
        for sequence in lost_sequences:
            sequence.instance_slots = None
            self._idle_sequences.pop(sequence, None)
            self._close(sequence)
            self._lost_ids[sequence.id] = None
            if len(self._lost_ids) > _MAX_LOST_IDS:
                self._lost_ids.popitem(last=False)
        return lost_sequences

    def close(self, slots: InstanceSlots) -> None:
        """Close an instance to new sequences.

        Its begun sequences continue there. The other sequences wait for another slot, ahead of the
        backlog.
        """
        if slots.is_closed:
            return
        slots.is_closed = True
        self._stale_count += slots.sequences.count(None)
        # The heap is rebuilt rarely enough that the cost is amortised by the removed slots.
        if 2 * self._stale_count > len(self._free_slots):
            self._free_slots = [entry for entry in self._free_slots if not entry[2].is_closed]
            heapq.heapify(self._free_slots)
            self._stale_count = 0
        unstarted_sequences = [s for s in slots.sequences if s is not None and not s.has_state]
        for sequence in sorted(
            unstarted_sequences, key=attrgetter("waiting.first.key"), reverse=True
        ):
            slots.mark_not_ready(sequence)
            slots.sequences[sequence.slot] = None
            sequence.instance_slots = None
            self.backlog.put_back(sequence)
        self._fill()

    # --- requests ---------------------------------------------------------------------------------

    def check(self, correlation_id: int | str, flags: int, owner: Owner) -> None:
        """Check whether a request is admitted.

        Raises:
            InvalidArgument: The request belongs to no sequence.
            QueueFull: Too many sequences of its owner wait.
        """
        if correlation_id in self._open_sequences:
            return
        if not flags & SEQUENCE_START:
            text = (
                f"inference request for sequence {correlation_id} to model "
                f"'{self._model}' must specify the START flag on the first request of the sequence"
            )
            if correlation_id in self._lost_ids:
                text += "; the state of this sequence was lost when the model's worker died"
            raise InvalidArgument(text)
        if self.backlog.count(owner) >= self._rules.max_waiting:
            raise QueueFull(
                f"at most {self._rules.max_waiting} sequences of a client may wait for a slot of "
                f"model '{self._model}'"
            )

    def enqueue(self, request: ScheduledRequest, correlation_id: int | str) -> bool:
        """Queue a checked request.

        Returns:
            Whether the request is a START that restarts an open sequence.
        """
        sequence = self._open_sequences.get(correlation_id)
        is_restart = sequence is not None and bool(request.flags & SEQUENCE_START)
        if sequence is None:
            self._lost_ids.pop(correlation_id, None)
            owner = (request.client, request.submit.source)
            sequence = self._open_sequences[correlation_id] = StatefulSequence(
                correlation_id, owner
            )
            self.backlog.append(sequence)
        request.sequence = sequence
        sequence.waiting.append(request)
        if request.flags & SEQUENCE_END:
            self._close(sequence)
        self._idle_sequences.pop(sequence, None)
        if sequence.instance_slots is None:
            self._fill()
        elif sequence.running_request is None:
            sequence.instance_slots.mark_ready(sequence)
        return is_restart

    def _close(self, sequence: StatefulSequence) -> None:
        sequence.has_ended = True
        if self._open_sequences.get(sequence.id) is sequence:
            del self._open_sequences[sequence.id]

    def remove(self, request: ScheduledRequest) -> list[ScheduledRequest]:
        """Remove a waiting request and the requests that depend on it, up to the next START.

        Return the removed requests. The sequence ends if no further request can come.
        """
        sequence: StatefulSequence = request.sequence
        ends_sequence = sequence.waiting.is_in_last_segment(request)
        removed_requests = sequence.waiting.remove(request)
        if ends_sequence:
            self._close(sequence)
        if removed_requests:  # empty if `request` was removed before, with an earlier request
            self._update_slot(sequence)
        return removed_requests

    def end_sequence(self, sequence: StatefulSequence) -> list[ScheduledRequest]:
        """End a sequence; remove and return its waiting requests."""
        removed_requests = list(sequence.waiting)
        sequence.waiting = WaitingRequests()
        self._close(sequence)
        self._update_slot(sequence)
        return removed_requests

    def _update_slot(self, sequence: StatefulSequence) -> None:
        """Update a sequence whose requests were removed: its readiness, or its end."""
        slots = sequence.instance_slots
        if sequence.waiting or sequence.running_request is not None:
            if slots is not None and not sequence.waiting:
                slots.mark_not_ready(sequence)
        elif slots is None:
            self.backlog.discard(sequence)
        else:
            self._end_early(sequence)

    # --- slots ------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Assign free slots to waiting sequences."""
        while self.backlog and self._free_slots:
            slot, _, slots = heapq.heappop(self._free_slots)
            if slots.is_closed:
                self._stale_count -= 1
                continue
            sequence = self.backlog.pop()
            sequence.instance_slots, sequence.slot = slots, slot
            slots.sequences[slot] = sequence
            slots.mark_ready(sequence)

    def _end_early(self, sequence: StatefulSequence) -> None:
        """End a sequence whose instance has not executed an END."""
        if sequence.has_state and sequence.instance_slots is not None:
            self._early_ended_slots.setdefault(sequence.instance_slots, []).append(sequence.slot)
        self._release_slot(sequence)

    def take_early_ended(self) -> dict[InstanceSlots, list[int]]:
        """Return the slots, by instance, whose sequences have ended without an END.

        Slots that an earlier call has returned are not included. The instances must be notified
        before another sequence begins in these slots.
        """
        early_ended_slots, self._early_ended_slots = self._early_ended_slots, {}
        return early_ended_slots

    def _release_slot(self, sequence: StatefulSequence) -> None:
        slots = sequence.instance_slots
        assert slots is not None
        slots.mark_not_ready(sequence)
        slots.sequences[sequence.slot] = None
        sequence.instance_slots = None
        self._idle_sequences.pop(sequence, None)
        if not slots.is_closed:
            heapq.heappush(self._free_slots, (sequence.slot, slots.fill_order, slots))
            self._fill()

    # --- executions -------------------------------------------------------------------------------

    def start_rows(
        self, slots: InstanceSlots, rows: Iterable[tuple[int, StatefulSequence | None]]
    ) -> list[ScheduledRequest]:
        """Start the rows of a batch and return their requests, in order.

        The END of a sequence frees its slot immediately.
        """
        requests: list[ScheduledRequest] = []
        ended_sequences: list[StatefulSequence] = []
        for _, sequence in rows:
            if sequence is None:
                continue
            request = sequence.waiting.pop_first()
            sequence.running_request = request
            sequence.has_state = True
            slots.mark_not_ready(sequence)
            slots.running_sequences.append(sequence)
            requests.append(request)
            # A sequence that ends without END is released later: its instance is notified first.
            if request.flags & SEQUENCE_END and not sequence.waiting and not self._is_iterative:
                ended_sequences.append(sequence)
        for sequence in ended_sequences:
            self._release_slot(sequence)
        return requests

    def requeue(self, request: ScheduledRequest) -> None:
        """Put a request that its model has rescheduled back at the front of its sequence."""
        sequence: StatefulSequence = request.sequence
        request.flags = 0
        sequence.waiting.put_back(request)

    def finish_batch(self, slots: InstanceSlots, now_ns: int) -> None:
        """Handle the end of an instance's batch: its sequences may run again or end."""
        sequences, slots.running_sequences = slots.running_sequences, []
        for sequence in sequences:
            sequence.running_request = None
            if sequence.instance_slots is not slots:
                continue  # the slot was freed while the batch ran
            if sequence.waiting:
                slots.mark_ready(sequence)
            elif sequence.has_ended or self._is_iterative:
                self._close(sequence)
                self._end_early(sequence)
            else:
                self._idle_sequences[sequence] = now_ns

    # --- time -------------------------------------------------------------------------------------

    def next_idle_ns(self) -> int:
        """Return the time (monotonic ns) at which `expire_idle` may end a sequence, or NEVER."""
        if not self._idle_sequences:
            return NEVER
        return next(iter(self._idle_sequences.values())) + self._rules.idle_ns

    def expire_idle(self, now_ns: int) -> list[StatefulSequence]:
        """End the sequences that were idle for too long."""
        expired_sequences: list[StatefulSequence] = []
        while self._idle_sequences:
            sequence, since_ns = next(iter(self._idle_sequences.items()))
            if now_ns - since_ns < self._rules.idle_ns:
                break
            self._close(sequence)
            self._end_early(sequence)
            expired_sequences.append(sequence)
        return expired_sequences
