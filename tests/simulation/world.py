"""The simulated world: a virtual clock, a heap of events, processes and the links between them.

Nothing here is random but `World.random`, which one seed begins: the same seed gives the same run.
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
TRACED = 200
_EPOCH_NS = 1_700_000_000 * SECOND


class Violation(AssertionError):
    """A rule that the simulation holds the cores to was broken."""


class World:
    """An event queue in virtual time, in ns. `trace` has the last events, `faults` counts what was
    done to the processes by kind; `skew_ns` is what the wall clock has jumped by."""

    def __init__(self, seed: int, traced: int = TRACED) -> None:
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
        """Epoch ns, by a clock that is set now and then."""
        return _EPOCH_NS + self.now_ns + self.skew_ns

    def after(self, delay_ns: int, call: Callable[..., None], *arguments: Any) -> None:
        """Have `call(*arguments)` happen in so many ns."""
        entry = (self.now_ns + delay_ns, next(self._numbers), call, arguments)
        heapq.heappush(self._heap, entry)

    def note(self, *words: Any) -> None:
        """Put an event in the trace."""
        self.trace.append((self.now_ns, *words))

    def fault(self, kind: str, *words: Any) -> None:
        """Count a fault that is about to happen."""
        self.faults[kind] += 1
        self.note("FAULT", kind, *words)

    def run(self, until_ns: int, over: Callable[[], bool] = lambda: False) -> None:
        """Let events happen up to a time, or until it is `over`."""
        heap = self._heap
        while heap and heap[0][0] <= until_ns and not over():
            self.now_ns, _, call, arguments = heapq.heappop(heap)
            self.events += 1
            call(*arguments)
        if not over():
            self.now_ns = max(self.now_ns, until_ns)

    @property
    def busy(self) -> bool:
        """Whether something else happens at this moment."""
        return bool(self._heap) and self._heap[0][0] <= self.now_ns

    def between(self, least: int, most: int) -> int:
        """A number of this range, where small ones are as likely as large ones."""
        return int(least * (most / least) ** self.random.random())

    def chance(self, probability: float) -> bool:
        """Whether something happens that is so likely."""
        return self.random.random() < probability

    def new_pid(self, reuse: bool = False) -> int:
        """A pid: one that a dead process had, where that is asked for and there is one."""
        if reuse and self._free_pids:
            return self._free_pids.pop(0)
        return next(self._pids)

    def free_pid(self, pid: int) -> None:
        """Everybody has been told that this process is gone: the kernel may give its pid again."""
        self._free_pids.append(pid)

    def report(self) -> str:
        """The last events, one a line."""
        return "\n".join(
            f"{(at - 1_000 * SECOND) / MS:12.4f} ms  " + " ".join(map(str, words))
            for at, *words in self.trace
        )


class Process:
    """A process, alive until it is killed: between any two events."""

    def __init__(self, world: World, title: str, pid: int = 0) -> None:
        self.world = world
        self.pid = pid or world.new_pid()
        self.title = f"{title}({self.pid})"
        self._alive = True

    def __repr__(self) -> str:
        return self.title

    @property
    def alive(self) -> bool:
        """Whether it does and hears anything."""
        return self._alive

    @property
    def address(self) -> Any:
        return self.pid

    def die(self) -> None:
        """It is gone: it does nothing more, and hears nothing."""
        self._alive = False


class Link:
    """One direction of a connection: in order, with any delay. What was sent before its sender died
    arrives; `deliver` takes several messages at a time where they have come together, and those of
    a frame at once."""

    def __init__(self, world: World, target: Process, deliver: Callable[[list[Any]], None]) -> None:
        self.target = target
        self.closed = False
        self._world = world
        self._deliver = deliver
        self._frames: deque[tuple[Any, ...]] = deque()
        self._waking = False
        self._stalled_until_ns = 0

    @property
    def connected(self) -> bool:
        """Whether what is sent now can arrive."""
        return self.target.alive and not self.closed

    @property
    def pending(self) -> bool:
        """Whether something is on its way."""
        return self.connected and bool(self._frames)

    def post(self, *messages: Any) -> None:
        """Send messages as one frame: they arrive together."""
        self._frames.append(messages)
        if not self._waking:
            self._waking = True
            self._world.after(self._world.between(5 * US, 200 * US), self._arrive)

    def stall(self, ns: int) -> None:
        """Its buffers are full: nothing arrives for a while."""
        self._stalled_until_ns = self._world.now_ns + ns

    def close(self) -> None:
        """Nothing arrives any more, of what was sent or will be."""
        self.closed = True
        self._frames.clear()

    def sent(self) -> list[Any]:
        """Take what has been sent, as who looks into its buffers does."""
        frames, self._frames = self._frames, deque()
        return [message for frame in frames for message in frame]

    def drain(self) -> None:
        """Deliver what has been sent, now."""
        while self._frames and self.connected:
            self._deliver([*self._frames.popleft()])

    def _arrive(self) -> None:
        world, frames = self._world, self._frames
        self._waking = False
        if not self.connected:
            frames.clear()
            return
        wait_ns = self._stalled_until_ns - world.now_ns
        if wait_ns <= 0:
            count = len(frames)
            if count > 1 and world.chance(0.3):
                count = world.random.randint(1, count)
            taken = [message for _ in range(count) for message in frames.popleft()]
            if taken:
                self._deliver(taken)
            wait_ns = world.between(5 * US, 100 * US)
        if frames and not self._waking:
            self._waking = True
            world.after(wait_ns, self._arrive)
