"""An ensemble's links to the schedulers of its steps: those of this process are called, others have
sockets."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

from shmserve.ipc.link_table import LinkTable
from shmserve.ipc.messages.inference import Cancel, Credit, Release, Submit
from shmserve.scheduler.hosting.event_loop import InProcessLinks, Waiter


@dataclass(eq=False)
class StepSchedulers:
    """The links by endpoint (`Links` of ipc/scheduler_client.py).

    Attributes:
        _waiter: Watches the sockets while they live.
        _neighbours: The links between the schedulers of this process.
        _identity: Names the ensemble among its neighbours.
        _take: Called with the endpoint of a scheduler and each message that it sends.
    """

    _waiter: Waiter
    _neighbours: InProcessLinks
    _identity: bytes
    _take: Callable[[str, Any], None]

    def __post_init__(self) -> None:
        name = f"{os.getpid()}.{secrets.token_hex(8)}"
        self._links = LinkTable(name, self._watch, self._waiter.unwatch)
        self._neighbours.enter(self._identity, self._take)

    def _watch(self, fd: int) -> None:
        self._waiter.watch(fd, partial(self._receive, fd))

    def _receive(self, fd: int) -> None:
        link = self._links.by_fd(fd)
        assert link is not None
        for message in link.receive():
            self._take(link.endpoint, message)

    def open(self, endpoint: str) -> None:
        if not self._neighbours.has(endpoint):
            self._links.open(endpoint)

    def queue(self, endpoint: str, message: Submit, byte_size: int) -> None:
        if not self._neighbours.post(endpoint, self._identity, message):
            self._links.queue(endpoint, message, byte_size)

    def tell(self, endpoint: str, message: Cancel | Credit | Release) -> None:
        if not self._neighbours.post(endpoint, self._identity, message):
            self._links.tell(endpoint, message)

    hold = tell  # what is queued leaves with the turn

    def lose(self, endpoint: str, take: Callable[[str, Any], None]) -> None:
        self._links.lose(endpoint, take)

    @property
    def pending(self) -> Sized:
        """As `Outbox` says."""
        return self._links.pending

    def flush(self) -> None:
        """Send what is queued."""
        self._links.flush()

    def close(self, linger_s: float = 0.0) -> None:
        """Close every link."""
        self._neighbours.leave(self._identity)
        self._links.close_all()
