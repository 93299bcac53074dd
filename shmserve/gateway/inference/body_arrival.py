"""The arrival of request bodies: a time limit for each, and admission control for the memory that
those hold together which are arriving, with eviction of the slowest where it is full, for a client
may take minutes to send the rest of its own.

What large ones leave is returned to the system, by `malloc_trim`, debounced: a large body comes in
pieces, and what is made of it is many small values; malloc keeps all that is freed below anything
that still lives, for good: one body of 20 MB costs 70 MB. `malloc_trim` gives back whole free pages
wherever they lie, in milliseconds, once the large requests are over.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter, methodcaller

from shmserve.errors import ShmserveError, Unavailable

LARGE = 1024 * 1024
_PAUSE_S = 0.5

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's only
# A body may take the body timeout and a second more for each of these bytes that came.
SLOWEST_RATE = 64 * 1024


class MallocTrim:
    """The timer of the next `malloc_trim` of this process."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def soon(self, byte_size: int) -> None:
        """Trim after a pause if so many bytes are large; each further call begins the pause
        anew."""
        if byte_size < LARGE:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_PAUSE_S, self._trim)

    def _trim(self) -> None:
        self._timer = None
        if _malloc_trim is not None:
            _malloc_trim(0)


class BodyBudget:
    """Accounts for the bodies that are arriving; `most` bounds, in bytes, what they hold together
    outside of the arena. One alone has its own limit. `trim` is told what is given back."""

    def __init__(self, most: int, trim: MallocTrim) -> None:
        self._most = most
        self._trim = trim
        self._used = 0
        self._bodies: set[Arrival] = set()

    def take(self, body: Arrival, more: int) -> None:
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

    def give(self, body: Arrival) -> None:
        """Return what was taken: it is no longer here, or belongs to a whole body."""
        held, body.held = body.held, 0
        self._used -= held
        self._bodies.discard(body)
        self._trim.soon(held)

    def keep(self, body: Arrival) -> None:
        """Register a body that has a block of the arena."""
        self._bodies.add(body)

    def evict(self) -> Iterator[None]:
        """The arena is full: at each step, the slowest of the bodies that hardly come and have a
        block of it has given that back."""
        for body in self._slow(attrgetter("has_block")):
            body.evict()
            yield

    def _slow(self, useful: Callable[[Arrival], int]) -> list[Arrival]:
        """The bodies that hardly come and are `useful` to end, the slowest first."""
        now = time.monotonic()
        slow = [body for body in self._bodies if useful(body) and body.is_slow(now)]
        return sorted(slow, key=methodcaller("rate", now))


# Where memory is full, a body is evicted that was waited for for this part of `body_timeout_s`,
# with less than so many bytes a second. The time it waited for us does not count.
_GRACE = 1 / 30
_SLOW_RATE = 1024 * 1024


class BodyTimeout(ShmserveError):
    """The client did not send its body in time."""

    code = "UNAVAILABLE"
    status = 408


class Arrival:
    """The arrival of one body: what of it is here counts in `budget`, `held` bytes outside of the
    arena.

    The time limit is `body_timeout_s`, and a second more for each `SLOWEST_RATE` bytes that came.
    """

    def __init__(self, body_timeout_s: float, budget: BodyBudget) -> None:
        self._timeout_s = body_timeout_s
        self._budget = budget
        self._began = time.monotonic()
        self._waiting: asyncio.Timeout | None = None  # for more of it, now
        self._since = 0.0  # when that began
        self._waited_s = 0.0  # before
        self._release: Callable[[], None] | None = None
        self._evicted = False
        self.received = 0
        self.held = 0

    async def next(self, read: Awaitable[bytes]) -> bytes:
        """The result of `read`, within the time limit; raises BodyTimeout."""
        limit = self._began + self._timeout_s + self.received / SLOWEST_RATE
        self._since = time.monotonic()
        try:
            async with asyncio.timeout(limit - self._since) as self._waiting:
                data = await read
        except TimeoutError:
            self.check()
            raise BodyTimeout("the request body did not arrive in time") from None
        finally:
            self._waited_s = self._waited(time.monotonic())
            self._waiting = None
        self.check()
        self.received += len(data)
        return data

    # --- memory

    def hold(self, more: int) -> None:
        """`more` bytes of it are kept outside of the arena; to be given back in any case.

        Raises Unavailable when they are too many with those of others, BodyTimeout if it was
        evicted.
        """
        self._budget.take(self, more)

    def give_back(self) -> None:
        """Nothing is kept outside of the arena any more, or the body is whole."""
        self._budget.give(self)

    def keep(self, release: Callable[[], None]) -> None:
        """It has a block of the arena, until it is given back; eviction frees that with
        `release`."""
        self._release = release
        self._budget.keep(self)

    @contextmanager
    def keeping(self, release: Callable[[], None]) -> Iterator[None]:
        """While this runs, it has a block of the arena, which eviction frees with `release`."""
        self.keep(release)
        try:
            yield
        finally:
            self._release = None

    # --- eviction

    @property
    def has_block(self) -> bool:
        """Whether eviction gives back a block of the arena."""
        return self._release is not None

    def rate(self, now: float) -> float:
        """Bytes for each second that was waited until now."""
        return self.received / max(self._waited(now), 1e-9)

    def is_slow(self, now: float) -> bool:
        """Whether it may be evicted."""
        grace_s = _GRACE * self._timeout_s
        return self._waited(now) > grace_s and self.rate(now) < _SLOW_RATE

    def _waited(self, now: float) -> float:
        return self._waited_s + (now - self._since if self._waiting is not None else 0.0)

    def evict(self) -> None:
        """Give its memory back now; the wait for the rest ends with BodyTimeout."""
        self._evicted = True
        self._budget.give(self)
        if self._release is not None:
            self._release()
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(0)

    def check(self) -> None:
        """Raise BodyTimeout if it was evicted; then no byte of its memory is its own."""
        if self._evicted:
            raise BodyTimeout("the request body came too slowly: others need the memory for it")
