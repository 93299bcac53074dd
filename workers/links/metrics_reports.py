"""Reports of a model's own metrics, and when an instance makes them.

Before the response in which they changed: who has a response sees what it counted. And between
batches, because a model may have threads of its own, but not for each change.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shmserve.ipc.messages.inference import MetricsReported
from shmserve.workers.links.scheduler import InstanceLink

_PAUSE_S = 0.1


class MetricsReports:
    """`changes` gives all families if anything changed since it was last called, else None."""

    def __init__(self, changes: Callable[[], list[list[Any]] | None]) -> None:
        self._changes = changes
        self._last: MetricsReported | None = None
        self._again_s = 0.0

    def attach(self, scheduler: InstanceLink) -> None:
        """A scheduler that knows nothing yet: queue all that there is."""
        with scheduler.lock:
            if not self.before_responses(scheduler) and self._last is not None:
                scheduler.post(self._last)

    def before_responses(self, scheduler: InstanceLink) -> bool:
        """Queue what changed, if anything did; with the link's lock held where others may send."""
        families = self._changes()
        if families is not None:
            self._last = MetricsReported(families)
            scheduler.post(self._last)
        return families is not None

    def between_batches(self, scheduler: InstanceLink) -> float | None:
        """Send what changed, unless that was done just now; how long to wait for it then."""
        now = time.monotonic()
        if now < self._again_s:
            return self._again_s - now
        with scheduler.lock:
            if not self.before_responses(scheduler):
                return None
            scheduler.flush()
        self._again_s = now + _PAUSE_S
        return _PAUSE_S
