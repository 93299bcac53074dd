"""The main loop of a scheduler's process, or an ensemble's: wait, receive, plan, send."""

from __future__ import annotations

import select
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, get_args

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
from shmserve.scheduler.waiting import Take, Waiter

_MOST_READS = 1024  # before a drain begins: some client may never end


class Core(Protocol):
    """What decides: it has no socket and no clock. Times are monotonic ns."""

    stopped: bool

    @property
    def live(self) -> int:
        """How many requests are under way."""

    def plan(self, now_ns: int) -> int:
        """Do what is due; returns when to come back."""

    def from_client(self, peer: bytes, message: Any, now_ns: int) -> None:
        """Handle a client's message."""

    def from_control(self, message: Any, now_ns: int) -> None:
        """Handle the supervisor's message."""

    def misplaced(self) -> None:
        """A message was dropped, since nobody may send it here."""


class Outbox(Protocol):
    """Where messages wait until they are sent together."""

    def flush(self) -> object:
        """Send what is queued."""


class Loop:
    """Runs a core on its sockets until it is told to stop.

    `inboxes` are those of the core's other peers, between the supervisor's and the clients'; those
    that come and go are the `waiter`'s to know. `spoken` is what the supervisor may say to this
    core. `outboxes` are flushed once a turn, in their order.
    """

    def __init__(
        self,
        core: Core,
        waiter: Waiter,
        inboxes: Mapping[int, Take],
        outboxes: Sequence[Outbox],
        control: Dealer,
        spoken: frozenset[type],
        clients: Router,
        local_clients: LocalClientListener,
    ) -> None:
        self._core = core
        self._outboxes = outboxes
        self._spoken = spoken
        self._local_clients = local_clients
        self._fronts = [clients.fd, local_clients.link.fd]
        self._waiter = waiter
        # The supervisor first: it says who is gone and who will come.
        self._inboxes = {
            control.fd: lambda: self._from_control(control),
            **inboxes,
            clients.fd: lambda: self._from_clients(clients),
            local_clients.link.fd: self._from_local_clients,
        }
        for fd, take in self._inboxes.items():
            waiter.watch(fd, take)

    def run(self) -> None:
        """Return after `Stop`."""
        core, waiter = self._core, self._waiter
        ready = [(fd, 0) for fd in self._inboxes]
        while not core.stopped:
            for fd, _ in ready:
                take = waiter.takers.get(fd)
                if take is not None:
                    take()
            wake_ns = core.plan(time.monotonic_ns())
            for outbox in self._outboxes:
                outbox.flush()
            if not core.stopped:
                ready = waiter.wait(wake_ns, core.live)

    def _from_control(self, control: Dealer) -> None:
        core, now_ns = self._core, time.monotonic_ns()
        for message in control.receive():
            if type(message) is Drain:
                self._catch_up()
            if type(message) is ProcessExited:
                self._local_clients.forget(message.pid)
            if type(message) in self._spoken:
                core.from_control(message, now_ns)
            else:
                core.misplaced()

    def _catch_up(self) -> None:
        """Take what clients sent before they heard of a successor: it is here, and was promised."""
        for _ in range(_MOST_READS):
            ready = select.select(self._fronts, (), (), 0)[0]
            if not ready:
                return
            for fd in ready:
                self._inboxes[fd]()

    def _from_clients(self, clients: Router) -> None:
        core, now_ns = self._core, time.monotonic_ns()
        for peer, message in clients.receive():
            if type(message) in _FROM_CLIENT:
                core.from_client(peer, message, now_ns)
            else:
                core.misplaced()

    def _from_local_clients(self) -> None:
        core, now_ns = self._core, time.monotonic_ns()
        local_clients = self._local_clients
        for peer, message in local_clients.link.receive():
            if type(message) not in _FROM_LOCAL_CLIENT:
                core.misplaced()
                continue
            believed = local_clients.check(peer, message, now_ns)
            if believed is not None:
                core.from_client(peer, believed, now_ns)


def scheduler_loop(
    scheduler: Scheduler,
    control: Dealer,
    workers: Router,
    clients: Router,
    local_clients: LocalClientListener,
) -> Loop:
    """The loop of a scheduler, which has workers besides."""

    def from_workers() -> None:
        now_ns = time.monotonic_ns()
        for peer, message in workers.receive():
            if type(message) in _FROM_WORKER:
                scheduler.from_worker(peer, message, now_ns)
            else:
                scheduler.misplaced()

    inboxes = {workers.fd: from_workers}
    outboxes = (control, workers, clients, local_clients.link)
    return Loop(
        scheduler, Waiter(), inboxes, outboxes, control, _FROM_CONTROL, clients, local_clients
    )


# What a peer may say: a well-formed message in the wrong direction is garbage too.
_FROM_CONTROL = frozenset(get_args(SupervisorToScheduler))
_FROM_WORKER = frozenset(get_args(WorkerToScheduler))
_FROM_CLIENT = frozenset(get_args(ClientToScheduler))
_FROM_LOCAL_CLIENT = frozenset(get_args(LocalClientToScheduler))
