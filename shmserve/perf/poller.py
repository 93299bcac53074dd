"""The loop that a load runs in: descriptors that are ready, and waits that end on time.

It is our own because of what it costs: a request takes a few microseconds of it.
"""

from __future__ import annotations

import select
from collections.abc import Callable

from shmserve.ipc.processes import exact_timers

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
_COARSE_NS = 1_000_000  # to which epoll rounds what it waits


class Poller:
    """Handlers by descriptor; for one thread."""

    def __init__(self) -> None:
        exact_timers()
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._soon: list[Callable[[], None]] = []

    def watch(self, fd: int, handler: Callable[[int], None], events: int = READ) -> None:
        """Call `handler(events)` when a descriptor is ready."""
        self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def change(self, fd: int, events: int) -> None:
        """Wait for other events of it."""
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Watch it no more; it is open still."""
        if self._handlers.pop(fd, None):
            self._epoll.unregister(fd)

    def soon(self, call: Callable[[], None]) -> None:
        """Call something once, before the next wait."""
        self._soon.append(call)

    def turn(self, wait_ns: int) -> None:
        """Wait so long, or until something is ready, and handle all that is."""
        calls, self._soon = self._soon, []
        for call in calls:
            call()
        if self._soon:  # for the next turn
            wait_ns = 0
        if 0 < wait_ns < 2 * _COARSE_NS:
            if not select.select((self._epoll,), (), (), wait_ns / 1e9)[0]:
                return
            wait_ns = 0
        coarse = max(wait_ns // _COARSE_NS - 1, 0) * _COARSE_NS  # the rest is the next turn's
        for fd, events in self._epoll.poll(coarse / 1e9):
            handler = self._handlers.get(fd)
            if handler is not None:  # else another one of this turn has forgotten it
                handler(events)

    def close(self) -> None:
        """Watch nothing any more."""
        self._handlers.clear()
        self._epoll.close()
