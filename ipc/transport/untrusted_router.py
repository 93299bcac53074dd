"""The untrusted router: a `Router` for programs outside the server, with limits, so that none may
cost the others anything.

- Who has no identity that is admitted gets no further than the handshake, and few may be on the way
  to one: the one that has been there for longest makes room for the next.
- A peer that does not read its responses is not read until it does.
- Frames have a bound, and so has what is kept of all that are not whole yet.
- Who sends what is no message is let off a few times.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

from shmserve.ipc.transport.connection import Connection
from shmserve.ipc.transport.router import Router

LARGEST_FRAME = 8 << 20  # others wait while it is read
MOST_ELEMENTS = 1 << 16  # of an array, as the one of its messages
_MOST_STRANGERS = 64
_MOST_UNSENT = 4 << 20
_MOST_HELD = 64 << 20
_MUCH = 1 << 20
_MOST_MALFORMED = 16
# linux/asm-generic/socket.h, since Linux 6.16; Python has no name for it
_SO_PASSRIGHTS = 83


def refuse_descriptors(sock: socket.socket) -> None:
    """Refuse descriptors from whoever connects to `sock`.

    The kernel closes those that nobody receives, in the process that reads the bytes: which then
    waits, where one is of a socket that lingers. Before Linux 6.16 that cannot be refused.
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)


class UntrustedRouter(Router):
    """`admits(identity)` says who may connect."""

    most = MOST_ELEMENTS

    def __init__(self, endpoint: str, admits: Callable[[bytes], bool]) -> None:
        super().__init__(endpoint)
        refuse_descriptors(self._listener.sock)
        self._admits = admits
        self._strangers: dict[Connection, None] = {}  # in the order of their arrival

    def peers(self) -> list[bytes]:
        """The identities that are connected."""
        return list(self._peers)

    def dismiss(self, peer: bytes) -> None:
        """End a peer's connection."""
        connection = self._peers.get(peer)
        if connection is not None:
            self._drop(connection)

    def _accept(self) -> Connection | None:
        connection = super()._accept()
        if connection is not None:
            connection.most_unsent = _MOST_UNSENT
            connection.decoder.largest = LARGEST_FRAME
            self._strangers[connection] = None
            if len(self._strangers) > _MOST_STRANGERS:
                self._drop(next(iter(self._strangers)))
        return connection

    def _name(self, connection: Connection, properties: dict[str, bytes]) -> None:
        if not self._admits(properties.get("identity", b"")):
            connection.decoder.broken = "it is nobody's that has come in"
            return
        super()._name(connection, properties)
        if connection.identity is not None:
            del self._strangers[connection]

    def _read(self, connection: Connection, received: list[tuple[bytes, Any]]) -> None:
        super()._read(connection, received)
        if connection.malformed > _MOST_MALFORMED or self._holds_too_much(connection):
            self._drop(connection)

    def _holds_too_much(self, connection: Connection) -> bool:
        if connection.decoder.held < _MUCH:
            return False
        return sum(each.decoder.held for each in self._connections.values()) > _MOST_HELD

    def _drop(self, connection: Connection) -> None:
        if connection.sock.fileno() >= 0:  # not dropped already
            self._strangers.pop(connection, None)
            super()._drop(connection)
