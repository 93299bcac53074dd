"""The client of schedulers: requests that are submitted to any number of schedulers and not settled
yet (without I/O).

    submit ──> pending ──Finished, Responded (final)───> responded, its memory is free
                 │  ├──Responded───────────────────────> pending: it never runs again from here on
                 │  ├──Failed──────────────────────────> responded, its memory is free
                 │  ├──Failed (early)──> settling ──Settled──> its memory is free
                 │  └──Failed (UNAVAILABLE)────────────> submitted to who serves the model now
                 └──its scheduler is lost──> submitted to the successor, or to who serves the model
                                             now; failed where it must not run again

Gateways, local clients, models that call other models, and ensembles submit with this class. Each
has a subclass of `InflightRequest` with what waits for the responses and the memory that the
request keeps, and its own way to wait for sockets (ipc/link_table.py has the sockets).
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from shmserve.errors import Unavailable
from shmserve.ipc.memory.lent import unread
from shmserve.ipc.messages import SchedulerToClient
from shmserve.ipc.messages.inference import (
    Cancel,
    Credit,
    Failed,
    Finished,
    Release,
    Responded,
    Response,
    Settled,
    StatisticsReported,
    Submit,
    message_size,
)
from shmserve.ipc.tensors.inference import runs_once
from shmserve.ipc.tensors.signature import id_prefix

ENDED = "the model's scheduler ended before it could answer, and no other serves the model"
BEGUN = "the model's scheduler was lost after the request's first response and before its last"
ONCE = (
    "the model's scheduler was lost before it could answer; the request's outputs go over its "
    "inputs, which may be changed"
)
_MOST_LOST = 4096
_RESPONSES = frozenset((Finished, Responded, Failed))

logger = logging.getLogger(__name__)


class Successors(dict[str, str]):
    """The schedulers that took the place of those that are lost, by endpoint; "": none did.

    Only the last 4,096 losses are kept: nothing that was lent before is still read.
    """

    def add(self, endpoint: str, successor: str) -> None:
        """Record a loss."""
        if len(self) >= _MOST_LOST:
            del self[next(iter(self))]
        self[endpoint] = successor

    def latest(self, endpoint: str) -> str:
        """Return the endpoint that serves what this one did: itself, or the last successor, ""
        where there is none."""
        while endpoint in self:
            endpoint = self[endpoint]
        return endpoint


class Links(Protocol):
    """The transport: one link to each scheduler, whose queued messages leave at `flush`."""

    def open(self, endpoint: str) -> Any:
        """Make a link to a scheduler unless there is one.

        Raises:
            Unavailable: The process has no descriptor left for it.
        """

    def queue(self, endpoint: str, message: Submit, byte_size: int) -> None:
        """Queue a request of about so many bytes. Raises what `open` does."""

    def tell(self, endpoint: str, message: Cancel | Credit) -> None:
        """Queue a message for a scheduler; nothing if there is no link to it."""

    def hold(self, endpoint: str, message: Release) -> None:
        """As `tell`, but the message may wait for others to the same scheduler."""

    def lose(self, endpoint: str, take: Callable[[str, Any], None]) -> None:
        """Close the link to a scheduler that has ended; `take(endpoint, message)` gets what the
        scheduler sent last."""


@dataclass(slots=True, eq=False)
class InflightRequest(ABC):
    """A request in flight; a subclass has what waits for its responses and the memory it keeps.

    Attributes:
        submit: The message that submits it.
        endpoint: The endpoint of the scheduler that has it.
        responses: The number of responses that have come, the failures not counted.
    """

    submit: Submit
    endpoint: str = field(init=False, default="")
    responses: int = field(init=False, default=0)

    @abstractmethod
    def awaited(self) -> bool:
        """Return whether somebody still waits for its responses."""

    @abstractmethod
    def respond(self, message: Response) -> None:
        """Take a response: the last one if it is a `Finished`, a `Failed` or final.

        Outputs that nobody reads are to be given to `SchedulerClient.discard`. A request that is
        submitted again here keeps its memory.
        """

    @abstractmethod
    def free(self) -> None:
        """Free its memory, which no worker uses any more."""

    def own_memories(self) -> Container[int]:
        """Return the ids of the requester's own memories, for which no `Release` is sent."""
        return ()

    def fail(self, why: str) -> None:
        """End it, when it is not in flight any more: no scheduler can run it."""
        text = id_prefix(self.submit.request_id) + why
        try:
            self.respond(Failed(self.submit.id, Unavailable.code, text, 0, early=False))
        finally:
            self.free()

    def strand(self) -> None:
        """End it: its scheduler is lost, and no other one serves its model."""
        self.fail(ENDED)


