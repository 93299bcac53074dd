"""Links to schedulers: one socket each, whose queued messages leave at `flush` as one frame."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shmserve.errors import Unavailable
from shmserve.ipc.messages.inference import Cancel, Credit, Release, Submit
from shmserve.ipc.transport.dealer import Dealer

Message = Submit | Cancel | Credit | Release

_MOST_UNSENT = 1 << 19  # bytes of requests; more leave at once: a frame has its bounds as well
_MOST_TOGETHER = 1 << 14  # messages


@dataclass(eq=False)
class LinkTable:
    """Dealers by endpoint and by descriptor, all with one `identity`. `watch(fd)` hears of a
    descriptor to wait for, `unwatch(fd)` that it is about to go."""

    _identity: str
    _watch: Callable[[int], None]
    _unwatch: Callable[[int], None]
    _by_endpoint: dict[str, Dealer] = field(default_factory=dict)
    _by_fd: dict[int, Dealer] = field(default_factory=dict)
    pending: list[Dealer] = field(default_factory=list)  # with something to flush
    unsent: int = 0  # messages that are queued
    _unsent_bytes: int = 0

    def __iter__(self) -> Iterator[Dealer]:
        return iter(self._by_endpoint.values())

    def get(self, endpoint: str) -> Dealer | None:
        """The link to a scheduler, if there is one."""
        return self._by_endpoint.get(endpoint)

    def by_fd(self, fd: int) -> Dealer | None:
        """The link with this descriptor."""
        return self._by_fd.get(fd)

    def open(self, endpoint: str) -> Dealer:
        """The link to a scheduler, made when it is needed. Raises Unavailable when the process has
        no descriptor left for it."""
        try:
            return self._by_endpoint.get(endpoint) or self.keep(self.connect(endpoint))
        except OSError as error:
            raise Unavailable(f"no link to a scheduler can be made: {error.strerror}") from error

    def connect(self, endpoint: str) -> Dealer:
        """A link that is not among these yet; see `keep`. Raises OSError without a descriptor."""
        return Dealer(endpoint, self._identity)

    def keep(self, link: Dealer) -> Dealer:
        """Register a link as the one to its endpoint from now on."""
        self._by_endpoint[link.endpoint] = link
        self._by_fd[link.fd] = link
        self._watch(link.fd)
        return link

    def queue(self, link: Dealer, message: Message, byte_size: int = 0) -> None:
        """Send a message at the next `flush`, or now with what waits if it is much."""
        link.post(message)
        self.unsent += 1
        self._unsent_bytes += byte_size
        if link not in self.pending:
            self.pending.append(link)
        if self.unsent >= _MOST_TOGETHER or self._unsent_bytes > _MOST_UNSENT:
            self.flush()

    def tell(self, endpoint: str, message: Message) -> None:
        """Queue a message for a scheduler, if there is a link to it."""
        link = self._by_endpoint.get(endpoint)
        if link is not None:
            self.queue(link, message)

    def flush(self) -> None:
        """Send what is queued."""
        pending, self.pending = self.pending, []
        self.unsent = self._unsent_bytes = 0
        for link in pending:
            link.flush()

    def lose(self, endpoint: str, successor: str, take: Callable[[Any], None]) -> None:
        """The scheduler at `endpoint` is gone: `take` gets each message that it sent last, and what
        that tells it goes to the successor, if there is one."""
        link = self._by_endpoint.pop(endpoint, None)
        if link is None:
            return
        if successor:
            with contextlib.suppress(Unavailable):
                self._by_endpoint[endpoint] = self.open(successor)
        while link.connected and link.wait(0):
            for message in link.receive():
                take(message)
        self._by_endpoint.pop(endpoint, None)
        self.flush()
        self._close(link)

    def drop(self, link: Dealer) -> None:
        """Close a link, for another one to its endpoint."""
        del self._by_endpoint[link.endpoint]
        self._close(link)

    def _close(self, link: Dealer) -> None:
        if link in self.pending:
            self.pending.remove(link)
        del self._by_fd[link.fd]
        self._unwatch(link.fd)
        link.close()

    def close_all(self) -> None:
        """Close every link."""
        for link in self._by_endpoint.values():
            self._close(link)
        self._by_endpoint.clear()
