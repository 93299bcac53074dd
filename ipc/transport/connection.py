"""A ZMTP connection over a unix socket with buffered output and a linger time."""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from shmserve.ipc.transport import zmtp

_CHUNK = 64 * 1024
PREFIX = "ipc://"


@dataclass(slots=True, eq=False)
class Connection:
    """A unix socket: whole frames are received, and bytes are sent as fast as the peer reads.

    `unsent` begins with the greeting.
    """

    sock: socket.socket
    poll: select.epoll
    unsent: bytearray
    decoder: zmtp.Decoder = field(default_factory=zmtp.Decoder)
    identity: bytes | None = None
    malformed: int = 0
    most_unsent: int = sys.maxsize  # a peer with more unread output is not read
    events: int = select.EPOLLIN

    def __post_init__(self) -> None:
        self.sock.setblocking(False)
        self.poll.register(self.sock, self.events)

    def send(self, data: bytes) -> None:
        """Send, or buffer what the peer does not read yet; raise OSError if the peer is gone."""
        if self.unsent:
            self.unsent += data
            self.push()
            return
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self.unsent += data[sent:]
            self._watch()

    def push(self) -> None:
        """Send more of the buffered output."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                with memoryview(self.unsent) as left:
                    sent = self.sock.send(left[:_CHUNK])
                del self.unsent[:sent]
        self._watch()

    def _watch(self) -> None:
        events = select.EPOLLIN if len(self.unsent) <= self.most_unsent else 0
        if self.unsent:
            events |= select.EPOLLOUT
        if events != self.events:
            self.events = events
            self.poll.modify(self.sock, events)

    def receive(self) -> list[bytes] | None:
        """Return the available frames after one bounded read.

        The result is None if the peer is gone or violates ZMTP.
        """
        try:
            data = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self.decoder.feed(data) if data else None

    def close(self) -> None:
        """Close the socket."""
        self.poll.unregister(self.sock)  # a process forked by a model may hold it open
        self.sock.close()


def linger(connections: Iterable[Connection], linger_s: float) -> None:
    """Send the unsent bytes of connections, for at most `linger_s` seconds in all."""
    end = time.monotonic() + linger_s
    for connection in connections:
        with contextlib.suppress(OSError):
            while connection.unsent and (left_s := end - time.monotonic()) > 0:
                writable = select.poll()
                writable.register(connection.sock, select.POLLOUT)
                writable.poll(left_s * 1000)
                connection.push()
