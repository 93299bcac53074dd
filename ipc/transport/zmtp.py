"""ZeroMQ's wire protocol, ZMTP 3.0 with the NULL mechanism (RFC 23), and its connections.

libzmq is not used because it passes every message through its own thread. That costs two more
wake-ups per hop, each as long as a whole small inference takes in a process. A client may use any
ZeroMQ library.

    greeting, 64 bytes      FF 00*8 7F  03 00  "NULL" 00*16  00  00*31
    frame                   flags (1: more follow, 2: long, 4: command), size (1 or 8 bytes), body
    READY command           05 "READY", then properties: size (1), name, size (4), value
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)

_TELLING = 10
_MORE, _LONG, _COMMAND = 1, 2, 4
_LONG_SIZE = struct.Struct(">Q")
_VALUE_SIZE = struct.Struct(">I")
_MAX_FRAME = 256 * 1024 * 1024
_MAX_HANDSHAKE = 4096


def ready(socket_type: str, identity: bytes = b"") -> bytes:
    """Return the frame that completes the handshake."""
    body = bytearray(b"\x05READY")
    for name, value in ((b"Socket-Type", socket_type.encode()), (b"Identity", identity)):
        body += bytes((len(name),)) + name + _VALUE_SIZE.pack(len(value)) + value
    return bytes((_COMMAND, len(body))) + body


@dataclass(slots=True, eq=False)
class Decoder:
    """The decoder of a connection's incoming bytes.

    Attributes:
        largest: The maximum size of a frame in bytes.
        properties: The peer's properties, after its READY.
        broken: The protocol violation after which the connection is unusable, or "".
        dropped: The number of dropped multipart messages, which no peer of this server sends.
    """

    largest: int = _MAX_FRAME
    properties: dict[str, bytes] | None = None
    broken: str = ""
    dropped: int = 0
    _buffer: bytearray = field(default_factory=bytearray)
    _needed: int = 0  # minimum size of the buffer that contains a complete frame
    _greeted: bool = False
    _skipping: bool = False  # whether the current frame belongs to a multipart message

    @property
    def held(self) -> int:
        """Return the number of bytes of incomplete frames."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that are complete with `data`."""
        buffered = self._buffer
        ready = self.properties is not None and not (self._skipping or self.broken)
        if ready and data and not buffered:
            # Most reads return exactly one frame.
            size = len(data)
            if data[0] == _LONG and 9 < size <= self.largest:
                if _LONG_SIZE.unpack_from(data, 1)[0] == size - 9:
                    return [data[9:]]
            elif data[0] == 0 and 2 <= size <= self.largest and data[1] == size - 2:
                return [data[2:]]
        if buffered:
            buffered += data
            if len(buffered) < self._needed:
                return []
            data = bytes(buffered)
            buffered.clear()
        messages: list[bytes] = []
        at = 0
        if not self._greeted:
            at = self._greet(data)
        if self._greeted:
            at = self._frames(data, at, messages)
        if at < len(data):
            buffered += data[at:]
        return messages

    def _greet(self, data: bytes) -> int:
        # The first ten bytes show whether this is a greeting.
        if not GREETING.startswith(data[:1]) or (len(data) >= _TELLING and not data[9] & 1):
            self.broken = "not ZMTP"
        elif len(data) < len(GREETING):
            self._needed = _TELLING if len(data) < _TELLING else len(GREETING)
        elif data[10] < 3 or data[12:32] != GREETING[12:32]:
            self.broken = "an unsupported version or mechanism of ZMTP"
        else:
            self._greeted = True
            return len(GREETING)
        return 0

    def _frames(self, data: bytes, at: int, messages: list[bytes]) -> int:
        """Take complete frames from `at`; return the offset of the first incomplete one."""
        size = len(data)
        self._needed = 0
        while size - at >= 2 and not self.broken:
            flags = data[at]
            if flags & _LONG:
                start = at + 9
                if start > size:
                    break
                end = start + int(_LONG_SIZE.unpack_from(data, at + 1)[0])
            else:
                start = at + 2
                end = start + data[at + 1]
            if end - start > (self.largest if self.properties is not None else _MAX_HANDSHAKE):
                self.broken = "a frame that is too large"
            elif end > size:
                self._needed = end - at
                break
            elif not flags & ~_LONG and not self._skipping:
                if self.properties is None:
                    self.broken = "a message before the handshake"
                else:
                    messages.append(data[start:end])
            else:
                self._unusual(flags, data[start:end])
            at = end
        return at

    def _unusual(self, flags: int, body: bytes) -> None:
        if flags & ~(_MORE | _LONG | _COMMAND):
            self.broken = "a frame with unknown flags"
        elif flags & _COMMAND:
            # Further commands, such as heartbeats, are ignored.
            if self.properties is None:
                self._ready(body)
        else:
            self._skipping = bool(flags & _MORE)
            self.dropped += not self._skipping

    def _ready(self, body: bytes) -> None:
        if not body.startswith(b"\x05READY"):
            self.broken = "a handshake without READY"
            return
        properties: dict[str, bytes] = {}
        at = 6
        while at < len(body):
            name_end = at + 1 + body[at]
            value = name_end + 4
            end = value
            if value <= len(body):
                end += int(_VALUE_SIZE.unpack_from(body, name_end)[0])
            if end > len(body) or value > len(body):
                self.broken = "a property that is cut short"
                return
            name = body[at + 1 : name_end].decode("ascii", "replace").lower()
            properties[name] = body[value:end]
            at = end
        self.properties = properties


_CHUNK = 64 * 1024
PREFIX = "ipc://"


@dataclass(slots=True, eq=False)
class Connection:
    """A unix socket: whole frames are received, and bytes are sent as fast as the peer reads.

    `unsent` begins with the greeting.
    """

    sock: socket.socket
    poll: select.epoll
    unsent: bytearray
    decoder: Decoder = field(default_factory=Decoder)
    identity: bytes | None = None
    malformed: int = 0
    most_unsent: int = sys.maxsize  # a peer with more unread output is not read
    events: int = select.EPOLLIN

    def __post_init__(self) -> None:
        self.sock.setblocking(False)
        self.poll.register(self.sock, self.events)

    def send(self, body: bytes) -> None:
        """Send a message of one part, or buffer what the peer does not read yet.

        Raises:
            OSError: The peer is gone.
        """
        size = len(body)
        if size < 256:
            data, size = b"\0%c%b" % (size, body), size + 2
        else:
            data, size = b"\2%b%b" % (_LONG_SIZE.pack(size), body), size + 9
        if self.unsent:
            self.unsent += data
            self.push()
            return
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        if sent < size:
            self.unsent += data[sent:]
            self._watch()

    def push(self) -> None:
        """Send more of the buffered output."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                with memoryview(self.unsent) as view:
                    sent = self.sock.send(view[:_CHUNK])
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
        """Return the available frames after one bounded read.

        The result is None if the peer is gone or violates ZMTP.
        """
        try:
            data = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self.decoder.feed(data) if data else None

    def close(self) -> None:
        """Close the socket."""
        # Unregistered explicitly, because a process forked by a model may hold it open.
        self.poll.unregister(self.sock)
        self.sock.close()


def linger(connections: Iterable[Connection], linger_s: float) -> None:
    """Send the unsent bytes of connections, for at most `linger_s` seconds in all."""
    end = time.monotonic() + linger_s
    for connection in connections:
        with contextlib.suppress(OSError):
            while connection.unsent and (remaining_s := end - time.monotonic()) > 0:
                writable = select.poll()
                writable.register(connection.sock, select.POLLOUT)
                writable.poll(remaining_s * 1000)
                connection.push()
