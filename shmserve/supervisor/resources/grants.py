"""The grants of the rate limiter, over the control socket: schedulers ask, and give back.

The death of a scheduler gives back all that it had, and what instances of its model execute then
is not counted any more; that of a worker its scheduler tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shmserve.ipc.messages import AskTicket, TicketGranted, TicketReturned
from shmserve.supervisor.resources import rate_limiter
from shmserve.supervisor.resources.rate_limiter import Needs, RateLimiter


class Grants:
    """The rate limiter of the server; `on` where it was asked for. Members are model versions, and
    the process of each one's scheduler speaks for it: `send` queues a message to a process."""

    def __init__(
        self,
        on: bool,
        explicit: Mapping[tuple[str, int | None], int],
        send: Callable[[int, TicketGranted], None],
    ) -> None:
        self.on = on
        self._send = send
        self._limiter = RateLimiter(explicit)
        self._speakers: dict[int, int] = {}  # pid -> member
        self._pids: dict[int, int] = {}

    def join(self, member: int, needs: Mapping[int, Needs]) -> None:
        """Instances of a model version load, by index. Raises InvalidArgument when one could never
        run."""
        self._limiter.join(member, needs)

    def part(self, member: int, index: int) -> None:
        """An instance is gone."""
        self._tell(self._limiter.part(member, index))

    def speaks(self, pid: int, member: int) -> None:
        """From now on this process asks for a member."""
        before = self._pids.get(member)
        if before is not None:
            self.exited(before)
        self._speakers[pid] = member
        self._pids[member] = pid

    def leave(self, member: int) -> None:
        """A model version is gone."""
        self._speakers.pop(self._pids.pop(member, 0), None)
        self._tell(self._limiter.leave(member))

    def exited(self, pid: int) -> None:
        """A process is gone."""
        member = self._speakers.pop(pid, None)
        if member is not None and self._pids.get(member) == pid:
            self._tell(self._limiter.forget(member))

    def handle(self, pid: int, message: AskTicket | TicketReturned) -> None:
        """A scheduler's message."""
        member = self._speakers.get(pid)
        if member is None:
            return
        if isinstance(message, AskTicket):
            self._tell(self._limiter.ask(member, message.index, message.ticket))
        else:
            self._tell(self._limiter.give_back(member, message.ticket, message.executed))

    def _tell(self, granted: Sequence[rate_limiter.GrantedTicket]) -> None:
        for member, ticket in granted:
            assert isinstance(member, int) and isinstance(ticket, int)
            self._send(self._pids[member], TicketGranted(ticket))
