"""A connection that never blocks: what the peer does not take yet is sent when it does."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections import deque
from functools import partial
from typing import Protocol

from shmserve.cli.transports import Address, Credentials
from shmserve.errors import Unavailable
from shmserve.perf.poller import READ, WRITE, Poller

_AT_ONCE = 1 << 18  # bytes
_CONNECT_S = 10.0
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Receiver(Protocol):
    """What hears from a connection."""

    def received(self, data: bytes) -> None:
        """Bytes have come."""

    def lost(self, reason: str) -> None:
        """It has ended; it is closed."""


class ClientConnection:
    """An open connection to a server, watched by a poller."""

    def __init__(
        self,
        address: Address,
        tls: ssl.SSLContext | None,
        poller: Poller,
        receiver: Receiver,
    ) -> None:
        """Raises Unavailable when nobody can be reached there."""
        self._sock = _connected(address, tls)
        self._tls = tls is not None
        self._poller = poller
        self._receiver = receiver
        self._unsent: deque[memoryview] = deque()
        self.open = True
        poller.watch(self._sock.fileno(), self._ready)

    def write(self, data: bytes) -> None:
        """Send this, as soon as it can be."""
        if self._unsent or not self.open:
            self._unsent.append(memoryview(data))
            return
        try:
            sent = self._sock.send(data)
        except _NOT_NOW:
            sent = 0
        except OSError as error:
            self.close()
            # Later: who hears of it may send the next, which it is in the middle of now.
            self._poller.soon(partial(self._lose, error.strerror or "it failed"))
            return
        if sent < len(data):
            self._unsent.append(memoryview(data)[sent:])
            self._poller.change(self._sock.fileno(), READ | WRITE)

    def _ready(self, events: int) -> None:
        if events & ~WRITE:
            self._read()
        if events & WRITE and self.open:
            self._write_more()

    def _write_more(self) -> None:
        unsent = self._unsent
        try:
            while unsent:
                sent = self._sock.send(unsent[0])
                if sent < len(unsent[0]):
                    unsent[0] = unsent[0][sent:]
                else:
                    unsent.popleft()
            self._poller.change(self._sock.fileno(), READ)
        except _NOT_NOW:
            pass
        except OSError as error:
            self._lose(error.strerror or "it failed")

    def _read(self) -> None:
        while self.open:
            try:
                data = self._sock.recv(_AT_ONCE)
            except _NOT_NOW:
                return
            except OSError as error:
                self._lose(error.strerror or "it failed")
                return
            if not data:
                self._lose("the server closed it")
                return
            self._receiver.received(data)
            if not self._tls:  # which may have more than the descriptor says
                return

    def _lose(self, reason: str) -> None:
        self.close()
        self._receiver.lost(f"a connection ended: {reason}")

    def close(self) -> None:
        """Close it. A second time is fine."""
        if self.open:
            self.open = False
            self._poller.forget(self._sock.fileno())
            self._sock.close()


def tls_of(address: Address, credentials: Credentials, protocol: str) -> ssl.SSLContext | None:
    """The context for an address with TLS; `protocol` as ALPN names it."""
    if not address.tls:
        return None
    context = credentials.tls()
    context.set_alpn_protocols([protocol])
    return context


def _connected(address: Address, tls: ssl.SSLContext | None) -> socket.socket:
    host, _, port = address.target.rpartition(":")
    made: socket.socket | None = None
    try:
        if address.unix_socket:
            made = socket.socket(socket.AF_UNIX)
            made.settimeout(_CONNECT_S)
            made.connect(address.unix_socket)
        else:
            made = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            made = tls.wrap_socket(made, server_hostname=host.strip("[]"))
        made.setblocking(False)
        return made
    except OSError as error:
        if made is not None:
            with contextlib.suppress(OSError):
                made.close()
        reason = error.strerror or str(error)
        raise Unavailable(f"{address.where} cannot be reached: {reason}") from None
