"""The listeners of a gateway: access rules, the identity of each client, and connection limits.

    ListenerRules        one listening socket, and the permissions of its clients
    ClientIdentity       the client of one connection, identified once for all of its requests
    Acceptor             the connections of a listener, up to a limit
    LimitedConnection    the base class of connections
    ActiveCount          the requests or connections that a drain waits for

Idle connections never exclude other clients: at the limit, the connections that have been idle for
longest are evicted for new ones. Each peer (a user at a unix socket, or an address of another host)
has a quota. Beyond its quota, the peer's own connections are evicted, so that one peer cannot use
up the limit. On loopback all clients have one address, and no quota applies.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ipaddress
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import InitVar, dataclass
from functools import partial
from operator import attrgetter
from typing import Any, cast

from multidict import istr

from shmserve.common.auth_tokens import SCOPES_WITHOUT_TOKEN, Authorisation
from shmserve.common.fd_limits import max_connections_per_peer
from shmserve.common.peers import (
    EVERYONE,
    REMOTE,
    SHM_DISABLED,
    Address,
    Peer,
    is_loopback,
    loopback_peer,
    network,
    unix_peer,
)
from shmserve.errors import PermissionDenied, ShmserveError, Unsupported

logger = logging.getLogger(__name__)

_AUTHORIZATION = istr("Authorization")
_HOST = istr("Host")


class ListenerKind(enum.Enum):
    """A kind of listening socket, by the clients that can reach it."""

    UNIX = "unix"
    LOOPBACK = "loopback"
    REMOTE = "remote"


class MisdirectedHost(PermissionDenied):
    """The error for a Host header that does not name this server (DNS rebinding attack)."""

    status = 421


@dataclass(eq=False)
class ListenerRules:
    """The access rules of one listening socket, shared by all its connections.

    Args:
        allow_shm: Whether clients may use shared memory; None permits it if no other host can reach
            the listener.
        host_names: Host names of the server, besides addresses and localhost. "*.NAME" means all
            names below NAME, and "*" for any name.
    """

    kind: ListenerKind
    authorisation: Authorisation
    allow_shm: InitVar[bool | None]
    host_names: frozenset[str] = frozenset()

    def __post_init__(self, allow_shm: bool | None) -> None:
        self.allows_shm = self.kind is not ListenerKind.REMOTE if allow_shm is None else allow_shm


def listener_kind(sock: socket.socket) -> ListenerKind:
    """Return whether a listening socket is a Unix, a loopback or a remote listener."""
    if sock.family == socket.AF_UNIX:
        return ListenerKind.UNIX
    return ListenerKind.LOOPBACK if is_loopback(sock.getsockname()[0]) else ListenerKind.REMOTE


class ClientIdentity:
    """The client of a connection, whose socket in the server is `sock` (None if it has none).

    A token or a host name that was accepted once on a connection is not checked again.
    """

    __slots__ = (
        *("_checked_header", "_accepted_host", "_disconnect_actions", "_peer", "_checked_rules"),
        *("_granted_scopes", "_sock", "is_server_user", "listener"),
    )

    def __init__(self, listener: ListenerRules, sock: Any) -> None:
        self.listener = listener
        self._sock = sock
        self._peer: Peer | None = None
        self._checked_header: str | None = None  # the Authorization header checked last
        # The rules under which the header was last checked.
        self._checked_rules: Authorisation | None = None
        self._granted_scopes: frozenset[str] | None = None
        self._accepted_host: str | None = None
        self._disconnect_actions: list[Callable[[], None]] | None = []
        # Whether the client is the server's own user or root, who need no token.
        self.is_server_user = False
        if listener.kind is ListenerKind.UNIX:
            with contextlib.suppress(OSError):
                self._peer = unix_peer(sock)
                self.is_server_user = self._peer.uid in (os.geteuid(), 0)

    def call_on_disconnect(self, action: Callable[[], None]) -> None:
        """Call `action` when the connection ends, or at once if the connection has ended."""
        if self._disconnect_actions is None:
            action()
        else:
            self._disconnect_actions.append(action)

    def call_disconnect_actions(self) -> None:
        """Call the registered actions, since the connection has ended."""
        actions, self._disconnect_actions = self._disconnect_actions or [], None
        for action in actions:
            action()

    def find_access_error(self, scope: str, headers: Mapping[str, str]) -> ShmserveError | None:
        """Return the error for a request to an API of `scope`; None if the request is permitted."""
        if (host_error := self.find_host_error(headers)) is not None:
            return host_error
        rules = self.listener.authorisation
        if rules.requires_token and not self.is_server_user and scope not in SCOPES_WITHOUT_TOKEN:
            header = headers.get(_AUTHORIZATION)
            if header is None or header != self._checked_header or rules is not self._checked_rules:
                self._granted_scopes = rules.scopes(header)
                self._checked_header = header
                self._checked_rules = rules
            if (refusal := rules.refuse_scope(scope, self._granted_scopes)) is not None:
                return refusal
        return rules.refuse_restricted(scope, headers) if rules.restrictions else None

    def find_host_error(self, headers: Mapping[str, str]) -> ShmserveError | None:
        """Return the error for a request whose Host header does not name this server, or None."""
        listener = self.listener
        host = headers.get(_HOST)
        if listener.kind is ListenerKind.LOOPBACK and host != self._accepted_host:
            if not _names_server(host or "", listener.host_names):
                text = "the Host header does not name this server (--allowed-host adds names)"
                return MisdirectedHost(text)
            self._accepted_host = host
        return None

    @property
    def uid(self) -> int | None:
        """Return the user reported by the kernel at a unix socket, or None."""
        return None if self._peer is None else self._peer.uid

    def runs_the_server(self) -> bool:
        """Check whether the client is the server's own user or root, if the kernel reports it."""
        if self.is_server_user or self.listener.kind is not ListenerKind.LOOPBACK:
            return self.is_server_user
        peer = self._find_user()
        return peer is not None and peer.uid in (os.geteuid(), 0)

    def peer(self) -> Peer:
        """Return the client's user, by which shared memory is authorised.

        Raises:
            Unsupported: The listener offers no shared memory.
            PermissionDenied: The user is unknown.
        """
        if not self.listener.allows_shm:
            raise Unsupported(SHM_DISABLED)
        if self._peer is None:
            self._peer = self._find_peer()
        return self._peer

    def _find_peer(self) -> Peer:
        if self.listener.kind is ListenerKind.REMOTE:
            return REMOTE
        # A local client that has hung up must not be treated as a remote client, which may use the
        # server's own objects. The kernel no longer reports the user of such a local client.
        peer = self._find_user() if self.listener.kind is ListenerKind.LOOPBACK else None
        if peer is None:
            raise PermissionDenied(
                "shared memory: the server cannot determine the user of this connection; "
                "send the request again on a new connection"
            )
        return peer

    def _find_user(self) -> Peer | None:
        """Return the user of a client on this host; None if unknown, as after a disconnect."""
        with contextlib.suppress(OSError):
            local_address, remote_address = self._sock.getsockname(), self._sock.getpeername()
            return loopback_peer(_parse_address(local_address), _parse_address(remote_address))
        return None

    def administrator_peer(self) -> Peer:
        """Return the client's user, or EVERYONE, who may use all regions, for the server's user."""
        peer = self.peer()
        return Peer(EVERYONE) if self.is_server_user else peer


