"""The log's lines of overload: how many requests a full queue refused, once a minute at most."""

from __future__ import annotations

import logging

from shmserve.scheduler.requests.request import NEVER

logger = logging.getLogger(__name__)

_EVERY_NS = 60_000_000_000


class OverloadLog:
    """The rate-limited lines of one model; times are monotonic ns."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._refused = 0
        self._due_ns = 0

    def refuse(self) -> None:
        """Count a request."""
        self._refused += 1

    def tick(self, now_ns: int) -> int:
        """Write what was counted, if that is due; returns when it will be (NEVER: nothing was)."""
        if not self._refused:
            return NEVER
        if now_ns < self._due_ns:
            return self._due_ns
        self._due_ns = now_ns + _EVERY_NS
        self.write()
        return NEVER

    def write(self) -> None:
        """Write what was counted."""
        if self._refused:
            logger.warning(
                "model '%s' is overloaded: its queue is full, and refused %d more requests",
                self._model,
                self._refused,
            )
            self._refused = 0