R = TypeVar("R", bound=InflightRequest)


class SchedulerClient(Generic[R]):
    """The requests of one thread or event loop that are in flight, whatever schedulers have them.

    At each step the tables are right before a request is told anything, so that telling may fail,
    or be interrupted by a signal.

    Attributes:
        pending: The requests that await a response, by number.
        settling: The requests that had their response, and whose memory a worker still uses.
        successors: The schedulers that are lost, which the owner records before `lost`.
    """

    __slots__ = ("_find", "_links", "pending", "settling", "successors")

    def __init__(
        self,
        links: Links,
        find: Callable[[R, Failed | None], str | None] = lambda request, refusal: "",
        successors: Successors | None = None,
    ) -> None:
        """Make a client without requests.

        Args:
            links: The transport.
            find: Returns the endpoint of the scheduler that serves the request's model now, or ""
                if none is known. The request was refused as unavailable, or its scheduler is lost.
                None: the finder will submit, or end, the request later.
            successors: Where losses are recorded; several clients may share one.
        """
        self._links = links
        self._find = find
        self.successors = Successors() if successors is None else successors
        self.pending: dict[int, R] = {}
        self.settling: dict[int, R] = {}

    def __bool__(self) -> bool:
        return bool(self.pending or self.settling)

    # --- to schedulers

    def submit(self, request: R, endpoint: str, byte_size: int = 0) -> None:
        """Queue a request, perhaps again, for the scheduler at `endpoint` or its successor.

        The memory of the request is kept from now on until the request is settled. Where no link
        can be made, or no scheduler serves the model any more, the request fails at once.

        Args:
            request: The request.
            endpoint: The endpoint of the scheduler.
            byte_size: The size of its message, about. Where much is queued, it leaves at once.
        """
        if endpoint in self.successors:
            self._submit_to_successor(request, self.successors.latest(endpoint))
            return
        request.endpoint = endpoint
        submit = request.submit
        # Before it leaves: wherever a signal interrupts this, its memory is kept.
        self.pending[submit.id] = request
        try:
            self._links.queue(endpoint, submit, byte_size)
        except Unavailable as error:
            del self.pending[submit.id]
            request.fail(error.message)

    def _submit_to_successor(self, request: R, successor: str) -> None:
        endpoint = successor or self._find(request, None)
        if endpoint and endpoint not in self.successors:
            self._submit_again(request, endpoint)
        elif endpoint is not None:
            request.strand()

    def _submit_again(self, request: R, endpoint: str) -> None:
        self.submit(request, endpoint, message_size(request.submit))

    def cancel(self, request: R, listening: bool = False) -> None:
        """Tell the scheduler that nobody waits for a request; its memory is in use until that
        responds. `listening`: its model should end it, and what comes until then is read."""
        if request.submit.id in self.pending:
            self._links.tell(request.endpoint, Cancel(request.submit.id, listening))

    def credit(self, request: R, responses: int) -> None:
        """Take so many more responses to a request: as many have been read."""
        if request.submit.id in self.pending:
            self._links.tell(request.endpoint, Credit(request.submit.id, responses))

    def release(self, endpoint: str, messages: Iterable[Release]) -> None:
        """Tell workers that outputs have been read, by the scheduler that sent them."""
        endpoint = self.successors.latest(endpoint)
        for message in messages:
            self._links.hold(endpoint, message)

    def discard(self, endpoint: str, message: Response, own: Container[int] = ()) -> None:
        """Release the outputs of a response that nobody reads: they take up a worker's memory."""
        if not isinstance(message, Failed) and message.data:
            self.release(endpoint, unread(message.data, own))

    # --- from schedulers

    def take(self, endpoint: str, message: SchedulerToClient) -> None:
        """Handle what the scheduler at `endpoint` says of a request.

        The outputs of responses to a request that is not here, or not there any more, are released.
        """
        kind = type(message)
        number = message.id
        request = self.pending.get(number)
        if request is None or request.endpoint != endpoint or kind not in _RESPONSES:
            self._take_late(endpoint, message)
            return
        if kind is Responded:
            request.responses += 1
            if not message.final:  # type: ignore[union-attr]
                request.respond(message)  # type: ignore[arg-type]
                return
        elif kind is Failed and self._keeps(request, message):  # type: ignore[arg-type]
            return
        if number in self.pending:
            del self.pending[number]
        try:
            request.respond(message)  # type: ignore[arg-type]
        finally:
            if number not in self.pending:
                request.free()

    def _keeps(self, request: R, failure: Failed) -> bool:
        """Handle a failure that does not free the memory of its request: an early one, or a refusal
        of what another scheduler takes."""
        number = request.submit.id
        if failure.early:
            # First: a worker has its memory yet, wherever a signal interrupts this.
            self.settling[number] = request
            del self.pending[number]
            request.respond(failure)
            return True
        if failure.code != Unavailable.code or request.responses or not request.awaited():
            return False
        del self.pending[number]
        endpoint = self._find(request, failure)
        if endpoint and endpoint != request.endpoint:
            self._submit_again(request, endpoint)
            return True
        return endpoint is None

    def _take_late(self, endpoint: str, message: SchedulerToClient) -> None:
        """Handle what is said of no request that awaits a response there."""
        if isinstance(message, StatisticsReported):
            self.take_report(message)
            return
        request = self.settling.get(message.id)
        if request is not None and request.endpoint != endpoint:
            request = None
        if not isinstance(message, Settled):  # a worker goes on with what has failed here
            self.discard(endpoint, message, () if request is None else request.own_memories())
        elif request is not None:
            self._settle(message.id)

    def take_report(self, message: StatisticsReported) -> None:
        """Take a scheduler's statistics, which only those get that request them."""

    def _settle(self, number: int) -> None:
        request = self.settling[number]
        self.pending.pop(number, None)  # where its failure was interrupted
        del self.settling[number]
        request.free()

    # --- losses

    def lost(self, endpoint: str) -> None:
        """Fail over: the scheduler at `endpoint` has ended, which `successors` say. What it sent
        last is taken, what it had goes to its successor, or to who serves the model now."""
        successor = self.successors.latest(endpoint)
        if successor:
            with contextlib.suppress(Unavailable):
                self._links.open(successor)  # for what is told of responses that were read here
        self._links.lose(endpoint, self._take_last)
        for request in self.withdraw(endpoint):
            self._submit_to_successor(request, successor)

    def _take_last(self, endpoint: str, message: Any) -> None:
        try:
            self.take(endpoint, message)
        except Exception:  # the others are still to be moved
            logger.exception("a %s could not be handled", type(message).__name__)

    def withdraw(self, endpoint: str) -> list[R]:
        """Take the requests of a scheduler, which has ended or its link, out of the table, and fail
        those that must not run again. Returns the others, in the order of submission."""
        again: list[R] = []
        for number, request in list(self.settling.items()):
            if request.endpoint == endpoint:
                self._settle(number)
        for number, request in list(self.pending.items()):
            if request.endpoint != endpoint:
                continue
            del self.pending[number]
            if not request.awaited():
                request.free()
            elif request.responses:
                request.fail(BEGUN)
            elif runs_once(request.submit.schema, request.submit.data):
                request.fail(ONCE)
            else:
                again.append(request)
        return again

    def withdraw_all(self) -> list[R]:
        """Take all requests out of the table, and return those that were pending: no scheduler has
        anything any more."""
        for number in list(self.settling):
            self._settle(number)
        pending = list(self.pending.values())
        self.pending.clear()
        return pending
