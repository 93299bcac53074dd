"""The grants of the rate limiter, over the control socket: schedulers ask, and give back.

The death of a scheduler gives back all that it had, and what instances of its model execute then
is not counted any more; that of a worker its scheduler tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shmserve.ipc.messages import AskGrant, Granted, GrantReturned
from shmserve.supervisor.processes.control_socket import Address, pid_of
from shmserve.supervisor.resources import rate_limiter
from shmserve.supervisor.resources.rate_limiter import Needs, RateLimiter


class Grants:
    """The rate limiter of the server; `on` where it was asked for. Members are model versions, and
    each one's scheduler speaks for it: `send` queues a message to it."""

    def __init__(
        self,
        on: bool,
        explicit: Mapping[tuple[str, int | None], int],
        send: Callable[[Address, Granted], None],
    ) -> None:
        self.on = on
        self._send = send
        self._limiter = RateLimiter(explicit)
        self._members: dict[Address, int] = {}
        self._schedulers: dict[int, Address] = {}

    def join(self, member: int, needs: Mapping[int, Needs]) -> None:
        """Instances of a model version load, by index. Raises InvalidArgument when one could never
        run."""
        self._limiter.join(member, needs)

    def part(self, member: int, index: int) -> None:
        """An instance is gone."""
        self._tell(self._limiter.part(member, index))

    def speaks(self, scheduler: Address, member: int) -> None:
        """From now on this scheduler asks for a member."""
        before = self._schedulers.get(member)
        if before is not None:
            self._forget(before)
        self._members[scheduler] = member
        self._schedulers[member] = scheduler

    def leave(self, member: int) -> None:
        """A model version is gone."""
        self._members.pop(self._schedulers.pop(member, 0), None)
        self._tell(self._limiter.leave(member))

    def exited(self, pid: int) -> None:
        """A process is gone."""
        for scheduler in [each for each in self._members if pid_of(each) == pid]:
            self._forget(scheduler)

    def _forget(self, scheduler: Address) -> None:
        member = self._members.pop(scheduler, None)
        if member is not None and self._schedulers.get(member) == scheduler:
            self._tell(self._limiter.forget(member))

    def handle(self, scheduler: Address, message: AskGrant | GrantReturned) -> None:
        """A scheduler's message."""
        member = self._members.get(scheduler)
        if member is None:
            return
        if isinstance(message, AskGrant):
            self._tell(self._limiter.ask(member, message.index, message.ticket))
        else:
            self._tell(self._limiter.give_back(member, message.ticket, message.executed))

    def _tell(self, granted: Sequence[rate_limiter.Granted]) -> None:
        for member, ticket in granted:
            assert isinstance(member, int) and isinstance(ticket, int)
            self._send(self._schedulers[member], Granted(ticket))
