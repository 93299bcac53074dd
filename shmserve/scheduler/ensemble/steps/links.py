"""An ensemble's links to the schedulers of its steps: those of this process are called, others have
sockets."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shmserve.errors import Unavailable
from shmserve.ipc.link_table import LinkTable
from shmserve.ipc.messages.inference import Cancel, Credit, Release, Submit
from shmserve.ipc.tensors.inference import byte_size_of
from shmserve.scheduler.hosting.event_loop import InProcessLinks, Waiter

_MOST_MOVED = 256


@dataclass(eq=False)
class StepSchedulers:
    """The links by endpoint; `waiter` watches the sockets while they live. `identity` is the
    ensemble's among its `neighbours`; `take(endpoint, message)` gets what schedulers send."""

    _waiter: Waiter
    _neighbours: InProcessLinks
    _identity: bytes
    _take: Callable[[str, Any], None]
    # Endpoint of one that was lost -> who took its place.
    _moved: dict[str, str] = field(default_factory=dict)

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

    def submit(self, endpoint: str, message: Submit) -> None:
        """Queue a request for a scheduler. Raises Unavailable when no link to it can be made."""
        if not self._neighbours.post(endpoint, self._identity, message):
            self._links.queue(self._links.open(endpoint), message, byte_size_of(message.data))

    def tell(self, endpoint: str, message: Cancel | Credit | Release) -> None:
        """Queue a message for a scheduler, or for who has taken its place."""
        now = self._moved.get(endpoint, endpoint)
        if self._neighbours.post(now, self._identity, message):
            return
        if now != endpoint:  # perhaps out of this process, and nothing was submitted there since
            with contextlib.suppress(Unavailable):
                self._links.open(now)
        self._links.tell(now, message)

    def lose(self, endpoint: str, successor: str) -> None:
        """The scheduler at `endpoint` is gone: what it sent last is taken."""
        for before in [old for old, now in self._moved.items() if now == endpoint]:
            del self._moved[before]
            if successor:
                self._moved[before] = successor
        if successor:
            self._moved[endpoint] = successor
            if len(self._moved) > _MOST_MOVED:  # nothing that was lent is as old
                del self._moved[next(iter(self._moved))]
        self._links.lose(endpoint, successor, partial(self._take, endpoint))

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
