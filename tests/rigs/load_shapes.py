"""A load of a given shape for a model whose instances are scaled: a queue in virtual time, counted
as by a scheduler, and the latency of each request.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from shmserve.supervisor.models.autoscaler import SAMPLE_EVERY_S, LoadSample, ScalingPolicy

_SAME_RATE_S = 0.1
START_S = 0.1  # of an instance, from the fork to its first request

Shape = Callable[[float], float]


def steps(*parts: tuple[float, float]) -> Shape:
    """Return a load that repeats these (seconds, rate) steps."""
    total = sum(seconds for seconds, _ in parts)

    def rate(at_s: float) -> float:
        at_s %= total
        for seconds, shape in parts:
            if at_s < seconds:
                return shape
            at_s -= seconds
        return parts[-1][1]

    return rate


@dataclass
class Run:
    """The result of a load: changes of the instance count, arrivals and latencies (s)."""

    counts: list[tuple[float, int]]
    durations: list[tuple[float, float]] = field(default_factory=list)

    def p99_s(self, from_s: float, to_s: float) -> float:
        found = sorted(took_s for at_s, took_s in self.durations if from_s <= at_s < to_s)
        return found[math.ceil(0.99 * len(found)) - 1] if found else 0.0

    def count_at(self, at_s: float) -> int:
        return next(count for changed_at_s, count in reversed(self.counts) if changed_at_s <= at_s)

    def regrets(self, within_s: float) -> int:
        """Return how often an instance was removed and another one added soon after."""
        count_changes = [(b[0], b[1] - a[1]) for a, b in pairwise(self.counts)]
        return sum(a[1] < 0 < b[1] and b[0] - a[0] < within_s for a, b in pairwise(count_changes))


@dataclass
class Host:
    """The queue and instances of a model; `executions(random)` is an execution time (s)."""

    policy: ScalingPolicy
    executions: Callable[[Random], float]
    random: Random
    count: int = 1

    def run(self, shape: Shape, seconds: float) -> Run:
        run = Run([(0.0, self.count)])
        queue: deque[float] = deque()
        busy: list[tuple[float, float, float]] = []  # start of waiting, arrival, start of execution
        ready, starting = self.count, 0
        executed = 0
        queueing_s = execution_s = 0.0
        at_s = came_s = 0.0
        looks_s = changes = math.inf
        looks_s = SAMPLE_EVERY_S
        came_s = self._next(shape, 0.0)
        while (at_s := min(came_s, looks_s, changes, busy[0][0] if busy else math.inf)) < seconds:
            if busy and busy[0][0] == at_s:
                _, arrival_s, began_s = heapq.heappop(busy)
                run.durations.append((arrival_s, at_s - arrival_s))
                executed += 1
                queueing_s += began_s - arrival_s
                execution_s += at_s - began_s
            elif at_s == changes:
                ready, starting, changes = ready + 1, 0, math.inf
                self._change(run, at_s, +1)
            elif at_s == came_s:
                queue.append(at_s)
                came_s = self._next(shape, at_s)
            else:
                looks_s += SAMPLE_EVERY_S
                counts = executed, executed, queueing_s, executed, execution_s
                load = LoadSample(at_s, *counts, len(queue), ready, min(ready, len(busy)))
                change = self.policy.sample(load, self.count)
                if change is not None and not starting and change.instance_count > self.count:
                    starting, changes = 1, at_s + START_S
                elif change is not None and not starting:
                    ready -= 1
                    self._change(run, at_s, -1)
            while queue and len(busy) < ready:
                duration_s = self.executions(self.random)
                heapq.heappush(busy, (at_s + duration_s, queue.popleft(), at_s))
        return run

    def _change(self, run: Run, at_s: float, difference: int) -> None:
        self.policy.record_change(at_s, self.count, self.count + difference)
        self.count += difference
        run.counts.append((at_s, self.count))

    def _next(self, shape: Shape, at_s: float) -> float:
        """Return the time of the next arrival of a Poisson process whose rate may change."""
        while True:
            rate = shape(at_s)
            gap = self.random.expovariate(rate) if rate > 0 else math.inf
            if gap <= _SAME_RATE_S:
                return at_s + gap
            at_s += _SAME_RATE_S  # by then the rate may be another, and the past does not count
