"""A request inside the scheduler, its state machine, and the processes that take part in it (pure).

The client of a request receives one final message: the (last) response, or an error. If a
worker still has the request then, the client also receives a `Settled` later. The state determines
which of these messages are outstanding. A worker may read a request's memory long after its client
has stopped waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from shmserve.errors import IllegalEvent
from shmserve.ipc import timers
from shmserve.ipc.memory.lent import Block
from shmserve.ipc.messages.inference import BatchFinished, Submit
from shmserve.ipc.tensors.schemas import Packed
from shmserve.ipc.transport.router import leading_pid

NEVER = timers.NEVER
EMPTY_RESPONSE: Packed = (b"", [])  # a response without schema and data
NO_SUBMIT = Submit(0, b"", [], 0, 0, 0, 0)  # replaces the message of a request that is done
CACHED = "cached"  # `Timing.close_reason` of a request that was answered from the response cache

R = TypeVar("R")  # the type of requests


class WorkerLinks(Protocol):
    """The link to workers."""

    @property
    def malformed_messages(self) -> int:
        """Return the number of unreadable frames so far."""

    def post(self, peer: bytes, message: Any) -> None:
        """Queue a message for the worker at this address."""


class ControlLink(Protocol):
    """The link to the supervisor. `malformed_messages` counts its unreadable frames."""

    malformed_messages: int

    def post(self, message: Any) -> None:
        """Queue a message."""


class Client(Generic[R]):
    """A submitter of requests.

    Attributes:
        peer: The client's address.
        pid: The client's process; 0: unknown.
        requests: The client's requests by number.
        post: Queues a message for the client.
    """

    __slots__ = ("peer", "pid", "post", "requests")

    def __init__(self, peer: bytes, post: Callable[[Any], object]) -> None:
        self.peer = peer
        self.pid = leading_pid(peer)
        self.post = post
        self.requests: dict[int, R] = {}


class Timing(NamedTuple):
    """The phases of an execution: its start (monotonic ns) and the duration of each phase (ns).

    The execution had `rows` rows. `close_reason` is the reason why its batch was closed. `spans`
    are the spans of requests that its model sent to other models.
    """

    compute_start_ns: int
    input_ns: int
    infer_ns: int
    output_ns: int
    rows: int = 0
    close_reason: str = ""
    spans: bytes = b""

    @classmethod
    def from_worker(
        cls, message: BatchFinished, sent_ns: int, now_ns: int, rows: int = 0, reason: str = ""
    ) -> Timing:
        """Return the phases that a worker reports, clamped to `sent_ns` .. `now_ns`."""
        compute_start, input_end = message.compute_start_ns, message.input_end_ns
        output_start, compute_end = message.output_start_ns, message.compute_end_ns
        if not sent_ns <= compute_start <= input_end <= output_start <= compute_end <= now_ns:
            compute_start = min(max(compute_start, sent_ns), now_ns)
            input_end = min(max(input_end, compute_start), now_ns)
            output_start = min(max(output_start, input_end), now_ns)
            compute_end = min(max(compute_end, output_start), now_ns)
        phases = (input_end - compute_start, output_start - input_end, compute_end - output_start)
        # `tuple.__new__` avoids the slower Python-level constructor of a named tuple.
        return tuple.__new__(cls, (compute_start, *phases, rows, reason, message.spans))


class State(StrEnum):
    """The states of a request."""

    QUEUED = auto()
    EXECUTING = auto()  # a worker executes it; if the worker is lost, it may run again
    RESPONDING = auto()  # it has had a response, or `execute` has returned and more may follow
    HELD = auto()  # executed; its response waits for earlier requests' responses
    FAILED_EARLY = auto()  # it has ended, but a worker still has it: `Settled` must be sent
    CANCELLED = auto()  # its client cancelled it and a worker still has it: an error must be sent
    ORPHANED = auto()  # its client has exited and a worker still has it: nothing must be sent
    DONE = auto()


class Event(StrEnum):
    """An event that changes the state of a request."""

    DISPATCH = auto()
    REQUEUE = auto()
    RESPOND = auto()
    HOLD = auto()
    FINISH = auto()
    FAIL_EARLY = auto()
    CANCEL = auto()
    ABANDON = auto()
    SETTLE = auto()


TRANSITIONS: Mapping[State, Mapping[Event, State]] = {
    State.QUEUED: {
        Event.DISPATCH: State.EXECUTING,
        Event.FINISH: State.DONE,
        Event.ABANDON: State.DONE,
    },
    State.EXECUTING: {
        Event.REQUEUE: State.QUEUED,
        Event.RESPOND: State.RESPONDING,
        Event.HOLD: State.HELD,
        Event.FINISH: State.DONE,
        Event.FAIL_EARLY: State.FAILED_EARLY,
        Event.CANCEL: State.CANCELLED,
        Event.ABANDON: State.ORPHANED,
    },
    State.RESPONDING: {
        Event.REQUEUE: State.QUEUED,  # the model reschedules the request
        Event.FINISH: State.DONE,
        Event.FAIL_EARLY: State.FAILED_EARLY,
        Event.CANCEL: State.CANCELLED,
        Event.ABANDON: State.ORPHANED,
    },
    State.HELD: {Event.FINISH: State.DONE, Event.ABANDON: State.DONE},
    State.FAILED_EARLY: {Event.SETTLE: State.DONE, Event.ABANDON: State.ORPHANED},
    State.CANCELLED: {Event.FINISH: State.DONE, Event.ABANDON: State.ORPHANED},
    State.ORPHANED: {Event.SETTLE: State.DONE},
    State.DONE: {},
}


# The states in which a worker has the request and its client waits for a response.
AT_WORK = frozenset((State.EXECUTING, State.RESPONDING))


class Worker(NamedTuple):
    """The worker of a request: its address and pid."""

    peer: bytes
    pid: int


class Lookup(NamedTuple):
    """The result of a lookup in the response cache.

    Attributes:
        key: The request's key after a miss, else empty.
        response: The cached response, or `EMPTY_RESPONSE` after a miss.
        duration_ns: The duration of the lookup.
        copies: The blocks with copies of large outputs. They are lent to the client, or freed.
    """

    key: bytes  # the request's cache key after a miss, else empty
    response: Packed
    duration_ns: int  # of the lookup
    copies: Sequence[Block]  # copies of large outputs

    @property
    def is_hit(self) -> bool:
        """Return whether there is a cached response."""
        return bool(self.response[0])

    def cancel(self) -> None:
        """Release the copied blocks of a response that will not be read."""
        for copy in self.copies:
            copy.release()


class Outcome(NamedTuple):
    """The outcome of an execution that is held until the outcomes of earlier requests were sent.

    An empty `code` is success. `timing` is None if the worker died.
    """

    code: str  # the error code; empty: success
    message: str
    response: Packed
    timing: Timing | None


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """An inference request of the batch size `rows`. Times are monotonic ns; 0: none.

    Attributes:
        submit: The message that submitted the request.
        deadline_ns: The deadline of the last response.
        queue_limit_ns: The end of the queue timeout, valid only in the queue.
        flush_by_ns: The time before which a batch should run rather than wait (`NEVER`: it may
            wait).
        level: The priority level; 1 is the highest.
        is_delayed: Whether the request has timed out and was moved to the end of its level.
        worker: The last worker.
        response_count: The number of responses that a decoupled model has sent.
        credited_responses: The number of responses that the client has read.
        responded_ns: The time of the last response.
        sequence: The sequence, if any.
        flags: The request's flags in its sequence.
        lookup: The result of its cache lookup, if there was one.
    """

    key: int
    client: Client[ScheduledRequest]
    id: int  # the client's number of the request
    rows: int
    shape_key: bytes
    arrived_ns: int
    enqueued_ns: int
    deadline_ns: int
    queue_limit_ns: int  # the end of the queue timeout
    flush_by_ns: int  # the time before which its batch should run
    submit: Submit
    level: int = 0  # the priority level; 1 is the highest
    is_delayed: bool = False  # whether its queue timeout moved it behind other requests
    state: State = State.QUEUED
    worker_exits: int = 0  # the exits of workers that executed the request
    outcome: Outcome | None = None
    worker: Worker | None = None
    response_count: int = 0  # responses that a decoupled model has sent
    responded_ns: int = 0  # the time of the last response
    credited_responses: int = 0  # responses that the client has read
    timing: Timing | None = None  # the phases of the execution, once it has returned
    sequence: Any = None  # a `batchers.sequences.StatefulSequence`
    flags: int = 0  # sequence flags
    succeeded_early: bool = False  # whether the request succeeded before its execution returned
    lookup: Lookup | None = None

    def transition(self, event: Event) -> None:
        """Apply an event to the state.

        Raise IllegalEvent and change nothing if it is not allowed.
        """
        try:
            self.state = TRANSITIONS[self.state][event]
        except KeyError:
            raise IllegalEvent(f"event {event.name} in state {self.state.name}") from None
