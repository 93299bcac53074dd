"""Client identity and authorisation of a connection: found out once, cached for every request.

ListenerRules    one listening socket, and what its clients may do there
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
    """From where a listening socket can be reached."""

    UNIX = "unix"
    LOOPBACK = "loopback"
    REMOTE = "remote"


class MisdirectedHost(PermissionDenied):
    """The Host header names somebody else: a page that another site's name brought here."""

    status = 421


class ListenerRules:
    """The access rules of one listening socket, the same for every connection that it accepts.

    `allow_shm`: over every listener, none, or (None) those that only this host reaches. `names` are
    host names that the server goes by, beside addresses and localhost.
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
    """From where a listening socket can be reached."""
    if sock.family == socket.AF_UNIX:
        return ListenerKind.UNIX
    return ListenerKind.LOOPBACK if is_loopback(sock.getsockname()[0]) else ListenerKind.REMOTE


class ClientIdentity:
    """The client at the other end of a connection; `sock` is ours (as far as transports give it).

    A token or a host name that was accepted once on a connection is not looked up again.
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
        self._rules: Authorisation | None = None  # by which the header has these scopes
        self._scopes: frozenset[str] | None = None
        self._host: str | None = None
        self._on_gone: list[Callable[[], None]] | None = []
        # Whoever runs the server needs no token.
        self.known = False
        if listener.kind is ListenerKind.UNIX:
            with contextlib.suppress(OSError):
                self._peer = unix_peer(sock)
                self.known = self._peer.uid in (os.geteuid(), 0)

    def when_gone(self, action: Callable[[], None]) -> None:
        """Call this when the connection has ended: at once if it has."""
        if self._on_gone is None:
            action()
        else:
            self._on_gone.append(action)

    def gone(self) -> None:
        """The connection has ended."""
        actions, self._on_gone = self._on_gone or [], None
        for action in actions:
            action()

    def refuse(self, scope: str, headers: Mapping[str, str]) -> ShmserveError | None:
        """Why a request to an API of `scope` is refused; None when it is not."""
        listener = self.listener
        if listener.kind is ListenerKind.LOOPBACK:
            host = headers.get(_HOST)
            if host != self._host:
                if not _is_ours(host or "", listener.names):
                    return MisdirectedHost("the Host header does not name this server")
                self._host = host
        rules = listener.authorisation
        if rules.asks_for_tokens and not self.known and scope not in OPEN:
            header = headers.get(_AUTHORIZATION)
            if header is None or header != self._header or rules is not self._rules:
                self._scopes, self._header, self._rules = rules.scopes(header), header, rules
            if (refusal := rules.refuse_scope(scope, self._scopes)) is not None:
                return refusal
        return rules.refuse_restricted(scope, headers) if rules.restrictions else None

    @property
    def source(self) -> int:
        """A number that tells the connection from others of this process."""
        return id(self)

    @property
    def uid(self) -> int | None:
        """The user that the kernel names, as it does at a unix socket."""
        return None if self._peer is None else self._peer.uid

    def runs_the_server(self) -> bool:
        """Whether the server's own user asks, or root, as far as the kernel says who it is."""
        if self.known or self.listener.kind is not ListenerKind.LOOPBACK:
            return self.known
        found = None
        with contextlib.suppress(OSError):
            found = self._find_user()
        return found is not None and found.uid in (os.geteuid(), 0)

    def peer(self) -> Peer:
        """The client's user, for shared memory.

        Raises Unsupported when there is none for it here, PermissionDenied when nobody knows who
        it is.
        """
        if not self.listener.shm:
            raise Unsupported(SHM_DISABLED)
        if self._peer is None:
            self._peer = self._find_peer()
        return self._peer

    def _find_peer(self) -> Peer:
        if self.listener.kind is ListenerKind.REMOTE:
            return REMOTE
        # No client of this host counts as one of another: what the kernel knows of it is gone as
        # soon as it hangs up, and the server's own objects are not for a client that does.
        found: Peer | None = None
        if self.listener.kind is ListenerKind.LOOPBACK:
            with contextlib.suppress(OSError):
                found = self._find_user()
        if found is None:
            raise PermissionDenied("the server cannot tell which user of this host asks")
        return found

    def _find_user(self) -> Peer | None:
        """The user of a client on this host, None if nobody knows it; raises OSError."""
        ours, theirs = self._sock.getsockname(), self._sock.getpeername()
        return loopback_peer(_address(ours), _address(theirs))

    def administrator(self) -> Peer:
        """The client's user; EVERYONE, who sees every region, if that runs the server."""
        peer = self.peer()
        return Peer(EVERYONE) if self.known else peer


def _address(name: tuple[Any, ...]) -> Address:
    return str(name[0]), int(name[1])


def _is_ours(host: str, names: frozenset[str]) -> bool:
    """Whether a Host header is an address, localhost, or a name of ours: no name that somebody
    else's name server could make point here."""
    name = host.rpartition(":")[0] if _has_port(host) else host
    name = name.lower().rstrip(".")
    if not name or name == "localhost" or name.endswith(".localhost") or name in names:
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name.strip("[]"))
        return True
    return False


def _has_port(host: str) -> bool:
    head, colon, tail = host.rpartition(":")
    return bool(colon) and tail.isdecimal() and (":" not in head or head.endswith("]"))
