"""An ensemble's links to its steps' schedulers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

from shmserve.ipc.messages import (
    Cancel,
    Credit,
    Release,
    ReportTimes,
    SchedulerToClient,
    Submit,
)
from shmserve.ipc.scheduler_links import SchedulerLinks
from shmserve.ipc.transport.dealer import Dealer
from shmserve.scheduler.ensemble.core import Ensemble
from shmserve.scheduler.waiting import Waiter


class StepSchedulers:
    """The links to the steps' schedulers; `waiter` watches them while they live. `ensemble` gives
    the one that hears them."""

    def __init__(self, waiter: Waiter, ensemble: Callable[[], Ensemble]) -> None:
        self._waiter = waiter
        self._ensemble = ensemble
        self._links = SchedulerLinks(self._watch, waiter.unwatch, ReportTimes())
        self._moved: dict[str, str] = {}  # to a successor

    def _watch(self, fd: int) -> None:
        link = next(link for link in self._links if link.fd == fd)
        self._waiter.watch(fd, partial(self._receive, link))

    def _receive(self, link: Dealer) -> None:
        ensemble, now_ns = self._ensemble(), time.monotonic_ns()
        for message in link.receive():
            if type(message) in _FROM_STEP:
                ensemble.from_step(link.endpoint, message, now_ns)
            else:
                ensemble.misplaced()

    def submit(self, endpoint: str, message: Submit) -> None:
        """Queue a request for a scheduler. Raises Unavailable when no link to it can be made."""
        self._links.open(endpoint).post(message)

    def tell(self, endpoint: str, message: Cancel | Credit | Release) -> None:
        """Queue a message for a scheduler, or for who has taken its place."""
        while endpoint in self._moved:
            endpoint = self._moved[endpoint]
        self._links.tell(endpoint, message)

    def lose(self, endpoint: str, successor: str, hear_out: Callable[[Any], None]) -> None:
        """The scheduler at `endpoint` is gone; `hear_out` takes its last words."""
        if successor:
            self._moved[endpoint] = successor

        def last_words(link: Dealer) -> None:
            while link.wait(0):
                for message in link.receive():
                    if type(message) in _FROM_STEP:
                        hear_out(message)
                if not link.connected:
                    return

        self._links.lose(endpoint, successor, last_words)

    def flush(self) -> None:
        """Send what is queued."""
        self._links.flush()

    def close(self) -> None:
        """Close every link."""
        self._links.close()


_FROM_STEP = frozenset(get_args(SchedulerToClient))
