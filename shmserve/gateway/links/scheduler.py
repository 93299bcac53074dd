"""The gateway's end of a scheduler: a link, the in-flight table, its successor in a fail-over."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable
from typing import Any

from shmserve.errors import Unavailable
from shmserve.gateway.links.channel import Link
from shmserve.ipc import messages as m
from shmserve.ipc.inflight import InflightRequest, InflightTable, Response
from shmserve.ipc.tensors.descriptors import Place
from shmserve.ipc.tensors.inference import Inferred, unpack_inferred
from shmserve.ipc.transport.records import MalformedMessage

logger = logging.getLogger(__name__)

# The callback of a request: called for each response, the last of which is a `Finished`, a
# `Failed`, or a `Responded` that is final.
OnResponse = Callable[[Response], None]


class Pending(InflightRequest):
    """A request of this gateway. `release` gives back what keeps its memory: its block of the
    arena, its references to regions.

    `future` has the last response; `on_response`, if there is one, takes each as it comes. A
    request for any number of them has one.
    """

    __slots__ = ("future", "on_response", "release", "scheduler")

    def __init__(
        self,
        scheduler: Scheduler,
        submit: m.Submit,
        release: Callable[[], None],
        future: asyncio.Future[Response],
        on_response: OnResponse | None = None,
    ) -> None:
        super().__init__(submit, scheduler.endpoint)
        self.scheduler = scheduler
        self.release = release
        self.future = future
        self.on_response = on_response

    def awaited(self) -> bool:
        return not self.future.done()

    def respond(self, message: Response) -> None:
        future, on_response = self.future, self.on_response
        if future.done():
            self.scheduler.discard(message)
        elif type(message) is not m.Responded or message.final:
            future.set_result(message)
            if on_response is not None:
                on_response(message)
        elif on_response is not None:
            on_response(message)
        else:
            self.scheduler.discard(message)

    def free(self) -> None:
        self.release()


class Scheduler:
    """A link to a scheduler, and what is in flight there; reference counted.

    `users` counts the models that send to it and the responses that are being read; an unused, idle
    scheduler is dropped.
    """

    def __init__(self, endpoint: str, on_idle: Callable[[Scheduler], None]) -> None:
        self.endpoint = endpoint
        self.inflight: InflightTable[Pending] = InflightTable()
        self._reports: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.users = 0
        self.successor: Scheduler | None = None
        self._unsent: list[m.Release] = []
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

    def latest(self) -> Scheduler:
        """Who serves what this one did: itself, or the last of its successors."""
        scheduler = self
        while scheduler.successor is not None:
            scheduler = scheduler.successor
        return scheduler

    def submit(self, pending: Pending) -> None:
        """Send a request, also one that another scheduler had."""
        pending.scheduler = self
        pending.endpoint = self.endpoint
        self.inflight.add(pending)
        self.link.post(pending.submit)

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
        report.add_done_callback(lambda _: self._report_ended(number))
        self.link.post(m.ReportStatistics(number))
        return report

    def _report_ended(self, number: int) -> None:
        del self._reports[number]
        if not self.users:
            self._check_idle()

    def fail_reports(self) -> None:
        """It is lost, and reports nothing any more."""
        for report in self._reports.values():
            if not report.done():
                report.set_exception(Unavailable("statistics are not available now"))

    def discard(self, message: Response) -> None:
        """Nobody reads this response, and its outputs take up a worker's memory."""
        if isinstance(message, m.Failed) or not message.body:
            return
        try:
            self.release_outputs(unpack_inferred(message.body))
        except MalformedMessage as error:
            logger.error("a worker's response is malformed: %s", error)

    def release_outputs(self, inferred: Inferred) -> None:
        """Tell the workers that their outputs have been read; clients' regions are not theirs."""
        offsets: dict[int, list[int]] = {}
        for tensor in inferred.outputs:
            place = tensor.data
            if isinstance(place, Place) and place.memory.sealed:
                offsets.setdefault(place.memory.pid, []).append(place.offset)
        for pid, of_pid in offsets.items():
            self._release(m.Release(pid, of_pid))

    def _release(self, release: m.Release) -> None:
        scheduler = self.latest()
        if scheduler.link.connected:
            scheduler.link.post(release)
        else:
            scheduler._unsent.append(release)

    def give_way(self, successor: Scheduler) -> None:
        """This one is gone: `successor` is sent what was not sent here."""
        self.successor = successor
        unsent, self._unsent = self._unsent, []
        for release in unsent:
            self._release(release)
