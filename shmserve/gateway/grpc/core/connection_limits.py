"""Eviction when there are too many of gRPC's connections, by the rules of
gateway/connection_limits.py.

gRPC's core accepts connections by itself, and at the limit it turns away whoever comes. So they are
looked at from outside: soon after somebody came, which shows at the listening socket unless the
core is quicker, and again and again while there are many.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from shmserve.common.access.peer_credentials import network
from shmserve.common.fd_limits import share_of
from shmserve.gateway.client_identity import ListenerKind
from shmserve.gateway.grpc.core import sockets as core_sockets
from shmserve.gateway.grpc.core.call_watchdog import Calls

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0
_RESTS = 20  # times as long as looking took
# GOAWAY of HTTP/2 (RFC 9113, 6.8), without an error and with the highest stream: what has been sent
# meanwhile is still served.
_GO_AWAY = bytes.fromhex("000008 07 00 00000000 7fffffff 00000000")


class Seen(NamedTuple):
    """A connection: whose it is (`peer`; None on loopback, where nobody has a share), how long ago
    something went through it, and whether it has calls."""

    connection: core_sockets.GrpcConnection
    peer: str | None
    silent_ms: int
    busy: bool


def leaving(seen: Collection[Seen], most: int) -> list[Seen]:
    """The connections that make room where there may be `most`.

    A peer that has more than its share loses what is too much, first what is idle. At the limit
    some of all that are idle go. Those that have been silent for longest come first.
    """
    share = share_of(most)
    order = sorted(seen, key=lambda one: (one.busy, -one.silent_ms))
    crowds: defaultdict[str, list[Seen]] = defaultdict(list)
    for one in order:
        if one.peer is not None:
            crowds[one.peer].append(one)
    ended = [one for crowd in crowds.values() for one in crowd[: max(0, len(crowd) - share)]]
    if not ended and len(seen) >= most:
        ended = [one for one in order if not one.busy][: max(1, most // 16)]
    return ended


class ConnectionLimits:
    """Watches the connections through one listener, of which there may be `most`."""

    def __init__(self, calls: Calls, kind: ListenerKind, ports: set[int], most: int) -> None:
        self._calls = calls
        self._all_are_one = kind is ListenerKind.LOOPBACK
        self._ports = ports
        self._most = most
        self._many = most if self._all_are_one else share_of(most)
        self._loop = asyncio.get_running_loop()
        self._listeners: list[int] = []

    def open(self) -> None:
        """Begin; the server listens."""
        self._listeners = [os.dup(fd) for fd in core_sockets.listeners(self._ports)]
        self._wait()

    def close(self) -> None:
        """End."""
        for fd in self._listeners:
            self._loop.remove_reader(fd)
            os.close(fd)
        self._listeners.clear()

    def let_nobody_in(self, *, tls: bool) -> None:
        """Refuse connections from now on. Who has one without a call is told to go; through TLS,
        where nobody but gRPC could say that, it ends. A request on one that has calls is for others
        to refuse."""
        self.close()
        for fd in core_sockets.listeners(self._ports):
            core_sockets.refuse(fd)
        busy = self._calls.addresses()
        for one in core_sockets.connections():
            if one.here[1] not in self._ports or one.client in busy:
                continue
            if tls:
                core_sockets.shut(one)
            else:
                core_sockets.send(one, _GO_AWAY)

    def _wait(self) -> None:
        for fd in self._listeners:
            self._loop.add_reader(fd, self._somebody_came)

    def _somebody_came(self) -> None:
        for fd in self._listeners:
            self._loop.remove_reader(fd)
        self._loop.call_later(_PAUSE_S, self._look)

    def _look(self) -> None:
        if not self._listeners:
            return
        # More descriptors than connections: whoever has few of the one has few of the other.
        if core_sockets.count() < self._many:
            self._wait()
            return
        began = time.monotonic()
        busy = self._calls.addresses()
        seen = [
            Seen(one, self._peer(one), silent_ms, one.client in busy)
            for one in core_sockets.connections()
            if one.here[1] in self._ports and (silent_ms := core_sockets.silent_ms(one)) is not None
        ]
        ended = leaving(seen, self._most)
        for one in ended:
            core_sockets.shut(one.connection)
        if ended:
            logger.warning("%d of %d connections were ended to make room", len(ended), len(seen))
        took_s = time.monotonic() - began
        self._loop.call_later(max(_PAUSE_S, _RESTS * took_s), self._look)

    def _peer(self, connection: core_sockets.GrpcConnection) -> str | None:
        return None if self._all_are_one else network(connection.client[0])
