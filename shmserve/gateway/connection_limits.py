"""Connection limits of a listener: eviction of idle connections, and a quota for each peer.

Idle connections never exclude other clients: at the limit, the connections that have been idle for
longest are evicted for new ones. A peer (a user at a unix socket, or an address of another host)
has a quota, so that it cannot use up the limit: beyond the quota, its own connections are evicted.
On loopback all clients have one address, and there is no quota.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from functools import partial
from operator import attrgetter, itemgetter
from typing import cast

from shmserve.common.fd_limits import share_of
from shmserve.common.peers import network
from shmserve.gateway.client_identity import ClientIdentity, ListenerKind, ListenerRules

logger = logging.getLogger(__name__)

_MOST_WARNINGS = 10  # about too many connections; further ones are debug messages


class LimitedConnection(asyncio.BaseProtocol, ABC):
    """A connection that may be evicted for another one."""

    transport: asyncio.Transport | None

    def attach(self, transport: asyncio.BaseTransport) -> asyncio.Transport:
        """Configure the socket to send immediately and to detect vanished peers."""
        self.transport = made = cast("asyncio.Transport", transport)  # not a subclass in uvloop
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # already closed
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, True)
        return made

    @property
    @abstractmethod
    def open(self) -> bool:
        """Return whether the connection accepts further requests."""

    @property
    @abstractmethod
    def idle_since(self) -> float | None:
        """Return the loop's time since which the connection has no request; None: it has one."""

    @property
    @abstractmethod
    def sending_since(self) -> float | None:
        """Return the loop's time since which the rest of a request is missing, or None."""

    @abstractmethod
    def shut_down(self, *, refuses: bool = False) -> None:
        """Notify the client, and close the connection once its requests are answered.

        The connection reports to its acceptor (`settled`) when no further request can arrive. With
        `refuses`, requests that cross the notification are refused, if the protocol has a way.
        """

    @abstractmethod
    def abort(self) -> None:
        """Close the connection at once, without flushing."""

    @abstractmethod
    def force_close(self) -> None:
        """Close the connection; written bytes may still be flushed."""


class Acceptor:
    """A factory of connections of one listener, up to `most`; `make` receives the factory."""

    def __init__(
        self,
        make: Callable[[Acceptor], LimitedConnection],
        listener: ListenerRules,
        most: int,
    ) -> None:
        self._make = make
        self._listener = listener
        self._most = most
        self._quota = share_of(most)
        self._connections: set[LimitedConnection] = set()
        self._by_peer: dict[object, set[LimitedConnection]] = {}  # by peer
        self._warnings = 0
        self._draining: set[LimitedConnection] = set()  # connections that were asked to close
        self._on_drained: Callable[[], None] | None = None

    def __call__(self) -> LimitedConnection:
        """Return the protocol of a new connection."""
        return self._make(self)

    @property
    def connections(self) -> list[LimitedConnection]:
        """Return the open connections."""
        return list(self._connections)

    def connection_made(self, connection: LimitedConnection) -> ClientIdentity:
        """Register a connection; if there are too many, evict others or this one."""
        transport = connection.transport
        assert transport is not None
        client = ClientIdentity(self._listener, transport.get_extra_info("socket"))
        self._connections.add(connection)
        peer = self._peer_of(client, transport)
        if peer is not None:
            its = self._by_peer.setdefault(peer, set())
            its.add(connection)
            client.when_gone(partial(self._remove_from_quota, peer, connection))
            if len(its) > self._quota:
                self._evict(connection, its, self._quota)
        if len(self._connections) > self._most:
            self._evict(connection, self._connections, self._most)
        return client

    def connection_lost(self, connection: LimitedConnection) -> None:
        """Remove a connection that has ended."""
        self._connections.discard(connection)
        self.settled(connection)

    def drain(self, on_drained: Callable[[], None], *, refuses: bool = False) -> None:
        """Ask clients to disconnect, and call `on_drained` when they are settled.

        Args:
            on_drained: The callback.
            refuses: Whether further requests are refused at once. The callback then waits only for
                the connections that are idle now.
        """
        connections = self.connections
        self._draining = {c for c in connections if not refuses or c.idle_since is not None}
        for connection in connections:
            connection.shut_down(refuses=refuses)
        self._on_drained = on_drained
        self._check_drained()

    def settled(self, connection: LimitedConnection) -> None:
        """Record that a drained client is notified and its requests are answered."""
        self._draining.discard(connection)
        self._check_drained()

    def _check_drained(self) -> None:
        if self._on_drained is not None and not self._draining:
            on_drained, self._on_drained = self._on_drained, None
            on_drained()

    def _peer_of(self, client: ClientIdentity, transport: asyncio.Transport) -> object:
        """Return the owner of the connection's quota; None on loopback.

        On loopback, clients are not distinguished.
        """
        if self._listener.kind is ListenerKind.UNIX:
            return client.uid
        if self._listener.kind is ListenerKind.LOOPBACK:
            return None
        return network(str((transport.get_extra_info("peername") or ("",))[0]))

    def _remove_from_quota(self, peer: object, connection: LimitedConnection) -> None:
        its = self._by_peer[peer]
        its.discard(connection)
        if not its:
            del self._by_peer[peer]

    def _evict(
        self, newcomer: LimitedConnection, among: Collection[LimitedConnection], most: int
    ) -> None:
        candidates = [
            connection for connection in among if connection.open and connection is not newcomer
        ]
        if len(candidates) < most or not newcomer.open:
            return  # the remaining connections are closing
        # Several at a time, to amortise the cost in a flood of connections.
        ended = _longest(candidates, attrgetter("idle_since"), max(1, most // 64))
        ended = ended or _longest(candidates, attrgetter("sending_since"), 1)
        logger.log(
            logging.WARNING if self._warnings < _MOST_WARNINGS else logging.DEBUG,
            "more than %d connections%s: %s",
            most,
            "" if most == self._most else " of one peer",
            f"{len(ended)} that were idle were ended" if ended else "one was refused",
        )
        self._warnings += 1
        for connection in ended or [newcomer]:
            connection.abort()


def _longest(
    connections: list[LimitedConnection],
    since: Callable[[LimitedConnection], float | None],
    count: int,
) -> list[LimitedConnection]:
    found = [(began, connection) for connection in connections if (began := since(connection))]
    return [connection for _, connection in sorted(found, key=itemgetter(0))[:count]]
