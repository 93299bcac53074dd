"""The links of a gateway in its event loop: to the supervisor, and to the schedulers.

What is queued during a turn of the loop leaves as one frame at its end. A client that leaves frees
no memory: its request is cancelled at the scheduler, and stays in flight until that responds.
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

from shmserve.errors import Unavailable, from_code
from shmserve.ipc.link_table import LinkTable
from shmserve.ipc.memory.lent import releases
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.control_requests import Answered, Refused
from shmserve.ipc.messages.inference import Response
from shmserve.ipc.scheduler_client import InflightRequest, SchedulerClient
from shmserve.ipc.tensors.descriptors import Range
from shmserve.ipc.tensors.inference import Inferred
from shmserve.ipc.transport.dealer import Dealer

logger = logging.getLogger(__name__)


# Where others are in flight, what was read is released with the next request, which saves a wake-up
# of the scheduler, and of the worker that owns the memory; or after this.
_MOST_HELD_S = 0.001


class SupervisorLink:
    """The link to the supervisor: notifications, and requests with their responses.

    `on_message` gets everything but the responses to `ask`.
    """

    def __init__(self, endpoint: str, identity: str, on_message: Callable[[Any], None]) -> None:
        self.endpoint = endpoint
        self._dealer = Dealer(endpoint, identity)
        self._on_notification = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._dealer.fd, self._receive)
        self._flushing = False
        self._closed = False
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}

    def post(self, message: Any) -> None:
        """Send a message at the end of this turn of the loop."""
        self._dealer.post(message)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if not self._closed:
            self._dealer.flush()

    def _receive(self) -> None:
        for message in self._dealer.receive():
            try:
                self._take(message)
            except Exception:
                logger.exception("a %s could not be handled", type(message).__name__)

    def close(self) -> None:
        """Close the link."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._dealer.fd)
            self._dealer.close()

    async def ask(self, kind: Callable[..., Any], *fields: Any) -> dict[str, Any]:
        """Send a request and return the response's payload.

        A caller that is cancelled only stops waiting: the supervisor finishes the request.

        Args:
            kind: The kind of the message.
            fields: Its fields behind the number.

        Raises:
            ShmserveError: The supervisor refused the request.
        """
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            self.post(kind(number, *fields))
            return await future
        finally:
            del self._pending[number]

    def _take(self, message: Any) -> None:
        match message:
            case Answered(number, payload):
                future = self._pending.get(number)
                if future is not None and not future.done():
                    future.set_result(payload)
            case Refused(number, code, text):
                future = self._pending.get(number)
                if future is not None and not future.done():
                    future.set_exception(from_code(code, text))
            case _:
                self._on_notification(message)


@dataclass(slots=True, eq=False)
class GatewayRequest(InflightRequest):
    """A request of a gateway; a subclass for each protocol says what a response does.

    Attributes:
        schedulers: The client that submits it.
        release: Gives back what keeps its memory: its block of the arena, its regions.
        ended: Its last response is here, or nobody waits for it any more.
    """

    schedulers: GatewaySchedulers
    release: Callable[[], None]
    ended: bool = field(init=False, default=False)

    @abstractmethod
    def responded(self, message: Response) -> None:
        """Take a response: the last one if the request is `ended`."""

    def awaited(self) -> bool:
        return not self.ended

    def respond(self, message: Response) -> None:
        if self.ended:
            self.discard(message)
            return
        self.ended = type(message) is not m.Responded or message.final
        self.responded(message)

    def free(self) -> None:
        self.release()

    def discard(self, message: Response) -> None:
        """Release the outputs of a response that nobody reads."""
        self.schedulers.discard(self.endpoint, message)

    def release_outputs(self, inferred: Inferred | None) -> None:
        """Release the outputs of a response that have been read."""
        if inferred is None:
            return
        places = [tensor.data for tensor in inferred.outputs if isinstance(tensor.data, Range)]
        if places:
            self.schedulers.release(self.endpoint, releases(places))

    def abandon(self) -> None:
        """Wait for it no more: what still comes is discarded, and its memory is in use until the
        scheduler responds."""
        self.ended = True
        self.schedulers.cancel(self)


class GatewaySchedulers(SchedulerClient[GatewayRequest]):
    """The client of all schedulers, in the event loop.

    A link lasts until its scheduler has ended and nothing is in flight there: a scheduler takes
    back what a client reads when the link closes.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        # A scheduler reads the pid from the identity.
        identity = f"{os.getpid()}.{secrets.token_hex(6)}"
        self._table = LinkTable(
            identity, self._watch, self._unwatch, self._on_queued, self._on_held
        )
        super().__init__(self._table)
        self._releasing: asyncio.TimerHandle | None = None
        self._reports: dict[int, tuple[str, asyncio.Future[dict[str, Any]]]] = {}
        # Returns another number for a request, each time it is called.
        self.next_number = itertools.count(1).__next__

    def open(self, endpoint: str) -> None:
        """Make the link to a scheduler, which the first request need not wait for."""
        self._table.open(endpoint)

    def close(self) -> None:
        """Close every link; requests in flight get no response."""
        self._table.close_all()

    # --- out

    def _on_queued(self) -> None:
        if len(self.pending) < 2:
            self._table.flush()  # nothing else will come that could leave with it
        else:
            self._loop.call_soon(self._table.flush)

    def _on_held(self) -> None:
        if not self.pending:
            self._table.flush()
        elif self._releasing is None:
            self._releasing = self._loop.call_later(_MOST_HELD_S, self._release_now)

    def _release_now(self) -> None:
        self._releasing = None
        self._table.flush()

    # --- in

    def _watch(self, fd: int) -> None:
        self._loop.add_reader(fd, self._receive, fd)

    def _unwatch(self, fd: int) -> None:
        self._loop.remove_reader(fd)

    def _receive(self, fd: int) -> None:
        link = self._table.by_fd(fd)
        assert link is not None
        endpoint = link.endpoint
        for message in link.receive():
            try:
                self.take(endpoint, message)
            except Exception:
                logger.exception("a %s could not be handled", type(message).__name__)
        if not link.connected:
            self._drop_unused(link)

    def take_report(self, message: m.StatisticsReported) -> None:
        _, report = self._reports.get(message.id, ("", None))
        if report is not None and not report.done():
            report.set_result(message.statistics)

    def _drop_unused(self, link: Dealer) -> None:
        """Close the link to a scheduler that has ended, unless `lost` is still to say who has what
        was in flight there."""
        endpoint = link.endpoint
        inflight = (*self.pending.values(), *self.settling.values())
        if all(request.endpoint != endpoint for request in inflight):
            self._table.drop(link)

    def fail_over(self, endpoint: str, successor: str) -> None:
        """Submit what was in flight at the scheduler at `endpoint`, which has ended, to the
        successor; fail it if that is ""."""
        self.successors.add(endpoint, successor)
        self.lost(endpoint)
        for at, report in list(self._reports.values()):
            if at == endpoint and not report.done():
                report.set_exception(Unavailable("statistics are not available now"))

    # --- statistics

    def report(self, endpoint: str) -> asyncio.Future[dict[str, Any]]:
        """Request a scheduler's statistics; the caller sets the limit on time."""
        report: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        number = self.next_number()
        endpoint = self.successors.latest(endpoint)
        self._reports[number] = (endpoint, report)
        report.add_done_callback(lambda _: self._reports.pop(number))
        self._table.queue(endpoint, m.ReportStatistics(number))
        return report
