"""When requests expire that nobody waits for in a loop: a heap of deadlines."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection

_MOST_OVER = 1024  # requests that have ended, remembered until their time has come


class Timeouts:
    """The deadlines of a channel's requests, by number; for one thread.

    waiting(): the numbers of those that have not ended; expire(number): the time of one is over.
    """

    def __init__(
        self, waiting: Callable[[], Collection[int]], expire: Callable[[int], None]
    ) -> None:
        self._waiting = waiting
        self._expire = expire
        self._heap: list[tuple[int, int]] = []

    def add(self, time_ns: int, number: int) -> None:
        """Have a request expire at a (monotonic) time."""
        waiting = self._waiting()
        if len(self._heap) > 2 * len(waiting) + _MOST_OVER:
            # Most end long before that, and are not to be kept until then.
            self._heap = [timed for timed in self._heap if timed[1] in waiting]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (time_ns, number))

    def run(self) -> float | None:
        """Expire those whose time is over; the seconds until the next one, None: there is none."""
        while self._heap:
            left_ns = self._heap[0][0] - time.monotonic_ns()
            if left_ns > 0:
                return left_ns / 1e9
            self._expire(heapq.heappop(self._heap)[1])
        return None
