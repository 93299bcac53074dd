"""The model's instances as slots, with their states and executions (pure).

    GONE <-> EXPECTED -> IDLE <-> BUSY -> DOOMED -> EXPECTED

The supervisor announces instances (`InstanceExpected`) and reports the exit of a process
(`ProcessExited`: back to EXPECTED, because a successor follows) or the end of an instance
(`InstanceGone`). A worker registers itself (`InstanceReady`). These messages arrive on two sockets
in any order, so the last registration is kept until its instance is announced. Only the announced
process is accepted, because workers of other models run foreign code, which could register itself,
but not with another pid.

An idle instance receives a batch immediately. A busy instance may receive more batches ahead, up to
the pipeline depth. This hides the latency of messages between two batches. A batch that was sent
ahead cannot grow any more, and waits for one worker while another may become free.

A retiring instance receives only requests of its own sequences, and leaves the pool when it has
nothing to do.

The executions of a slot and its requests end independently. An instance of a decoupled model is
free again when `execute` has returned, and its open requests continue until their last response.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from shmserve.errors import IllegalEvent
from shmserve.ipc.messages.control_requests import AskTicket, TicketReturned
from shmserve.scheduler.batchers import CloseReason
from shmserve.scheduler.requests.scheduled import NEVER, ControlLink, ScheduledRequest, Worker


class SlotState(StrEnum):
    """The states of an instance."""

    GONE = "gone"  # it has no process
    EXPECTED = "expected"  # its process was announced
    IDLE = "idle"  # its worker can run a batch
    BUSY = "busy"  # its worker runs a batch
    DOOMED = "doomed"  # its exit was requested


TRANSITIONS: Mapping[SlotState, Mapping[str, SlotState]] = {
    SlotState.GONE: {"expect": SlotState.EXPECTED, "give_up": SlotState.GONE},
    SlotState.EXPECTED: {
        "expect": SlotState.EXPECTED,
        "register": SlotState.IDLE,
        "give_up": SlotState.GONE,
    },
    SlotState.IDLE: {
        "expect": SlotState.IDLE,
        "assign": SlotState.BUSY,
        "exit": SlotState.EXPECTED,
    },
    SlotState.BUSY: {
        "expect": SlotState.BUSY,
        "finish": SlotState.IDLE,
        "doom": SlotState.DOOMED,
        "exit": SlotState.EXPECTED,
    },
    SlotState.DOOMED: {
        "expect": SlotState.DOOMED,
        "finish": SlotState.DOOMED,
        "exit": SlotState.EXPECTED,
    },
}


@dataclass(slots=True, eq=False)
class Execution:
    """A batch that was sent to a worker.

    `started_ns` is the time at which the batch became the oldest that the worker has not
    returned. The worker may have started the batch slightly earlier, because its previous result
    takes time to arrive here, but not before `sent_ns`. `rows` is the total batch size, once an
    instance is assigned.
    """

    id: int
    requests: list[ScheduledRequest]
    reason: CloseReason | None  # why the batch closed; None: a step of a generative model
    sent_ns: int
    started_ns: int
    rows: int = 0  # total batch size


@dataclass(slots=True, eq=False)
class Slot:
    """An instance of the model, with the index that the supervisor assigned to it.

    `peer` and `pid` are the address and process of its worker, if there is one. `requests` has the
    requests of its executions, and those of a decoupled model that are open after their execution.
    """

    index: int
    state: SlotState = SlotState.GONE
    peer: bytes = b""  # the address of its worker
    pid: int = 0
    awaited_pid: int = 0  # the pid of the announced process; 0: unknown
    registration: Worker | None = None  # the last registration of a worker, until it is accepted
    worker: Worker | None = None  # the accepted worker: `peer` and `pid`
    is_retiring: bool = False
    has_served: bool = False  # its process has completed an execution
    engine: Any = None  # the engine of its process, if the model is generative
    executions: deque[Execution] = field(default_factory=deque)  # the running one first
    requests: dict[int, ScheduledRequest] = field(default_factory=dict)

    @property
    def execution(self) -> Execution | None:
        """Return the execution that runs now, or None; executions sent ahead follow it."""
        return self.executions[0] if self.executions else None

    @property
    def is_idle(self) -> bool:
        """Return whether the instance can run a batch immediately."""
        return self.state is SlotState.IDLE

    def transition(self, event: str) -> None:
        """Apply an event to the state; raise IllegalEvent if the state does not allow it."""
        try:
            self.state = TRANSITIONS[self.state][event]
        except KeyError:
            raise IllegalEvent(f"event {event} in state {self.state}") from None


class LostWork(NamedTuple):
    """The work of an instance that ended.

    Attributes:
        executions: Its executions, the running one first.
        open_requests: The open requests whose execution had returned.
    """

    executions: list[Execution]
    open_requests: list[ScheduledRequest]  # their executions had returned


class InstanceTickets:
    """The rate limiter's tickets of this model version's instances, by index.

    The supervisor's rate limiter reserves an instance's resources by a ticket, and an instance
    executes only with a ticket. A ticket is requested once a batch could run, so that no resources
    are reserved while requests are still awaited. Unused tickets are sent back at the end of the
    dispatch. Used tickets are sent back at the end of the turn. An instance with more work has
    requested its next ticket by then, and keeps its turn among other instances.
    """

    def __init__(self, control: ControlLink) -> None:
        self._control = control
        self._ticket_numbers = itertools.count(1)
        self._requested_tickets: dict[int, int] = {}  # by instance index, as in the next two
        self._granted_tickets: dict[int, int] = {}
        self._used_tickets: dict[int, int] = {}
        self._tickets_to_return: list[int] = []

    def record_grant(self, ticket: int) -> None:
        """Record that the supervisor has granted a ticket, unless its request was withdrawn."""
        for index, requested_ticket in self._requested_tickets.items():
            if requested_ticket == ticket:
                del self._requested_tickets[index]
                self._granted_tickets[index] = ticket
                return

    def find_granted(self, slots: Iterable[Slot]) -> Slot | None:
        """Return the first of these instances whose ticket was granted, or None."""
        return next((slot for slot in slots if slot.index in self._granted_tickets), None)

    def request_tickets(self, slots: Iterable[Slot], max_count: int) -> None:
        """Request tickets for the first `max_count` of these instances."""
        for slot in itertools.islice(slots, max_count):
            is_requested = slot.index in self._requested_tickets
            if not is_requested and slot.index not in self._granted_tickets:
                ticket = self._requested_tickets[slot.index] = next(self._ticket_numbers)
                self._control.post(AskTicket(ticket, slot.index, slot.pid))

    def use(self, slot: Slot) -> None:
        """Mark the ticket of an instance as used, because the instance executes."""
        self._used_tickets[slot.index] = self._granted_tickets.pop(slot.index)

    def record_done(self, slot: Slot) -> None:
        """Record that an instance has executed; `end_turn` then returns its ticket."""
        ticket = self._used_tickets.pop(slot.index, 0)
        if ticket:
            self._tickets_to_return.append(ticket)

    def end_turn(self) -> None:
        """Send the used tickets back to the supervisor."""
        for ticket in self._tickets_to_return:
            self._control.post(TicketReturned(ticket, True))
        self._tickets_to_return.clear()

    def return_tickets(self, instance_index: int) -> None:
        """Send the tickets of a removed instance back to the supervisor."""
        for tickets in (self._requested_tickets, self._granted_tickets, self._used_tickets):
            ticket = tickets.pop(instance_index, 0)
            if ticket:
                self._control.post(TicketReturned(ticket, tickets is self._used_tickets))

    def return_unused(self) -> None:
        """Send the granted tickets that were not used back to the supervisor."""
        for ticket in self._granted_tickets.values():
            self._control.post(TicketReturned(ticket, False))
        self._granted_tickets.clear()


@dataclass(eq=False)
class Pool:
    """The instances of a model version, and their executions.

    Attributes:
        _tickets: The rate limiter's tickets, one for each execution; None if there is no limit.
        _max_requests: The number of open requests at which an instance of a decoupled model takes
            no further batch; 0: unlimited.
        free_slots: The instances that can take a batch, the longest free one first.
        failure: The reason of the last failure if all instances are gone; otherwise "".
        due_ns: No execution exceeds the time limit for executions before this time.
    """

    _execution_limit_ns: int
    _tickets: InstanceTickets | None = None
    _max_requests: int = 0  # open requests per instance; 0: unlimited
    _slots: dict[int, Slot] = field(default_factory=dict)
    _slots_by_peer: dict[bytes, Slot] = field(default_factory=dict)
    # Registrations of unannounced processes by pid.
    _registrations: dict[int, Worker] = field(default_factory=dict)
    free_slots: deque[Slot] = field(default_factory=deque)
    failure: str = ""  # why all instances are gone; empty otherwise
    _last_failure: str = ""  # the reason of the last `instance_failed`
    retiring_slots: list[Slot] = field(default_factory=list)
    membership_changes: int = 0  # counts joins, exits and retirements
    due_ns: int = NEVER  # the earliest end of the time limit of an execution

    def __post_init__(self) -> None:
        # Returns the instance with this address, or None; a method would cost one more call.
        self.find_by_peer: Callable[[bytes], Slot | None] = self._slots_by_peer.get

    # --- registration and exit --------------------------------------------------------------------

    def announce(self, instance_index: int, pid: int) -> Slot | None:
        """Announce an instance, for which requests wait from now on.

        Args:
            instance_index: The index of the instance.
            pid: The pid of its process, or 0 if unknown.

        Returns:
            Its slot if its worker has registered itself before, otherwise None.
        """
        slot = self._slot(instance_index)
        slot.transition("expect")
        slot.awaited_pid = pid or slot.awaited_pid
        self._update_failure()
        return self._accept_registration(slot)

    def register_worker(self, instance_index: int, peer: bytes, pid: int) -> Slot | None:
        """Record that a worker is ready.

        Returns:
            The slot of its instance, or None if the worker was not announced yet.
        """
        slot = self._slots.get(instance_index)
        if slot is None:
            self._registrations[instance_index] = Worker(peer, pid)
        elif slot.pid != pid:
            slot.registration = Worker(peer, pid)
            return self._accept_registration(slot)
        return None

    def process_exited(self, pid: int) -> LostWork | None:
        """Record the exit of a process; return the work of its instance, None if it had none.

        A successor is expected.
        """
        self._registrations = {i: w for i, w in self._registrations.items() if w.pid != pid}
        for slot in self._slots.values():
            if slot.registration is not None and slot.registration.pid == pid:
                slot.registration = None
            if slot.awaited_pid == pid != slot.pid:
                slot.awaited_pid = 0
            if slot.pid == pid:
                return self._remove(slot)
        return None

    def retire(self, instance_index: int) -> None:
        """Mark an instance to be removed when it has nothing to do."""
        slot = self._slot(instance_index)
        if not slot.is_retiring:
            slot.is_retiring = True
            self.retiring_slots.append(slot)
            self.membership_changes += 1
            if slot in self.free_slots:
                self.free_slots.remove(slot)

    def take_retired(self, is_needed: Callable[[Slot], bool]) -> list[int]:
        """Remove the retiring instances that have nothing to do and are not `is_needed`.

        Return the pid of each instance's process, or 0 if it has none.
        """
        removed_pids: list[int] = []
        for slot in self.retiring_slots[:]:
            has_work = slot.requests or slot.state in (SlotState.BUSY, SlotState.DOOMED)
            if not has_work and not is_needed(slot):
                removed_pids.append(slot.pid or slot.awaited_pid)
                self._remove(slot)
        return removed_pids

    def instance_failed(self, instance_index: int, reason: str) -> None:
        """Record that an instance without a process will not be restarted."""
        self._slot(instance_index).transition("give_up")
        self._last_failure = reason
        self._update_failure()

    def _update_failure(self) -> None:
        all_gone = all(slot.state is SlotState.GONE for slot in self._slots.values())
        self.failure = self._last_failure if all_gone else ""

    def _slot(self, instance_index: int) -> Slot:
        slot = self._slots.get(instance_index)
        if slot is None:
            slot = self._slots[instance_index] = Slot(instance_index)
            slot.registration = self._registrations.pop(instance_index, None)
        return slot

    def _accept_registration(self, slot: Slot) -> Slot | None:
        registration = slot.registration
        if (
            slot.state is not SlotState.EXPECTED
            or registration is None
            or registration.pid != slot.awaited_pid
        ):
            return None
        slot.transition("register")
        slot.peer, slot.pid = slot.worker = registration
        slot.registration = None
        self._slots_by_peer[slot.peer] = slot
        if not slot.is_retiring:
            self.free_slots.append(slot)
        self.membership_changes += 1
        return slot

    def _remove(self, slot: Slot) -> LostWork:
        if slot.peer:
            slot.transition("exit")
        if self._tickets is not None:
            self._tickets.return_tickets(slot.index)
        executions = list(slot.executions)
        executing_keys = {request.key for execution in executions for request in execution.requests}
        open_requests = [r for r in slot.requests.values() if r.key not in executing_keys]
        lost_work = LostWork(executions, open_requests)
        slot.executions.clear()
        slot.requests.clear()
        self._slots_by_peer.pop(slot.peer, None)
        self.membership_changes += 1
        if slot in self.free_slots:
            self.free_slots.remove(slot)
        if slot.awaited_pid == slot.pid:
            slot.awaited_pid = 0
        slot.peer, slot.pid, slot.worker, slot.has_served = b"", 0, None, False
        slot.engine = None  # its successor's memory is empty, also if it has the same pid
        if slot.is_retiring:
            self.retiring_slots.remove(slot)
            del self._slots[slot.index]
            self._update_failure()
        return lost_work

    # --- work -------------------------------------------------------------------------------------

    def least_busy(self, depth: int, has_short_batches: bool = False) -> Slot | None:
        """Return the busy instance with the fewest batches, if they are fewer than `depth`.

        With `has_short_batches`, the depth is at least two if the model has only one instance.
        """
        least_busy: Slot | None = None
        if depth == 1 and has_short_batches and len(self._slots_by_peer) == 1:
            depth = 2  # no other instance could run a batch that is sent ahead
        if depth > 1:
            for slot in self._slots_by_peer.values():
                batch_count = len(slot.executions)
                if (
                    batch_count < depth
                    and slot.state is SlotState.BUSY
                    and not slot.is_retiring
                    and (not self._max_requests or len(slot.requests) < self._max_requests)
                ):
                    least_busy, depth = slot, batch_count
        return least_busy

    def assign(self, execution: Execution, required_slot: Slot | None = None) -> Slot:
        """Assign a batch to an instance, and return its slot.

        The instance is `required_slot`, which is idle or has fewer batches than the pipeline depth,
        or else the longest free one.
        """
        if required_slot is None:
            slot = self.free_slots.popleft()
            slot.transition("assign")
        elif required_slot.state is SlotState.BUSY:
            slot = required_slot
        else:
            slot = required_slot
            if slot in self.free_slots:
                self.free_slots.remove(slot)
            if self._tickets is not None:
                self._tickets.use(slot)
            slot.transition("assign")
        slot.executions.append(execution)
        if self._execution_limit_ns and self.due_ns == NEVER:
            self.due_ns = execution.started_ns + self._execution_limit_ns
        worker, requests = slot.worker, slot.requests
        for request in execution.requests:
            execution.rows += request.rows
            requests[request.key] = request
            request.worker = worker
            request.responded_ns = execution.sent_ns
        return slot

    def join(self, slot: Slot, request: ScheduledRequest, now_ns: int) -> None:
        """Register a request that an instance runs outside of any `Execution`."""
        slot.requests[request.key] = request
        request.worker = slot.worker
        request.responded_ns = now_ns

    def finish(self, slot: Slot, now_ns: int) -> None:
        """Record that an instance has returned its running batch; a batch sent ahead then starts.

        The caller handles the requests.
        """
        slot.executions.popleft()
        if self._tickets is not None:
            self._tickets.record_done(slot)
        if slot.executions:
            slot.executions[0].started_ns = now_ns
            return
        slot.transition("finish")
        self.update_free(slot)

    def update_free(self, slot: Slot) -> None:
        """Update `free_slots` after an execution or an open request of an instance has ended."""
        if slot.state is not SlotState.IDLE or slot.is_retiring or slot in self.free_slots:
            return
        if not self._max_requests or len(slot.requests) < self._max_requests:
            self.free_slots.append(slot)

    def are_blocked(
        self,
        caller_ids: Container[tuple[int, int]],
        slots: Iterable[Slot] = (),
        any_suffices: bool = False,
    ) -> bool:
        """Check whether all instances are occupied by executions that wait for a queued request.

        Args:
            caller_ids: The waiting executions, each as the pid of its worker and the key of a
                request.
            slots: The instances that the request may run on; empty: all of them.
            any_suffices: Whether one occupied instance is enough to block the request.
        """
        usable_slots = slots or [s for s in self._slots.values() if s.state is not SlotState.GONE]
        occupied_slots = [
            bool(slot.executions)
            and any((slot.pid, r.key) in caller_ids for r in slot.executions[0].requests)
            for slot in usable_slots
        ]
        return any(occupied_slots) if any_suffices else bool(occupied_slots) and all(occupied_slots)

    def executions_by_peer(self) -> dict[bytes, list[int]]:
        """Return the pid of each instance's process and the keys of the requests that it runs.

        Returns:
            [pid, key, ...] by the address of the worker.
        """
        return {
            slot.peer: [slot.pid, *(request.key for request in slot.executions[0].requests)]
            if slot.executions
            else [slot.pid]
            for slot in self._slots.values()
            if slot.state is not SlotState.GONE
        }

    def ready(self) -> list[Slot]:
        """Return the instances whose workers are connected."""
        return list(self._slots_by_peer.values())

    def find_by_pid(self, pid: int) -> Slot | None:
        """Return the instance with this process, or None."""
        return next((slot for slot in self._slots_by_peer.values() if slot.pid == pid), None)

    def awaited_pids(self) -> list[int]:
        """Return the pids of announced processes that have not registered yet."""
        slots = self._slots.values()
        return [slot.awaited_pid for slot in slots if slot.awaited_pid not in (0, slot.pid)]

    # --- time and counts --------------------------------------------------------------------------

    def overdue_slots(self, now_ns: int) -> list[Slot]:
        """Return the instances whose batch has exceeded the execution limit.

        The caller must mark them as DOOMED. `due_ns` becomes the next time at which the batch of
        another instance exceeds the limit.
        """
        overdue_slots: list[Slot] = []
        self.due_ns = NEVER
        for slot in self._slots_by_peer.values():
            if slot.state is SlotState.BUSY:
                end_ns = slot.executions[0].started_ns + self._execution_limit_ns
                if end_ns <= now_ns:
                    overdue_slots.append(slot)
                elif end_ns < self.due_ns:
                    self.due_ns = end_ns
        return overdue_slots

    @property
    def ready_count(self) -> int:
        """Return the number of instances with a worker."""
        return len(self._slots_by_peer)

    @property
    def executing_count(self) -> int:
        """Return the number of requests that were sent to instances and have not ended there."""
        return sum(len(slot.requests) for slot in self._slots_by_peer.values())

    def counts(self) -> dict[str, int]:
        """Return the number of instances in each state."""
        counts = dict.fromkeys(map(str, SlotState), 0)
        for slot in self._slots.values():
            counts[slot.state] += 1
        return counts
