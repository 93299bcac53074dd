"""Batchers on a simulated model and load, in virtual time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shmserve.scheduler.batchers import Batch, Batcher, CloseReason, WaitUntil
from shmserve.scheduler.requests.scheduled import NEVER

MS = 1_000_000


@dataclass(slots=True, eq=False)
class Item:
    """A request of one row."""

    enqueued_ns: int
    rows: int = 1
    shape_key: bytes = b""
    flush_by_ns: int = NEVER


@dataclass(slots=True)
class Run:
    """The result of a simulation: latencies and duration (ns), batch sizes, reasons of closing."""

    latencies: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    reasons: list[CloseReason] = field(default_factory=list)
    ended_ns: int = 0

    @property
    def per_second(self) -> float:
        return len(self.latencies) / (self.ended_ns / 1e9)

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the latencies after the first tenth, for learning."""
        steady = sorted(self.latencies[len(self.latencies) // 10 :])
        return steady[min(len(steady) - 1, int(len(steady) * percent / 100))] / MS


class Arriving:
    """A heap of arrival times; clients that wait for responses add their next arrivals."""

    def __init__(self) -> None:
        self.due: list[int] = []
        self._to_come = 0
        self._think: Callable[[], float] = float

    @classmethod
    def closed_loop(cls, clients: int, requests: int, think_ns: Callable[[], float]) -> Arriving:
        """Return a load of clients with one request at a time and a pause after each response."""
        load = cls()
        load._think, load._to_come = think_ns, requests
        load.responses_returned(1, clients)
        return load

    @classmethod
    def open_loop(cls, per_second: float, requests: int, seed: int = 1) -> Arriving:
        """Return a load of requests that arrive as a Poisson process."""
        load, gaps, arrival_ns = cls(), random.Random(seed), 1.0
        for _ in range(requests):
            arrival_ns += gaps.expovariate(per_second) * 1e9
            load.due.append(int(arrival_ns))
        return load

    def responses_returned(self, now_ns: int, count: int) -> None:
        """Schedule the next requests of clients that have received their responses."""
        for _ in range(min(count, self._to_come)):
            heapq.heappush(self.due, int(now_ns + self._think()))
            self._to_come -= 1


class Simulation:
    """`instances` that take `time_ns(size, now_ns)` for a batch, fed by `batcher`."""

    def __init__(
        self, batcher: Batcher, time_ns: Callable[[int, int], float], instances: int = 1
    ) -> None:
        self._batcher = batcher
        self._time_ns = time_ns
        self._free = instances
        self._queue: deque[Item] = deque()
        self._events: list[tuple[int, int, tuple[int, list[Item]] | None]] = []  # None: wake up
        self._order = itertools.count()
        self._now = 1
        self._waiting_count = 0
        self._run = Run()

    def closed_loop(self, clients: int, requests: int, think_ns: Callable[[], float]) -> Run:
        return self.run(Arriving.closed_loop(clients, requests, think_ns))

    def open_loop(self, per_second: float, requests: int, seed: int = 1) -> Run:
        return self.run(Arriving.open_loop(per_second, requests, seed))

    def run(self, load: Arriving) -> Run:
        while load.due or self._events:
            self._now = min([*load.due[:1], *(ns for ns, *_ in self._events[:1])])
            while load.due and load.due[0] == self._now:
                heapq.heappop(load.due)
                self._arrive()
            while self._events and self._events[0][0] == self._now:
                _, _, started_batch = heapq.heappop(self._events)
                if started_batch is not None:
                    self._finish(*started_batch)
                    load.responses_returned(self._now, len(started_batch[1]))
            self._plan()
        assert not self._queue
        self._run.ended_ns = self._now
        return self._run

    def _at(self, ns: float, started_batch: tuple[int, list[Item]] | None) -> None:
        heapq.heappush(self._events, (int(ns), next(self._order), started_batch))

    def _arrive(self) -> None:
        self._queue.append(Item(self._now))
        self._waiting_count += 1
        self._batcher.record_arrival(self._now, self._waiting_count)

    def _plan(self) -> None:
        while self._free and self._queue:
            match self._batcher.decide(self._now, self._queue, 0):
                case Batch(count=count, reason=reason):
                    batch = [self._queue.popleft() for _ in range(count)]
                    self._free -= 1
                    self._run.sizes.append(count)
                    self._run.reasons.append(reason)
                    self._at(self._now + self._time_ns(count, self._now), (self._now, batch))
                case WaitUntil(end_ns=ns):
                    assert ns > self._now
                    self._at(ns, None)
                    return
                case None:
                    raise AssertionError("there are requests")

    def _finish(self, began_ns: int, batch: list[Item]) -> None:
        self._free += 1
        self._waiting_count -= len(batch)
        delays = [self._now - item.enqueued_ns for item in batch]
        self._run.latencies += delays
        duration_ns = self._now - began_ns
        self._batcher.record_batch(self._now, self._waiting_count, len(batch), duration_ns, delays)


def fixed_run(size: int, wait_ns: int, time_ns: Callable[[int, int], float], load: Arriving) -> Run:
    """Return quickly what a `Simulation` of this `DynamicBatcher` with one instance returns."""
    run, free_ns = Run(), 0
    waiting: deque[int] = deque()
    due = load.due
    while due or waiting:
        if not waiting:
            waiting.append(heapq.heappop(due))
        start_ns, flush_ns = max(free_ns, waiting[0]), waiting[0] + wait_ns
        while due and len(waiting) < size and due[0] <= max(start_ns, flush_ns):
            waiting.append(heapq.heappop(due))
        start_ns = max(start_ns, flush_ns if len(waiting) < size else waiting[size - 1])
        while due and due[0] <= start_ns:
            waiting.append(heapq.heappop(due))
        count = min(size, len(waiting))
        free_ns = start_ns + int(time_ns(count, start_ns))
        run.sizes.append(count)
        for _ in range(count):
            run.latencies.append(free_ns - waiting.popleft())
        load.responses_returned(free_ns, count)
    run.ended_ns = free_ns
    return run


def linear(
    setup_ms: float, each_ms: float, noise: float = 0.0, seed: int = 1
) -> Callable[[int, int], float]:
    """Return a model of `setup_ms + each_ms * size`, plus up to `noise` times that."""
    rng = random.Random(seed)
    return lambda size, _: (setup_ms + each_ms * size) * MS * (1 + noise * rng.random() ** 2)


def uniform_pauses(ms: float, seed: int = 2) -> Callable[[], float]:
    """Return a distribution of pauses between half and one and a half of `ms`."""
    rng = random.Random(seed)
    return lambda: ms * MS * (0.5 + rng.random())


def exponential_pauses(ms: float, seed: int = 3) -> Callable[[], float]:
    """Return a distribution of pauses with this mean, many short ones and some long ones."""
    rng = random.Random(seed)
    return lambda: rng.expovariate(1 / ms) * MS
