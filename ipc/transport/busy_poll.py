"""Adaptive busy-polling: whether to spin before sleeping (pure).

A sleep and a wake-up cost as much as a small execution, and more on an idle core, which must also
be woken. If requests have recently arrived one at a time and within a moment, schedulers and
workers spin for that moment. Otherwise they sleep at once.
"""

from __future__ import annotations

import os

SPIN_NS = 400_000
_LONG_NS = 4 * SPIN_NS  # longer waits count as this
_FEW = 1.5  # concurrent requests; above this number the cores have other work


class BusyPoll:
    """The estimate of one process.

    `cores` is the number of usable cores, by default the kernel's.
    """

    def __init__(self, cores: int = 0) -> None:
        self._allowed = (cores or len(os.sched_getaffinity(0))) > 1
        # The mean wait while no request is in flight, and while some are.
        self._mean_ns = [2.0 * SPIN_NS, 2.0 * SPIN_NS]
        self._most = 0.0  # recent number of concurrent requests

    def worth(self, requests: int) -> bool:
        """Check whether to spin while this number of requests is in flight."""
        if self._most > _FEW or not self._allowed:
            return False
        return self._mean_ns[requests > 0] < SPIN_NS

    def observe(self, requests: int, waited_ns: int) -> None:
        """Record the time until there was work."""
        busy = requests > 0
        self._most -= 1 / 32
        if requests > self._most:
            self._most = requests
        if waited_ns > _LONG_NS:
            waited_ns = _LONG_NS
        self._mean_ns[busy] += (waited_ns - self._mean_ns[busy]) / 8
