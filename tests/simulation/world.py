"""The simulated world: a virtual clock, a heap of events, processes and their links.

The only source of randomness is `World.random`, so the same seed produces the same run.
"""

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

US = 1_000
MS = 1_000_000
SECOND = 1_000_000_000
TRACED_EVENTS = 200
_EPOCH_NS = 1_700_000_000 * SECOND


class Violation(AssertionError):
    """The error for a broken rule of the simulation."""


class World:
    """An event queue in virtual time (ns), with a `trace` and the `faults` by kind."""

    def __init__(self, seed: int, traced: int = TRACED_EVENTS) -> None:
        self.random = random.Random(seed)
        self.now_ns = 1_000 * SECOND
        self.skew_ns = 0
        self.trace: deque[tuple[Any, ...]] = deque(maxlen=traced)
        self.faults: Counter[str] = Counter()
        self.events = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._pids = itertools.count(100)
        self._free_pids: list[int] = []

    def wall_clock(self) -> int:
        """Return epoch ns by a clock that is adjusted now and then."""
        return _EPOCH_NS + self.now_ns + self.skew_ns

    def after(self, delay_ns: int, call: Callable[..., None], *arguments: Any) -> None:
        """Schedule `call(*arguments)` after a delay in ns."""
        entry = (self.now_ns + delay_ns, next(self._numbers), call, arguments)
        heapq.heappush(self._heap, entry)

    def note(self, *words: Any) -> None:
        self.trace.append((self.now_ns, *words))

    def fault(self, kind: str, *words: Any) -> None:
        """Count and trace a fault that is about to happen."""
        self.faults[kind] += 1
        self.note("FAULT", kind, *words)

    def run(self, until_ns: int, is_over: Callable[[], bool] = lambda: False) -> None:
        """Run events up to a time, or until `is_over` returns True."""
        heap = self._heap
        while heap and heap[0][0] <= until_ns and not is_over():
            self.now_ns, _, call, arguments = heapq.heappop(heap)
            self.events += 1
            call(*arguments)
        if not is_over():
            self.now_ns = max(self.now_ns, until_ns)

    @property
    def busy(self) -> bool:
        """Return whether another event is scheduled for the current time."""
        return bool(self._heap) and self._heap[0][0] <= self.now_ns

    def between(self, least: int, maximum: int) -> int:
        """Draw a number from a range, with a uniform distribution of its logarithm."""
        return int(least * (maximum / least) ** self.random.random())

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def new_pid(self, reuse: bool = False) -> int:
        """Return a pid; with `reuse`, that of a dead process if one is available."""
        if reuse and self._free_pids:
            return self._free_pids.pop(0)
        return next(self._pids)

    def free_pid(self, pid: int) -> None:
        """Allow the reuse of a pid, after all processes were notified of the exit."""
        self._free_pids.append(pid)

    def report(self) -> str:
        """Return the last events, one per line."""
        return "\n".join(
            f"{(time_ns - 1_000 * SECOND) / MS:12.4f} ms  " + " ".join(map(str, words))
            for time_ns, *words in self.trace
        )


class Process:
    """A process that is alive until it is killed, which happens between two events."""

    def __init__(self, world: World, title: str, pid: int = 0) -> None:
        self.world = world
        self.pid = pid or world.new_pid()
        self.title = f"{title}({self.pid})"
        self._alive = True

    def __repr__(self) -> str:
        return self.title

    @property
    def alive(self) -> bool:
        """Return whether the process runs and receives messages."""
        return self._alive

    @property
    def address(self) -> Any:
        return self.pid

    def die(self) -> None:
        """Kill the process: it executes nothing more and receives nothing."""
        self._alive = False


class Link:
    """One direction of a connection: ordered, with any delay.

    Messages sent before the sender died still arrive. `deliver` receives several messages at a time
    if they arrive together, and all messages of a frame at once.
    """

    def __init__(self, world: World, target: Process, deliver: Callable[[list[Any]], None]) -> None:
        self.target = target
        self.is_closed = False
        self._world = world
        self._deliver = deliver
        self._frames: deque[tuple[Any, ...]] = deque()
        self._is_delivery_scheduled = False
        self._stalled_until_ns = 0

    @property
    def connected(self) -> bool:
        """Return whether a message sent now can arrive."""
        return self.target.alive and not self.is_closed

    @property
    def pending(self) -> bool:
        return self.connected and bool(self._frames)

    def post(self, *messages: Any) -> None:
        """Send messages as one frame, so that they arrive together."""
        self._frames.append(messages)
        if not self._is_delivery_scheduled:
            self._is_delivery_scheduled = True
            self._world.after(self._world.between(5 * US, 200 * US), self._arrive)

    def stall(self, ns: int) -> None:
        """Delay all deliveries, as if buffers were full."""
        self._stalled_until_ns = self._world.now_ns + ns

    def close(self) -> None:
        """Drop all messages in transit and all later ones."""
        self.is_closed = True
        self._frames.clear()

    def take_in_transit(self) -> list[Any]:
        frames, self._frames = self._frames, deque()
        return [message for frame in frames for message in frame]

    def drain(self) -> None:
        """Deliver all messages in transit now."""
        while self._frames and self.connected:
            self._deliver([*self._frames.popleft()])

    def _arrive(self) -> None:
        world, frames = self._world, self._frames
        self._is_delivery_scheduled = False
        if not self.connected:
            frames.clear()
            return
        wait_ns = self._stalled_until_ns - world.now_ns
        if wait_ns <= 0:
            count = len(frames)
            if count > 1 and world.chance(0.3):
                count = world.random.randint(1, count)
            messages = [message for _ in range(count) for message in frames.popleft()]
            if messages:
                self._deliver(messages)
            wait_ns = world.between(5 * US, 100 * US)
        if frames and not self._is_delivery_scheduled:
            self._is_delivery_scheduled = True
            world.after(wait_ns, self._arrive)
