"""The links of a gateway to the supervisor and the schedulers, in the gateway's event loop.

The messages queued during an iteration of the loop are sent together, as one frame for each link.
When a client disconnects, its request is cancelled at the scheduler. The request keeps its memory
until the scheduler responds.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shmserve.common.tasks import resolve_future
from shmserve.errors import Unavailable, from_code
from shmserve.ipc.memory.lent import release_messages
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.control_requests import Answered, Refused
from shmserve.ipc.messages.inference import Response
from shmserve.ipc.scheduler_client import InflightRequest, SchedulerClient
from shmserve.ipc.tensors.descriptors import Range
from shmserve.ipc.tensors.schemas import Inferred
from shmserve.ipc.transport.zmtp import Dealer, LinkTable

logger = logging.getLogger(__name__)


# The longest delay of a `Release` while other requests are in flight. Sending it with the next
# request saves a wake-up of the scheduler, and of the worker that owns the memory.
_MAX_RELEASE_DELAY_S = 0.001


class GatewaySupervisorLink:
    """The link to the supervisor, for notifications and for requests with responses.

    Args:
        endpoint: The endpoint of the supervisor.
        identity: The identity of the gateway.
        on_message: Called with every message except the responses to `send_request`.
    """

    def __init__(self, endpoint: str, identity: str, on_message: Callable[[Any], None]) -> None:
        self.endpoint = endpoint
        self._dealer = Dealer(endpoint, identity)
        self._on_notification = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._dealer.fd, self._receive)
        self._is_flush_scheduled = False
        self._is_closed = False
        self._message_numbers = itertools.count(1)
        self._pending_responses: dict[int, asyncio.Future[dict[str, Any]]] = {}

    def post(self, message: Any) -> None:
        """Queue a message, which is sent in the next iteration of the loop."""
        self._dealer.post(message)
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_scheduled = False
        if not self._is_closed:
            self._dealer.flush()

    def _receive(self) -> None:
        for message in self._dealer.receive():
            try:
                self._handle_message(message)
            except Exception:
                text = "the message %s from the supervisor could not be handled; it is not repeated"
                logger.exception(text, type(message).__name__)

    def close(self) -> None:
        """Close the link."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._dealer.fd)
            self._dealer.close()

    async def send_request(self, message_class: Callable[..., Any], *fields: Any) -> dict[str, Any]:
        """Send a request and return the response's payload.

        Cancelling this coroutine does not cancel the request, which the supervisor completes.

        Args:
            message_class: The class of the request.
            fields: The fields of the message after its number.

        Raises:
            ShmserveError: The supervisor rejected the request.
        """
        message_number = next(self._message_numbers)
        response: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending_responses[message_number] = response
        try:
            self.post(message_class(message_number, *fields))
            return await response
        finally:
            del self._pending_responses[message_number]

    def _handle_message(self, message: Any) -> None:
        match message:
            case Answered(message_number, payload):
                resolve_future(self._pending_responses.get(message_number), payload)
            case Refused(message_number, code, error_text):
                future = self._pending_responses.get(message_number)
                if future is not None and not future.done():
                    future.set_exception(from_code(code, error_text))
            case _:
                self._on_notification(message)


@dataclass(slots=True, eq=False)
class GatewayRequest(InflightRequest):
    """An in-flight request of a gateway. A subclass for each protocol handles the responses.

    Attributes:
        schedulers: The client that submits the request.
        on_release: Releases the arena block and the regions of the request; None if it has neither.
        has_ended: Whether the last response was received, or the request was abandoned.
    """

    schedulers: GatewaySchedulers
    on_release: Callable[[], None] | None  # frees the memory of the request
    has_ended: bool = field(init=False, default=False)

    @abstractmethod
    def handle_response(self, message: Response) -> None:
        """Handle a response; it is the last one if the request `has_ended`."""

    def is_awaited(self) -> bool:
        return not self.has_ended

    def handle(self, message: Response) -> None:
        if self.has_ended:
            self.discard(message)
            return
        self.has_ended = type(message) is not m.Responded or message.final
        self.handle_response(message)

    def free(self) -> None:
        if self.on_release is not None:
            self.on_release()

    def discard(self, message: Response) -> None:
        """Release the outputs of a response without reading them."""
        self.schedulers.discard(self.endpoint, message)

    def release_outputs(self, inferred: Inferred | None) -> None:
        """Release the outputs of a response that have been read."""
        if inferred is None:
            return
        ranges = [tensor.data for tensor in inferred.outputs if isinstance(tensor.data, Range)]
        if ranges:
            self.schedulers.release(self.endpoint, release_messages(ranges))

    def abandon(self) -> None:
        """Cancel the request and discard further responses.

        Its memory stays in use until the scheduler responds.
        """
        self.has_ended = True
        self.schedulers.cancel(self)


