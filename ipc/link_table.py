"""Links to schedulers, one socket each; `flush` sends a link's queued messages as one frame."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shmserve.errors import Unavailable
from shmserve.ipc.messages.inference import Cancel, Credit, Release, ReportStatistics, Submit
from shmserve.ipc.transport.dealer import Dealer

Message = Submit | Cancel | Credit | Release | ReportStatistics

# Above these limits, queued messages are sent at once, because the size of a frame is limited.
_MOST_UNSENT = 1 << 19  # bytes of requests
_MOST_TOGETHER = 1 << 14  # messages


def _nothing() -> None:
    """Do nothing: the owner of the table calls `flush`."""


@dataclass(eq=False)
class LinkTable:
    """A table of the links (dealers) to schedulers, by endpoint and by file descriptor.

    Attributes:
        _identity: The identity of this end of every link.
        _watch: Called with the descriptor of a new link.
        _unwatch: Called with a descriptor that is about to be closed.
        _on_queued: Called when the first message after a flush was queued.
        _on_deferred: Called when a message was queued that may be delayed.
        pending: The links with queued messages.
        unsent: The number of queued messages, without those that may be delayed.
    """

    _identity: str
    _watch: Callable[[int], None]
    _unwatch: Callable[[int], None]
    _on_queued: Callable[[], None] = _nothing
    _on_deferred: Callable[[], None] = _nothing
    _by_endpoint: dict[str, Dealer] = field(default_factory=dict)
    _by_fd: dict[int, Dealer] = field(default_factory=dict)
    pending: list[Dealer] = field(default_factory=list)
    unsent: int = 0
    _unsent_bytes: int = 0

    def __iter__(self) -> Iterator[Dealer]:
        return iter(self._by_endpoint.values())

    def by_fd(self, fd: int) -> Dealer | None:
        """Return the link with this descriptor."""
        return self._by_fd.get(fd)

    def open(self, endpoint: str) -> Dealer:
        """Return the link to a scheduler; open it if needed.

        Raises:
            Unavailable: The process is out of file descriptors.
        """
        return self._by_endpoint.get(endpoint) or self.keep(self.connect(endpoint))

    def connect(self, endpoint: str) -> Dealer:
        """Open a link without adding it to the table (see `keep`).

        Raises:
            Unavailable: The process is out of file descriptors.
        """
        try:
            return Dealer(endpoint, self._identity)
        except OSError as error:
            raise Unavailable(f"no link to a scheduler can be made: {error.strerror}") from error

    def keep(self, link: Dealer) -> Dealer:
        """Add a link to the table, and return it."""
        self._by_endpoint[link.endpoint] = link
        self._by_fd[link.fd] = link
        self._watch(link.fd)
        return link

    def queue(self, endpoint: str, message: Message, byte_size: int = 0) -> None:
        """Queue a message for the next `flush`. A large queue is flushed at once.

        Args:
            endpoint: The endpoint of the scheduler, to which a link is opened if needed.
            message: The message.
            byte_size: The approximate size of the message.

        Raises:
            Unavailable: The process is out of file descriptors.
        """
        try:
            link = self._by_endpoint[endpoint]
        except KeyError:
            link = self.open(endpoint)
        link.post(message)
        if link not in self.pending:
            self.pending.append(link)
        self.unsent += 1
        self._unsent_bytes += byte_size
        if self.unsent == 1:
            self._on_queued()
        if self.unsent >= _MOST_TOGETHER or self._unsent_bytes > _MOST_UNSENT:
            self.flush()

    def post(self, endpoint: str, message: Message) -> None:
        """Queue a message for a scheduler; do nothing if there is no link to it."""
        if endpoint in self._by_endpoint:
            self.queue(endpoint, message)

    def defer(self, endpoint: str, message: Message) -> None:
        """Queue a message that may be delayed until other messages go to the same scheduler."""
        link = self._by_endpoint.get(endpoint)
        if link is not None:
            link.post(message)
            if link not in self.pending:
                self.pending.append(link)
            self._on_deferred()

    def flush(self) -> None:
        """Send the queued messages."""
        pending, self.pending = self.pending, []
        self.unsent = self._unsent_bytes = 0
        for link in pending:
            link.flush()

    def drain(self, endpoint: str, take: Callable[[str, Any], None]) -> None:
        """Close the link to a scheduler that has exited.

        Args:
            endpoint: The endpoint of the scheduler.
            take: Called with the endpoint and each message that has not been received yet.
        """
        link = self._by_endpoint.get(endpoint)
        if link is None:
            return
        while link.connected and link.wait(0):
            for message in link.receive():
                take(endpoint, message)
        self.flush()
        self.drop(link)

    def drop(self, link: Dealer) -> None:
        """Close a link and remove it from the table."""
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
