"""The in-flight table: requests that were submitted to schedulers and are not settled (sans IO).

    add ──> pending ──Finished, Responded (final)───> responded, its memory is free
              │  ├──Responded───────────────────────> pending: it never runs again from here on
              │  ├──Failed──────────────────────────> responded, its memory is free
              │  ├──Failed (early)──> settling ──Settled──> its memory is free
              │  └──Failed (UNAVAILABLE)────────────> its owner may take it elsewhere
              └──its scheduler is lost──> handed back, to be submitted to who serves the model now;
                                          failed where it must not run again

Gateways, local clients and models that call others each have their own kind of request, with what
waits for it and the memory it keeps; the rules of its life are here, once.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from shmserve.errors import Unavailable
from shmserve.ipc.messages.inference import Failed, Finished, Responded, Settled, Submit
from shmserve.ipc.tensors.inference import runs_once
from shmserve.ipc.tensors.signature import id_prefix

Response = Finished | Responded | Failed

# A limit on time beyond this, in microseconds, is as good as this: its deadline is a number still.
LONGEST_TIMEOUT_US = 10**15

_STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"
ENDED = "the model's scheduler ended before it could answer, and no other serves the model"
BEGUN = "the model's scheduler was lost after the request's first response and before its last"
ONCE = (
    "the model's scheduler was lost before it could answer; the request's outputs go over its "
    "inputs, which may be changed"
)


def stopping(request_id: str, *, of_sequence: bool = False) -> str:
    """The error text for a request that comes, or is still here, when no work begins any more; in
    Triton's words, which name one of a sequence only by an id that its client gave."""
    return _STOPPING if of_sequence and not request_id else id_prefix(request_id) + _STOPPING


def make_submit(
    number: int,
    schema: bytes,
    data: list[Any],
    arrived_ns: int,
    *,
    request_id: str = "",
    priority: int = 0,
    timeout_us: int = 0,
    limit_us: int = 0,
    call_limit_us: int = 0,
    ends_ns: int = 0,
    flags: int = 0,
    correlation_id: int | str = 0,
    source: int = 0,
    trace: str = "",
) -> Submit:
    """Return the message that submits a request, of this schema and these data.

    The deadline is the shortest of the request's own `timeout_us`, the server's `limit_us` and the
    call's `call_limit_us`, which count from the arrival, and the caller's end `ends_ns` (monotonic
    clock); 0: none.
    """
    if timeout_us > LONGEST_TIMEOUT_US:
        timeout_us = LONGEST_TIMEOUT_US
    shortest_us = timeout_us
    if limit_us and (not shortest_us or limit_us < shortest_us):
        shortest_us = limit_us
    if call_limit_us and (not shortest_us or call_limit_us < shortest_us):
        shortest_us = min(call_limit_us, LONGEST_TIMEOUT_US)
    deadline_ns = ends_ns
    if shortest_us:
        deadline_ns = arrived_ns + shortest_us * 1000
        if ends_ns:
            deadline_ns = min(deadline_ns, ends_ns)
    sequence, text = correlation_fields(correlation_id) if correlation_id else (0, "")
    return Submit(
        number,
        schema,
        data,
        arrived_ns,
        deadline_ns,
        timeout_us,
        priority,
        request_id,
        flags,
        sequence,
        text,
        source,
        trace,
    )


def correlation_fields(correlation_id: int | str) -> tuple[int, str]:
    """A sequence's id as messages carry it: `correlation_id` and `correlation_text`."""
    return (correlation_id, "") if isinstance(correlation_id, int) else (0, correlation_id)


@dataclass(slots=True, eq=False)
class InflightRequest:
    """A request in the table: its `submit`, the scheduler's `endpoint` that has it, and how many
    `responses` it has had. Its owner says in a subclass who waits, and what memory it keeps."""

    submit: Submit
    endpoint: str
    responses: int = field(init=False, default=0)

    @abstractmethod
    def awaited(self) -> bool:
        """Whether somebody still waits for its responses."""

    @abstractmethod
    def respond(self, message: Response) -> None:
        """A response, the last if it is a `Finished`, a `Failed` or final. Outputs that nobody
        reads are to be given back. Whoever adds it to the table again, keeps its memory."""

    @abstractmethod
    def free(self) -> None:
        """No worker has its memory any more."""

    def goes_elsewhere(self, message: Failed) -> bool:
        """Its scheduler refused it as unavailable, and it has no response: whether its owner takes
        it, out of the table, to who serves the model now."""
        return False

    def fail(self, why: str) -> None:
        """End it, out of the table: nobody can run it."""
        text = id_prefix(self.submit.request_id) + why
        try:
            self.respond(Failed(self.submit.id, Unavailable.code, text, 0, early=False))
        finally:
            self.free()


R = TypeVar("R", bound=InflightRequest)


class InflightTable(Generic[R]):
    """Requests by number: those `pending` await a response, those `settling` had it, and keep their
    memory. At each step the table is right before its owner is told, so that telling may fail."""

    __slots__ = ("pending", "settling")

    def __init__(self) -> None:
        self.pending: dict[int, R] = {}
        self.settling: dict[int, R] = {}

    def __bool__(self) -> bool:
        return bool(self.pending or self.settling)

    def add(self, request: R) -> None:
        """Add a request that is submitted, perhaps again."""
        self.pending[request.submit.id] = request

    def take(self, message: Response | Settled) -> bool:
        """Handle what a scheduler says; False: of no request here, nobody reads its outputs."""
        number = message.id
        if type(message) is Settled:
            return self._settle(number)
        request = self.pending.get(number)
        if request is None:
            return False
        if type(message) is Responded:
            request.responses += 1
            if not message.final:
                request.respond(message)
                return True
        elif type(message) is Failed:
            if message.early:
                # First: a worker has its memory yet, wherever a signal interrupts this.
                self.settling[number] = request
                del self.pending[number]
                request.respond(message)
                return True
            refused = message.code == Unavailable.code and not request.responses
            if refused and request.awaited():
                del self.pending[number]
                if request.goes_elsewhere(message):
                    return True
        if number in self.pending:
            del self.pending[number]
        try:
            request.respond(message)  # type: ignore[arg-type]
        finally:
            if number not in self.pending:
                request.free()
        return True

    def _settle(self, number: int) -> bool:
        request = self.settling.get(number)
        if request is None:
            return False
        self.pending.pop(number, None)  # where its failure was interrupted
        del self.settling[number]
        request.free()
        return True

    def lose(self, endpoint: str) -> list[R]:
        """Take out the requests of an `endpoint` that is lost. Returns those that may run again: to
        be submitted elsewhere, or failed."""
        again: list[R] = []
        for request in [each for each in self.settling.values() if each.endpoint == endpoint]:
            self._settle(request.submit.id)
        for request in [each for each in self.pending.values() if each.endpoint == endpoint]:
            del self.pending[request.submit.id]
            if not request.awaited():
                request.free()
            elif request.responses:
                request.fail(BEGUN)
            elif runs_once(request.submit.schema, request.submit.data):
                request.fail(ONCE)
            else:
                again.append(request)
        return again

    def drop(self) -> list[R]:
        """All that is pending, out of the table: no scheduler has anything any more."""
        for number in list(self.settling):
            self._settle(number)
        dropped = list(self.pending.values())
        self.pending.clear()
        return dropped
