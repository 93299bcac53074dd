"""A closed loop over HTTP in one thread: several connections with one request in flight each."""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from bench.load.client import RequestFailed

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_TIMEOUT_S = 20.0


@dataclass
class _Connection:
    """A connection that sends the same request repeatedly."""

    socket: socket.socket
    request: bytes
    unsent: memoryview = field(init=False)
    received: bytes = b""
    started_at: float = 0.0

    def start_request(self) -> bool:
        """Start the next request; return whether bytes of it are left to send."""
        self.unsent, self.received = memoryview(self.request), b""
        self.started_at = time.perf_counter()
        return self.send()

    def send(self) -> bool:
        """Send as much as the socket accepts; return whether bytes are left."""
        self.unsent = self.unsent[self.socket.send(self.unsent) :]
        return len(self.unsent) > 0

    def receive(self) -> bool:
        """Read from the socket; return whether the response is complete."""
        chunk = self.socket.recv(1 << 16)
        self.received += chunk
        head, separator, body = self.received.partition(b"\r\n\r\n")
        if not chunk or (separator and b" 200 " not in head[:15]):
            raise RequestFailed(self.received[:600].decode(errors="replace") or "disconnected")
        if not separator:
            return False
        length = _LENGTH.search(head)
        return len(body) == int(length[1]) if length else body.endswith(b"0\r\n\r\n")


class Connections:
    """Open connections to a port, each of which sends its entry of `requests` repeatedly.

    Raises:
        OSError: The server cannot be reached.
    """

    def __init__(self, port: int, requests: Sequence[bytes]) -> None:
        self._poll = select.epoll()
        self._connections: dict[int, _Connection] = {}  # by descriptor
        try:
            for request in requests:
                sock = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S)
                self._connections[sock.fileno()] = _Connection(sock, request)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setblocking(False)
                self._poll.register(sock, select.EPOLLIN)
        except OSError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._poll.close()
        for connection in self._connections.values():
            connection.socket.close()

    def run(self, may_send: Callable[[int], bool]) -> list[float]:
        """Send requests while `may_send(COUNT)` is true, and receive all their responses.

        Args:
            may_send: Returns whether to send another request, given the number of requests sent.

        Returns:
            The seconds that each request took.

        Raises:
            RequestFailed: A response is not 200 or late, or the server closed a connection.
            OSError: A connection has failed.
        """
        times_s: list[float] = []
        sent_count = 0

        def start_request(descriptor: int, connection: _Connection) -> None:
            nonlocal sent_count
            if may_send(sent_count):
                sent_count += 1
                if connection.start_request():
                    self._poll.modify(descriptor, select.EPOLLIN | select.EPOLLOUT)

        for descriptor, connection in self._connections.items():
            start_request(descriptor, connection)
        while len(times_s) < sent_count:
            events = self._poll.poll(_TIMEOUT_S)
            if not events:
                raise RequestFailed(f"no response within {_TIMEOUT_S:.0f} s")
            for descriptor, event in events:
                connection = self._connections[descriptor]
                if event & select.EPOLLOUT and not connection.send():
                    self._poll.modify(descriptor, select.EPOLLIN)
                if event & ~select.EPOLLOUT and connection.receive():
                    times_s.append(time.perf_counter() - connection.started_at)
                    start_request(descriptor, connection)
        return times_s


def latencies(port: int, request: bytes, in_flight: int, seconds: float) -> list[float]:
    """Send a request repeatedly for some seconds, and return the seconds that each took.

    Each of `in_flight` connections sends at least one request. Raises errors like
    `Connections.run`.
    """
    with Connections(port, [request] * in_flight) as connections:
        end_s = time.perf_counter() + seconds
        return connections.run(lambda count: count < in_flight or time.perf_counter() < end_s)
