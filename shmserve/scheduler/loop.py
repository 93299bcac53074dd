"""The scheduler's main loop: wait, receive, plan, send."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from typing import Any, get_args

import zmq

from shmserve.ipc.channels import Dealer, Router
from shmserve.ipc.messages import (
    ClientToScheduler,
    GuestToScheduler,
    ProcessExited,
    SupervisorToScheduler,
    WorkerToScheduler,
)
from shmserve.scheduler.core import Scheduler
from shmserve.scheduler.guests import GuestDoor
from shmserve.scheduler.requests import NEVER

# A sleeping thread runs again some time after its timer: up to this much is anticipated.
_MOST_LATE_NS = 60_000

# A client's deadline may be any number; no timer needs to be longer than this.
_LONGEST_WAIT_NS = 3_600_000_000_000

# Messages taken from one socket a turn, so that a flood on it cannot keep the others waiting.
_MOST_A_TURN = 1024


class _Inbox:
    """One socket's incoming messages, taken a bounded number at a time."""

    def __init__(self, link: Dealer | Router, handle: Callable[[Any], None]) -> None:
        self.link = link
        self._handle = handle
        self._left: Iterator[Any] | None = None
        self.sent = False

    def drain(self) -> None:
        """Handle what is here."""
        messages = self._left or self.link.receive()
        handle = self._handle
        taken = 0
        for _, message in zip(range(_MOST_A_TURN), messages, strict=False):
            handle(message)
            taken += 1
        # What an unfinished iterator still holds of a frame is nowhere else.
        self._left = messages if taken == _MOST_A_TURN else None

    def pending(self) -> bool:
        """Whether something is here that the edge-triggered descriptor may not announce again."""
        if self._left is not None:
            return True
        # What came after the last look is announced, unless a send has swallowed the edge.
        return self.sent and bool(int(self.link.socket.get(zmq.EVENTS)) & zmq.POLLIN)


class Loop:
    """Runs a scheduler on its sockets until it is told to stop."""

    def __init__(
        self,
        scheduler: Scheduler,
        control: Dealer,
        workers: Router,
        clients: Router,
        guests: GuestDoor | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._guests = guests
        self._late_ns = 0
        # The supervisor first: it says who is gone and who will come.
        self._inboxes = {
            control.fd: _Inbox(control, self._from_control),
            workers.fd: _Inbox(workers, self._from_worker),
            clients.fd: _Inbox(clients, self._from_client),
        }
        if guests is not None:
            self._inboxes[guests.link.fd] = _Inbox(guests.link, self._from_guest)

    def run(self) -> None:
        """Return after `Stop`."""
        ready = list(self._inboxes.values())
        while not self._scheduler.stopped:
            for inbox in ready:
                inbox.drain()
            wake_ns = self._scheduler.plan(time.monotonic_ns())
            for inbox in self._inboxes.values():
                inbox.sent = inbox.link.flush()
            ready = self._wait(wake_ns)

    def _wait(self, wake_ns: int) -> list[_Inbox]:
        """The inboxes with something in them; blocks until one has, or until about `wake_ns`."""
        pending = [inbox for inbox in self._inboxes.values() if inbox.pending()]
        if pending or self._scheduler.stopped:
            return pending
        if wake_ns == NEVER:
            readable, _, _ = select.select(self._inboxes, (), ())
        else:
            readable = self._wait_until(wake_ns)
        return [inbox for fd, inbox in self._inboxes.items() if fd in readable]

    def _wait_until(self, wake_ns: int) -> list[int]:
        """What became readable; rather early than late: then the caller comes again."""
        aim_ns = wake_ns - self._late_ns
        timeout_ns = min(max(0, aim_ns - time.monotonic_ns()), _LONGEST_WAIT_NS)
        readable, _, _ = select.select(self._inboxes, (), (), timeout_ns / 1e9)
        if 0 < timeout_ns < _LONGEST_WAIT_NS and not readable:
            late_ns = min(time.monotonic_ns() - aim_ns, _MOST_LATE_NS)
            self._late_ns += (late_ns - self._late_ns) // 8
        return readable

    def _from_control(self, message: Any) -> None:
        if type(message) is ProcessExited and self._guests is not None:
            self._guests.forget(message.pid)
        if type(message) in _FROM_CONTROL:
            self._scheduler.from_control(message, time.monotonic_ns())
        else:
            self._scheduler.misplaced()

    def _from_worker(self, item: tuple[bytes, Any]) -> None:
        peer, message = item
        if type(message) in _FROM_WORKER:
            self._scheduler.from_worker(peer, message, time.monotonic_ns())
        else:
            self._scheduler.misplaced()

    def _from_client(self, item: tuple[bytes, Any]) -> None:
        peer, message = item
        if type(message) in _FROM_CLIENT:
            self._scheduler.from_client(peer, message, time.monotonic_ns())
        else:
            self._scheduler.misplaced()

    def _from_guest(self, item: tuple[bytes, Any]) -> None:
        assert self._guests is not None
        peer, message = item
        if type(message) in _FROM_GUEST:
            believed = self._guests.check(peer, message)
            if believed is not None:
                self._scheduler.from_client(peer, believed, time.monotonic_ns())
        else:
            self._scheduler.misplaced()


# What a peer may say: a well-formed message in the wrong direction is garbage too.
_FROM_CONTROL = frozenset(get_args(SupervisorToScheduler))
_FROM_WORKER = frozenset(get_args(WorkerToScheduler))
_FROM_CLIENT = frozenset(get_args(ClientToScheduler))
_FROM_GUEST = frozenset(get_args(GuestToScheduler))
