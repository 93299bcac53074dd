"""Reports of a model's own metrics, and when an instance makes them.

Before the response in which they changed: who has a response sees what it counted. Between batches,
because a model may have threads of its own, but not for each change. And with a change while the
model executes, because it may look at the metrics page itself: some at once, and then no more than
are sent between batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shmserve.ipc.messages.inference import MetricsReported
from shmserve.workers.links.scheduler import InstanceLink, Timer

_PAUSE_S = 0.1
_SOON_NS = 1_000_000
_AT_ONCE = 100


class MetricsReports:
    """`changes` gives all families if anything changed since it was last called, else None.
    `timer`: when what the collector has ended is told, through `scheduler`."""

    def __init__(
        self, changes: Callable[[], list[list[Any]] | None], scheduler: InstanceLink
    ) -> None:
        self._changes = changes
        self._scheduler = scheduler
        self._last: MetricsReported | None = None
        self._again_s = 0.0
        self._left, self._counted_s = float(_AT_ONCE), 0.0  # reports that may be sent at once; when
        self.timer = Timer(_SOON_NS, self._send)

    def changed(self, at_once: bool) -> None:
        """Something changed that was not reported; in any thread. Not `at_once`: at any moment."""
        if at_once:
            self._send()
        else:
            self.timer.start()

    def _send(self) -> None:
        now = time.monotonic()
        self._left = min(_AT_ONCE, self._left + (now - self._counted_s) / _PAUSE_S)
        self._counted_s = now
        if self._left < 1:
            return
        with self._scheduler.lock:
            if self.before_responses(self._scheduler):
                self._left -= 1
                self._scheduler.flush()

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