class GatewaySchedulers(SchedulerClient[GatewayRequest]):
    """The client of all schedulers, in the event loop.

    A link is closed only when its scheduler has exited and no request is in flight there. Closing
    the link of a running scheduler would make it reclaim memory that the gateway is still reading.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        # Schedulers read the gateway's pid from the identity.
        identity = f"{os.getpid()}.{secrets.token_hex(6)}"
        callbacks = (self._watch, self._unwatch, self._on_queued, self._on_deferred)
        self._table = LinkTable(identity, *callbacks)
        super().__init__(self._table)
        self._release_timer: asyncio.TimerHandle | None = None
        self._pending_statistics: dict[int, tuple[str, asyncio.Future[dict[str, Any]]]] = {}
        # Returns the number of the next request.
        self.next_number = itertools.count(1).__next__

    def open(self, endpoint: str) -> None:
        """Open the link to a scheduler in advance, so that the first request is not delayed."""
        self._table.open(endpoint)

    def close(self) -> None:
        """Close every link. Requests in flight receive no response."""
        self._table.close_all()

    # --- sending

    def _on_queued(self) -> None:
        if len(self.pending) < 2:
            self._table.flush()  # no other request is in flight, so no message will follow soon
        else:
            self._loop.call_soon(self._table.flush)

    def _on_deferred(self) -> None:
        if not self.pending:
            self._table.flush()
        elif self._release_timer is None:
            self._release_timer = self._loop.call_later(_MAX_RELEASE_DELAY_S, self._flush_deferred)

    def _flush_deferred(self) -> None:
        self._release_timer = None
        self._table.flush()

    # --- receiving

    def _watch(self, fd: int) -> None:
        self._loop.add_reader(fd, self._receive, fd)

    def _unwatch(self, fd: int) -> None:
        self._loop.remove_reader(fd)

    def _receive(self, fd: int) -> None:
        link = self._table.find_by_fd(fd)
        assert link is not None
        endpoint = link.endpoint
        for message in link.receive():
            try:
                self.handle(endpoint, message)
            except Exception:
                text = "the message %s from a scheduler could not be handled; it is not repeated"
                logger.exception(text, type(message).__name__)
        if not link.connected:
            self._close_if_unused(link)

    def handle_report(self, message: m.StatisticsReported) -> None:
        _, statistics = self._pending_statistics.get(message.id, ("", None))
        resolve_future(statistics, message.statistics)

    def _close_if_unused(self, link: Dealer) -> None:
        """Close the link to a scheduler that has exited, if no request is in flight there.

        Otherwise the link remains open until `fail_over`.
        """
        endpoint = link.endpoint
        inflight_requests = (*self.pending.values(), *self.settling.values())
        if all(request.endpoint != endpoint for request in inflight_requests):
            self._table.remove(link)

    def fail_over(self, endpoint: str, successor: str) -> None:
        """Resubmit the requests of a scheduler that has exited to its successor.

        Args:
            endpoint: The endpoint of the scheduler that has exited.
            successor: The endpoint of the successor. If it is "", the requests fail.
        """
        self.successors.add(endpoint, successor)
        self.handle_loss(endpoint)
        for statistics_endpoint, statistics in list(self._pending_statistics.values()):
            if statistics_endpoint == endpoint and not statistics.done():
                statistics.set_exception(Unavailable("statistics are not available now"))

    # --- statistics

    def request_statistics(self, endpoint: str) -> asyncio.Future[dict[str, Any]]:
        """Request a scheduler's statistics; the caller must await the future with a timeout."""
        statistics: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        request_number = self.next_number()
        endpoint = self.successors.latest(endpoint)
        self._pending_statistics[request_number] = (endpoint, statistics)
        statistics.add_done_callback(lambda _: self._pending_statistics.pop(request_number))
        self._table.queue(endpoint, m.ReportStatistics(request_number))
        return statistics
