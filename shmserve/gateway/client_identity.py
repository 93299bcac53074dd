"""Client identity and authorisation of a connection: determined once, cached for every request.

ListenerRules    one listening socket, and the permissions of its clients
ClientIdentity   the client of one connection through it
"""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from multidict import istr

from shmserve.common.auth_tokens import OPEN, Authorisation
from shmserve.common.peers import (
    EVERYONE,
    REMOTE,
    SHM_DISABLED,
    Address,
    Peer,
    is_loopback,
    loopback_peer,
    unix_peer,
)
from shmserve.errors import PermissionDenied, ShmserveError, Unsupported

_AUTHORIZATION = istr("Authorization")
_HOST = istr("Host")


class ListenerKind(enum.Enum):
    """The reachability of a listening socket."""

    UNIX = "unix"
    LOOPBACK = "loopback"
    REMOTE = "remote"


class MisdirectedHost(PermissionDenied):
    """The error of a Host header with a foreign name, as in a DNS rebinding attack."""

    status = 421


class ListenerRules:
    """The access rules of one listening socket, shared by all its connections.

    Args:
        allow_shm: Whether all listeners offer shared memory; None: only those that only this host
            reaches.
        names: Host names of the server, besides addresses and localhost. "*.NAME" stands for all
            names below NAME, and "*" for any name.
    """

    def __init__(
        self,
        kind: ListenerKind,
        authorisation: Authorisation,
        allow_shm: bool | None,
        names: frozenset[str] = frozenset(),
    ) -> None:
        self.kind = kind
        self.authorisation = authorisation
        self.shm = kind is not ListenerKind.REMOTE if allow_shm is None else allow_shm
        self.names = names


def listener_kind(sock: socket.socket) -> ListenerKind:
    """Return the reachability of a listening socket."""
    if sock.family == socket.AF_UNIX:
        return ListenerKind.UNIX
    return ListenerKind.LOOPBACK if is_loopback(sock.getsockname()[0]) else ListenerKind.REMOTE


class ClientIdentity:
    """The client at the other end of a connection; `sock` is the server's end, if available.

    A token or a host name that was accepted once on a connection is not checked again.
    """

    __slots__ = (
        *("_header", "_host", "_on_gone", "_peer", "_rules", "_scopes", "_sock"),
        *("known", "listener"),
    )

    def __init__(self, listener: ListenerRules, sock: Any) -> None:
        self.listener = listener
        self._sock = sock
        self._peer: Peer | None = None
        self._header: str | None = None
        self._rules: Authorisation | None = None  # the rules by which the header has these scopes
        self._scopes: frozenset[str] | None = None
        self._host: str | None = None
        self._on_gone: list[Callable[[], None]] | None = []
        # The server's own user needs no token.
        self.known = False
        if listener.kind is ListenerKind.UNIX:
            with contextlib.suppress(OSError):
                self._peer = unix_peer(sock)
                self.known = self._peer.uid in (os.geteuid(), 0)

    def when_gone(self, action: Callable[[], None]) -> None:
        """Call `action` when the connection has ended, or at once if it has."""
        if self._on_gone is None:
            action()
        else:
            self._on_gone.append(action)

    def gone(self) -> None:
        """Call the actions for the end of the connection."""
        actions, self._on_gone = self._on_gone or [], None
        for action in actions:
            action()

    def refuse(self, scope: str, headers: Mapping[str, str]) -> ShmserveError | None:
        """Return the error for a request to an API of `scope`; None if the request is permitted."""
        if (misdirected := self.refuse_host(headers)) is not None:
            return misdirected
        rules = self.listener.authorisation
        if rules.asks_for_tokens and not self.known and scope not in OPEN:
            header = headers.get(_AUTHORIZATION)
            if header is None or header != self._header or rules is not self._rules:
                self._scopes, self._header, self._rules = rules.scopes(header), header, rules
            if (refusal := rules.refuse_scope(scope, self._scopes)) is not None:
                return refusal
        return rules.refuse_restricted(scope, headers) if rules.restrictions else None

    def refuse_host(self, headers: Mapping[str, str]) -> ShmserveError | None:
        """Return the error for a request whose Host header does not name this server, or None."""
        listener = self.listener
        host = headers.get(_HOST)
        if listener.kind is ListenerKind.LOOPBACK and host != self._host:
            if not _is_ours(host or "", listener.names):
                return MisdirectedHost(
                    "the Host header does not name this server (--allowed-host adds names)"
                )
            self._host = host
        return None

    @property
    def source(self) -> int:
        """Return a number that identifies the connection within this process."""
        return id(self)

    @property
    def uid(self) -> int | None:
        """Return the user reported by the kernel at a unix socket, or None."""
        return None if self._peer is None else self._peer.uid

    def runs_the_server(self) -> bool:
        """Check whether the client is the server's own user or root, if the kernel reports it."""
        if self.known or self.listener.kind is not ListenerKind.LOOPBACK:
            return self.known
        found = None
        with contextlib.suppress(OSError):
            found = self._find_user()
        return found is not None and found.uid in (os.geteuid(), 0)

    def peer(self) -> Peer:
        """Return the client's user, for shared memory.

        Raises:
            Unsupported: The listener offers no shared memory.
            PermissionDenied: The user is unknown.
        """
        if not self.listener.shm:
            raise Unsupported(SHM_DISABLED)
        if self._peer is None:
            self._peer = self._find_peer()
        return self._peer

    def _find_peer(self) -> Peer:
        if self.listener.kind is ListenerKind.REMOTE:
            return REMOTE
        # A client of this host is never treated as a remote one. After it has hung up the kernel no
        # longer reports its user, and the server's own objects must not be accessible to such a
        # client.
        found: Peer | None = None
        if self.listener.kind is ListenerKind.LOOPBACK:
            with contextlib.suppress(OSError):
                found = self._find_user()
        if found is None:
            raise PermissionDenied("the server cannot determine the user that sent the request")
        return found

    def _find_user(self) -> Peer | None:
        """Return the user of a client on this host, or None if unknown; raise OSError."""
        ours, theirs = self._sock.getsockname(), self._sock.getpeername()
        return loopback_peer(_address(ours), _address(theirs))

    def administrator(self) -> Peer:
        """Return the client's user, or EVERYONE (access to all regions) if it runs the server."""
        peer = self.peer()
        return Peer(EVERYONE) if self.known else peer


def _address(name: tuple[Any, ...]) -> Address:
    return str(name[0]), int(name[1])


def _is_ours(host: str, names: frozenset[str]) -> bool:
    """Check whether a Host header is an address, localhost, or a name of this server.

    Other names could be made to resolve to this host by a foreign name server.
    """
    name = host.rpartition(":")[0] if _has_port(host) else host
    name = name.lower().rstrip(".")
    if not name or name == "localhost" or name.endswith(".localhost") or name in names:
        return True
    above = name.split(".")[1:]
    if "*" in names or any("*." + ".".join(above[at:]) in names for at in range(len(above))):
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name.strip("[]"))
        return True
    return False


def _has_port(host: str) -> bool:
    head, colon, tail = host.rpartition(":")
    return bool(colon) and tail.isdecimal() and (":" not in head or head.endswith("]"))
