"""ZeroMQ's wire protocol, ZMTP 3.0 with the NULL mechanism (RFC 23), its connections, and dealers.

libzmq is not used because it passes every message through its own thread. This costs two more
wake-ups per hop, and a wake-up takes as long as all work of a process for a small inference. A
client may use any ZeroMQ library.

    greeting, 64 bytes      FF 00*8 7F  03 00  "NULL" 00*16  00  00*31
    frame                   flags (1: more follow, 2: long, 4: command), size (1 or 8 bytes), body
    READY command           05 "READY", then properties: size (1), name, size (4), value

Dealers (ZeroMQ's DEALER) are the connecting ends of links for typed messages, and never block. A
`LinkTable` has the dealers of a submitter, one for each scheduler. Its `flush` sends the queued
messages of a link as one frame.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from shmserve.errors import Unavailable
from shmserve.ipc.transport.frames import MalformedMessage, pack, unpack

logger = logging.getLogger(__name__)

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)

_SIGNATURE_SIZE = 10  # the first bytes of a greeting, which identify ZMTP
_MORE_FLAG, _LONG_FLAG, _COMMAND_FLAG = 1, 2, 4
_LONG_SIZE_FORMAT = struct.Struct(">Q")
_VALUE_SIZE_FORMAT = struct.Struct(">I")
# Larger than any load request, whose files have up to 2 GiB (gRPC). A larger frame closes the link.
_MAX_FRAME_SIZE = 1 << 32
_MAX_HANDSHAKE_FRAME_SIZE = 4096
# Bound here, because `gevent.monkey` in a model removes the function from its module.
_epoll = select.epoll


def ready_command(socket_type: str, identity: bytes = b"") -> bytes:
    """Return the frame that completes the handshake."""
    body = bytearray(b"\x05READY")
    for name, value in ((b"Socket-Type", socket_type.encode()), (b"Identity", identity)):
        body += bytes((len(name),)) + name + _VALUE_SIZE_FORMAT.pack(len(value)) + value
    return bytes((_COMMAND_FLAG, len(body))) + body


@dataclass(slots=True, eq=False)
class Decoder:
    """The decoder of a connection's incoming bytes.

    Attributes:
        max_frame_size: The maximum size of a frame in bytes.
        properties: The peer's properties, after its READY.
        violation: The protocol violation after which the connection is unusable, or "".
        dropped_messages: The number of dropped multipart messages; the protocol does not use them.
    """

    max_frame_size: int = _MAX_FRAME_SIZE  # bytes
    properties: dict[str, bytes] | None = None  # of the peer; None: not received yet
    violation: str = ""  # of the protocol; "": none
    dropped_messages: int = 0  # number of multipart messages
    _buffer: bytearray = field(default_factory=bytearray)
    _needed_bytes: int = 0  # minimum size of the buffer that contains a complete frame
    _is_greeted: bool = False  # whether the peer's greeting has arrived
    _is_skipping: bool = False  # whether the current frame belongs to a multipart message

    @property
    def buffered_bytes(self) -> int:
        """Return the number of bytes of incomplete frames."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that are complete with `data`."""
        buffer = self._buffer
        is_ready = self.properties is not None and not (self._is_skipping or self.violation)
        if is_ready and data and not buffer:
            # Most reads return exactly one frame.
            size = len(data)
            if data[0] == _LONG_FLAG and 9 < size <= self.max_frame_size:
                if _LONG_SIZE_FORMAT.unpack_from(data, 1)[0] == size - 9:
                    return [data[9:]]
            elif data[0] == 0 and 2 <= size <= self.max_frame_size and data[1] == size - 2:
                return [data[2:]]
        if buffer:
            buffer += data
            if len(buffer) < self._needed_bytes:
                return []
            data = bytes(buffer)
            buffer.clear()
        messages: list[bytes] = []
        offset = 0
        if not self._is_greeted:
            offset = self._decode_greeting(data)
        if self._is_greeted:
            offset = self._decode_frames(data, offset, messages)
        if offset < len(data):
            buffer += data[offset:]
        return messages

    def _decode_greeting(self, data: bytes) -> int:
        if not GREETING.startswith(data[:1]) or (len(data) >= _SIGNATURE_SIZE and not data[9] & 1):
            self.violation = "not ZMTP"
        elif len(data) < len(GREETING):
            self._needed_bytes = _SIGNATURE_SIZE if len(data) < _SIGNATURE_SIZE else len(GREETING)
        elif data[10] < 3 or data[12:32] != GREETING[12:32]:
            self.violation = "an unsupported version or mechanism of ZMTP"
        else:
            self._is_greeted = True
            return len(GREETING)
        return 0

    def _decode_frames(self, data: bytes, offset: int, messages: list[bytes]) -> int:
        """Take complete frames from `offset`; return the offset of the first incomplete one."""
        size = len(data)
        self._needed_bytes = 0
        while size - offset >= 2 and not self.violation:
            flags = data[offset]
            if flags & _LONG_FLAG:
                start = offset + 9
                if start > size:
                    break
                end = start + int(_LONG_SIZE_FORMAT.unpack_from(data, offset + 1)[0])
            else:
                start = offset + 2
                end = start + data[offset + 1]
            if end - start > (
                self.max_frame_size if self.properties is not None else _MAX_HANDSHAKE_FRAME_SIZE
            ):
                self.violation = "a frame that is too large"
            elif end > size:
                self._needed_bytes = end - offset
                break
            elif not flags & ~_LONG_FLAG and not self._is_skipping:
                if self.properties is None:
                    self.violation = "a message before the handshake"
                else:
                    messages.append(data[start:end])
            else:
                self._handle_unusual_frame(flags, data[start:end])
            offset = end
        return offset

    def _handle_unusual_frame(self, flags: int, body: bytes) -> None:
        if flags & ~(_MORE_FLAG | _LONG_FLAG | _COMMAND_FLAG):
            self.violation = "a frame with unknown flags"
        elif flags & _COMMAND_FLAG:
            # Further commands, such as heartbeats, are ignored.
            if self.properties is None:
                self._decode_ready_command(body)
        else:
            self._is_skipping = bool(flags & _MORE_FLAG)
            self.dropped_messages += not self._is_skipping

    def _decode_ready_command(self, body: bytes) -> None:
        if not body.startswith(b"\x05READY"):
            self.violation = "a handshake without READY"
            return
        properties: dict[str, bytes] = {}
        offset = 6
        while offset < len(body):
            name_end = offset + 1 + body[offset]
            value_start = name_end + 4
            value_end = value_start
            if value_start <= len(body):
                value_end += int(_VALUE_SIZE_FORMAT.unpack_from(body, name_end)[0])
            if value_end > len(body) or value_start > len(body):
                self.violation = "a property that is cut short"
                return
            name = body[offset + 1 : name_end].decode("ascii", "replace").lower()
            properties[name] = body[value_start:value_end]
            offset = value_end
        self.properties = properties


