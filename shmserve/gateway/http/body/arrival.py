"""The arrival of a request body: its time limit, and its eviction where memory is full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from shmserve.errors import ShmserveError
from shmserve.gateway.inference.body_budget import SLOWEST_RATE, BodyBudget

# Where memory is full, a body is evicted that was waited for for this part of `body_timeout_s`,
# with less than so many bytes a second. The time it waited for us does not count.
_GRACE = 1 / 30
_SLOW_RATE = 1024 * 1024


class BodyTimeout(ShmserveError):
    """The client did not send its body in time."""

    code = "UNAVAILABLE"
    status = 408


class Arrival:
    """The arrival of one body, an `ArrivingBody`: what of it is here counts in `budget`.

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
        """What `read` gives, within the time limit; raises BodyTimeout."""
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

    @contextmanager
    def keeping(self, release: Callable[[], None]) -> Iterator[None]:
        """While this runs, it has a block of the arena, which eviction frees with `release`."""
        self._release = release
        self._budget.keep(self)
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
