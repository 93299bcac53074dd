"""Message links in the event loop, with write coalescing. What is posted during a turn of the loop
is sent as one frame at its end.

That to the supervisor has notifications, and requests with their responses; that to a scheduler the
requests in flight there, and fail-over. `shmserve.ipc.inflight` has the life of a request. A client
that leaves frees no memory: its request is cancelled at the scheduler, and stays in flight until
that responds.
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
from functools import partial
from typing import Any

from shmserve.errors import Unavailable, from_code
from shmserve.ipc.inflight import ENDED, InflightRequest, InflightTable, Response
from shmserve.ipc.memory.lent import releases, unread
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.control_requests import Answered, Refused
from shmserve.ipc.tensors.descriptors import Place
from shmserve.ipc.tensors.inference import Inferred
from shmserve.ipc.transport.dealer import Dealer

logger = logging.getLogger(__name__)


_CLOSE_DELAY_S = 1.0

# Where others are in flight, what was read is released with the next request, which saves a wake-up
# of the scheduler, and of the worker whose memory it is; or after this.
_MOST_HELD_S = 0.001


class Link:
    """A `Dealer` whose messages go to `on_message` and whose posts are flushed once a turn."""

    def __init__(self, endpoint: str, identity: str, on_message: Callable[[Any], None]) -> None:
        self.endpoint = endpoint
        self._dealer = Dealer(endpoint, identity)
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._dealer.fd, self._receive)
        self._flushing = False
        self._closed = False

    def post(self, message: Any) -> None:
        """Send a message at the end of this turn of the loop."""
        self._dealer.post(message)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send now what is posted: nothing else will come this turn that could be coalesced."""
        if not self._flushing:
            return  # done already
        self._flushing = False
        if not self._closed:
            self._dealer.flush()

    def _receive(self) -> None:
        for message in self._dealer.receive():
            try:
                self._on_message(message)
            except Exception:
                logger.exception("a %s could not be handled", type(message).__name__)

    @property
    def connected(self) -> bool:
        """Whether the other end is there, as far as is known."""
        return self._dealer.connected

    def receive_remaining(self) -> None:
        """Handle all messages that are here: the other end is gone."""
        while self._dealer.wait(0):
            self._receive()

    def retire(self) -> None:
        """Receive no more; close once the last posts are on their way."""
        if not self._closed:
            self.flush()
            self._stop_reading()
            self._loop.call_later(_CLOSE_DELAY_S, self._dealer.close)

    def close(self) -> None:
        """Close now."""
        if not self._closed:
            self._stop_reading()
            self._dealer.close()

    def _stop_reading(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._dealer.fd)