_READ_SIZE = 64 * 1024
ENDPOINT_PREFIX = "ipc://"


@dataclass(slots=True, eq=False)
class Connection:
    """A unix socket that receives whole frames, and sends bytes as fast as the peer reads them.

    The first bytes in `unsent`, the buffer of bytes to send, are the greeting.
    """

    sock: socket.socket
    poll: select.epoll
    unsent: bytearray  # bytes to send
    decoder: Decoder = field(default_factory=Decoder)
    identity: bytes | None = None  # of the peer
    malformed_messages: int = 0  # number received
    max_unsent: int = sys.maxsize  # while `unsent` is longer, no messages are read from the peer
    events: int = select.EPOLLIN  # for which `poll` wakes

    def __post_init__(self) -> None:
        self.sock.setblocking(False)
        self.poll.register(self.sock, self.events)

    def send(self, body: bytes) -> None:
        """Send a message of one part; buffer the bytes that the peer does not read yet.

        Raises:
            OSError: The peer is gone.
        """
        size = len(body)
        if size < 256:
            data, size = b"\0%c%b" % (size, body), size + 2
        else:
            data, size = b"\2%b%b" % (_LONG_SIZE_FORMAT.pack(size), body), size + 9
        if self.unsent:
            self.unsent += data
            self.push()
            return
        try:
            sent_bytes = self.sock.send(data)
        except BlockingIOError:
            sent_bytes = 0
        if sent_bytes < size:
            self.unsent += data[sent_bytes:]
            self._update_events()

    def push(self) -> None:
        """Send as many of the buffered bytes as the peer accepts now."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                with memoryview(self.unsent) as view:
                    sent_bytes = self.sock.send(view[:_READ_SIZE])
                del self.unsent[:sent_bytes]
        self._update_events()

    def _update_events(self) -> None:
        events = select.EPOLLIN if len(self.unsent) <= self.max_unsent else 0
        if self.unsent:
            events |= select.EPOLLOUT
        if events != self.events:
            self.events = events
            self.poll.modify(self.sock, events)

    def receive(self) -> list[bytes] | None:
        """Return the available frames after one bounded read.

        The result is None if the peer is gone or violates ZMTP.
        """
        try:
            data = self.sock.recv(_READ_SIZE)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self.decoder.feed(data) if data else None

    def close(self) -> None:
        """Close the socket."""
        # epoll would keep reporting the closed socket if a process that a model has forked still
        # holds it open.
        self.poll.unregister(self.sock)
        self.sock.close()


def linger(connections: Iterable[Connection], linger_s: float) -> None:
    """Send the unsent bytes of connections, for at most `linger_s` seconds in all."""
    deadline = time.monotonic() + linger_s
    for connection in connections:
        with contextlib.suppress(OSError):
            while connection.unsent and (remaining_s := deadline - time.monotonic()) > 0:
                poll = select.poll()
                poll.register(connection.sock, select.POLLOUT)
                poll.poll(remaining_s * 1000)
                connection.push()


_CONNECT_TIMEOUT_S = 1.0
# Above these limits, queued messages are sent at once, because the size of a frame is limited.
_MAX_QUEUED_BYTES = 1 << 19  # bytes of queued requests
_MAX_QUEUED_MESSAGES = 1 << 14  # number of queued messages


class Dealer:
    """The connecting end of a link to a `Router`, which identifies this end by its `identity`.

    A dealer sends before it receives the peer's greeting, so that messages sent just before its
    process exits arrive. `Router` accepts this; the router of libzmq does not. If no socket listens
    at `endpoint`, messages are lost; the supervisor handles exits and successors.
    """

    def __init__(self, endpoint: str, identity: str) -> None:
        self.endpoint = endpoint
        self.malformed_messages = 0
        self.pending: list[Any] = []
        # Queues a message for the next `flush`. Requests use this often, so it avoids another call.
        self.post: Callable[[Any], None] = self.pending.append
        self._poll = _epoll()
        self.fd: int = self._poll.fileno()
        self._connection: Connection | None = None
        self.connected = False  # whether the other end is known to be connected
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(_CONNECT_TIMEOUT_S)
        try:
            sock.connect(endpoint.removeprefix(ENDPOINT_PREFIX))
        except OSError as error:
            logger.debug("no process listens at %s: %s", endpoint, error)
            sock.close()
            return
        first_bytes = bytearray(GREETING + ready_command("DEALER", identity.encode()))
        self._connection = Connection(sock, self._poll, first_bytes)
        self.connected = True
        with contextlib.suppress(OSError):
            self._connection.push()

    def flush(self) -> bool:
        """Send the queued messages as one frame.

        A message that cannot be packed raises an exception and is removed from the queue.

        Returns:
            False if the other end is gone.
        """
        pending = self.pending
        if not pending:
            return True
        messages = pending[:]
        pending.clear()
        return self._write(pack(messages))

    def send(self, message: Any) -> bool:
        """Call `post` and `flush`; return False if the other end is gone."""
        if self.pending:
            self.post(message)
            return self.flush()
        return self._write(pack((message,)))

    def _write(self, frame: bytes) -> bool:
        if self._connection is None:
            return False
        try:
            self._connection.send(frame)
        except OSError:
            # Unsent bytes are lost, but `receive` still returns the messages that the peer sent
            # before it closed the connection, and then detects the end of the connection.
            self._connection.unsent.clear()
            return False
        return True

    def receive(self) -> list[Any]:
        """Return the available messages, at most those of one bounded read."""
        connection = self._connection
        if connection is None:
            return []
        if connection.unsent:
            with contextlib.suppress(OSError):
                connection.push()
        frames = connection.receive()
        messages: list[Any] = []
        for frame in frames or ():
            try:
                messages += unpack(frame)
            except MalformedMessage as error:
                self.malformed_messages += 1
                logger.warning("dropped a malformed frame from %s: %s", self.endpoint, error)
        if frames is None or connection.decoder.violation:
            self._disconnect(connection)
        elif connection.decoder.dropped_messages:
            self.malformed_messages += connection.decoder.dropped_messages
            connection.decoder.dropped_messages = 0
        return messages

    def _disconnect(self, connection: Connection) -> None:
        connection.close()
        self._connection = None
        self.connected = False

    def wait(self, timeout_s: float | None) -> bool:
        """Block until a message is available (True) or the time has expired (False)."""
        return bool(self._poll.poll(timeout_s))

    def close(self, linger_s: float = 0.0) -> None:
        """Close the link.

        Output that the other end has not read after `linger_s` seconds is lost.
        """
        if self._connection is not None:
            linger([self._connection], linger_s)
            self._disconnect(self._connection)
        self._poll.close()


@dataclass(eq=False)
class LinkTable:
    """A table of the links (dealers) to schedulers, by endpoint and by file descriptor.

    Attributes:
        _identity: The identity of this end of every link.
        _watch: Called with the descriptor of a new link.
        _unwatch: Called with a descriptor that is about to be closed.
        _on_queued: Called when the first message after a flush was queued.
        _on_deferred: Called when a message was queued that may be delayed.
        pending: The links with queued messages.
        queued_count: The number of queued messages, without those that may be delayed.
    """

    _identity: str
    _watch: Callable[[int], None]  # called with the descriptor of a new link
    _unwatch: Callable[[int], None]  # called before a descriptor is closed
    _on_queued: Callable[[], None] = lambda: None  # default: the owner calls `flush`
    _on_deferred: Callable[[], None] = lambda: None
    _links_by_endpoint: dict[str, Dealer] = field(default_factory=dict)
    _links_by_fd: dict[int, Dealer] = field(default_factory=dict)
    pending: list[Dealer] = field(default_factory=list)  # links with queued messages
    queued_count: int = 0  # number of queued messages
    _queued_bytes: int = 0

    def __iter__(self) -> Iterator[Dealer]:
        return iter(self._links_by_endpoint.values())

    def find_by_fd(self, fd: int) -> Dealer | None:
        """Return the link with this descriptor, or None."""
        return self._links_by_fd.get(fd)

    def open(self, endpoint: str) -> Dealer:
        """Return the link to a scheduler; open it if needed.

        Raises:
            Unavailable: The process is out of file descriptors.
        """
        return self._links_by_endpoint.get(endpoint) or self.add(self.connect(endpoint))

    def connect(self, endpoint: str) -> Dealer:
        """Open a link without adding it to the table (see `add`).

        Raises:
            Unavailable: The process is out of file descriptors.
        """
        try:
            return Dealer(endpoint, self._identity)
        except OSError as error:
            raise Unavailable(f"cannot connect to a scheduler: {error.strerror}") from error

    def add(self, link: Dealer) -> Dealer:
        """Add a link to the table, and return it."""
        self._links_by_endpoint[link.endpoint] = link
        self._links_by_fd[link.fd] = link
        self._watch(link.fd)
        return link

    def queue(self, endpoint: str, message: Any, byte_size: int = 0) -> None:
        """Queue a message for the next `flush`. A large queue is flushed at once.

        Args:
            endpoint: The endpoint of the scheduler, to which a link is opened if needed.
            message: The message.
            byte_size: The approximate size of the message.

        Raises:
            Unavailable: The process is out of file descriptors.
        """
        try:
            link = self._links_by_endpoint[endpoint]
        except KeyError:
            link = self.open(endpoint)
        link.post(message)
        if link not in self.pending:
            self.pending.append(link)
        self.queued_count += 1
        self._queued_bytes += byte_size
        if self.queued_count == 1:
            self._on_queued()
        if self.queued_count >= _MAX_QUEUED_MESSAGES or self._queued_bytes > _MAX_QUEUED_BYTES:
            self.flush()

    def post(self, endpoint: str, message: Any) -> None:
        """Queue a message for a scheduler; do nothing if there is no link to it."""
        if endpoint in self._links_by_endpoint:
            self.queue(endpoint, message)

    def defer(self, endpoint: str, message: Any) -> None:
        """Queue a message that may be delayed until other messages go to the same scheduler."""
        link = self._links_by_endpoint.get(endpoint)
        if link is not None:
            link.post(message)
            if link not in self.pending:
                self.pending.append(link)
            self._on_deferred()

    def flush(self) -> None:
        """Send the queued messages."""
        pending, self.pending = self.pending, []
        self.queued_count = self._queued_bytes = 0
        for link in pending:
            link.flush()

    def drain(self, endpoint: str, on_message: Callable[[str, Any], None]) -> None:
        """Pass on the last messages of a scheduler that has exited, and close its link.

        Args:
            endpoint: The endpoint of the scheduler.
            on_message: Called with the endpoint and each remaining message of the scheduler.
        """
        link = self._links_by_endpoint.get(endpoint)
        if link is None:
            return
        while link.connected and link.wait(0):
            for message in link.receive():
                on_message(endpoint, message)
        self.flush()
        self.remove(link)

    def remove(self, link: Dealer) -> None:
        """Close a link and remove it from the table."""
        del self._links_by_endpoint[link.endpoint]
        self._close(link)

    def _close(self, link: Dealer) -> None:
        if link in self.pending:
            self.pending.remove(link)
        del self._links_by_fd[link.fd]
        self._unwatch(link.fd)
        link.close()

    def close_all(self) -> None:
        """Close every link."""
        for link in self._links_by_endpoint.values():
            self._close(link)
        self._links_by_endpoint.clear()
