"""The client of schedulers, which tracks the requests in flight at any number of schedulers.

The states of a request (this module performs no I/O):

    submit ──> pending ──Finished, Responded (final)───> responded, its memory is free
                 │  ├──Responded───────────────────────> pending; must not run again
                 │  ├──Failed──────────────────────────> responded, its memory is free
                 │  ├──Failed (early)──> settling ──Settled──> its memory is free
                 │  └──Failed (UNAVAILABLE)────────────> resubmitted to its current scheduler
                 └──its scheduler is lost──> resubmitted to the successor or to the model's current
                                             scheduler; failed if it must not run again

Gateways, local clients, models that call other models, and ensembles use `SchedulerClient`. Each of
them has a subclass of `InflightRequest`, which holds the memory of the request and notifies the
waiting code. Each waits for its sockets (ipc/transport/zmtp.py) in its own way.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from shmserve.errors import Unavailable
from shmserve.ipc.memory.lent import unread_releases
from shmserve.ipc.messages.inference import (
    Cancel,
    Credit,
    Failed,
    Finished,
    Release,
    Responded,
    Response,
    SchedulerToClient,
    Settled,
    StatisticsReported,
    Submit,
    message_size,
)
from shmserve.ipc.tensors.schemas import runs_once
from shmserve.ipc.tensors.signature import id_prefix

NO_SCHEDULER = "the model's scheduler ended before its response, and no other scheduler serves it"
LOST_AFTER_RESPONSE = (
    "the model's scheduler was lost after the request's first response and before its last"
)
CANNOT_RUN_AGAIN = (
    "the model's scheduler was lost before it could answer; the request's outputs overlap its "
    "inputs, which may have changed"
)
_MAX_LOSSES = 4096
_RESPONSE_TYPES = frozenset((Finished, Responded, Failed))

logger = logging.getLogger(__name__)


class Successors(dict[str, str]):
    """The successors of lost schedulers, by endpoint; "" if there is no successor.

    Only the last 4,096 losses are kept. By then, the memory that an earlier scheduler lent has long
    been released.
    """

    def add(self, endpoint: str, successor: str) -> None:
        """Record the loss of a scheduler; `successor` is "" if it has no successor."""
        if len(self) >= _MAX_LOSSES:
            del self[next(iter(self))]
        self[endpoint] = successor

    def latest(self, endpoint: str) -> str:
        """Return the endpoint itself, or its last successor if the scheduler is lost.

        Returns:
            The endpoint, or "" if the lost scheduler has no successor.
        """
        while endpoint in self:
            endpoint = self[endpoint]
        return endpoint


class Links(Protocol):
    """The transport: one link to each scheduler, whose queued messages are sent by `flush`."""

    def open(self, endpoint: str) -> Any:
        """Open a link to a scheduler unless it is open already.

        Raises:
            Unavailable: The process is out of file descriptors.
        """

    def queue(self, endpoint: str, message: Submit, byte_size: int) -> None:
        """Queue a request of about `byte_size` bytes, and open the link if needed.

        Raises:
            Unavailable: The process is out of file descriptors.
        """

    def post(self, endpoint: str, message: Cancel | Credit) -> None:
        """Queue a message for a scheduler; do nothing if there is no link to it."""

    def defer(self, endpoint: str, message: Release) -> None:
        """Queue a message that may be delayed until other messages go to the same scheduler."""

    def drain(self, endpoint: str, on_message: Callable[[str, Any], None]) -> None:
        """Pass on the last messages of a scheduler that has exited, and close its link.

        Args:
            endpoint: The endpoint of the scheduler.
            on_message: Called with the endpoint and each remaining message of the scheduler.
        """


@dataclass(slots=True, eq=False)
class InflightRequest(ABC):
    """A request in flight. A subclass handles its responses and holds its memory.

    Attributes:
        submit: The message that submits the request.
        endpoint: The endpoint of the scheduler that processes the request.
        response_count: The number of responses received, without failures.
    """

    submit: Submit
    endpoint: str = field(init=False, default="")
    response_count: int = field(init=False, default=0)

    @abstractmethod
    def is_awaited(self) -> bool:
        """Return whether the requester still waits for responses."""

    @abstractmethod
    def handle(self, message: Response) -> None:
        """Handle a response. `Finished`, `Failed` and a final `Responded` end the request.

        An implementation must pass responses that it does not read to `SchedulerClient.discard`.
        An implementation may resubmit the request, which then keeps its memory.
        """

    @abstractmethod
    def free(self) -> None:
        """Free the memory of the request, which no worker uses any more."""

    def own_memories(self) -> Container[int]:
        """Return the ids of the requester's own memories, for which no `Release` is sent."""
        return ()

    def fail(self, reason: str) -> None:
        """Fail the request with the code of Unavailable, and free its memory.

        The request is no longer in the tables of `SchedulerClient`.
        """
        text = id_prefix(self.submit.request_id) + reason
        try:
            self.handle(Failed(self.submit.id, Unavailable.code, text, 0, early=False))
        finally:
            self.free()

    def fail_without_scheduler(self) -> None:
        """Fail the request because its scheduler is lost and no successor serves its model."""
        self.fail(NO_SCHEDULER)


