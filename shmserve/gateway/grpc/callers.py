"""The clients of gRPC's calls: where each comes from, and which user it is.

gRPC tells a call's peer by its address alone, and a moment later that address may be another
user's. So a user is remembered with the connection, which is found among our own descriptors.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any
from urllib.parse import unquote

from shmserve.gateway.callers import Caller, Door
from shmserve.gateway.peers import Address, loopback_peer
from shmserve.trust import Peer

_MOST_KNOWN = 16384
_INTERNET = (socket.AF_INET, socket.AF_INET6)


class CallCaller(Caller):
    """The client of one call; nothing is looked up unless it wants shared memory."""

    __slots__ = ("_call", "_users")

    def __init__(self, door: Door, users: Users, call: Any) -> None:
        super().__init__(door, None)
        self._users = users
        self._call = call

    def _find_user(self) -> Peer | None:
        client = address_of(self._call.peer())
        return None if client is None else self._users.at(client)


class Users:
    """The users at the other ends of connections that this process has, by their addresses."""

    def __init__(self) -> None:
        self._known: dict[Address, tuple[int, int, Peer]] = {}  # descriptor, inode, user

    def at(self, client: Address) -> Peer | None:
        """The user of the client that is connected from this address, None if nobody knows it;
        raises OSError."""
        found = self._known.get(client)
        if found is not None and _ends(found[0], found[1], client) is not None:
            return found[2]
        self._known.pop(client, None)
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                fd = int(name)
                inode = os.fstat(fd).st_ino
                ours = _ends(fd, inode, client)
                if ours is None or (peer := loopback_peer(ours, client)) is None:
                    continue
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[client] = (fd, inode, peer)
                return peer
        return None


def _ends(fd: int, inode: int, client: Address) -> Address | None:
    """Our own address, if a descriptor is the socket of this inode and is connected to `client`.

    An inode's number is one socket's for as long as it lives; one whose connection has ended is
    connected to nobody.
    """
    try:
        found = socket.socket(fileno=fd)
    except OSError:
        return None
    try:
        if found.family not in _INTERNET or found.type != socket.SOCK_STREAM:
            return None
        if _plain(found.getpeername()) != client or os.fstat(fd).st_ino != inode:
            return None
        return _plain(found.getsockname())
    except OSError:
        return None
    finally:
        found.detach()  # it is gRPC's


def _plain(name: tuple[Any, ...]) -> Address:
    # gRPC's sockets are of the newer family even where their addresses are of the older.
    return str(name[0]).removeprefix("::ffff:"), int(name[1])


def address_of(peer: str) -> Address | None:
    """What gRPC calls "ipv4:HOST:PORT" or "ipv6:[HOST]:PORT" (escaped); None for anything else."""
    family, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return host.strip("[]"), int(port)
