"""Timers of requests: when the next one is over, and whose time is over (pure).

A request that is done leaves its timers where they are, for to find them would cost as much as the
request: they are passed over when their time comes, or swept when there are many.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

from shmserve.scheduler.requests.request import NEVER

# A sweep looks at all timers, and leaves those of requests that are not done: the next one comes
# when there are twice as many, and this many more.
_MOST_STALE = 1024

R = TypeVar("R")


class Timers(Generic[R]):
    """Times (monotonic ns) that requests have until something, of which there may be any number a
    request; `done` says of one that it has ended. Before `due_ns` nobody's time is over."""

    def __init__(self, done: Callable[[R], bool]) -> None:
        self._done = done
        self._heap: list[tuple[int, int, R]] = []
        self._numbers = itertools.count()
        self._sweep_at = _MOST_STALE
        self.due_ns = NEVER

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, until_ns: int, request: R) -> None:
        """A request has time until then."""
        heap = self._heap
        if len(heap) >= self._sweep_at:
            self._sweep()
        heapq.heappush(heap, (until_ns, next(self._numbers), request))
        # A time is over when more than it has passed.
        self.due_ns = heap[0][0] + 1

    def over(self, now_ns: int) -> list[R]:
        """Those whose time is over, once for each of their times; never one that is done."""
        heap, over = self._heap, []
        while heap and (heap[0][0] < now_ns or self._done(heap[0][2])):
            request = heapq.heappop(heap)[2]
            if not self._done(request):
                over.append(request)
        self.due_ns = heap[0][0] + 1 if heap else NEVER
        return over

    def _sweep(self) -> None:
        heap, done = self._heap, self._done
        heap[:] = [timer for timer in heap if not done(timer[2])]
        heapq.heapify(heap)
        self._sweep_at = 2 * len(heap) + _MOST_STALE
