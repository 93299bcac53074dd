"""Waiting for sockets, or for a time in microseconds: asleep, or awake where that is worth it."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from shmserve.ipc.transport.busy_poll import SPIN_NS, BusyPoll
from shmserve.scheduler.requests.request import NEVER

# A sleeping thread runs again some time after its timer: up to this much is anticipated.
_MOST_LATE_NS = 60_000

# A client's deadline may be any number; no timer needs to be longer than this.
_LONGEST_WAIT_NS = 3_600_000_000_000

_NS_PER_MS = 1_000_000
# epoll_wait(2) counts in whole ms: what is nearer waits in select(2), which counts in µs, for the
# epoll(7) that stands for all.
_NEAR_NS = 5 * _NS_PER_MS

Take = Callable[[], None]
Ready = list[tuple[int, int]]


class Waiter:
    """Waits for what has something to read; `takers` has what takes from each descriptor."""

    def __init__(self) -> None:
        self.takers: dict[int, Take] = {}
        self._epoll = select.epoll()
        self._late_ns = 0
        self._busy_poll = BusyPoll()

    def watch(self, fd: int, take: Take) -> None:
        """Wait for this descriptor, too, in turn after those that are watched already."""
        self.takers[fd] = take
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Wait for this descriptor no longer."""
        del self.takers[fd]
        self._epoll.unregister(fd)

    def wait(self, wake_ns: int, requests: int) -> Ready:
        """The descriptors with something to read, in order, with epoll(7)'s events; at about
        `wake_ns` none. `requests` are under way."""
        began_ns = time.monotonic_ns()
        ready: Ready = []
        if self._busy_poll.worth(requests):
            ready = self._stay_awake(min(wake_ns, began_ns + SPIN_NS))
        if not ready:
            ready = self._epoll.poll() if wake_ns == NEVER else self._sleep(wake_ns)
        self._busy_poll.observe(requests, time.monotonic_ns() - began_ns)
        if len(ready) > 1:
            order = list(self.takers)
            ready.sort(key=lambda each: order.index(each[0]))
        return ready

    def _stay_awake(self, until_ns: int) -> Ready:
        while time.monotonic_ns() < until_ns:
            ready = self._epoll.poll(0)
            if ready:
                return ready
            os.sched_yield()
        return []

    def _sleep(self, wake_ns: int) -> Ready:
        left_ns = wake_ns - time.monotonic_ns()
        if left_ns < _NEAR_NS:
            return self._wait_until(wake_ns)
        # Rather early than late: then the caller comes again, and waits for what is left.
        timeout_ms = min(left_ns, _LONGEST_WAIT_NS) // _NS_PER_MS - 1
        return self._epoll.poll(timeout_ms / 1000)

    def _wait_until(self, wake_ns: int) -> Ready:
        aim_ns = wake_ns - self._late_ns
        timeout_ns = max(0, aim_ns - time.monotonic_ns())
        readable, _, _ = select.select((self._epoll,), (), (), timeout_ns / 1e9)
        if timeout_ns and not readable:
            late_ns = min(time.monotonic_ns() - aim_ns, _MOST_LATE_NS)
            self._late_ns += (late_ns - self._late_ns) // 8
        return self._epoll.poll(0) if readable else []
