"""The router (ZeroMQ's ROUTER): the bound end of links, with peers that cannot block each other.

`PeerCredRouter` accepts the server's own processes. `UntrustedRouter` accepts programs outside the
server, with these limits, so that no program affects the others:

- Peers without a registered identity are limited to the handshake. The number of pending handshakes
  is bounded; the oldest is dropped when another peer connects.
- If a peer does not read its responses, the router reads no more messages from the peer.
- The size of frames and the total size of incomplete frames are bounded.
- A peer that sends malformed messages is disconnected after a few of them.

A process that is out of file descriptors cannot accept, and the level-triggered listener would
spin. One spare descriptor is therefore reserved to accept and close such connections.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import select
import socket
import struct
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from shmserve.errors import Unavailable
from shmserve.ipc.transport import zmtp
from shmserve.ipc.transport.frames import MalformedMessage, pack, unpack
from shmserve.ipc.transport.zmtp import ENDPOINT_PREFIX, Connection, linger

logger = logging.getLogger(__name__)


_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_LISTEN_BACKLOG = 1024
_WRITABLE = select.EPOLLOUT
# Malformed messages up to this number are logged, and later ones at each power of two.
_MAX_CONSECUTIVE_WARNINGS = 32
MAX_FRAME_SIZE = 8 << 20  # limited, because other peers wait while a frame is read
MAX_ARRAY_LEN = 1 << 16  # maximum number of elements of an array, such as the messages of a frame
_MAX_UNREGISTERED = 64  # maximum number of connections without a registered identity
# The maximum of consecutive reads of the only connection before new connections are accepted.
_MAX_UNPOLLED_READS = 8
_MAX_UNSENT_BYTES = 4 << 20  # no messages are read from a peer with more unread output
_MAX_BUFFERED_BYTES = 64 << 20  # maximum bytes of incomplete frames of all peers
_TOLERATED_BUFFER_BYTES = 1 << 20  # the limit disconnects no peer with fewer buffered bytes
_MAX_MALFORMED = 16  # malformed messages after which a peer is disconnected
# The value in linux/asm-generic/socket.h since Linux 6.16, which Python does not define.
_SO_PASSRIGHTS = 83


def open_listening_socket(kind: socket.SocketKind, path: str, backlog: int) -> socket.socket:
    """Return a socket of this kind that listens at `path`.

    Raises:
        Unavailable: The folder does not exist, or the host has no resources for a socket.
    """
    try:
        sock = socket.socket(socket.AF_UNIX, kind)
        try:
            sock.bind(path)
            sock.listen(backlog)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise socket_error(error) from None
    return sock


def socket_error(error: OSError) -> Unavailable:
    """Return the error for a socket that cannot be created in the run directory."""
    return Unavailable(f"cannot create a socket in the run directory: {error.strerror or error}")


class Listener:
    """A listener that accepts connections at `sock`, which becomes non-blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)
        self._spare_fd = _open_spare_descriptor()

    def fileno(self) -> int:
        """Return the listening socket's descriptor."""
        return self.sock.fileno()

    def accept(self) -> socket.socket | None:
        """Accept the next connection, which becomes non-blocking.

        Returns:
            The connection; None if none is pending or it was rejected.
        """
        try:
            accepted_sock, _ = self.sock.accept()
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                self._reject()
            return None
        accepted_sock.setblocking(False)
        return accepted_sock

    def _reject(self) -> None:
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
            with contextlib.suppress(OSError):
                self.sock.accept()[0].close()
        self._spare_fd = _open_spare_descriptor()

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
            self._spare_fd = -1


def _open_spare_descriptor() -> int:
    try:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


