"""Acknowledgements: a barrier until a published change holds in every process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Hashable, Iterable


class Acknowledgements:
    """Waits until a numbered change holds in each of a set of processes, or they are gone."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[set[Hashable], asyncio.Future[None]]] = {}

    def begin(self, peers: Iterable[Hashable]) -> tuple[int, asyncio.Future[None]]:
        """A number to send, and a future that resolves when all `peers` acknowledged it. Nothing is
        kept of one that nobody waits for any more, and has cancelled."""
        number = next(self._numbers)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waited_for = set(peers)
        if waited_for:
            self._open[number] = (waited_for, future)
            future.add_done_callback(lambda _: self._open.pop(number))
        else:
            future.set_result(None)
        return number, future

    def acknowledged(self, peer: Hashable, number: int) -> None:
        """The change holds at `peer`."""
        entry = self._open.get(number)
        if entry is None:
            return
        missing, future = entry
        missing.discard(peer)
        if not (missing or future.done()):
            future.set_result(None)

    def exited(self, peer: Hashable) -> None:
        """Nothing is to be waited for from `peer` any more."""
        for number in list(self._open):
            self.acknowledged(peer, number)
