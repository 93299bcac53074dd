"""Sockets that speak typed messages: many a frame, never blocking, never trusting.

A `Router` binds a unix socket, many `Dealer`s connect to it; on the wire they are ZeroMQ's (see
zmtp.py), so that a DEALER of any ZeroMQ library may connect. `post` queues; `flush` sends
everything queued for a peer as one frame: call it once a loop turn. `fd` is readable when `receive`
has something to do; it takes a bounded amount, and what is left is announced again. There are no
high-water marks: work in flight is bounded by credits, and a peer that does not read costs memory,
never a wait. A frame that is not ours is dropped and counted; what is not ZMTP ends its connection.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from shmserve.ipc import zmtp
from shmserve.ipc.frames import pack, unpack
from shmserve.ipc.listener import Listener, listening, no_room, refuse_descriptors
from shmserve.ipc.tensors import MalformedMessage

logger = logging.getLogger(__name__)

_CHUNK = 64 * 1024
_BACKLOG = 1024
_CONNECT_S = 1.0
_COMPLAINTS = 32  # so many are logged, and then ever fewer
_PREFIX = "ipc://"


class Connection:
    """A unix socket between two ends: whole frames in, bytes out as fast as they are taken."""

    __slots__ = (
        "decoder",
        "events",
        "identity",
        "malformed",
        "most_unsent",
        "poll",
        "sock",
        "unsent",
    )

    def __init__(self, sock: socket.socket, poll: select.epoll, greeting: bytes) -> None:
        self.sock = sock
        self.poll = poll
        self.decoder = zmtp.Decoder()
        self.unsent = bytearray(greeting)
        self.identity: bytes | None = None
        self.malformed = 0
        self.most_unsent = sys.maxsize  # a peer with more than that to read is not read
        self.events = select.EPOLLIN
        sock.setblocking(False)
        poll.register(sock, self.events)

    def send(self, data: bytes) -> None:
        """Send, or keep what the peer does not take yet; raises OSError when it is gone."""
        if self.unsent:
            self.unsent += data
            self.push()
            return
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self.unsent += data[sent:]
            self._watch()

    def push(self) -> None:
        """Send more of what is kept."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                with memoryview(self.unsent) as left:
                    sent = self.sock.send(left[:_CHUNK])
                del self.unsent[:sent]
        self._watch()

    def _watch(self) -> None:
        events = select.EPOLLIN if len(self.unsent) <= self.most_unsent else 0
        if self.unsent:
            events |= select.EPOLLOUT
        if events != self.events:
            self.events = events
            self.poll.modify(self.sock, events)

    def receive(self) -> list[bytes] | None:
        """The frames that are here now, after what a bounded read brings; None: the peer is gone,
        or speaks something else."""
        try:
            data = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self.decoder.feed(data) if data else None

    def close(self) -> None:
        """Close the socket."""
        self.poll.unregister(self.sock)  # a process that a model forked may hold it open
        self.sock.close()


class Dealer:
    """One end of a link to a `Router`. `identity` names this end to the other side.

    It speaks without waiting for the other's greeting, so that what is said just before the end
    arrives; a Router takes that, libzmq's would not. Where nothing listens at `endpoint`, or no
    longer, what is sent is lost: who ends and who takes over is the supervisor's to say.
    """

    def __init__(self, endpoint: str, identity: str) -> None:
        self.endpoint = endpoint
        self.malformed = 0
        self._pending: list[Any] = []
        self._poll = select.epoll()
        self.fd: int = self._poll.fileno()
        self._connection: Connection | None = None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(_CONNECT_S)
        try:
            sock.connect(endpoint.removeprefix(_PREFIX))
        except OSError as error:
            logger.debug("nobody listens at %s: %s", endpoint, error)
            sock.close()
            return
        greeting = zmtp.GREETING + zmtp.ready("DEALER", identity.encode())
        self._connection = Connection(sock, self._poll, greeting)
        self._send(b"")

    def post(self, message: Any) -> None:
        """Queue a message for the next `flush`."""
        self._pending.append(message)

    def flush(self) -> bool:
        """Send what is queued as one frame; what cannot be packed raises, and is queued no more.

        False: the other end has gone, and will not have it.
        """
        if not self._pending:
            return True
        messages, self._pending = self._pending, []
        return self._send(zmtp.frame(pack(messages)))

    def send(self, message: Any) -> bool:
        """`post` and `flush`."""
        self._pending.append(message)
        return self.flush()

    def _send(self, data: bytes) -> bool:
        if self._connection is None:
            return False
        try:
            self._connection.send(data)
        except OSError:
            # What it said before it went is still to be read; the end of it shows there.
            self._connection.unsent.clear()
            return False
        return True

    def receive(self) -> list[Any]:
        """The messages that are here now; never more than a bounded read brings."""
        connection = self._connection
        if connection is None:
            return []
        if connection.unsent:
            self._send(b"")
        frames = connection.receive()
        messages: list[Any] = []
        for frame in frames or ():
            try:
                messages += unpack(frame)
            except MalformedMessage as error:
                self.malformed += 1
                logger.warning("dropped a malformed frame: %s", error)
        if frames is None or connection.decoder.broken:
            connection.close()
            self._connection = None
        elif connection.decoder.dropped:
            self.malformed += connection.decoder.dropped
            connection.decoder.dropped = 0
        return messages

    @property
    def connected(self) -> bool:
        """Whether the other end is there, as far as is known."""
        return self._connection is not None

    def wait(self, timeout_s: float | None) -> bool:
        """Block until something is here (True) or the time is over (False)."""
        return bool(self._poll.poll(timeout_s))

    def close(self, linger_s: float = 0.0) -> None:
        """Close; what the other end has not taken after `linger_s` seconds is lost."""
        if self._connection is not None:
            _linger([self._connection], linger_s)
            self._connection.close()
            self._connection = None
        self._poll.close()