class SupervisorLink(Link):
    """The link to the supervisor. `on_message` gets everything but the responses to `ask`."""

    def __init__(self, endpoint: str, identity: str, on_message: Callable[[Any], None]) -> None:
        super().__init__(endpoint, identity, self._take)
        self._on_notification = on_message
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def ask(self, kind: Callable[..., Any], *fields: Any) -> dict[str, Any]:
        """Send a request, a message of this kind with these fields behind its number; raises what
        it is refused with.

        A caller who is cancelled only stops waiting: the supervisor finishes what it was asked for.
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
    """A request of this gateway, whose kinds say in `responded` what each response does. `release`
    gives back what keeps its memory: its block of the arena, its references to regions.

    `over`: its last response is here, or nobody waits for it any more.
    """

    scheduler: SchedulerHandle
    release: Callable[[], None]
    over: bool = field(init=False, default=False)

    @abstractmethod
    def responded(self, message: Response) -> None:
        """A response has come: the last one if it is `over`, by a `Finished`, a `Failed`, or a
        `Responded` that is final."""

    def awaited(self) -> bool:
        return not self.over

    def respond(self, message: Response) -> None:
        if self.over:
            self.scheduler.discard(message)
            return
        self.over = type(message) is not m.Responded or message.final
        self.responded(message)

    def free(self) -> None:
        self.release()

    def grant(self, responses: int) -> None:
        """The client has read so many responses, and takes as many more: `FIRST_CREDIT` of them
        come unasked."""
        if self.submit.id in self.scheduler.inflight.pending:
            self.scheduler.post(m.Credit(self.submit.id, responses))

    def give_up(self) -> None:
        """Nobody waits for it any more: what still comes is discarded, and its memory is in use
        until the scheduler responds."""
        self.over = True
        if self.submit.id in self.scheduler.inflight.pending:
            self.scheduler.post(m.Cancel(self.submit.id))


class SchedulerHandle:
    """A link to a scheduler, and what is in flight there; reference counted.

    `users` counts the models that send to it and the responses that are being read; an unused, idle
    scheduler is dropped.
    """

    def __init__(self, endpoint: str, on_idle: Callable[[SchedulerHandle], None]) -> None:
        self.endpoint = endpoint
        self.inflight: InflightTable[GatewayRequest] = InflightTable()
        self._reports: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.users = 0
        self.successor: SchedulerHandle | None = None
        self._unsent: list[m.Release] = []
        self._releasing: asyncio.TimerHandle | None = None
        self._on_idle = on_idle
        # The scheduler reads our pid from the identity; the rest tells a gateway's links apart.
        identity = f"{os.getpid()}.{secrets.token_hex(6)}"
        self.link = Link(endpoint, identity, self._take)

    def use(self) -> None:
        """Keep the link until `leave`."""
        self.users += 1

    def leave(self) -> None:
        """One user less."""
        self.users -= 1
        self._check_idle()

    def _check_idle(self) -> None:
        if not (self.users or self.inflight or self._reports):
            self._on_idle(self)

    def latest(self) -> SchedulerHandle:
        """The scheduler that serves what this one did: itself, or the last of its successors."""
        scheduler = self
        while scheduler.successor is not None:
            scheduler = scheduler.successor
        return scheduler

    def submit(self, request: GatewayRequest) -> None:
        """Send a request, also one that another scheduler had; its `release` runs when no worker
        can touch its memory any more."""
        if self.successor is not None:
            self.latest().submit(request)
            return
        request.scheduler = self
        request.endpoint = self.endpoint
        alone = not self.inflight.pending
        self.inflight.add(request)
        if self._unsent:
            self._send_releases()
        self.link.post(request.submit)
        if alone:
            self.link.flush()

    def post(self, message: m.Credit | m.Cancel) -> None:
        """Send a message, and what was held for the next one."""
        if self._unsent:
            self._send_releases()
        self.link.post(message)

    def _take(self, message: Any) -> None:
        match message:
            case m.Finished() | m.Responded() | m.Failed() | m.Settled():
                if not self.inflight.take(message) and not isinstance(message, m.Settled):
                    self.discard(message)
            case m.StatisticsReported(id=number, statistics=statistics):
                report = self._reports.get(number)
                if report is not None and not report.done():
                    report.set_result(statistics)
            case _:
                logger.warning("a scheduler sent a %s", type(message).__name__)
        if not self.users:
            self._check_idle()

    def report(self, number: int) -> asyncio.Future[dict[str, Any]]:
        """Request its statistics; the caller sets the limit on time."""
        report: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._reports[number] = report
        report.add_done_callback(partial(self._report_ended, number))
        self.link.post(m.ReportStatistics(number))
        return report

    def _report_ended(self, number: int, _: asyncio.Future[dict[str, Any]]) -> None:
        del self._reports[number]
        if not self.users:
            self._check_idle()

    def fail_reports(self) -> None:
        """Fail the reports that are awaited: the scheduler is lost."""
        for report in self._reports.values():
            if not report.done():
                report.set_exception(Unavailable("statistics are not available now"))

    def discard(self, message: Response) -> None:
        """Release the outputs of a response that nobody reads: they take up a worker's memory."""
        if not isinstance(message, m.Failed):
            for release in unread(message.data):
                self._release(release)

    def release_outputs(self, inferred: Inferred) -> None:
        """Tell the workers that their outputs have been read; clients' regions are not theirs."""
        places = [tensor.data for tensor in inferred.outputs if isinstance(tensor.data, Place)]
        for release in releases(places):
            self._release(release)

    def _release(self, release: m.Release) -> None:
        scheduler = self.latest()
        scheduler._unsent.append(release)
        if not scheduler.inflight.pending:
            scheduler._send_releases()
        elif scheduler._releasing is None:
            loop = asyncio.get_running_loop()
            scheduler._releasing = loop.call_later(_MOST_HELD_S, scheduler._release_now)

    def _release_now(self) -> None:
        self._releasing = None
        self._send_releases()

    def _send_releases(self) -> None:
        """Send what is held; where the scheduler is gone, a successor is."""
        if self.link.connected:
            unsent, self._unsent = self._unsent, []
            for release in unsent:
                self.link.post(release)

    def close(self) -> None:
        """Release the link, which nobody uses any more: what is still to be said is sent."""
        self._send_releases()
        self.link.retire()

    def give_way(self, successor: SchedulerHandle) -> None:
        """This one is gone: `successor` is sent what was not sent here."""
        self.successor = successor
        unsent, self._unsent = self._unsent, []
        for release in unsent:
            self._release(release)


class RequestDispatcher:
    """Schedulers by endpoint, the numbers of requests, and fail-over."""

    def __init__(self) -> None:
        self._schedulers: dict[str, SchedulerHandle] = {}
        # A number for a request, each time it is called.
        self.next_number = itertools.count(1).__next__

    def scheduler(self, endpoint: str) -> SchedulerHandle:
        """The scheduler at `endpoint`; it lasts while it has users or requests in flight."""
        scheduler = self._schedulers.get(endpoint)
        if scheduler is None:
            scheduler = self._schedulers[endpoint] = SchedulerHandle(endpoint, self._drop)
        return scheduler

    def _drop(self, scheduler: SchedulerHandle) -> None:
        if self._schedulers.get(scheduler.endpoint) is not scheduler:
            return  # dropped before: a response that it had given was read only now
        del self._schedulers[scheduler.endpoint]
        scheduler.close()
        if scheduler.successor is not None:
            scheduler.successor.leave()

    def close(self) -> None:
        """Close every link; requests in flight get no response."""
        for scheduler in self._schedulers.values():
            scheduler.link.close()

    def lost(self, endpoint: str, successor: str) -> None:
        """Fail over: the scheduler at `endpoint` is gone, what was in flight there is submitted to
        `successor`, or, if that is "", fails."""
        old = self._schedulers.get(endpoint)
        if old is None or old.successor is not None:
            return
        old.use()
        old.link.receive_remaining()
        new: SchedulerHandle | None = None
        if successor:
            new = self.scheduler(successor)
            old.give_way(new)
            new.use()  # models send there through the old one until they are published anew
        for request in old.inflight.lose(endpoint):
            if new is None:
                request.fail(ENDED)
            else:
                new.submit(request)
        old.fail_reports()
        old.leave()

    def report(self, scheduler: SchedulerHandle) -> asyncio.Future[dict[str, Any]]:
        """Request a scheduler's statistics; the caller sets the limit on time."""
        return scheduler.latest().report(self.next_number())