def _parse_address(socket_name: tuple[Any, ...]) -> Address:
    return str(socket_name[0]), int(socket_name[1])


def _names_server(host: str, names: frozenset[str]) -> bool:
    """Check whether a Host header is an address, localhost, or a name of this server.

    Other names are refused, because an attacker's name server can resolve them to this host (DNS
    rebinding).
    """
    name = host.rpartition(":")[0] if _has_port(host) else host
    name = name.lower().rstrip(".")
    if not name or name == "localhost" or name.endswith(".localhost") or name in names:
        return True
    parent_labels = name.split(".")[1:]
    if "*" in names or any(
        "*." + ".".join(parent_labels[index:]) in names for index in range(len(parent_labels))
    ):
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name.strip("[]"))
        return True
    return False


def _has_port(host: str) -> bool:
    host_part, colon, port = host.rpartition(":")
    return bool(colon) and port.isdecimal() and (":" not in host_part or host_part.endswith("]"))


_MAX_WARNINGS = 10  # number of warnings about too many connections; later ones are debug messages


class LimitedConnection(asyncio.BaseProtocol, ABC):
    """The base class of connections, which may be evicted for new connections."""

    transport: asyncio.Transport | None

    def attach(self, transport: asyncio.BaseTransport) -> asyncio.Transport:
        """Configure the socket to send immediately and to detect vanished peers."""
        # A cast, since uvloop's transports are not subclasses of asyncio's.
        self.transport = socket_transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # the socket may be closed already
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, True)
        return socket_transport

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Return whether the connection accepts further requests."""

    @property
    @abstractmethod
    def idle_since(self) -> float | None:
        """Return the event loop's time when the connection became idle; None while it is busy."""

    @property
    @abstractmethod
    def incomplete_since(self) -> float | None:
        """Return the loop's time since when a request is incomplete; None if none is incomplete."""

    @abstractmethod
    def shut_down(self, *, refuses_requests: bool = False) -> None:
        """Notify the client, and close the connection once its requests are answered.

        The connection calls `Acceptor.connection_drained` when no further request can arrive.

        Args:
            refuses_requests: Whether requests that the client sends before it receives the
                notification are refused, if the protocol can refuse them.
        """

    @abstractmethod
    def abort(self) -> None:
        """Close the connection at once, without flushing."""

    @abstractmethod
    def force_close(self) -> None:
        """Close the connection; written bytes may still be flushed."""

    def _close_transport(self, flush_timeout_s: float) -> None:
        """Close the transport, and abort it if the client does not read the rest in time."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.close()
            if transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(flush_timeout_s, transport.abort)


class ActiveCount:
    """The number (`active_count`) of requests or connections that a drain waits for."""

    def __init__(self) -> None:
        self.active_count = 0
        self._on_idle: Callable[[], None] | None = None

    def decrement(self) -> None:
        """Decrease the count by one."""
        self.active_count -= 1
        if not self.active_count and self._on_idle is not None:
            self.call_when_idle(self._on_idle)

    def call_when_idle(self, on_idle: Callable[[], None]) -> None:
        """Call `on_idle` once, as soon as the count is 0."""
        self._on_idle = on_idle if self.active_count else None
        if not self.active_count:
            on_idle()


@dataclass(eq=False)
class Acceptor:
    """A factory of the connections of one listener, with a limit on open connections.

    `_create_connection` receives the acceptor and returns a connection.
    """

    _create_connection: Callable[[Acceptor], LimitedConnection]
    listener: ListenerRules
    _max_connections: int

    def __post_init__(self) -> None:
        self._max_per_peer = max_connections_per_peer(self._max_connections)
        self._connections: set[LimitedConnection] = set()
        # Connections by the owner of their quota.
        self._connections_by_peer: dict[object, set[LimitedConnection]] = {}
        self._warning_count = 0
        # The connections that `drain` waits for.
        self._draining_connections: set[LimitedConnection] = set()
        self._on_drained: Callable[[], None] | None = None

    def __call__(self) -> LimitedConnection:
        """Return the protocol object of a new connection; asyncio calls the acceptor for each."""
        return self._create_connection(self)

    @property
    def connections(self) -> list[LimitedConnection]:
        """Return the open connections."""
        return list(self._connections)

    def connection_made(self, connection: LimitedConnection) -> ClientIdentity:
        """Register a connection.

        Above the listener's limit or the peer's quota, the connections that have been idle for
        longest are closed. If none is idle, the connection whose request has been incomplete for
        longest is closed. If all requests are complete, the new connection is closed.
        """
        transport = connection.transport
        assert transport is not None
        client = ClientIdentity(self.listener, transport.get_extra_info("socket"))
        self._connections.add(connection)
        peer = self._peer_of(client, transport)
        if peer is not None:
            peer_connections = self._connections_by_peer.setdefault(peer, set())
            peer_connections.add(connection)
            client.call_on_disconnect(partial(self._remove_from_quota, peer, connection))
            if len(peer_connections) > self._max_per_peer:
                self._evict(connection, peer_connections, self._max_per_peer)
        if len(self._connections) > self._max_connections:
            self._evict(connection, self._connections, self._max_connections)
        return client

    def connection_lost(self, connection: LimitedConnection) -> None:
        """Remove a connection that has ended."""
        self._connections.discard(connection)
        self.connection_drained(connection)

    def drain(self, on_drained: Callable[[], None], *, refuses_requests: bool = False) -> None:
        """Ask clients to disconnect, and call `on_drained` when no further request can arrive.

        Args:
            on_drained: The callback.
            refuses_requests: Whether further requests are refused at once. The callback then waits
                only for the connections that are idle now.
        """
        connections = self.connections
        draining = {c for c in connections if not refuses_requests or c.idle_since is not None}
        self._draining_connections = draining
        for connection in connections:
            connection.shut_down(refuses_requests=refuses_requests)
        self._on_drained = on_drained
        self._check_drained()

    def connection_drained(self, connection: LimitedConnection) -> None:
        """Record that a client was notified of the drain and its requests were answered."""
        self._draining_connections.discard(connection)
        self._check_drained()

    def _check_drained(self) -> None:
        if self._on_drained is not None and not self._draining_connections:
            on_drained, self._on_drained = self._on_drained, None
            on_drained()

    def _peer_of(self, client: ClientIdentity, transport: asyncio.Transport) -> object:
        """Return the owner of the connection's quota; None on loopback, which has no quota."""
        if self.listener.kind is ListenerKind.UNIX:
            return client.uid
        if self.listener.kind is ListenerKind.LOOPBACK:
            return None
        return network(str((transport.get_extra_info("peername") or ("",))[0]))

    def _remove_from_quota(self, peer: object, connection: LimitedConnection) -> None:
        peer_connections = self._connections_by_peer[peer]
        peer_connections.discard(connection)
        if not peer_connections:
            del self._connections_by_peer[peer]

    def _evict(
        self, newest: LimitedConnection, connections: Collection[LimitedConnection], limit: int
    ) -> None:
        candidates = [c for c in connections if c.is_open and c is not newest]
        if len(candidates) < limit or not newest.is_open:
            return  # enough connections are closing already
        # Evicting several connections at a time amortises the sorting during a flood.
        victims = _oldest(candidates, attrgetter("idle_since"), max(1, limit // 64))
        victims = victims or _oldest(candidates, attrgetter("incomplete_since"), 1)
        level = logging.WARNING if self._warning_count < _MAX_WARNINGS else logging.DEBUG
        limit_text = "" if limit == self._max_connections else " of one peer"
        outcome = f"closed {len(victims)} of them" if victims else "refused the new connection"
        logger.log(level, "more than %d connections%s: %s", limit, limit_text, outcome)
        self._warning_count += 1
        for connection in victims or [newest]:
            connection.abort()


def _oldest(
    connections: list[LimitedConnection], start_time: Callable[[LimitedConnection], Any], count: int
) -> list[LimitedConnection]:
    """Return at most `count` connections, those with the earliest `start_time` that is not None."""
    return sorted(filter(start_time, connections), key=start_time)[:count]
