"""Links to schedulers: one socket each, whose queued messages leave at `flush` as one frame."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shmserve.errors import Unavailable
from shmserve.ipc.messages.inference import Cancel, Credit, Release, ReportStatistics, Submit
from shmserve.ipc.transport.dealer import Dealer

Message = Submit | Cancel | Credit | Release | ReportStatistics

_MOST_UNSENT = 1 << 19  # bytes of requests; more leave at once: a frame has its bounds as well
_MOST_TOGETHER = 1 << 14  # messages


def _nothing() -> None:
    """Leave it to the owner to flush."""


@dataclass(eq=False)
class LinkTable:
    """Dealers by endpoint and by descriptor.

    Attributes:
        _identity: Names this end of every link.
        _watch: Called with a descriptor that is to be waited for.
        _unwatch: Called with a descriptor that is about to be closed.
        _on_queued: Called when the first message after a flush was queued.
        _on_held: Called when a message was queued that may wait for others.
        unsent: The number of messages that are queued and do not wait for others.
    """

    _identity: str
    _watch: Callable[[int], None]
    _unwatch: Callable[[int], None]
    _on_queued: Callable[[], None] = _nothing
    _on_held: Callable[[], None] = _nothing
    _by_endpoint: dict[str, Dealer] = field(default_factory=dict)
    _by_fd: dict[int, Dealer] = field(default_factory=dict)
    pending: list[Dealer] = field(default_factory=list)  # with something to flush
    unsent: int = 0
    _unsent_bytes: int = 0

    def __iter__(self) -> Iterator[Dealer]:
        return iter(self._by_endpoint.values())

    def by_fd(self, fd: int) -> Dealer | None:
        """Return the link with this descriptor."""
        return self._by_fd.get(fd)

    def open(self, endpoint: str) -> Dealer:
        """Return the link to a scheduler, and make it if there is none.

        Raises:
            Unavailable: The process has no descriptor left for it.
        """
        return self._by_endpoint.get(endpoint) or self.keep(self.connect(endpoint))

    def connect(self, endpoint: str) -> Dealer:
        """Make a link that is not in the table yet, see `keep`. Raises what `open` does."""
        try:
            return Dealer(endpoint, self._identity)
        except OSError as error:
            raise Unavailable(f"no link to a scheduler can be made: {error.strerror}") from error

    def keep(self, link: Dealer) -> Dealer:
        """Make a link the one to its endpoint from now on."""
        self._by_endpoint[link.endpoint] = link
        self._by_fd[link.fd] = link
        self._watch(link.fd)
        return link

    def queue(self, endpoint: str, message: Message, byte_size: int = 0) -> None:
        """Send a message at the next `flush`, or now with what waits if it is much.

        Args:
            endpoint: The endpoint of the scheduler.
            message: The message.
            byte_size: Its size, about.

        Raises:
            Unavailable: As `open` does.
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

    def tell(self, endpoint: str, message: Message) -> None:
        """Queue a message for a scheduler; nothing if there is no link to it."""
        if endpoint in self._by_endpoint:
            self.queue(endpoint, message)

    def hold(self, endpoint: str, message: Message) -> None:
        """As `tell`, but the message may wait for others to the same scheduler."""
        link = self._by_endpoint.get(endpoint)
        if link is not None:
            link.post(message)
            if link not in self.pending:
                self.pending.append(link)
            self._on_held()

    def flush(self) -> None:
        """Send what is queued."""
        pending, self.pending = self.pending, []
        self.unsent = self._unsent_bytes = 0
        for link in pending:
            link.flush()

    def lose(self, endpoint: str, take: Callable[[str, Any], None]) -> None:
        """Close the link to a scheduler that has ended.

        Args:
            endpoint: The endpoint of the scheduler.
            take: Called with the endpoint and each message that the scheduler sent last.
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
        """Close a link, for another one to its endpoint or for none."""
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
