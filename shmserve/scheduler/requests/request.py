"""A request inside the scheduler, and the states of its life as a table (pure).

Every request ends once for its client: with its response, with the last of its responses, or with
an error; and there is one `Settled` besides when that came while a worker still had it. The states
say who owes what: a worker may still be reading a request's memory long after its client stopped
waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any, NamedTuple

from shmserve.ipc.memory.lent import Block
from shmserve.ipc.messages.inference import Submit
from shmserve.ipc.tensors.inference import Packed
from shmserve.scheduler.requests.client import Client
from shmserve.scheduler.statistics.timing import Timing

NEVER = 1 << 63  # later than any time
NOTHING: Packed = (b"", [])  # no response
DONE = Submit(0, b"", [], 0, 0, 0, 0)  # of a request that is done: nothing is kept


class State(StrEnum):
    """The states of a request."""

    QUEUED = auto()
    EXECUTING = auto()  # if its worker is lost, it may run again
    RESPONDING = auto()  # it has had a response, or `execute` has returned and more may follow
    HELD = auto()  # executed; its response waits for those of earlier requests
    FAILED_EARLY = auto()  # a worker still has it, `Settled` is owed
    CANCELLED = auto()  # nobody waits for the result: a worker still has it, an error is owed
    ORPHANED = auto()  # its client is gone: a worker still has it, nothing is owed
    DONE = auto()


class Event(StrEnum):
    """An event in the life of a request."""

    DISPATCH = auto()
    RETURN = auto()
    RESPOND = auto()
    HOLD = auto()
    FINISH = auto()
    FAIL_EARLY = auto()
    CANCEL = auto()
    ABANDON = auto()
    SETTLE = auto()


LIFE: Mapping[State, Mapping[Event, State]] = {
    State.QUEUED: {
        Event.DISPATCH: State.EXECUTING,
        Event.FINISH: State.DONE,
        Event.ABANDON: State.DONE,
    },
    State.EXECUTING: {
        Event.RETURN: State.QUEUED,
        Event.RESPOND: State.RESPONDING,
        Event.HOLD: State.HELD,
        Event.FINISH: State.DONE,
        Event.FAIL_EARLY: State.FAILED_EARLY,
        Event.CANCEL: State.CANCELLED,
        Event.ABANDON: State.ORPHANED,
    },
    State.RESPONDING: {
        Event.RETURN: State.QUEUED,  # its model asks for it once more
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


class IllegalEvent(Exception):
    """A request met an event that its state does not know: a defect of ours."""


# A worker has the request, and its client waits.
AT_WORK = frozenset((State.EXECUTING, State.RESPONDING))


class Worker(NamedTuple):
    """The worker that runs a request: its address and pid."""

    peer: bytes
    pid: int


class Lookup(NamedTuple):
    """The result of a lookup in the response cache.

    Attributes:
        key: The request's key, where it missed; else empty.
        response: The cached response; `NOTHING` where it missed.
        ns: How long the lookup took.
        copies: The blocks that the response is read from, to be lent or cancelled.
    """

    key: bytes
    response: Packed
    ns: int
    copies: Sequence[Block]

    @property
    def hit(self) -> bool:
        """Whether there is a cached response."""
        return bool(self.response[0])

    def cancel(self) -> None:
        """Release the copies of a response that nobody will read."""
        for copy in self.copies:
            copy.release()


class Outcome(NamedTuple):
    """The outcome of a request's execution whose turn is still to come: `code` "" is success, no
    `timing` a death."""

    code: str
    message: str
    response: Packed
    timing: Timing | None


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """One inference, which counts for `units` in a batch, and the message that submitted it, as
    long as it lives. Times are monotonic ns, 0: none.

    `deadline_ns` holds until the last response, `queue_limit_ns` only in the queue; before
    `flush_by_ns` a batch should rather run than wait for more (`NEVER`: it may wait). `worker`
    is who had it last. Of a decoupled model's: `responses` it has had, as many as `credited` of
    which its client has read; since `responded_ns` the model has been at the next one. `level`
    is its priority level, 1 the highest; it is `delayed` where its timeout put it behind the
    others there. `sequence` is the one that it belongs to, where there are any, and `flags` say
    where in it. `lookup` is what the response cache said of it, if it was asked.
    """

    key: int
    client: Client[ScheduledRequest]
    id: int
    units: int
    shape_key: bytes
    arrived_ns: int
    enqueued_ns: int
    deadline_ns: int
    queue_limit_ns: int
    flush_by_ns: int
    submit: Submit
    level: int = 0
    delayed: bool = False
    state: State = State.QUEUED
    deaths: int = 0
    outcome: Outcome | None = None
    worker: Worker | None = None
    responses: int = 0
    responded_ns: int = 0
    credited: int = 0
    timing: Timing | None = None  # of the execution, once it has returned
    sequence: Any = None  # a batchers.sequence.slots.Sequence
    flags: int = 0
    untimed: bool = False  # it succeeded before that
    lookup: Lookup | None = None

    def meet(self, event: Event) -> None:
        """Move to the next state; raises IllegalEvent and changes nothing where there is none."""
        try:
            self.state = LIFE[self.state][event]
        except KeyError:
            raise IllegalEvent(f"{event.name} in state {self.state.name}") from None