R = TypeVar("R", bound=InflightRequest)


class SchedulerClient(Generic[R]):
    """The requests in flight of one thread or event loop, at all schedulers.

    The tables are updated before any method of a request is called. The method may therefore raise
    an exception or be interrupted by a signal.

    Attributes:
        pending: The requests that await a response, by number.
        settling: The requests that have failed while a worker still uses their memory, by number.
        successors: The successors of lost schedulers. The owner records a loss before it calls
            `handle_loss`.
    """

    __slots__ = ("_find_scheduler", "_links", "pending", "settling", "successors")

    def __init__(
        self,
        links: Links,
        find_scheduler: Callable[[R, Failed | None], str | None] = lambda request, refusal: "",
        successors: Successors | None = None,
    ) -> None:
        """Create a client without requests.

        Args:
            links: The transport.
            find_scheduler: Returns the endpoint of the scheduler that currently serves a request's
                model, or "" if none is known. A result of None means that `find_scheduler` submits
                or ends the request later. Its second argument is the failure if the request failed
                as UNAVAILABLE, and None if the scheduler is lost.
            successors: The record of losses, which several clients may share.
        """
        self._links = links
        self._find_scheduler = find_scheduler
        self.successors = Successors() if successors is None else successors
        self.pending: dict[int, R] = {}  # by id
        self.settling: dict[int, R] = {}  # failed, but a worker still uses the memory; by id

    def __bool__(self) -> bool:
        return bool(self.pending or self.settling)

    # --- to schedulers

    def submit(self, request: R, endpoint: str, byte_size: int = 0) -> None:
        """Queue a new or resubmitted request for the scheduler at `endpoint` or its successor.

        The client keeps the memory of the request until the request is settled. The request fails
        at once if no link can be opened or no scheduler serves the model any more.

        Args:
            request: The request.
            endpoint: The endpoint of the scheduler.
            byte_size: The approximate size of the message. The transport may send a large queue
                at once.
        """
        if endpoint in self.successors:
            self._submit_to_successor(request, self.successors.latest(endpoint))
            return
        request.endpoint = endpoint
        submit = request.submit
        # The request is stored before it is queued. If a signal handler then raises an exception,
        # the memory that a worker may read is still kept.
        self.pending[submit.id] = request
        try:
            self._links.queue(endpoint, submit, byte_size)
        except Unavailable as error:
            del self.pending[submit.id]
            request.fail(error.message)

    def _submit_to_successor(self, request: R, successor: str) -> None:
        endpoint = successor or self._find_scheduler(request, None)
        if endpoint and endpoint not in self.successors:
            self._submit_again(request, endpoint)
        elif endpoint is not None:
            request.fail_without_scheduler()

    def _submit_again(self, request: R, endpoint: str) -> None:
        self.submit(request, endpoint, message_size(request.submit))

    def cancel(self, request: R, keeps_reading: bool = False) -> None:
        """Cancel a pending request. Its memory stays in use until the scheduler responds.

        Args:
            request: The request.
            keeps_reading: Whether responses that the model sends before it ends are still read.
        """
        if request.submit.id in self.pending:
            self._links.post(request.endpoint, Cancel(request.submit.id, keeps_reading))

    def credit(self, request: R, responses: int) -> None:
        """Grant the scheduler credit for `responses` more responses to a request."""
        if request.submit.id in self.pending:
            self._links.post(request.endpoint, Credit(request.submit.id, responses))

    def release(self, endpoint: str, messages: Sequence[Release]) -> None:
        """Send `Release` messages for outputs to the scheduler that sent them, or its successor."""
        if endpoint in self.successors:
            endpoint = self.successors.latest(endpoint)
            if endpoint and messages:  # there may be no link to the successor yet
                with contextlib.suppress(Unavailable):
                    self._links.open(endpoint)
        for message in messages:
            self._links.defer(endpoint, message)

    def discard(self, endpoint: str, message: Response, own_memories: Container[int] = ()) -> None:
        """Release the outputs of a response that is not read, which occupy a worker's memory.

        Args:
            endpoint: The endpoint of the scheduler that sent the response.
            message: The response.
            own_memories: The ids of the requester's own memories, for which no `Release` is sent.
        """
        if not isinstance(message, Failed) and message.data:
            self.release(endpoint, unread_releases(message.data, own_memories))

    # --- from schedulers

    def handle(self, endpoint: str, message: SchedulerToClient) -> None:
        """Handle a message from the scheduler at `endpoint`.

        The outputs of a response are released if its request is unknown or at another scheduler.
        """
        message_type = type(message)
        number = message.id
        request = self.pending.get(number)
        if request is None or request.endpoint != endpoint or message_type not in _RESPONSE_TYPES:
            self._handle_late(endpoint, message)
            return
        if message_type is Responded:
            request.response_count += 1
            if not message.final:  # type: ignore[union-attr]
                request.handle(message)  # type: ignore[arg-type]
                return
        elif message_type is Failed and self._handle_nonfinal_failure(request, message):  # type: ignore[arg-type]
            return
        if number in self.pending:
            del self.pending[number]
        try:
            request.handle(message)  # type: ignore[arg-type]
        finally:
            if number not in self.pending:
                request.free()

    def remove_finished(self, endpoint: str, message: Finished) -> R | None:
        """Remove and return the pending request that a `Finished` ends.

        The caller then passes the message to the request and frees the request.

        Returns:
            The request, or None if the caller must pass the message to `handle`.
        """
        request = self.pending.get(message.id)
        if request is None or request.endpoint != endpoint:
            return None
        del self.pending[message.id]
        return request

    def _handle_nonfinal_failure(self, request: R, failure: Failed) -> bool:
        """Handle a failure after which the request keeps its memory.

        Either a worker still uses the memory (`early`), or the refused request is resubmitted.

        Returns:
            Whether the failure was of this kind; otherwise the caller must handle it.
        """
        number = request.submit.id
        if failure.early:
            # `settling` gets the request before `pending` loses it. If a signal handler raises an
            # exception in between, the memory that a worker still uses is kept.
            self.settling[number] = request
            del self.pending[number]
            request.handle(failure)
            return True
        if failure.code != Unavailable.code or request.response_count or not request.is_awaited():
            return False
        del self.pending[number]
        endpoint = self._find_scheduler(request, failure)
        if endpoint and endpoint != request.endpoint:
            self._submit_again(request, endpoint)
            return True
        return endpoint is None

    def _handle_late(self, endpoint: str, message: SchedulerToClient) -> None:
        """Handle a message for which no request is pending at that scheduler."""
        if isinstance(message, StatisticsReported):
            self.handle_report(message)
            return
        request = self.settling.get(message.id)
        if request is not None and request.endpoint != endpoint:
            request = None
        if not isinstance(message, Settled):  # a response of a request that failed early
            self.discard(endpoint, message, () if request is None else request.own_memories())
        elif request is not None:
            self._settle(message.id)

    def handle_report(self, message: StatisticsReported) -> None:
        """Handle a scheduler's statistics. A subclass that requests statistics overrides this."""

    def _settle(self, number: int) -> None:
        request = self.settling[number]
        self.pending.pop(number, None)  # still present if a signal interrupted its early failure
        del self.settling[number]
        request.free()

    # --- losses

    def handle_loss(self, endpoint: str) -> None:
        """Move the requests of the lost scheduler at `endpoint`, which `successors` must contain.

        The last messages of the scheduler are handled first. Its remaining requests are then
        resubmitted to its successor, or to the scheduler that currently serves the model.
        """
        successor = self.successors.latest(endpoint)
        self._links.drain(endpoint, self._handle_or_log)
        for request in self.withdraw(endpoint):
            self._submit_to_successor(request, successor)

    def _handle_or_log(self, endpoint: str, message: Any) -> None:
        try:
            self.handle(endpoint, message)
        except Exception:  # the remaining requests must still be resubmitted after any exception
            text = "the message %s from a scheduler could not be handled; it is not repeated"
            logger.exception(text, type(message).__name__)

    def withdraw(self, endpoint: str) -> list[R]:
        """Remove the requests of a scheduler that has exited or whose link was disconnected.

        Requests that must not run again fail.

        Returns:
            The requests to resubmit, in the order of submission.
        """
        resubmitted_requests: list[R] = []
        for number, request in list(self.settling.items()):
            if request.endpoint == endpoint:
                self._settle(number)
        for number, request in list(self.pending.items()):
            if request.endpoint != endpoint:
                continue
            del self.pending[number]
            if not request.is_awaited():
                request.free()
            elif request.response_count:
                request.fail(LOST_AFTER_RESPONSE)
            elif runs_once(request.submit.schema, request.submit.data):
                request.fail(CANNOT_RUN_AGAIN)
            else:
                resubmitted_requests.append(request)
        return resubmitted_requests

    def withdraw_all(self) -> list[R]:
        """Remove all requests, which no scheduler processes any more.

        Returns:
            The requests that were pending.
        """
        for number in list(self.settling):
            self._settle(number)
        pending_requests = list(self.pending.values())
        self.pending.clear()
        return pending_requests
