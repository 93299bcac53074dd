"""Adaptive busy-polling: whether to spin for a moment before sleeping (pure).

Falling asleep and being woken costs as much as a small execution, and more on a core that has
nothing else to do: it has to be woken, too. Where requests have lately come one at a time, and what
is waited for within a moment, schedulers and workers spend that moment awake; where nothing comes,
nothing is spent.
"""

from __future__ import annotations

import os

SPIN_NS = 400_000
_LONG_NS = 4 * SPIN_NS  # what is longer counts as this
_FEW = 1.5  # requests at a time; where there are more, the cores have better things to do


class BusyPoll:
    """The estimate of one process; `cores`: how many it may use, by default as the kernel says."""

    def __init__(self, cores: int = 0) -> None:
        self._allowed = (cores or len(os.sched_getaffinity(0))) > 1
        # The mean wait while no request is under way, and while some are.
        self._mean_ns = [2.0 * SPIN_NS, 2.0 * SPIN_NS]
        self._most = 0.0  # requests at a time, of late

    def worth(self, requests: int) -> bool:
        """Whether to stay awake while so many requests are under way."""
        if self._most > _FEW or not self._allowed:
            return False
        return self._mean_ns[requests > 0] < SPIN_NS

    def observe(self, requests: int, waited_ns: int) -> None:
        """Record how long it took until there was something to do."""
        busy = requests > 0
        self._most -= 1 / 32
        if requests > self._most:
            self._most = requests
        if waited_ns > _LONG_NS:
            waited_ns = _LONG_NS
        self._mean_ns[busy] += (waited_ns - self._mean_ns[busy]) / 8
