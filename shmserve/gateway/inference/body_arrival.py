"""Limits on the time and the memory of request bodies that are arriving.

Each body has a time limit. All bodies together have a memory limit. If it is reached, the slowest
bodies are evicted, since a client may take minutes to send the rest of its body.

The memory of large bodies is returned to the system by `malloc_trim`, after a pause. A large body
arrives in pieces and is parsed into many small values. malloc keeps freed memory below any value
that is still in use: one body of 20 MB costs 70 MB. `malloc_trim` returns all free pages within
milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from operator import attrgetter, methodcaller

from shmserve.errors import ShmserveError, Unavailable
from shmserve.ipc import processes

MIN_COUNTED_BYTES = 128 * 1024  # smaller released blocks do not count for a trim
_MIN_TRIMMED_BYTES = 1024 * 1024  # released bytes from which the heap is trimmed
_TRIM_DELAY_S = 0.5  # the pause before the heap is trimmed

# In bytes per second. Each `SLOWEST_RATE` received bytes extend the time limit of a body by a
# second. A client that reads a response at a lower rate is disconnected.
SLOWEST_RATE = 64 * 1024


class MallocTrim:
    """The timer of the next `malloc_trim` of this process."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._released_bytes = 0

    def schedule(self, byte_size: int) -> None:
        """Trim after a pause once `_MIN_TRIMMED_BYTES` were released. Each call restarts the pause.

        Blocks below `MIN_COUNTED_BYTES` do not count, because malloc soon uses them again.
        """
        if byte_size < MIN_COUNTED_BYTES:
            return
        self._released_bytes += byte_size
        if self._released_bytes < _MIN_TRIMMED_BYTES:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_TRIM_DELAY_S, self._trim_heap)

    def _trim_heap(self) -> None:
        self._timer, self._released_bytes = None, 0
        processes.trim_heap()


class BodyBudget:
    """The memory of the bodies that are arriving.

    Args:
        capacity_bytes: The limit of the bytes of all bodies outside of the arena. One body has a
            limit of its own.
        trim: The timer that returns released memory to the system.
    """

    def __init__(self, capacity_bytes: int, trim: MallocTrim) -> None:
        self._capacity_bytes = capacity_bytes
        self._trim = trim
        self._used_bytes = 0
        self._bodies: set[Arrival] = set()

    def reserve(self, body: Arrival, byte_size: int) -> None:
        """Count `byte_size` more bytes of a body; evict slow bodies if the limit is exceeded.

        Raises:
            Unavailable: The bodies together exceed the limit, and no other slow body is left.
        """
        self._bodies.add(body)
        body.heap_bytes += byte_size
        self._used_bytes += byte_size
        if self._used_bytes > max(self._capacity_bytes, body.heap_bytes):
            for slow_body in self._slow_bodies(attrgetter("heap_bytes")):
                slow_body.evict()
                if self._used_bytes <= max(self._capacity_bytes, body.heap_bytes):
                    break
            else:
                text = f"server memory for request bodies ({self._capacity_bytes} bytes) is full"
                raise Unavailable(text)
        body.check_not_evicted()

    def release(self, body: Arrival) -> None:
        """Stop counting the bytes of a body that is complete, discarded or evicted."""
        heap_bytes, body.heap_bytes = body.heap_bytes, 0
        self._used_bytes -= heap_bytes
        self._bodies.discard(body)
        self._trim.schedule(heap_bytes)

    def register(self, body: Arrival) -> None:
        """Register a body with an arena block, so that `evict` can evict the body."""
        self._bodies.add(body)

    def evict(self) -> Iterator[None]:
        """Evict the slow bodies with an arena block, the slowest first; yield after each one."""
        for body in self._slow_bodies(attrgetter("has_block")):
            body.evict()
            yield

    def _slow_bodies(self, freed_bytes: Callable[[Arrival], int]) -> list[Arrival]:
        """Return the slow bodies for which `freed_bytes` is true, the slowest first."""
        now = time.monotonic()
        slow_bodies = [body for body in self._bodies if freed_bytes(body) and body.is_slow(now)]
        return sorted(slow_bodies, key=methodcaller("rate", now))


# A body is not evicted before this fraction of `body_timeout_s` has passed.
_GRACE_FRACTION = 1 / 30
# A body that arrives at a lower rate, in bytes per second, may be evicted.
_SLOW_RATE = 1024 * 1024


class BodyTimeout(ShmserveError):
    """An error about a body that did not arrive in time."""

    code = "UNAVAILABLE"
    status = 408


