"""Admission control for the memory of request bodies that are arriving: a limit to what they hold
together, and eviction of the slowest where it is full, for a client may take minutes to send the
rest of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from operator import attrgetter, methodcaller
from typing import Protocol

from shmserve.errors import Unavailable
from shmserve.gateway.inference.malloc_trim import MallocTrim

# A body may take the body timeout and a second more for each of these bytes that came.
SLOWEST_RATE = 64 * 1024


class ArrivingBody(Protocol):
    """A request's body of which more is to come."""

    held: int  # bytes outside of the arena

    @property
    def has_block(self) -> bool:
        """Whether eviction gives back a block of the arena."""

    def is_slow(self, now: float) -> bool:
        """Whether it may be evicted."""

    def rate(self, now: float) -> float:
        """Bytes for each second that was waited until now."""

    def evict(self) -> None:
        """Give its memory back now; the wait for the rest ends with an error."""

    def check(self) -> None:
        """Raise what it ends with if it was evicted."""


class BodyBudget:
    """Accounts for the bodies that are arriving; `most` bounds, in bytes, what they hold together
    outside of the arena. One alone has its own limit. `trim` is told what is given back."""

    def __init__(self, most: int, trim: MallocTrim) -> None:
        self._most = most
        self._trim = trim
        self._used = 0
        self._bodies: set[ArrivingBody] = set()

    def take(self, body: ArrivingBody, more: int) -> None:
        """`more` bytes of it are here; to be given back in any case.

        Raises Unavailable when they are too many with those of others.
        """
        self._bodies.add(body)
        body.held += more
        self._used += more
        if self._used > max(self._most, body.held):
            for slow in self._slow(attrgetter("held")):
                slow.evict()
                if self._used <= max(self._most, body.held):
                    break
            else:
                raise Unavailable(f"server memory for request bodies ({self._most} bytes) is full")
        body.check()

    def give(self, body: ArrivingBody) -> None:
        """What was taken is no longer here, or belongs to a whole body."""
        held, body.held = body.held, 0
        self._used -= held
        self._bodies.discard(body)
        self._trim.soon(held)

    def keep(self, body: ArrivingBody) -> None:
        """It has a block of the arena."""
        self._bodies.add(body)

    def evict(self) -> Iterator[None]:
        """The arena is full: at each step, the slowest of the bodies that hardly come and have a
        block of it has given that back."""
        for body in self._slow(attrgetter("has_block")):
            body.evict()
            yield

    def _slow(self, useful: Callable[[ArrivingBody], int]) -> list[ArrivingBody]:
        """Those that hardly come and are `useful` to end, the slowest first."""
        now = time.monotonic()
        slow = [body for body in self._bodies if useful(body) and body.is_slow(now)]
        return sorted(slow, key=methodcaller("rate", now))
