"""What this gateway submitted and to whom: one answer each, whatever becomes of them.

    submit ──> pending ──Finished/Failed──────────────> answered, holds released
                  │  └──Failed(early)──> settling ──Settled──> holds released
                  └──SchedulerLost──> submitted again to the successor; failed where there is none

A request's holds (its arena block, its references to regions) last until no worker can touch them
any more. A client that leaves takes nobody's hold away: its request is cancelled at the scheduler
and stays pending until that answers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
from collections.abc import Callable
from typing import Any

from shmserve.errors import Unavailable
from shmserve.gateway.links.channel import Link
from shmserve.ipc import messages as m
from shmserve.ipc.tensors.aliasing import runs_once
from shmserve.ipc.tensors.descriptors import Place
from shmserve.ipc.tensors.inference import Inferred, unpack_inferred
from shmserve.ipc.tensors.signature import id_prefix
from shmserve.ipc.transport.records import MalformedMessage

logger = logging.getLogger(__name__)

_ONCE = (
    "the model's scheduler ended before it could answer; the request's outputs go over its inputs, "
    "which may be changed"
)
_BEGUN = "the model's scheduler ended after the request's first response and before its last"
_ENDED = "the model's scheduler ended before it could answer, and no other serves the model"


# What a client that takes any number of responses hears: each one, and what ends them, which is
# the last that it hears: a `Failed`, or a `Responded` that is final.
OnResponse = Callable[[m.Responded | m.Failed], None]


class Pending:
    """A request that is not answered yet. `release` gives its holds back.

    Of one that takes any number of responses, `on_response` hears, and `future` has the last.
    """

    __slots__ = ("future", "on_response", "release", "responses", "scheduler", "submit")

    def __init__(
        self,
        scheduler: Scheduler,
        submit: m.Submit,
        release: Callable[[], None],
        future: asyncio.Future[m.Finished | m.Responded | m.Failed],
        on_response: OnResponse | None = None,
    ) -> None:
        self.on_response = on_response
        self.responses = 0
        self.scheduler = scheduler
        self.submit = submit
        self.release = release
        self.future = future


class Scheduler:
    """A scheduler, as the gateway sees it: a link, and what waits for its answer.

    `users` counts the models that send to it and the answers that are being read; an unused, idle
    scheduler is dropped.
    """

    def __init__(
        self,
        endpoint: str,
        on_idle: Callable[[Scheduler], None],
    ) -> None:
        self.endpoint = endpoint
        self.pending: dict[int, Pending] = {}
        self.settling: dict[int, Pending] = {}
        self.reports: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.users = 0
        self.successor: Scheduler | None = None
        self._unheard: list[m.Release] = []
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
        if not (self.users or self.pending or self.settling or self.reports):
            self._on_idle(self)

    def _take(self, message: Any) -> None:
        match message:
            case m.Finished(id=number):
                pending = self.pending.pop(number, None)
                if pending is not None:
                    self._answer(pending, message)
                    pending.release()
            case m.Responded():
                self._responded(message)
            case m.Failed(id=number, early=early):
                pending = self.pending.pop(number, None)
                if pending is not None:
                    self._answer(pending, message)
                    if early:
                        self.settling[number] = pending
                    else:
                        pending.release()
            case m.Settled(id=number):
                pending = self.settling.pop(number, None)
                if pending is not None:
                    pending.release()
            case m.StatisticsReported(id=number, statistics=statistics):
                report = self.reports.pop(number, None)
                if report is not None and not report.done():
                    report.set_result(statistics)
            case _:
                logger.warning("a scheduler sent a %s", type(message).__name__)
        if not self.users:
            self._check_idle()

    def _responded(self, message: m.Responded) -> None:
        pending = self.pending.get(message.id)
        if pending is None:
            self.discard(message)
            return
        pending.responses += 1
        if message.final:
            del self.pending[message.id]
            self._answer(pending, message)
            pending.release()
        elif pending.on_response is not None and not pending.future.done():
            pending.on_response(message)
        else:
            self.discard(message)

    def _answer(self, pending: Pending, message: m.Finished | m.Responded | m.Failed) -> None:
        if pending.future.done():
            self.discard(message)
            return
        pending.future.set_result(message)
        if pending.on_response is not None:
            if isinstance(message, m.Finished):
                message = m.Responded(message.id, "", "", message.body, final=True)
            pending.on_response(message)

    def discard(self, message: m.Finished | m.Responded | m.Failed) -> None:
        """Nobody reads this answer, and its outputs take up a worker's memory."""
        if isinstance(message, m.Failed) or not message.body:
            return
        try:
            self.release_outputs(unpack_inferred(message.body))
        except MalformedMessage as error:
            logger.error("a worker's answer is malformed: %s", error)

    def release_outputs(self, answer: Inferred) -> None:
        """Tell the workers that their outputs have been read; clients' regions are not theirs."""
        offsets: dict[int, list[int]] = {}
        for tensor in answer.outputs:
            place = tensor.data
            if isinstance(place, Place) and place.memory.sealed:
                offsets.setdefault(place.memory.pid, []).append(place.offset)
        for pid, of_pid in offsets.items():
            self._release(m.Release(pid, of_pid))

    def _release(self, release: m.Release) -> None:
        scheduler = self
        while scheduler.successor is not None:
            scheduler = scheduler.successor
        if scheduler.link.connected:
            scheduler.link.post(release)
        else:
            scheduler._unheard.append(release)

    def give_way(self, successor: Scheduler) -> None:
        """This one is gone: `successor` hears what it could not."""
        self.successor = successor
        unheard, self._unheard = self._unheard, []
        for release in unheard:
            self._release(release)


