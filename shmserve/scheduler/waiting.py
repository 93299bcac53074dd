"""Waiting for sockets, or for a time in microseconds: asleep, or awake where that is worth it."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping
from typing import Any

from shmserve.ipc.transport.busy_poll import SPIN_NS, BusyPoll
from shmserve.scheduler.requests.request import NEVER

# A sleeping thread runs again some time after its timer: up to this much is anticipated.
_MOST_LATE_NS = 60_000

# A client's deadline may be any number; no timer needs to be longer than this.
_LONGEST_WAIT_NS = 3_600_000_000_000


class Waiter:
    """Waits for what has something to read among `inboxes`, by descriptor; these may change."""

    def __init__(self, inboxes: Mapping[int, Any]) -> None:
        self._inboxes = inboxes
        self._late_ns = 0
        self._busy_poll = BusyPoll()

    def wait(self, wake_ns: int, requests: int) -> list[int]:
        """The descriptors with something to read, at about `wake_ns` none. `requests` are under
        way."""
        began_ns = time.monotonic_ns()
        ready: list[int] = []
        if self._busy_poll.worth(requests):
            ready = self._stay_awake(min(wake_ns, began_ns + SPIN_NS))
        if not ready:
            ready = self._sleep(wake_ns)
        self._busy_poll.observe(requests, time.monotonic_ns() - began_ns)
        return ready

    def _stay_awake(self, until_ns: int) -> list[int]:
        while time.monotonic_ns() < until_ns:
            ready = select.select(self._inboxes, (), (), 0)[0]
            if ready:
                return ready
            os.sched_yield()
        return []

    def _sleep(self, wake_ns: int) -> list[int]:
        if wake_ns == NEVER:
            return select.select(self._inboxes, (), ())[0]
        return self._wait_until(wake_ns)

    def _wait_until(self, wake_ns: int) -> list[int]:
        """What became readable; rather early than late: then the caller comes again."""
        aim_ns = wake_ns - self._late_ns
        timeout_ns = min(max(0, aim_ns - time.monotonic_ns()), _LONGEST_WAIT_NS)
        readable, _, _ = select.select(self._inboxes, (), (), timeout_ns / 1e9)
        if 0 < timeout_ns < _LONGEST_WAIT_NS and not readable:
            late_ns = min(time.monotonic_ns() - aim_ns, _MOST_LATE_NS)
            self._late_ns += (late_ns - self._late_ns) // 8
        return readable
