"""The deadlines of requests, as a heap that discards the deadlines of ended requests (no I/O)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

NEVER = 1 << 63  # later than any time
# A sweep visits every timer and keeps the timers of live requests. The next sweep follows when
# there are twice as many timers as were kept, plus this number.
_MAX_STALE = 1024

R = TypeVar("R")


class Timers(Generic[R]):
    """A heap of request deadlines (monotonic ns). A request may have several.

    `has_ended` reports whether a request has ended. No timer expires before `due_ns`. The timers of
    an ended request stay in the heap, because removing each of them would take as long as a
    request. `take_expired` skips such timers, and a sweep removes them when there are many.
    """

    def __init__(self, has_ended: Callable[[R], bool]) -> None:
        self._has_ended = has_ended
        self._heap: list[tuple[int, int, R]] = []  # (expiry, tie breaker, request)
        self._tie_breakers = itertools.count()
        self._sweep_size = _MAX_STALE
        self.due_ns = NEVER

    def add(self, until_ns: int, request: R) -> None:
        """Start a timer of a request that expires at `until_ns`."""
        heap = self._heap
        if len(heap) >= self._sweep_size:
            self._sweep()
        heapq.heappush(heap, (until_ns, next(self._tie_breakers), request))
        # A timer expires once its time has strictly passed.
        self.due_ns = heap[0][0] + 1

    def take_expired(self, now_ns: int) -> list[R]:
        """Remove the expired timers and return their requests, except those that have ended."""
        heap, expired_items = self._heap, []
        while heap and (heap[0][0] < now_ns or self._has_ended(heap[0][2])):
            request = heapq.heappop(heap)[2]
            if not self._has_ended(request):
                expired_items.append(request)
        self.due_ns = heap[0][0] + 1 if heap else NEVER
        return expired_items

    def _sweep(self) -> None:
        heap, has_ended = self._heap, self._has_ended
        heap[:] = [timer for timer in heap if not has_ended(timer[2])]
        heapq.heapify(heap)
        self._sweep_size = 2 * len(heap) + _MAX_STALE
