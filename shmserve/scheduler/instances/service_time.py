"""The recent service time: when to come back, when to start to be done in time (pure)."""

from __future__ import annotations

from dataclasses import dataclass

_NS_PER_S = 1_000_000_000
_FIRST_GUESS_NS = 10_000_000
_MARGIN_NS = 1_000_000  # timers and messages on the way
_LONGEST_RETRY_S = 60
_AHEAD_NS = 500_000  # of computation that may be at a worker
_DEEPEST = 4
_KNOWN = 16  # observations that say something about the next execution


@dataclass(slots=True, eq=False)
class ServiceTime:
    """Moving averages, as TCP keeps them of round trips (RFC 6298): mean and mean deviation."""

    _mean_ns: float = 0.0
    _deviation_ns: float = 0.0
    _busy_ns: float = 0.0
    _requests: float = 0.0
    _observed: int = 0
    # How many batches a worker may have at a time: more than one where they are so short that it
    # would otherwise wait for messages as long as it computes.
    pipeline_depth: int = 1
    # How long before a deadline an execution must start to be done in time.
    reserve_ns: int = _FIRST_GUESS_NS

    def observe(self, duration_ns: int, busy_ns: int, requests: int) -> None:
        """An execution of `requests` requests took this long, from dispatch to return, of which
        its worker was busy with it for `busy_ns`."""
        self._observed += 1
        if self._requests:
            self._busy_ns += (busy_ns - self._busy_ns) / 8
            error = duration_ns - self._mean_ns
            self._mean_ns += error / 8
            self._deviation_ns += (abs(error) - self._deviation_ns) / 4
            self._requests += (requests - self._requests) / 8
        else:
            self._mean_ns = duration_ns
            self._deviation_ns = duration_ns / 2
            self._requests = requests
            self._busy_ns = busy_ns
        self.reserve_ns = int(self._mean_ns + 4 * self._deviation_ns) + _MARGIN_NS
        if self._observed >= _KNOWN:
            self.pipeline_depth = max(1, min(_DEEPEST, int(_AHEAD_NS / (self._busy_ns + 1))))

    def drain_s(self, waiting: int, instances: int) -> int:
        """Whole seconds, at least 1, until `waiting` requests are through `instances` instances."""
        if not self._requests:
            return 1
        executions = waiting / self._requests / max(instances, 1)
        seconds = executions * self._mean_ns / _NS_PER_S
        return max(1, min(_LONGEST_RETRY_S, int(seconds + 0.999)))
