"""The dispatcher of a stateful model: each sequence has its slot at one instance."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from operator import attrgetter

from shmserve.errors import InvalidArgument
from shmserve.ipc.messages.inference import EndSequences, SequenceRow, Submit, correlation_fields
from shmserve.ipc.tensors.schemas import SEQUENCE_START
from shmserve.ipc.tensors.signature import BatchProperties, id_prefix
from shmserve.scheduler.batchers import WaitUntil
from shmserve.scheduler.batchers.sequences import (
    InstanceSlots,
    SequenceBatch,
    Sequences,
    StatefulSequence,
    decide,
)
from shmserve.scheduler.instances.dispatch import Dispatcher, SequenceKey
from shmserve.scheduler.instances.pool import Slot
from shmserve.scheduler.requests.queue import EXPIRED_TEXT, queue_expired_text
from shmserve.scheduler.requests.scheduled import NEVER, Client, Event, ScheduledRequest
from shmserve.scheduler.statistics import Reason

logger = logging.getLogger(__name__)

_BACKLOG_EXPIRED = "timeout of the corresponding sequence has been expired"  # as in Triton
_ENDED_BY_EARLIER = "an earlier request of the sequence was cancelled or timed out, which ended it"


@dataclass(eq=False)
class SequenceDispatcher(Dispatcher):
    """The dispatcher of sequences, which sends a free instance the next batch of its slots."""

    def __post_init__(self) -> None:
        super().__post_init__()
        settings = self._settings
        assert settings.sequences is not None
        rules = self._rules = settings.sequences
        self._name = settings.name
        self._required_batch_size = 1 if settings.max_batch_size else 0
        self._sequences = Sequences(
            settings.name, rules.idle_ns, rules.max_waiting, rules.spec.iterative_sequence
        )
        self._slots_by_peer: dict[bytes, InstanceSlots] = {}
        self._join_numbers = itertools.count()  # of instances, in the order in which they joined
        self._checked_changes = -1  # the value of `Pool.membership_changes` at the last turn
        self._generated_ids = itertools.count(1)

    # --- requests ---------------------------------------------------------------------------------

    def admit(
        self, client: Client[ScheduledRequest], submit: Submit, properties: BatchProperties
    ) -> SequenceKey:
        """Return the sequence of a request, and the flags of the request in the sequence.

        Raises:
            InvalidArgument: The request cannot belong to a sequence.
            QueueFull: Too many sequences wait.
        """
        subject = f"inference request to model '{self._name}'"
        correlation_id: int | str = submit.correlation_text or submit.correlation_id
        flags = submit.flags
        if not correlation_id and self._rules.spec.iterative_sequence:
            correlation_id = next(i for i in self._generated_ids if not self._sequences.is_open(i))
            flags |= SEQUENCE_START
        if properties.batch_size != self._required_batch_size:
            text = f"{subject} must specify batch-size 1 due to requirements of sequence batcher"
            raise InvalidArgument(text)
        if not correlation_id:
            raise InvalidArgument(f"{subject} must specify a non-zero or non-empty correlation ID")
        self._rules.check_datatype(correlation_id, id_prefix(submit.request_id), self._name)
        self._sequences.check(correlation_id, flags, (client, submit.source))
        return SequenceKey(correlation_id, flags)

    @property
    def open_sequence_count(self) -> int:
        return self._sequences.open_count

    def accepts_while_draining(self, submit: Submit) -> bool:
        is_open = self._sequences.is_open(submit.correlation_text or submit.correlation_id)
        return is_open and not submit.flags & SEQUENCE_START

    def on_enqueued(self, request: ScheduledRequest, sequence_key: SequenceKey | None) -> None:
        assert sequence_key is not None
        request.flags = sequence_key.flags
        if self._sequences.enqueue(request, sequence_key.correlation_id):
            logger.warning(
                "sequence %s of model '%s' was restarted before its END",
                sequence_key.correlation_id,
                self._name,
            )

    def lost_text(self, request: ScheduledRequest) -> str:
        return _state_lost(request.sequence)

    def expired_text(self, request: ScheduledRequest, now_ns: int) -> str:
        text = queue_expired_text(request, now_ns)
        if request.sequence.instance_slots is None:
            text = _BACKLOG_EXPIRED + text.removeprefix(EXPIRED_TEXT)
        return text

    def on_removed(
        self,
        request: ScheduledRequest,
        now_ns: int,
        *,
        has_expired: bool = False,
        keep_dependents: bool = False,
    ) -> None:
        sequence: StatefulSequence = request.sequence
        code, text, reason = "CANCELLED", _ENDED_BY_EARLIER, Reason.CANCELED
        if has_expired:
            code, reason = "UNAVAILABLE", Reason.REJECTED
        if has_expired and sequence.instance_slots is None:
            text = _BACKLOG_EXPIRED
            removed_requests = self._sequences.end_sequence(sequence)
        else:
            removed_requests = self._sequences.remove(request)
        for dependent in () if keep_dependents else removed_requests:
            if dependent is not request:
                self._fail(dependent, code, text, reason, now_ns)

    def _fail(
        self, request: ScheduledRequest, code: str, text: str, reason: Reason, now_ns: int
    ) -> None:
        self._queue.remove(request)
        self._responses.fail(request, code, text, reason, now_ns)

    def requeue(self, request: ScheduledRequest) -> bool:
        self._queue.put_back(request)
        self._sequences.requeue(request)
        return True

    # --- time -------------------------------------------------------------------------------------

    def flush(self) -> None:
        self._holds_batches = False
        self._rules = self._rules.without_delay()

    def run(self, now_ns: int) -> int:
        sequences, find_by_peer = self._sequences, self._pool.find_by_peer
        if self._checked_changes != self._pool.membership_changes:
            self._checked_changes = self._pool.membership_changes
            self._update_slots(now_ns)
        instances = [(slots, find_by_peer(peer)) for peer, slots in self._slots_by_peer.items()]
        for slots, instance in instances:
            if slots.running_sequences and instance is not None and instance.execution is None:
                sequences.finish_batch(slots, now_ns)
        for expired_sequence in sequences.expire_idle(now_ns):
            text = "sequence %s of model '%s' is closed: it was idle for too long"
            logger.info(text, expired_sequence.id, self._name)
        for slots, ended_slots in sequences.take_early_ended().items():
            if self._slots_by_peer.get(slots.peer) is slots:
                self._executions.post(slots.peer, EndSequences(ended_slots))
        wake_ns = NEVER
        if not self._must_hold():
            for slots, instance in instances:
                if instance is not None and instance.is_idle:
                    wake_ns = min(wake_ns, self._start(slots, instance, now_ns))
        if self._tickets is not None:
            self._tickets.return_unused()
        return min(wake_ns, sequences.next_idle_ns())

    def _update_slots(self, now_ns: int) -> None:
        """Update the slots after instances joined the pool, began to retire, or left the pool."""
        ready_instances = {instance.peer: instance for instance in self._pool.ready()}
        for peer in self._slots_by_peer.keys() - ready_instances.keys():
            for sequence in self._sequences.remove_instance(self._slots_by_peer.pop(peer)):
                text = _state_lost(sequence)
                for request in sequence.waiting:
                    self._fail(request, "INTERNAL", text, Reason.BACKEND, now_ns)
        for instance in sorted(ready_instances.values(), key=attrgetter("index")):
            peer = instance.peer
            if peer not in self._slots_by_peer:
                fill_order = (instance.index, next(self._join_numbers))
                self._slots_by_peer[peer] = InstanceSlots(peer, fill_order, self._rules.slots)
                self._sequences.join(self._slots_by_peer[peer])
            if instance.is_retiring:
                self._sequences.close(self._slots_by_peer[peer])

    def has_work(self, slot: Slot) -> bool:
        slots = self._slots_by_peer.get(slot.peer)
        return slots is not None and not slots.is_empty

    def _must_hold(self) -> bool:
        """Check whether batches are held because too few requests wait (`_is_held`)."""
        if not self._holds_batches:
            return False
        backlog = sum(len(sequence.waiting) for sequence in self._sequences.backlog)
        return self._is_held(len(self._queue) - backlog, backlog)

    def _start(self, slots: InstanceSlots, instance: Slot, now_ns: int) -> int:
        """Start the next batch of an idle instance; return when to call again (NEVER: no need)."""
        decision = decide(now_ns, slots, self._rules, self._executions.service_time.reserve_ns)
        if isinstance(decision, SequenceBatch):
            if self._tickets is not None and self._tickets.find([instance]) is None:
                self._tickets.request_tickets([instance], 1)
                return NEVER
            # The rows are created before `start_rows`, which removes the requests from their
            # sequences.
            rows = [_row(slot, sequence) for slot, sequence in decision.rows]
            requests = self._sequences.start_rows(slots, decision.rows)
            for request in requests:
                self._queue.remove(request)
                request.transition(Event.DISPATCH)
            self._executions.start(requests, decision.reason, now_ns, instance, rows)
        elif isinstance(decision, WaitUntil):
            return decision.end_ns
        return NEVER


def _state_lost(sequence: StatefulSequence) -> str:
    return (
        f"the model's worker died, and the state of sequence {sequence.id} is lost with it: "
        "begin the sequence again, with the START flag"
    )


def _row(slot: int, sequence: StatefulSequence | None) -> SequenceRow:
    if sequence is None:
        return SequenceRow(slot, 0)
    request = sequence.waiting.first
    return SequenceRow(slot, request.key, request.flags, *correlation_fields(sequence.id))
