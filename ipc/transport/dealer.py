"""Dealers (ZeroMQ's DEALER): the connecting ends of links for typed messages, which never block.

A `LinkTable` has the dealers of a submitter, one for each scheduler. Its `flush` sends the queued
messages of a link as one frame.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shmserve.errors import Unavailable
from shmserve.ipc.transport import zmtp
from shmserve.ipc.transport.frames import MalformedMessage, pack, unpack
from shmserve.ipc.transport.zmtp import ENDPOINT_PREFIX, Connection, linger

logger = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S = 1.0
# Above these limits, queued messages are sent at once, because the size of a frame is limited.
_MAX_UNSENT_BYTES = 1 << 19  # bytes of queued requests
_MAX_UNSENT_MESSAGES = 1 << 14  # number of queued messages


class Dealer:
    """The connecting end of a link to a `Router`; `identity` names this end.

    A dealer sends before it receives the peer's greeting, so that messages sent just before its
    exit arrive. `Router` accepts this, whereas libzmq's does not. If no socket listens at
    `endpoint`, messages are lost; the supervisor handles exits and successors.
    """

    def __init__(self, endpoint: str, identity: str) -> None:
        self.endpoint = endpoint
        self.malformed_messages = 0
        self.pending: list[Any] = []
        # Queues a message for the next `flush`. Requests use this often, so it avoids another call.
        self.post: Callable[[Any], None] = self.pending.append
        self._poll = select.epoll()
        self.fd: int = self._poll.fileno()
        self._connection: Connection | None = None
        self.connected = False  # whether the other end is known to be connected
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(_CONNECT_TIMEOUT_S)
        try:
            sock.connect(endpoint.removeprefix(ENDPOINT_PREFIX))
        except OSError as error:
            logger.debug("no process listens at %s: %s", endpoint, error)
            sock.close()
            return
        greeting = bytearray(zmtp.GREETING + zmtp.ready_command("DEALER", identity.encode()))
        self._connection = Connection(sock, self._poll, greeting)
        self.connected = True
        with contextlib.suppress(OSError):
            self._connection.push()

    def flush(self) -> bool:
        """Send the queued messages as one frame.

        A message that cannot be packed raises an exception and is removed from the queue.

        Returns:
            False if the other end is gone.
        """
        pending = self.pending
        if not pending:
            return True
        messages = pending[:]
        pending.clear()
        return self._write(pack(messages))

    def send(self, message: Any) -> bool:
        """Call `post` and `flush`."""
        if self.pending:
            self.post(message)
            return self.flush()
        return self._write(pack((message,)))

    def _write(self, frame: bytes) -> bool:
        if self._connection is None:
            return False
        try:
            self._connection.send(frame)
        except OSError:
            # Messages that the peer sent before it closed are still read, and `receive` detects the
            # end of the connection.
            self._connection.unsent.clear()
            return False
        return True

    def receive(self) -> list[Any]:
        """Return the available messages, at most those of one bounded read."""
        connection = self._connection
        if connection is None:
            return []
        if connection.unsent:
            with contextlib.suppress(OSError):
                connection.push()
        frames = connection.receive()
        messages: list[Any] = []
        for frame in frames or ():
            try:
                messages += unpack(frame)
            except MalformedMessage as error:
                self.malformed_messages += 1
                logger.warning("dropped a malformed frame: %s", error)
        if frames is None or connection.decoder.violation:
            self._disconnect(connection)
        elif connection.decoder.dropped_messages:
            self.malformed_messages += connection.decoder.dropped_messages
            connection.decoder.dropped_messages = 0
        return messages

    def _disconnect(self, connection: Connection) -> None:
        connection.close()
        self._connection = None
        self.connected = False

    def wait(self, timeout_s: float | None) -> bool:
        """Block until a message is available (True) or the time has expired (False)."""
        return bool(self._poll.poll(timeout_s))

    def close(self, linger_s: float = 0.0) -> None:
        """Close the link.

        Output that the other end has not read after `linger_s` seconds is lost.
        """
        if self._connection is not None:
            linger([self._connection], linger_s)
            self._disconnect(self._connection)
        self._poll.close()


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
    _on_queued: Callable[[], None] = lambda: None  # The owner calls `flush`.
    _on_deferred: Callable[[], None] = lambda: None
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
        return self._by_endpoint.get(endpoint) or self.add(self.connect(endpoint))

    def connect(self, endpoint: str) -> Dealer:
        """Open a link without adding it to the table (see `add`).

        Raises:
            Unavailable: The process is out of file descriptors.
        """
        try:
            return Dealer(endpoint, self._identity)
        except OSError as error:
            raise Unavailable(f"cannot connect to a scheduler: {error.strerror}") from error

    def add(self, link: Dealer) -> Dealer:
        """Add a link to the table, and return it."""
        self._by_endpoint[link.endpoint] = link
        self._by_fd[link.fd] = link
        self._watch(link.fd)
        return link

    def queue(self, endpoint: str, message: Any, byte_size: int = 0) -> None:
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
        if self.unsent >= _MAX_UNSENT_MESSAGES or self._unsent_bytes > _MAX_UNSENT_BYTES:
            self.flush()

    def post(self, endpoint: str, message: Any) -> None:
        """Queue a message for a scheduler; do nothing if there is no link to it."""
        if endpoint in self._by_endpoint:
            self.queue(endpoint, message)

    def defer(self, endpoint: str, message: Any) -> None:
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

    def drain(self, endpoint: str, on_message: Callable[[str, Any], None]) -> None:
        """Close the link to a scheduler that has exited.

        Args:
            endpoint: The endpoint of the scheduler.
            on_message: Called with the endpoint and each message that has not been received yet.
        """
        link = self._by_endpoint.get(endpoint)
        if link is None:
            return
        while link.connected and link.wait(0):
            for message in link.receive():
                on_message(endpoint, message)
        self.flush()
        self.remove(link)

    def remove(self, link: Dealer) -> None:
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
