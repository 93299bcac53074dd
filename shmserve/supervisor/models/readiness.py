"""Readiness checks that models make themselves: workers are asked for what `is_ready` returns.

A check may take longer than whoever asked waits for it, so a worker has one at a time: who asks
meanwhile waits for the response to that one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shmserve.ipc.messages.supervision import CheckReady, ReadyChecked

PATIENCE_S = 5.0


class _Check(NamedTuple):
    """A check that a worker has not responded to; the outcome is None when it is gone."""

    number: int
    outcome: asyncio.Future[bool | None]


class ReadinessCheck:
    """The checks in flight, by worker. `send(pid, message)` reaches one."""

    def __init__(self, send: Callable[[int, Any], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._in_flight: dict[int, _Check] = {}

    async def check(self, pids: Sequence[int]) -> bool:
        """Whether a model's workers say that it is ready: one says so, and none says no. A worker
        that does not respond in time, or ends, does not count."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        pending = {self._outcome(pid) for pid in pids}
        ready = False
        while pending:
            done, pending = await asyncio.wait(
                pending,
                timeout=max(0.0, deadline - loop.time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            outcomes = {future.result() for future in done}
            if False in outcomes:
                return False
            ready = ready or True in outcomes
            if not done:
                break
        return ready

    def _outcome(self, pid: int) -> asyncio.Future[bool | None]:
        check = self._in_flight.get(pid)
        if check is None:
            outcome: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()
            check = self._in_flight[pid] = _Check(next(self._numbers), outcome)
            self._send(pid, CheckReady(check.number))
        return check.outcome

    def checked(self, pid: int, message: ReadyChecked) -> None:
        """Worker `pid` responds."""
        check = self._in_flight.get(pid)
        if check is not None and check.number == message.id:
            del self._in_flight[pid]
            check.outcome.set_result(message.ready)

    def exited(self, pid: int) -> None:
        """A process has ended: nothing is to be waited for from it."""
        check = self._in_flight.pop(pid, None)
        if check is not None:
            check.outcome.set_result(None)
