"""A single-threaded load generator, which repeats one HTTP request at a fixed concurrency."""

from __future__ import annotations

import re
import select
import socket
import time
from dataclasses import dataclass

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_TIMEOUT_S = 20.0


class LoadFailed(Exception):
    """A response that is not 200, or a connection that was closed."""


@dataclass
class _Connection:
    """A connection with one request in flight."""

    socket: socket.socket
    unsent: memoryview
    received: bytes = b""
    started_at: float = 0.0

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
            raise LoadFailed(self.received[:600].decode(errors="replace") or "disconnected")
        if not separator:
            return False
        length = _LENGTH.search(head)
        return len(body) == int(length[1]) if length else body.endswith(b"0\r\n\r\n")


def latencies(port: int, request: bytes, in_flight: int, seconds: float) -> list[float]:
    """Send a request repeatedly for some seconds, and return the seconds that each took.

    Raises:
        LoadFailed: A request failed.
        OSError: The server cannot be reached.
    """
    times_s: list[float] = []
    connections: dict[int, _Connection] = {}
    poll = select.epoll()
    try:
        for _ in range(in_flight):
            sock = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            connections[sock.fileno()] = _Connection(
                sock, memoryview(request), started_at=time.perf_counter()
            )
            poll.register(sock, select.EPOLLIN | select.EPOLLOUT)
        end_s = time.perf_counter() + seconds
        active = in_flight
        while active:
            events = poll.poll(_TIMEOUT_S)
            if not events:
                raise LoadFailed(f"no response within {_TIMEOUT_S:.0f} s")
            for descriptor, event in events:
                connection = connections[descriptor]
                if event & select.EPOLLOUT and not connection.send():
                    poll.modify(descriptor, select.EPOLLIN)
                if event & ~select.EPOLLOUT and connection.receive():
                    now = time.perf_counter()
                    times_s.append(now - connection.started_at)
                    connection.unsent, connection.received = memoryview(request), b""
                    connection.started_at = now
                    if now >= end_s:
                        active -= 1
                    elif connection.send():
                        poll.modify(descriptor, select.EPOLLIN | select.EPOLLOUT)
        return times_s
    finally:
        poll.close()
        for connection in connections.values():
            connection.socket.close()
