"""Asking models themselves whether they are ready: those that define `is_ready`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from shmserve.ipc.messages import CheckReady, ReadyChecked

PATIENCE_S = 5.0


class ReadinessCheck:
    """Questions to workers, by number. `send(pid, message)` reaches one."""

    def __init__(self, send: Callable[[int, Any], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[set[int], asyncio.Future[bool]]] = {}
        self._said_yes: set[int] = set()  # questions that some worker has said yes to

    async def check(self, pids: Sequence[int]) -> bool:
        """Whether a model's workers say that it is ready: one says so, and none says no. A worker
        answers after what it executes; one that does not in time does not count."""
        if not pids:
            return False
        number = next(self._numbers)
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._open[number] = set(pids), future
        for pid in pids:
            self._send(pid, CheckReady(number))
        try:
            return await asyncio.wait_for(future, PATIENCE_S)
        except TimeoutError:
            return number in self._said_yes
        finally:
            del self._open[number]
            self._said_yes.discard(number)

    def checked(self, pid: int, message: ReadyChecked) -> None:
        """What worker `pid` says."""
        pids, future = self._open.get(message.id, (set(), None))
        if future is None or pid not in pids or future.done():
            return
        pids.remove(pid)
        if message.ready:
            self._said_yes.add(message.id)
        if not message.ready or not pids:
            future.set_result(message.ready)
