"""Acknowledgements: a barrier until a published change holds in every process."""

from __future__ import annotations

import asyncio
import itertools


class Acknowledgements:
    """Waits until a numbered change holds in each of a set of processes, or they are gone."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[set[int], asyncio.Future[None]]] = {}

    def begin(self, pids: set[int]) -> tuple[int, asyncio.Future[None]]:
        """A number to send, and a future that resolves when all `pids` acknowledged it. Nothing is
        kept of one that nobody waits for any more, and has cancelled."""
        number = next(self._numbers)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if pids:
            self._open[number] = (set(pids), future)
            future.add_done_callback(lambda _: self._open.pop(number))
        else:
            future.set_result(None)
        return number, future

    def acknowledged(self, pid: int, number: int) -> None:
        """`pid` says that the change holds there."""
        entry = self._open.get(number)
        if entry is None:
            return
        missing, future = entry
        missing.discard(pid)
        if not (missing or future.done()):
            future.set_result(None)

    def exited(self, pid: int) -> None:
        """Nothing is to be waited for from `pid` any more."""
        for number in list(self._open):
            self.acknowledged(pid, number)
