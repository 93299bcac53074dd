"""When a model needs another instance, and when it can spare one: decided from what its scheduler
has counted (pure).

One more, where requests wait too long: where whoever comes now would, for two looks in a row, or
where those that were served have, by their mean: waits in a queue are about exponential, so that
their p99 is ln 100 times the mean (L. Kleinrock, "Queueing Systems", vol. 1, 1975). Not while what
waits will be gone within a second.

One less, where for twenty seconds nobody waited too long, and the others would have been at work
for 60 % of the time at most, in each half second. One that is missed soon after doubles these
twenty seconds: what comes again and again, each minute, say, is expected then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple, Self

LOOK_EVERY_S = 0.1
_LATE_LOOKS = 2
_CATCH_UP_S = 1.0
_SERVED_S = 5.0  # of what was served, for the mean of its waits
_ENOUGH = 20  # requests for a mean
_TAIL = math.log(100)  # the p99 of an exponential distribution, in means
_IDLE_S = 20.0
_AT_WORK_S = 0.5  # for the mean of busy instances
_STEP_S = 2.0  # between one that is spared and the next
_FITS = 0.6
_SOON = 3.0  # as long as was waited before one was spared
_LONGEST_IDLE_S = 320.0
_LEAST_ALLOWED = 0.25  # of the target, where an execution takes nearly all of it


class LoadSample(NamedTuple):
    """What a scheduler has counted at a time (monotonic, seconds): requests that were executed and
    those of them that succeeded, executions, and the seconds that all of these took and waited;
    requests in its queue now, and its instances that are there and at work."""

    at_s: float
    executed: int
    succeeded: int
    waited_s: float
    executions: int
    took_s: float
    pending: int
    ready: int
    busy: int

    @classmethod
    def of(cls, statistics: Mapping[str, Any], at_s: float, decoupled: bool = False) -> Self:
        """Of a `StatisticsSnapshot`. An instance of a `decoupled` model is at work as long as it
        has a request that is open."""
        instances, compute = statistics["instances"], statistics["compute_seconds"]
        ready = instances["idle"] + instances["busy"]
        succeeded = statistics["success"] - statistics["cache_hit"]
        return cls(
            at_s=at_s,
            executed=succeeded + statistics["failures"]["BACKEND"],
            succeeded=succeeded,
            waited_s=statistics["queue_ns"] / 1e9,
            executions=compute["count"],
            took_s=compute["sum"],
            pending=statistics["pending"],
            ready=ready,
            busy=min(ready, statistics["executing"]) if decoupled else instances["busy"],
        )


class Change(NamedTuple):
    """The number of instances that there should be, and why."""

    total: int
    because: str


@dataclass(slots=True, eq=False)
class Sizing:
    """How many instances a model needs, from `least` to `most`. A request may wait until it misses
    `target_s`, its execution included; without one (0) for `delay_s` on average, or for as long as
    an execution takes, where that is longer: so long it waits for one that has begun."""

    least: int
    most: int
    target_s: float = 0.0
    delay_s: float = 0.0
    _loads: deque[LoadSample] = field(init=False, default_factory=deque)
    _changed_s: float = field(init=False, default=-math.inf)
    _crowded_s: float = field(init=False, default=-math.inf)  # when requests waited too long last
    _fresh_s: float = field(init=False, default=-math.inf)  # what was served since then counts
    _moved_s: float = field(init=False, default=math.inf)  # when something was done last
    _late: int = field(init=False, default=0)  # looks in a row
    _request_s: float = field(init=False, default=0.0)  # of an instance's time, that one takes
    _execution_s: float = field(init=False, default=0.0)
    _idle_s: float = field(init=False, default=_IDLE_S)
    _spared_s: float = field(init=False, default=-math.inf)

    def look(self, load: LoadSample, count: int) -> Change | None:
        """What is to change of the `count` instances that there are; None: nothing."""
        self._learn(load)
        if count < self.least:
            return Change(count + 1, f"at least {self.least}")
        if count > self.most:
            return Change(count - 1, f"at most {self.most}")
        wait = self._too_long(load)
        if not wait:
            self._late = 0
            return self._spare(load, count)
        self._crowded_s, self._late = load.at_s, self._late + 1
        if self._late < _LATE_LOOKS or count == self.most or self._catching_up(load):
            return None
        return Change(count + 1, wait)

    def changed(self, at_s: float, before: int, after: int) -> None:
        """There are so many now."""
        if after < before:
            self._spared_s = at_s
        else:
            if at_s - self._spared_s < _SOON * self._idle_s:
                self._idle_s = min(2 * self._idle_s, _LONGEST_IDLE_S)
            self._spared_s, self._crowded_s = -math.inf, at_s
        self._late = 0
        self._fresh_s = self._changed_s = at_s

    def _learn(self, load: LoadSample) -> None:
        loads = self._loads
        last = loads[-1] if loads else load
        if load.executions < last.executions or load.executed < last.executed:
            loads.clear()  # another scheduler counts anew
            last = load
        loads.append(load)
        while load.at_s - loads[0].at_s > self._idle_s:
            loads.popleft()
        executions, executed = load.executions - last.executions, load.executed - last.executed
        took_s = load.took_s - last.took_s
        if executions and executed:
            # The last sixteen count for most.
            gain = max(1 / 16, min(1.0, executions / 16)) if self._execution_s else 1.0
            self._request_s += (took_s / executed - self._request_s) * gain
            self._execution_s += (took_s / executions - self._execution_s) * gain
        if executions or not last.pending:
            self._moved_s = load.at_s

    @property
    def _allowed_s(self) -> float:
        """The wait that is allowed, on average."""
        if self.target_s:
            left_s = max(self.target_s - self._execution_s, _LEAST_ALLOWED * self.target_s)
            return left_s / _TAIL
        return max(self.delay_s, self._execution_s)

    def _too_long(self, load: LoadSample) -> str:
        """How long requests wait, where that is too long."""
        allowed_s = self._allowed_s
        if not allowed_s:
            return ""  # nothing has been executed yet
        if load.pending and load.ready and load.busy == load.ready:
            coming_s = load.pending * self._request_s / load.ready
            coming_s = max(coming_s, load.at_s - self._moved_s)
            if coming_s > _TAIL * allowed_s:
                self._fresh_s = load.at_s
                return f"requests wait {_ms(coming_s)}, {_ms(_TAIL * allowed_s)} are allowed"
        first_s = max(load.at_s - _SERVED_S, self._fresh_s)
        first = next((each for each in self._loads if each.at_s >= first_s), load)
        count = load.succeeded - first.succeeded
        mean_s = (load.waited_s - first.waited_s) / count if count >= _ENOUGH else 0.0
        if mean_s <= allowed_s:
            return ""
        return f"requests wait {_ms(mean_s)} on average, {_ms(allowed_s)} are allowed"

    def _catching_up(self, load: LoadSample) -> bool:
        """Whether what waits will be gone soon."""
        before = self._loads[-min(4, len(self._loads))]
        passed_s, fewer = load.at_s - before.at_s, before.pending - load.pending
        return fewer > 0 and load.pending / fewer * passed_s < _CATCH_UP_S

    def _spare(self, load: LoadSample, count: int) -> Change | None:
        at_s, first_s = load.at_s, self._loads[0].at_s
        quiet_s = at_s - max(self._crowded_s, first_s)
        if count == self.least or at_s - self._changed_s < _STEP_S or quiet_s < 0.95 * self._idle_s:
            return None
        busy = self._busiest()
        if busy > _FITS * (count - 1):
            return None
        return Change(count - 1, f"no more than {busy:.1f} were busy for {self._idle_s:g} s")

    def _busiest(self) -> float:
        """The most instances that were at work on average of a part of the last looks."""
        busy, looks = [each.busy for each in self._loads], round(_AT_WORK_S / LOOK_EVERY_S)
        ends = range(looks, len(busy) + 1, looks)
        return max((fmean(busy[end - looks : end]) for end in ends), default=math.inf)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