class Arrival:
    """The arrival of one body.

    The time limit is `body_timeout_s`, and a second more for each `SLOWEST_RATE` received bytes.

    Attributes:
        started_at: The time when the arrival began, on the monotonic clock.
        received_bytes: The number of received bytes.
        heap_bytes: The number of received bytes outside of the arena, which count in the budget.
    """

    def __init__(self, body_timeout_s: float, budget: BodyBudget) -> None:
        self._timeout_s = body_timeout_s
        self._body_budget = budget
        self.started_at = time.monotonic()
        # The timeout of the current wait for bytes.
        self._current_timeout: asyncio.Timeout | None = None
        self._wait_started_at = 0.0  # the start of the current wait
        self._earlier_waits_s = 0.0  # the total time of the earlier waits
        self._release_block: Callable[[], None] | None = None
        self._is_evicted = False
        self.received_bytes = 0
        self.heap_bytes = 0

    @property
    def _time_limit_s(self) -> float:
        """Return the time limit, in seconds from the start."""
        return self._timeout_s + self.received_bytes / SLOWEST_RATE

    async def next(self, next_bytes: Awaitable[bytes]) -> bytes:
        """Await `next_bytes` within the time limit, and return the next bytes of the body.

        Raises:
            BodyTimeout: The time limit has expired, or the body was evicted.
        """
        limit_s = self._time_limit_s
        deadline = self.started_at + limit_s
        self._wait_started_at = time.monotonic()
        try:
            async with asyncio.timeout(deadline - self._wait_started_at) as self._current_timeout:
                data = await next_bytes
        except TimeoutError:
            self.check_not_evicted()
            text = f"the request body did not arrive in time (limit: {limit_s:.1f} s)"
            raise BodyTimeout(text) from None
        finally:
            self._earlier_waits_s = self._total_wait_s(time.monotonic())
            self._current_timeout = None
        self.check_not_evicted()
        self.received_bytes += len(data)
        return data

    async def wait_for_end(self, body_end: asyncio.Future[None]) -> None:
        """Wait for the end of a body whose receiver updates `received_bytes`.

        Raises:
            BodyTimeout: As in `next`.
        """

        async def wait() -> bytes:
            await asyncio.wait((body_end,))
            return b""

        while not body_end.done():
            received_bytes = self.received_bytes
            try:
                await self.next(wait())
            except BodyTimeout:
                if self._is_evicted or self.received_bytes == received_bytes:
                    raise

    # --- memory

    def reserve(self, byte_size: int) -> None:
        """Count `byte_size` bytes outside of the arena, until `release_budget`.

        Raises:
            Unavailable: The bodies together exceed the limit.
            BodyTimeout: The body was evicted.
        """
        self._body_budget.reserve(self, byte_size)

    def release_budget(self) -> None:
        """Stop counting the bytes of `reserve`, since the body is complete or discarded."""
        self._body_budget.release(self)

    def register_block(self, release: Callable[[], None]) -> None:
        """Register an arena block, which `evict` frees by calling `release`.

        The registration ends with `release_budget`.
        """
        self._release_block = release
        self._body_budget.register(self)

    # --- eviction

    @property
    def has_block(self) -> bool:
        """Return whether `evict` would release an arena block of this body."""
        return self._release_block is not None

    def rate(self, now: float) -> float:
        """Return the received bytes, divided by the seconds of waiting for the body."""
        return self.received_bytes / max(self._total_wait_s(now), 1e-9)

    def is_slow(self, now: float) -> bool:
        """Return whether the body arrives so slowly that it may be evicted."""
        grace_s = _GRACE_FRACTION * self._timeout_s
        return self._total_wait_s(now) > grace_s and self.rate(now) < _SLOW_RATE

    def _total_wait_s(self, now: float) -> float:
        is_waiting = self._current_timeout is not None
        return self._earlier_waits_s + (now - self._wait_started_at if is_waiting else 0.0)

    def evict(self) -> None:
        """Release the memory of the body, and end the wait for it with BodyTimeout."""
        self._is_evicted = True
        self._body_budget.release(self)
        if self._release_block is not None:
            self._release_block()
        if self._current_timeout is not None and not self._current_timeout.expired():
            self._current_timeout.reschedule(0)

    def check_not_evicted(self) -> None:
        """Raise BodyTimeout if the body was evicted."""
        if self._is_evicted:
            text = "arrived at less than 1 MiB/s while the memory for request bodies was full"
            raise BodyTimeout(f"the request body {text}")