class Router:
    """The bound end of links from many `Dealer`s, which are identified by their identity.

    A second connection with the identity of a connected dealer is rejected.
    """

    max_array_len = -1

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.malformed_messages = 0  # number received
        # Messages to send, by the identity of the peer.
        self.pending: defaultdict[bytes, list[Any]] = defaultdict(list)
        self._poll = select.epoll()
        self.fd: int = self._poll.fileno()
        self._connections: dict[int, Connection] = {}  # by descriptor
        self._peers: dict[bytes, Connection] = {}  # by identity
        self._anonymous_numbers = itertools.count(1)  # identities of peers that send none
        self._only_connection: Connection | None = None  # the connection of an only peer
        self._unpolled_reads = 0  # reads of the only connection since the last poll
        self._path = endpoint.removeprefix(ENDPOINT_PREFIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # the socket of a killed server
        listener = open_listening_socket(socket.SOCK_STREAM, self._path, _LISTEN_BACKLOG)
        self._listener = Listener(listener)
        try:
            self._socket_stat = os.stat(self._path)
        except OSError as error:  # the folder was removed at the same time
            raise socket_error(error) from None
        self._poll.register(self._listener, select.EPOLLIN)

    def post(self, peer: bytes, message: Any) -> None:
        """Queue a message for a peer until the next `flush`."""
        self.pending[peer].append(message)

    def flush(self) -> None:
        """Send the queued messages, one frame per peer; drop those for disconnected peers.

        A message that cannot be packed raises an exception and is removed. Messages for other peers
        stay queued.
        """
        pending, peers = self.pending, self._peers
        for peer in list(pending):
            messages = pending.pop(peer)
            if peer not in peers:
                logger.debug("dropped %d messages for a disconnected peer", len(messages))
                continue
            connection = peers[peer]
            try:
                connection.send(pack(messages))
            except OSError:
                connection.unsent.clear()  # `receive` will detect the end of the connection

    def receive(self) -> list[tuple[bytes, Any]]:
        """Return the available (peer, message) pairs, at most one bounded read per peer.

        A worker is usually the only peer. Its connection is read without a preceding poll.
        """
        connections = self._connections
        received_messages: list[tuple[bytes, Any]] = []  # (peer, message)
        only_connection = self._only_connection
        if (
            only_connection is not None
            and self._unpolled_reads < _MAX_UNPOLLED_READS
            and not only_connection.unsent
        ):
            self._unpolled_reads += 1
            self._read(only_connection, received_messages)
            if received_messages:
                return received_messages
        self._unpolled_reads = 0
        for fd, events in self._poll.poll(0):
            if fd not in connections:
                self._accept()
                continue
            connection = connections[fd]
            if events & _WRITABLE:
                with contextlib.suppress(OSError):
                    connection.push()
            if events & ~_WRITABLE:
                self._read(connection, received_messages)
        return received_messages

    def _read(self, connection: Connection, received_messages: list[tuple[bytes, Any]]) -> None:
        frames = connection.receive()
        decoder = connection.decoder
        if connection.identity is None and decoder.properties is not None:
            self._identify(connection, decoder.properties)
        peer = connection.identity or b""
        for frame in frames or ():
            if decoder.violation and connection.identity is None:
                break
            try:
                received_messages += itertools.product((peer,), unpack(frame, self.max_array_len))
            except MalformedMessage as error:
                connection.malformed_messages += 1
                if self._count_malformed():
                    logger.warning("dropped a malformed frame at %s: %s", self.endpoint, error)
        if decoder.dropped_messages:
            connection.malformed_messages += decoder.dropped_messages
            self.malformed_messages += decoder.dropped_messages
            decoder.dropped_messages = 0
        if frames is None or decoder.violation:
            if decoder.violation and self._count_malformed():
                logger.warning("closed a connection to %s: %s", self.endpoint, decoder.violation)
            self._close_connection(connection)

    def _count_malformed(self) -> bool:
        """Count a malformed message; return whether it is logged."""
        # Only some are logged, because a peer could flood the log with malformed messages.
        self.malformed_messages = count = self.malformed_messages + 1
        return count <= _MAX_CONSECUTIVE_WARNINGS or count.bit_count() == 1

    def _identify(self, connection: Connection, properties: dict[str, bytes]) -> None:
        identity = properties.get("identity") or b"\0%d" % next(self._anonymous_numbers)
        if identity in self._peers:
            connection.decoder.violation = "it claims the identity of another peer"
            return
        connection.identity = identity
        self._peers[identity] = connection
        self._update_only_connection()

    def _update_only_connection(self) -> None:
        """Update `_only_connection` after a change of the connections."""
        peers = self._peers.values()
        has_only_peer = len(self._connections) == len(peers) == 1
        self._only_connection = next(iter(peers)) if has_only_peer else None

    def _accept(self) -> Connection | None:
        sock = self._listener.accept()
        if sock is None:
            return None
        first_bytes = bytearray(zmtp.GREETING + zmtp.ready_command("ROUTER"))
        connection = self._connections[sock.fileno()] = Connection(sock, self._poll, first_bytes)
        self._update_only_connection()
        with contextlib.suppress(OSError):
            connection.push()
        return connection

    def _close_connection(self, connection: Connection) -> None:
        del self._connections[connection.sock.fileno()]
        if connection.identity is not None:
            del self._peers[connection.identity]
        self._update_only_connection()
        connection.close()

    def wait(self, timeout_s: float | None) -> bool:
        """Block until `receive` has work (True) or the time has expired (False)."""
        return bool(self._poll.poll(timeout_s))

    def close(self, linger_s: float = 0.0) -> None:
        """Close the router; output that peers have not read after `linger_s` seconds is lost."""
        linger(self._connections.values(), linger_s)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._peers.clear()
        self._update_only_connection()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            # If the folder was removed, another server may have created it again.
            if os.path.samestat(os.stat(self._path), self._socket_stat):
                os.unlink(self._path)
        self._poll.close()


class PeerCredRouter(Router):
    """A router that checks peers' identities against the pid that the kernel reports (SO_PEERCRED).

    A connection whose `pid_of(identity)` differs is closed. The check is needed because models run
    foreign code as the server's user, which can connect to any worker's endpoint.
    """

    def __init__(self, endpoint: str, pid_of: Callable[[bytes], int]) -> None:
        super().__init__(endpoint)
        self._pid_of = pid_of

    def _identify(self, connection: Connection, properties: dict[str, bytes]) -> None:
        credentials = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, _, _ = struct.unpack("iii", credentials)
        if self._pid_of(properties.get("identity", b"")) != pid:
            connection.decoder.violation = "it claims to be another process"
            return
        super()._identify(connection, properties)


def leading_pid(identity: bytes) -> int:
    """Return the pid in "PID.anything", or 0 if the identity has no pid."""
    return _pid_or_zero(identity.partition(b".")[0])


def trailing_pid(identity: bytes) -> int:
    """Return the pid in "anything.PID", or 0 if the identity has no pid."""
    return _pid_or_zero(identity.rpartition(b".")[2])


def _pid_or_zero(digits: bytes) -> int:
    return int(digits) if digits.isdigit() and len(digits) < 10 else 0


def refuse_descriptors(sock: socket.socket) -> None:
    """Reject descriptors from peers that connect to `sock`.

    The kernel closes unreceived descriptors in the process that reads the bytes. If one is a socket
    that lingers, its close blocks the process. Linux can reject descriptors since 6.16.
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)


class UntrustedRouter(Router):
    """A router for programs outside the server, which `is_admitted` admits by their identity."""

    max_array_len = MAX_ARRAY_LEN

    def __init__(self, endpoint: str, is_admitted: Callable[[bytes], bool]) -> None:
        super().__init__(endpoint)
        refuse_descriptors(self._listener.sock)
        self._is_admitted = is_admitted
        # Connections without a registered identity, in order of arrival.
        self._unregistered_connections: dict[Connection, None] = {}
        self.has_buffered_much = False  # whether a large frame has arrived; the owner resets it

    def peers(self) -> list[bytes]:
        """Return the identities of connected peers."""
        return list(self._peers)

    def disconnect(self, peer: bytes) -> None:
        """Close a peer's connection."""
        connection = self._peers.get(peer)
        if connection is not None:
            self._close_connection(connection)

    def _accept(self) -> Connection | None:
        connection = super()._accept()
        if connection is not None:
            connection.max_unsent = _MAX_UNSENT_BYTES
            connection.decoder.max_frame_size = MAX_FRAME_SIZE
            self._unregistered_connections[connection] = None
            if len(self._unregistered_connections) > _MAX_UNREGISTERED:
                self._close_connection(next(iter(self._unregistered_connections)))
        return connection

    def _identify(self, connection: Connection, properties: dict[str, bytes]) -> None:
        if not self._is_admitted(properties.get("identity", b"")):
            connection.decoder.violation = "its peer has not registered"
            return
        super()._identify(connection, properties)
        if connection.identity is not None:
            del self._unregistered_connections[connection]

    def _read(self, connection: Connection, received_messages: list[tuple[bytes, Any]]) -> None:
        super()._read(connection, received_messages)
        if connection.malformed_messages > _MAX_MALFORMED or self._buffers_too_much(connection):
            self._close_connection(connection)

    def _buffers_too_much(self, connection: Connection) -> bool:
        if connection.decoder.buffered_bytes < _TOLERATED_BUFFER_BYTES:
            return False
        self.has_buffered_much = True
        return (
            sum(other.decoder.buffered_bytes for other in self._connections.values())
            > _MAX_BUFFERED_BYTES
        )

    def _close_connection(self, connection: Connection) -> None:
        if connection.sock.fileno() >= 0:  # the connection was not closed in the meantime
            self._unregistered_connections.pop(connection, None)
            super()._close_connection(connection)
