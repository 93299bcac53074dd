"""The router (ZeroMQ's ROUTER), the bound end of links: peers by identity, none of which can block
another; `PeerCredRouter` is one for the server's own processes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import socket
import struct
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from shmserve.ipc.transport import zmtp
from shmserve.ipc.transport.connection import PREFIX, Connection, linger
from shmserve.ipc.transport.frames import pack, unpack
from shmserve.ipc.transport.listener import Listener, listening, no_room
from shmserve.ipc.transport.records import MalformedMessage

logger = logging.getLogger(__name__)
_LISTEN_BACKLOG = 1024
_OUT = select.EPOLLOUT
_COMPLAINTS = 32  # so many are logged, and then ever fewer


class Router:
    """The bound end of links from many `Dealer`s, told apart by their identity.

    An identity that is connected already is not given to another connection. `most` is how many
    elements an array in a frame may have (-1: any number).
    """

    most = -1

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.malformed = 0
        self._pending: defaultdict[bytes, list[Any]] = defaultdict(list)
        self._poll = select.epoll()
        self.fd: int = self._poll.fileno()
        self._connections: dict[int, Connection] = {}
        self._peers: dict[bytes, Connection] = {}
        self._anonymous = itertools.count(1)
        self._path = endpoint.removeprefix(PREFIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # a server that was killed left it
        self._listener = Listener(listening(socket.SOCK_STREAM, self._path, _LISTEN_BACKLOG))
        try:
            self._made = os.stat(self._path)
        except OSError as error:  # the folder was removed just now
            raise no_room(error) from None
        self._poll.register(self._listener, select.EPOLLIN)

    def post(self, peer: bytes, message: Any) -> None:
        """Queue a message for a peer, for the next `flush`."""
        self._pending[peer].append(message)

    def flush(self) -> None:
        """Send what is queued, one frame a peer; what is for a peer that is gone is dropped.

        What cannot be packed raises, and is queued no more; what is for others stays queued.
        """
        pending = self._pending
        for peer in list(pending) if pending else ():
            messages = pending.pop(peer)
            connection = self._peers.get(peer)
            if connection is None:
                logger.debug("%d messages for a peer that is gone", len(messages))
                continue
            try:
                connection.send(zmtp.frame(pack(messages)))
            except OSError:
                connection.unsent.clear()  # the end of it shows when it is read

    def receive(self) -> list[tuple[bytes, Any]]:
        """The (peer, message)s that are here now; never more than one bounded read a peer."""
        received: list[tuple[bytes, Any]] = []
        for fd, events in self._poll.poll(0):
            connection = self._connections.get(fd)
            if connection is None:
                self._accept()
                continue
            if events & _OUT:
                with contextlib.suppress(OSError):
                    connection.push()
            if events & ~_OUT:
                self._read(connection, received)
        return received

    def _read(self, connection: Connection, received: list[tuple[bytes, Any]]) -> None:
        frames = connection.receive()
        decoder = connection.decoder
        if connection.identity is None and decoder.properties is not None:
            self._name(connection, decoder.properties)
        peer = connection.identity or b""
        for frame in frames or ():
            if decoder.broken and connection.identity is None:
                break
            try:
                received += zip(itertools.repeat(peer), unpack(frame, self.most), strict=False)
            except MalformedMessage as error:
                connection.malformed += 1
                self._complain("dropped a malformed frame: %s", error)
        if decoder.dropped:
            connection.malformed += decoder.dropped
            self.malformed += decoder.dropped
            decoder.dropped = 0
        if frames is None or decoder.broken:
            if decoder.broken:
                self._complain("a connection was ended: %s", decoder.broken)
            self._drop(connection)

    def _complain(self, text: str, what: object) -> None:
        # Whoever sends garbage may send a lot of it: the log shall not be full of that.
        self.malformed += 1
        if self.malformed <= _COMPLAINTS or not self.malformed & (self.malformed - 1):
            logger.warning(text, what)

    def _name(self, connection: Connection, properties: dict[str, bytes]) -> None:
        identity = properties.get("identity") or b"\0%d" % next(self._anonymous)
        if identity in self._peers:
            connection.decoder.broken = "it claims the identity of another"
            return
        connection.identity = identity
        self._peers[identity] = connection

    def _accept(self) -> Connection | None:
        sock = self._listener.accept()
        if sock is None:
            return None
        greeting = bytearray(zmtp.GREETING + zmtp.ready("ROUTER"))
        connection = self._connections[sock.fileno()] = Connection(sock, self._poll, greeting)
        with contextlib.suppress(OSError):
            connection.push()
        return connection

    def _drop(self, connection: Connection) -> None:
        del self._connections[connection.sock.fileno()]
        if connection.identity is not None:
            del self._peers[connection.identity]
        connection.close()

    def wait(self, timeout_s: float | None) -> bool:
        """Block until `receive` has something to do (True) or the time is over (False)."""
        return bool(self._poll.poll(timeout_s))

    def close(self, linger_s: float = 0.0) -> None:
        """Close; what the peers have not taken after `linger_s` seconds is lost."""
        linger(self._connections.values(), linger_s)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._peers.clear()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            # Where somebody has removed the folder, another server may have made it again.
            if os.path.samestat(os.stat(self._path), self._made):
                os.unlink(self._path)
        self._poll.close()


class PeerCredRouter(Router):
    """A router whose peers' identities name the pid that the kernel reports (SO_PEERCRED):
    `pid_of(identity)`, else the connection is ended.

    Models run foreign code as the server's user, which may connect wherever a worker may.
    """

    def __init__(self, endpoint: str, pid_of: Callable[[bytes], int]) -> None:
        super().__init__(endpoint)
        self._pid_of = pid_of

    def _name(self, connection: Connection, properties: dict[str, bytes]) -> None:
        credentials = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, _, _ = struct.unpack("iii", credentials)
        if self._pid_of(properties.get("identity", b"")) != pid:
            connection.decoder.broken = "it claims to be another process"
            return
        super()._name(connection, properties)


def first_number(identity: bytes) -> int:
    """The pid in "PID.anything"; 0 when there is none."""
    return _number(identity.partition(b".")[0])


def last_number(identity: bytes) -> int:
    """The pid in "anything.PID"; 0 when there is none."""
    return _number(identity.rpartition(b".")[2])


def _number(digits: bytes) -> int:
    return int(digits) if digits.isdigit() and len(digits) < 10 else 0
