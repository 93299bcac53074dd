"""Tickets of the rate limiter, over the control socket: schedulers ask for them, and release them.

The death of a scheduler releases all that it had, and what instances of its model execute then is
not counted any more; that of a worker is reported by its scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from shmserve.ipc.messages.supervision import AskTicket, TicketGranted, TicketReturned
from shmserve.supervisor.processes.control_socket import Address, pid_of
from shmserve.supervisor.resources import rate_limiter
from shmserve.supervisor.resources.rate_limiter import GLOBAL, Needs, RateLimiter, Resource

logger = logging.getLogger(__name__)


class Tickets:
    """The rate limiter of the server; `on` where it was asked for. Members are model versions, each
    bound to its scheduler: `send` queues a message to one."""

    def __init__(
        self,
        on: bool,
        explicit: Mapping[tuple[str, int | None], int],
        send: Callable[[Address, TicketGranted], None],
    ) -> None:
        self.on = on
        self._send = send
        self._limiter = RateLimiter(explicit)
        self._logged: dict[Resource, int] = {}
        self._members: dict[Address, int] = {}
        self._schedulers: dict[int, Address] = {}

    def join(self, member: int, needs: Mapping[int, Needs]) -> None:
        """Add instances of a model version, by index. Raises InvalidArgument when one could never
        run."""
        self._limiter.join(member, needs)
        self._log()

    def remove_instance(self, member: int, index: int) -> None:
        """Drop an instance that has ended."""
        self._send_granted(self._limiter.remove_instance(member, index))
        self._log()

    def bind(self, scheduler: Address, member: int) -> None:
        """Have this scheduler ask for a member from now on, and its predecessor no more."""
        before = self._schedulers.get(member)
        if before is not None:
            self._release(before)
        self._members[scheduler] = member
        self._schedulers[member] = scheduler

    def remove(self, member: int) -> None:
        """Drop a model version that has ended."""
        self._members.pop(self._schedulers.pop(member, 0), None)
        self._send_granted(self._limiter.remove(member))
        self._log()

    def _log(self) -> None:
        """Say how much there is of each resource, where that has changed; in Triton's words."""
        capacity = self._limiter.capacity()
        if capacity != self._logged:
            self._logged = capacity
            for (name, device), count in sorted(capacity.items()):
                where = "GLOBAL" if device == GLOBAL else device
                logger.info("Device: %s Resource: %s\t Count: %d", where, name, count)

    def exited(self, pid: int) -> None:
        """Release what the schedulers in a process had that has ended."""
        for scheduler in [each for each in self._members if pid_of(each) == pid]:
            self._release(scheduler)

    def _release(self, scheduler: Address) -> None:
        member = self._members.pop(scheduler, None)
        if member is not None and self._schedulers.get(member) == scheduler:
            self._send_granted(self._limiter.disconnect(member))

    def handle(self, scheduler: Address, message: AskTicket | TicketReturned) -> None:
        """A scheduler's message."""
        member = self._members.get(scheduler)
        if member is None:
            return
        if isinstance(message, AskTicket):
            self._send_granted(self._limiter.ask(member, message.index, message.ticket))
        else:
            self._send_granted(self._limiter.release(member, message.ticket, message.executed))

    def _send_granted(self, granted: Sequence[rate_limiter.GrantedTicket]) -> None:
        for member, ticket in granted:
            assert isinstance(member, int) and isinstance(ticket, int)
            self._send(self._schedulers[member], TicketGranted(ticket))
