"""The event loop of the load generator, and its non-blocking connection.

It is not asyncio's loop, because a request must take only a few microseconds of CPU time.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from shmserve.errors import Unavailable
from shmserve.ipc.processes import PreciseWait, disable_timer_slack
from shmserve.protocols import Address, Credentials

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
_EPOLL_UNIT_NS = 1_000_000  # epoll rounds its timeout to this unit
_MAX_READ_BYTES = 1 << 18  # maximum number of bytes per read
_CONNECT_TIMEOUT_S = 10.0
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class EventLoop:
    """An event loop for one thread: handlers of descriptors, called when these are ready."""

    def __init__(self) -> None:
        disable_timer_slack()
        self._epoll = select.epoll()
        self._short_wait = PreciseWait(self._epoll.fileno())
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._scheduled_calls: list[Callable[[], None]] = []

    def watch(self, fd: int, handler: Callable[[int], None], events: int = READ) -> None:
        """Register a handler, which is called with the ready events of a descriptor."""
        self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def change(self, fd: int, events: int) -> None:
        """Change the events that a watched descriptor is polled for."""
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Unregister a descriptor, which stays open."""
        if self._handlers.pop(fd, None):
            self._epoll.unregister(fd)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Schedule a call, to run before the next wait for descriptors."""
        self._scheduled_calls.append(call)

    def run_turn(self, wait_ns: int) -> None:
        """Run the scheduled calls, wait for descriptors or the timeout, and call the handlers."""
        scheduled_calls, self._scheduled_calls = self._scheduled_calls, []
        for scheduled_call in scheduled_calls:
            scheduled_call()
        if self._scheduled_calls:  # scheduled by the calls above, for the next turn
            wait_ns = 0
        if 0 < wait_ns < 2 * _EPOLL_UNIT_NS:
            if not self._short_wait.wait(wait_ns):
                return
            wait_ns = 0
        # The timeout is rounded down; the next turn waits for the remainder.
        epoll_wait_ns = max(wait_ns // _EPOLL_UNIT_NS - 1, 0) * _EPOLL_UNIT_NS
        for fd, events in self._epoll.poll(epoll_wait_ns / 1e9):
            handler = self._handlers.get(fd)
            if handler is not None:  # None: another handler of this turn has removed it
                handler(events)

    def close(self) -> None:
        """Unregister all descriptors."""
        self._handlers.clear()
        self._epoll.close()


class Receiver(Protocol):
    """The receiver of a connection's bytes and of its end."""

    def on_received(self, data: bytes) -> None:
        """Handle received bytes."""

    def on_lost(self, reason: str) -> None:
        """Handle the end of the connection, which is closed."""


class ClientConnection:
    """A non-blocking connection to a server, whose socket an event loop watches."""

    def __init__(
        self, address: Address, tls: ssl.SSLContext | None, loop: EventLoop, receiver: Receiver
    ) -> None:
        """Connect to an address. Raises Unavailable if the server cannot be reached."""
        try:
            self._socket = connect(address, tls, _CONNECT_TIMEOUT_S)
        except OSError as error:
            reason = error.strerror or str(error)
            raise Unavailable(f"{address.address_text} cannot be reached: {reason}") from None
        self._socket.setblocking(False)
        self._uses_tls = tls is not None
        self._loop = loop
        self._receiver = receiver
        self._unsent_pieces: deque[memoryview] = deque()
        self.is_open = True
        loop.watch(self._socket.fileno(), self._on_ready)

    def write(self, data: bytes) -> None:
        """Send bytes as soon as the peer accepts them."""
        if self._unsent_pieces or not self.is_open:
            self._unsent_pieces.append(memoryview(data))
            return
        try:
            sent_bytes = self._socket.send(data)
        except _WOULD_BLOCK:
            sent_bytes = 0
        except OSError as error:
            self.close()
            # Deferred, because `on_lost` may send the next request before this call returns.
            self._loop.call_soon(partial(self._on_lost, error.strerror or "it failed"))
            return
        if sent_bytes < len(data):
            self._unsent_pieces.append(memoryview(data)[sent_bytes:])
            self._loop.change(self._socket.fileno(), READ | WRITE)

    def _on_ready(self, events: int) -> None:
        if events & ~WRITE:
            self._receive_available()
        if events & WRITE and self.is_open:
            self._write_unsent()

    def _write_unsent(self) -> None:
        unsent_pieces = self._unsent_pieces
        try:
            while unsent_pieces:
                sent_bytes = self._socket.send(unsent_pieces[0])
                if sent_bytes < len(unsent_pieces[0]):
                    unsent_pieces[0] = unsent_pieces[0][sent_bytes:]
                else:
                    unsent_pieces.popleft()
            self._loop.change(self._socket.fileno(), READ)
        except _WOULD_BLOCK:
            pass
        except OSError as error:
            self._on_lost(error.strerror or "it failed")

    def _receive_available(self) -> None:
        while self.is_open:
            try:
                data = self._socket.recv(_MAX_READ_BYTES)
            except _WOULD_BLOCK:
                return
            except OSError as error:
                self._on_lost(error.strerror or "it failed")
                return
            if not data:
                self._on_lost("the server closed it")
                return
            self._receiver.on_received(data)
            if not self._uses_tls:  # TLS may buffer more than the descriptor reports
                return

    def _on_lost(self, reason: str) -> None:
        self.close()
        self._receiver.on_lost(f"a connection ended: {reason}")

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self.is_open:
            self.is_open = False
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()


def create_tls_context(
    address: Address, credentials: Credentials, protocol: str
) -> ssl.SSLContext | None:
    """Return the TLS context of an address, None without TLS. `protocol` is the name in ALPN."""
    if not address.uses_tls:
        return None
    context = credentials.create_tls_context()
    context.set_alpn_protocols([protocol])
    return context


def connect(
    address: Address, tls: ssl.SSLContext | None, timeout_s: float | None = None
) -> socket.socket:
    """Return a blocking socket that is connected to an address; raise OSError if that fails."""
    host, _, port = address.target.rpartition(":")
    with contextlib.ExitStack() as cleanup:
        if address.unix_socket:
            sock = cleanup.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(timeout_s)
            sock.connect(address.unix_socket)
        else:
            host_and_port = (host.strip("[]"), int(port))
            sock = cleanup.enter_context(socket.create_connection(host_and_port, timeout_s))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            sock = tls.wrap_socket(sock, server_hostname=host.strip("[]"))
        cleanup.pop_all()
    return sock