class Router:
    """The bound end of links from many `Dealer`s, told apart by their identity.

    An identity that is connected already is not given to another connection. `most` is how many
    elements an array in a frame may have (-1: any number).
    """

    most = -1

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.malformed = 0
        self._pending: dict[bytes, list[Any]] = {}
        self._poll = select.epoll()
        self.fd: int = self._poll.fileno()
        self._connections: dict[int, Connection] = {}
        self._peers: dict[bytes, Connection] = {}
        self._anonymous = itertools.count(1)
        self._path = endpoint.removeprefix(_PREFIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # a server that was killed left it
        self._listener = Listener(listening(socket.SOCK_STREAM, self._path, _BACKLOG))
        refuse_descriptors(self._listener.sock)
        try:
            self._made = os.stat(self._path)
        except OSError as error:  # the folder was removed just now
            raise no_room(error) from None
        self._poll.register(self._listener, select.EPOLLIN)

    def post(self, peer: bytes, message: Any) -> None:
        """Queue a message for a peer, for the next `flush`."""
        queue = self._pending.get(peer)
        if queue is None:
            self._pending[peer] = [message]
        else:
            queue.append(message)

    def flush(self) -> None:
        """Send what is queued, one frame a peer; what is for a peer that is gone is dropped.

        What cannot be packed raises, and is queued no more; what is for others stays queued.
        """
        while self._pending:
            peer = next(iter(self._pending))
            messages = self._pending.pop(peer)
            connection = self._peers.get(peer)
            if connection is None:
                logger.debug("%d messages for a peer that is gone", len(messages))
                continue
            try:
                connection.send(zmtp.frame(pack(messages)))
            except OSError:
                connection.unsent.clear()  # the end of it shows when it is read

    def receive(self) -> Iterator[tuple[bytes, Any]]:
        """The (peer, message)s that are here now; never more than one bounded read a peer."""
        for fd, events in self._poll.poll(0):
            connection = self._connections.get(fd)
            if connection is None:
                self._accept()
                continue
            if events & select.EPOLLOUT:
                with contextlib.suppress(OSError):
                    connection.push()
            if events & ~select.EPOLLOUT:
                yield from self._read(connection)

    def _read(self, connection: Connection) -> Iterator[tuple[bytes, Any]]:
        frames = connection.receive()
        decoder = connection.decoder
        if connection.identity is None and decoder.properties is not None:
            self._name(connection, decoder.properties)
        peer = connection.identity or b""
        for frame in frames or ():
            if decoder.broken and connection.identity is None:
                break
            try:
                messages = unpack(frame, self.most)
            except MalformedMessage as error:
                connection.malformed += 1
                self._complain("dropped a malformed frame: %s", error)
                continue
            for message in messages:
                yield peer, message
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
        greeting = zmtp.GREETING + zmtp.ready("ROUTER")
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
        _linger(self._connections.values(), linger_s)
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


def _linger(connections: Iterable[Connection], linger_s: float) -> None:
    end = time.monotonic() + linger_s
    for connection in connections:
        with contextlib.suppress(OSError):
            while connection.unsent and (left_s := end - time.monotonic()) > 0:
                writable = select.poll()
                writable.register(connection.sock, select.POLLOUT)
                writable.poll(left_s * 1000)
                connection.push()
