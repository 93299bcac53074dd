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

_SIGNATURE_SIZE = 10  # the first bytes of a greeting, which identify ZMTP
_MORE_FLAG, _LONG_FLAG, _COMMAND_FLAG = 1, 2, 4
_LONG_SIZE = struct.Struct(">Q")
_VALUE_SIZE = struct.Struct(">I")
_MAX_FRAME_SIZE = 256 * 1024 * 1024
_MAX_HANDSHAKE_FRAME_SIZE = 4096


def ready_command(socket_type: str, identity: bytes = b"") -> bytes:
    """Return the frame that completes the handshake."""
    body = bytearray(b"\x05READY")
    for name, value in ((b"Socket-Type", socket_type.encode()), (b"Identity", identity)):
        body += bytes((len(name),)) + name + _VALUE_SIZE.pack(len(value)) + value
    return bytes((_COMMAND_FLAG, len(body))) + body


@dataclass(slots=True, eq=False)
class Decoder:
    """The decoder of a connection's incoming bytes.

    Attributes:
        largest: The maximum size of a frame in bytes.
        properties: The peer's properties, after its READY.
        violation: The protocol violation after which the connection is unusable, or "".
        dropped: The number of dropped multipart messages, which no peer of this server sends.
    """

    largest: int = _MAX_FRAME_SIZE
    properties: dict[str, bytes] | None = None
    violation: str = ""
    dropped: int = 0
    _buffer: bytearray = field(default_factory=bytearray)
    _needed_bytes: int = 0  # minimum size of the buffer that contains a complete frame
    _greeted: bool = False
    _skipping: bool = False  # whether the current frame belongs to a multipart message

    @property
    def buffered_bytes(self) -> int:
        """Return the number of bytes of incomplete frames."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that are complete with `data`."""
        buffer = self._buffer
        is_ready = self.properties is not None and not (self._skipping or self.violation)
        if is_ready and data and not buffer:
            # Most reads return exactly one frame.
            size = len(data)
            if data[0] == _LONG_FLAG and 9 < size <= self.largest:
                if _LONG_SIZE.unpack_from(data, 1)[0] == size - 9:
                    return [data[9:]]
            elif data[0] == 0 and 2 <= size <= self.largest and data[1] == size - 2:
                return [data[2:]]
        if buffer:
            buffer += data
            if len(buffer) < self._needed_bytes:
                return []
            data = bytes(buffer)
            buffer.clear()
        messages: list[bytes] = []
        offset = 0
        if not self._greeted:
            offset = self._decode_greeting(data)
        if self._greeted:
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
            self._greeted = True
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
                end = start + int(_LONG_SIZE.unpack_from(data, offset + 1)[0])
            else:
                start = offset + 2
                end = start + data[offset + 1]
            if end - start > (
                self.largest if self.properties is not None else _MAX_HANDSHAKE_FRAME_SIZE
            ):
                self.violation = "a frame that is too large"
            elif end > size:
                self._needed_bytes = end - offset
                break
            elif not flags & ~_LONG_FLAG and not self._skipping:
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
            self._skipping = bool(flags & _MORE_FLAG)
            self.dropped += not self._skipping

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
                value_end += int(_VALUE_SIZE.unpack_from(body, name_end)[0])
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
    """A unix socket: whole frames are received, and bytes are sent as fast as the peer reads.

    `unsent` begins with the greeting.
    """

    sock: socket.socket
    poll: select.epoll
    unsent: bytearray
    decoder: Decoder = field(default_factory=Decoder)
    identity: bytes | None = None
    malformed: int = 0
    max_unsent: int = sys.maxsize  # a peer with more unread output is not read
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
            sent_bytes = self.sock.send(data)
        except BlockingIOError:
            sent_bytes = 0
        if sent_bytes < size:
            self.unsent += data[sent_bytes:]
            self._update_events()

    def push(self) -> None:
        """Send more of the buffered output."""
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
        # Unregistered explicitly, because a process forked by a model may hold it open.
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