class Dispatcher:
    """All schedulers this gateway talks to."""

    def __init__(self) -> None:
        self._schedulers: dict[str, Scheduler] = {}
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()

    def scheduler(self, endpoint: str) -> Scheduler:
        """The scheduler at `endpoint`; it lasts while it has users or owes answers."""
        scheduler = self._schedulers.get(endpoint)
        if scheduler is None:
            scheduler = self._schedulers[endpoint] = Scheduler(endpoint, self._drop)
        return scheduler

    def _drop(self, scheduler: Scheduler) -> None:
        if self._schedulers.get(scheduler.endpoint) is not scheduler:
            return  # dropped before: an answer that it had given was read only now
        del self._schedulers[scheduler.endpoint]
        scheduler.link.retire()
        if scheduler.successor is not None:
            scheduler.successor.leave()

    def close(self) -> None:
        """Drop every link; nothing is answered any more."""
        for scheduler in self._schedulers.values():
            scheduler.link.close()

    def next_number(self) -> int:
        """A number for a request."""
        return next(self._numbers)

    def submit(
        self, scheduler: Scheduler, submit: m.Submit, release: Callable[[], None]
    ) -> Pending:
        """Hand a request over; `pending.future` resolves to `Finished` or `Failed`, once.

        `release` runs when no worker can touch the request's memory any more.
        """
        return self._submit(scheduler, submit, release, None)

    def open(
        self,
        scheduler: Scheduler,
        submit: m.Submit,
        release: Callable[[], None],
        on_response: OnResponse,
    ) -> Pending:
        """As `submit`, for a model that may give any number of responses: `on_response` hears of
        each, in the event loop, the end included. Whoever has read some says so with `grant`:
        `FIRST_CREDIT` of them come unasked, and no more before that."""
        return self._submit(scheduler, submit, release, on_response)

    def grant(self, pending: Pending, responses: int) -> None:
        """The client has read so many responses, and takes as many more."""
        if pending.submit.id in pending.scheduler.pending:
            pending.scheduler.link.post(m.Grant(pending.submit.id, responses))

    def _submit(
        self,
        scheduler: Scheduler,
        submit: m.Submit,
        release: Callable[[], None],
        on_response: OnResponse | None,
    ) -> Pending:
        while scheduler.successor is not None:
            scheduler = scheduler.successor
        pending = Pending(scheduler, submit, release, self._loop.create_future(), on_response)
        scheduler.pending[submit.id] = pending
        scheduler.link.post(submit)
        if len(scheduler.pending) == 1:
            scheduler.link.hurry()
        return pending

    def cancel(self, pending: Pending) -> None:
        """Nobody waits for this any more, or will read its answer if that has come already; its
        holds last until the scheduler answers."""
        future = pending.future
        if future.done() and not future.cancelled() and pending.on_response is None:
            pending.scheduler.discard(future.result())
        future.cancel()
        if pending.submit.id in pending.scheduler.pending:
            pending.scheduler.link.post(m.Cancel(pending.submit.id))

    def lost(self, endpoint: str, successor: str) -> None:
        """The scheduler at `endpoint` is gone: what it had not answered goes to `successor`, or, if
        that is "", is refused."""
        old = self._schedulers.get(endpoint)
        if old is None or old.successor is not None:
            return
        old.use()
        old.link.hear_out()
        waiting, over = list(old.pending.values()), list(old.settling.values())
        old.pending.clear()
        old.settling.clear()
        new: Scheduler | None = None
        if successor:
            new = self.scheduler(successor)
            old.give_way(new)
            new.use()  # models send there through the old one until they are published anew
        for pending in waiting:
            if pending.future.done():
                over.append(pending)
            elif new is None or pending.responses or runs_once(pending.submit.work):
                why = _ENDED if new is None else _BEGUN if pending.responses else _ONCE
                text = id_prefix(pending.submit.request_id) + why
                failed = m.Failed(pending.submit.id, Unavailable.code, text, 0, early=False)
                old._answer(pending, failed)
                over.append(pending)
            else:
                pending.scheduler = new
                new.pending[pending.submit.id] = pending
                new.link.post(pending.submit)
        # Nobody waits for these, and whoever could have said that their workers are done is gone.
        for pending in over:
            pending.release()
        for number in list(old.reports):
            report = old.reports.pop(number)
            if not report.done():
                report.set_exception(Unavailable("statistics are not available now"))
        old.leave()

    def report(self, scheduler: Scheduler) -> asyncio.Future[dict[str, Any]]:
        """Ask a scheduler for its statistics; the caller sets the limit on time."""
        while scheduler.successor is not None:
            scheduler = scheduler.successor
        number = self.next_number()
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        scheduler.reports[number] = future
        future.add_done_callback(lambda _: scheduler.reports.pop(number, None))
        scheduler.link.post(m.ReportStatistics(number))
        return future
