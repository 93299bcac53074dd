"""Dispatch to schedulers, with fail-over: requests move when a scheduler is lost.

`shmserve.ipc.inflight` has the life of a request. A client that leaves frees no memory: its request
is cancelled at the scheduler, and stays in flight until that responds.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from shmserve.gateway.links.scheduler import OnResponse, Pending, Scheduler
from shmserve.ipc import messages as m
from shmserve.ipc.inflight import ENDED


class Dispatcher:
    """Schedulers by endpoint, and the operations on requests: submit, grant, cancel."""

    def __init__(self) -> None:
        self._schedulers: dict[str, Scheduler] = {}
        # A number for a request, each time it is called.
        self.next_number = itertools.count(1).__next__
        self._loop = asyncio.get_running_loop()

    def scheduler(self, endpoint: str) -> Scheduler:
        """The scheduler at `endpoint`; it lasts while it has users or requests in flight."""
        scheduler = self._schedulers.get(endpoint)
        if scheduler is None:
            scheduler = self._schedulers[endpoint] = Scheduler(endpoint, self._drop)
        return scheduler

    def _drop(self, scheduler: Scheduler) -> None:
        if self._schedulers.get(scheduler.endpoint) is not scheduler:
            return  # dropped before: a response that it had given was read only now
        del self._schedulers[scheduler.endpoint]
        scheduler.link.retire()
        if scheduler.successor is not None:
            scheduler.successor.leave()

    def close(self) -> None:
        """Close every link; requests in flight get no response."""
        for scheduler in self._schedulers.values():
            scheduler.link.close()

    def submit(
        self,
        scheduler: Scheduler,
        submit: m.Submit,
        release: Callable[[], None],
        on_response: OnResponse | None = None,
    ) -> Pending:
        """Hand a request over; `pending.future` resolves to its last response, once: `Finished` or
        `Failed`.

        `release` runs when no worker can touch the request's memory any more. For a model that may
        give any number of responses, `on_response` is called for each, in the event loop, the last
        included. Flow control is by credit: `FIRST_CREDIT` of them come unasked, and more as they
        are granted with `grant`.
        """
        if scheduler.successor is not None:
            scheduler = scheduler.latest()
        pending = Pending(scheduler, submit, release, self._loop.create_future(), on_response)
        scheduler.submit(pending)
        if len(scheduler.inflight.pending) == 1:
            scheduler.link.hurry()
        return pending

    def grant(self, pending: Pending, responses: int) -> None:
        """The client has read so many responses, and takes as many more."""
        if pending.submit.id in pending.scheduler.inflight.pending:
            pending.scheduler.link.post(m.Credit(pending.submit.id, responses))

    def cancel(self, pending: Pending) -> None:
        """Nobody waits for this any more, or will read its response if that has come already; its
        memory is in use until the scheduler responds."""
        future = pending.future
        if future.done() and not future.cancelled() and pending.on_response is None:
            pending.scheduler.discard(future.result())
        future.cancel()
        if pending.submit.id in pending.scheduler.inflight.pending:
            pending.scheduler.link.post(m.Cancel(pending.submit.id))

    def lost(self, endpoint: str, successor: str) -> None:
        """Fail over: the scheduler at `endpoint` is gone, what was in flight there is submitted to
        `successor`, or, if that is "", fails."""
        old = self._schedulers.get(endpoint)
        if old is None or old.successor is not None:
            return
        old.use()
        old.link.hear_out()
        new: Scheduler | None = None
        if successor:
            new = self.scheduler(successor)
            old.give_way(new)
            new.use()  # models send there through the old one until they are published anew
        for pending in old.inflight.lose(endpoint):
            if new is None:
                pending.fail(ENDED)
            else:
                new.submit(pending)
        old.fail_reports()
        old.leave()

    def report(self, scheduler: Scheduler) -> asyncio.Future[dict[str, Any]]:
        """Request a scheduler's statistics; the caller sets the limit on time."""
        return scheduler.latest().report(self.next_number())
