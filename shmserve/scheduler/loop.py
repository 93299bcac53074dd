"""The scheduler's main loop: wait, receive, plan, send."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import get_args

from shmserve.ipc.messages import (
    ClientToScheduler,
    Drain,
    LocalClientToScheduler,
    ProcessExited,
    SupervisorToScheduler,
    WorkerToScheduler,
)
from shmserve.ipc.transport.dealer import Dealer
from shmserve.ipc.transport.router import Router
from shmserve.scheduler.core import Scheduler
from shmserve.scheduler.local_clients import LocalClientListener
from shmserve.scheduler.waiting import Waiter

_MOST_READS = 1024  # before a drain begins: some client may never end


class Loop:
    """Runs a scheduler on its sockets until it is told to stop."""

    def __init__(
        self,
        scheduler: Scheduler,
        control: Dealer,
        workers: Router,
        clients: Router,
        local_clients: LocalClientListener,
    ) -> None:
        self._scheduler = scheduler
        self._links: list[Dealer | Router] = [control, workers, clients, local_clients.link]
        self._local_clients = local_clients
        # The supervisor first: it says who is gone and who will come.
        self._inboxes: dict[int, Callable[[], None]] = {
            control.fd: lambda: self._from_control(control),
            workers.fd: lambda: self._from_workers(workers),
            clients.fd: lambda: self._from_clients(clients),
            local_clients.link.fd: lambda: self._from_local_clients(local_clients),
        }
        self._fronts = [clients.fd, local_clients.link.fd]
        self._waiter = Waiter(self._inboxes)

    def run(self) -> None:
        """Return after `Stop`."""
        ready = list(self._inboxes)
        while not self._scheduler.stopped:
            for fd, take in self._inboxes.items():
                if fd in ready:
                    take()
            wake_ns = self._scheduler.plan(time.monotonic_ns())
            for link in self._links:
                link.flush()
            if not self._scheduler.stopped:
                ready = self._waiter.wait(wake_ns, self._scheduler.live)

    def _from_control(self, control: Dealer) -> None:
        scheduler, now_ns = self._scheduler, time.monotonic_ns()
        for message in control.receive():
            if type(message) is Drain:
                self._catch_up()
            if type(message) is ProcessExited:
                self._local_clients.forget(message.pid)
            if type(message) in _FROM_CONTROL:
                scheduler.from_control(message, now_ns)
            else:
                scheduler.misplaced()

    def _catch_up(self) -> None:
        """Take what clients sent before they heard of a successor: it is here, and was promised."""
        for _ in range(_MOST_READS):
            ready = select.select(self._fronts, (), (), 0)[0]
            if not ready:
                return
            for fd in ready:
                self._inboxes[fd]()

    def _from_workers(self, workers: Router) -> None:
        scheduler, now_ns = self._scheduler, time.monotonic_ns()
        for peer, message in workers.receive():
            if type(message) in _FROM_WORKER:
                scheduler.from_worker(peer, message, now_ns)
            else:
                scheduler.misplaced()

    def _from_clients(self, clients: Router) -> None:
        scheduler, now_ns = self._scheduler, time.monotonic_ns()
        for peer, message in clients.receive():
            if type(message) in _FROM_CLIENT:
                scheduler.from_client(peer, message, now_ns)
            else:
                scheduler.misplaced()

    def _from_local_clients(self, local_clients: LocalClientListener) -> None:
        scheduler, now_ns = self._scheduler, time.monotonic_ns()
        for peer, message in local_clients.link.receive():
            if type(message) not in _FROM_LOCAL_CLIENT:
                scheduler.misplaced()
                continue
            believed = local_clients.check(peer, message, now_ns)
            if believed is not None:
                scheduler.from_client(peer, believed, now_ns)


# What a peer may say: a well-formed message in the wrong direction is garbage too.
_FROM_CONTROL = frozenset(get_args(SupervisorToScheduler))
_FROM_WORKER = frozenset(get_args(WorkerToScheduler))
_FROM_CLIENT = frozenset(get_args(ClientToScheduler))
_FROM_LOCAL_CLIENT = frozenset(get_args(LocalClientToScheduler))
