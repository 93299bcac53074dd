"""An ensemble's main loop: wait, receive, plan, send."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any, get_args

from shmserve.ipc.messages import (
    Cancel,
    ClientToScheduler,
    Drain,
    Grant,
    LocalClientToScheduler,
    ProcessExited,
    Release,
    ReportTimes,
    SchedulerToClient,
    Submit,
    SupervisorToEnsemble,
)
from shmserve.ipc.scheduler_links import SchedulerLinks
from shmserve.ipc.transport.dealer import Dealer
from shmserve.ipc.transport.router import Router
from shmserve.scheduler.ensemble.core import Ensemble
from shmserve.scheduler.local_clients import LocalClientListener
from shmserve.scheduler.waiting import Waiter

_MOST_READS = 1024  # before a drain begins: some client may never end


class Steps:
    """The links to the steps' schedulers; `inboxes` has them by descriptor while they live."""

    def __init__(self, inboxes: dict[int, Callable[[], None]]) -> None:
        self._inboxes = inboxes
        self._links = SchedulerLinks(self._watch, self._unwatch, ReportTimes())
        self._moved: dict[str, str] = {}  # to a successor
        self.ensemble: Ensemble | None = None

    def _watch(self, fd: int) -> None:
        self._inboxes[fd] = lambda: self._receive(fd)

    def _unwatch(self, fd: int) -> None:
        del self._inboxes[fd]

    def _receive(self, fd: int) -> None:
        for link in list(self._links):
            if link.fd == fd:
                self._drain(link)

    def _drain(self, link: Dealer) -> None:
        assert self.ensemble is not None
        now_ns = time.monotonic_ns()
        for message in link.receive():
            if type(message) in _FROM_STEP:
                self.ensemble.from_step(link.endpoint, message, now_ns)
            else:
                self.ensemble.misplaced()

    def submit(self, endpoint: str, message: Submit) -> None:
        """Queue a request for a scheduler. Raises Unavailable when no link to it can be made."""
        self._links.open(endpoint).post(message)

    def tell(self, endpoint: str, message: Cancel | Grant | Release) -> None:
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


class Loop:
    """Runs an ensemble on its sockets until it is told to stop."""

    def __init__(
        self,
        ensemble: Ensemble,
        steps: Steps,
        inboxes: dict[int, Callable[[], None]],
        control: Dealer,
        clients: Router,
        local_clients: LocalClientListener,
    ) -> None:
        self._ensemble = ensemble
        self._inboxes = inboxes
        # Steps before clients: who waits for their last words hears them first.
        self._links: list[Dealer | Router | Steps] = [steps, clients, local_clients.link, control]
        self._fronts = [clients.fd, local_clients.link.fd]
        self._waiter = Waiter(inboxes)
        self._local_clients = local_clients
        inboxes[control.fd] = lambda: self._from_control(control)
        inboxes[clients.fd] = lambda: self._from_clients(clients)
        inboxes[local_clients.link.fd] = lambda: self._from_local_clients(local_clients)

    def run(self) -> None:
        """Return after `Stop`."""
        ready = list(self._inboxes)
        while not self._ensemble.stopped:
            for fd in ready:
                take = self._inboxes.get(fd)
                if take is not None:
                    take()
            wake_ns = self._ensemble.plan(time.monotonic_ns())
            for link in self._links:
                link.flush()
            if not self._ensemble.stopped:
                ready = self._waiter.wait(wake_ns, self._ensemble.live)

    def _from_control(self, control: Dealer) -> None:
        ensemble, now_ns = self._ensemble, time.monotonic_ns()
        for message in control.receive():
            if type(message) is Drain:
                self._catch_up()
            if type(message) is ProcessExited:
                self._local_clients.forget(message.pid)
            if type(message) in _FROM_CONTROL:
                ensemble.from_control(message, now_ns)
            else:
                ensemble.misplaced()

    def _catch_up(self) -> None:
        """Take what clients sent before they heard of a successor: it is here, and was promised."""
        for _ in range(_MOST_READS):
            ready = select.select(self._fronts, (), (), 0)[0]
            if not ready:
                return
            for fd in ready:
                self._inboxes[fd]()

    def _from_clients(self, clients: Router) -> None:
        ensemble, now_ns = self._ensemble, time.monotonic_ns()
        for peer, message in clients.receive():
            if type(message) in _FROM_CLIENT:
                ensemble.from_client(peer, message, now_ns)
            else:
                ensemble.misplaced()

    def _from_local_clients(self, local_clients: LocalClientListener) -> None:
        ensemble, now_ns = self._ensemble, time.monotonic_ns()
        for peer, message in local_clients.link.receive():
            if type(message) not in _FROM_LOCAL_CLIENT:
                ensemble.misplaced()
                continue
            believed = local_clients.check(peer, message, now_ns)
            if believed is not None:
                ensemble.from_client(peer, believed, now_ns)


# What a peer may say: a well-formed message in the wrong direction is garbage too.
_FROM_CONTROL = frozenset(get_args(SupervisorToEnsemble))
_FROM_STEP = frozenset(get_args(SchedulerToClient))
_FROM_CLIENT = frozenset(get_args(ClientToScheduler))
_FROM_LOCAL_CLIENT = frozenset(get_args(LocalClientToScheduler))
