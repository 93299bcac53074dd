"""gRPC at full speed: as much of HTTP/2 as a client of it takes. Calls of one response are told by
their trailers alone; the messages of streams are read as far as their ends show.

Some lanes share a connection; what they send in one turn of the loop leaves as one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any
from urllib.parse import unquote

from hpack import Decoder

from shmserve.cli.transports import Address, Credentials, OutgoingRequest
from shmserve.cli.transports.grpc import infer_message, pb, set_parameters
from shmserve.errors import Unavailable
from shmserve.gateway.http2 import frames as h2
from shmserve.gateway.http2.header_blocks import encode
from shmserve.perf.doors import Heard
from shmserve.perf.doors.connection import ClientConnection, tls_of
from shmserve.perf.poller import Poller

_SERVICE = "/inference.GRPCInferenceService/"
_SHARE = 6  # lanes a connection, as Triton's client has it
_HEADER_TABLE_SIZE = 1
_TOP_UP = 1 << 30  # bytes read, after which a window is made as large as it was
_MESSAGE_HEAD = 5  # bytes: compressed or not, size
# A parameter of a response that is true, as it is serialised.
_FINAL = b"\x0a\x15triton_final_response\x12\x02\x08\x01"
_FAILED = b"\x0a"  # what a message of the stream begins with that is an error


class GrpcDoor:
    """ModelInfer; or ModelStreamInfer, with one stream a lane and one request at a time on it."""

    def __init__(
        self, address: Address, credentials: Credentials, poller: Poller, *, streams: bool
    ) -> None:
        """Raises InvalidArgument for files of TLS that are none."""
        self.streams = streams
        self.poller = poller
        self._connect = partial(
            ClientConnection, address, tls_of(address, credentials, "h2"), poller
        )
        fields = {
            ":method": "POST",
            ":scheme": "https" if address.tls else "http",
            ":path": _SERVICE + ("ModelStreamInfer" if streams else "ModelInfer"),
            ":authority": address.target,
            "content-type": "application/grpc",
            "te": "trailers",
            **{name.lower(): value for name, value in credentials.headers},
        }
        self.head = encode((name.encode(), value.encode()) for name, value in fields.items())
        self._connections: list[Http2Client] = []
        self._lanes = 0

    def encode(self, request: OutgoingRequest) -> bytes:
        """A message, with its length before it."""
        message = infer_message(request)
        if self.streams:
            set_parameters(message, {"triton_enable_empty_final_response": True})
        packed: bytes = message.SerializeToString()
        return b"\0" + h2.pack_long(len(packed)) + packed

    def lane(self, heard: Heard) -> GrpcLane:
        """A stream of a connection that it shares."""
        number, self._lanes = self._lanes // _SHARE, self._lanes + 1
        if number == len(self._connections):
            self._connections.append(Http2Client(self._connect, self.poller))
        return GrpcLane(self, number, heard)

    def connection(self, number: int) -> Http2Client:
        """That of lanes, made anew if it was lost."""
        if not self._connections[number].open:
            self._connections[number] = Http2Client(self._connect, self.poller)
        return self._connections[number]

    def close(self) -> None:
        """Close its connections."""
        for connection in self._connections:
            connection.close()


class GrpcLane:
    """One call after the other, or one stream with one request after the other."""

    def __init__(self, door: GrpcDoor, number: int, heard: Heard) -> None:
        self.heard = heard
        self._door = door
        self._number = number
        self._connection = door.connection(number)
        self._stream = 0
        self._busy = False
        self._messages = bytearray()

    def send(self, message: bytes) -> None:
        """Send a request."""
        self._busy = True
        if not self._stream:
            self._connection = self._door.connection(self._number)
            self._stream = self._connection.start(self, self._door.head)
        self._connection.send(self._stream, message, end=not self._door.streams)

    def data(self, payload: bytes) -> None:
        """Of a message, or of several."""
        if not self._door.streams:
            return
        messages = self._messages
        messages += payload
        at, end = 0, len(messages)
        while end - at >= _MESSAGE_HEAD:
            begin = at + _MESSAGE_HEAD
            next_ = begin + int.from_bytes(messages[at + 1 : begin], "big")
            if next_ > end:
                break
            self._response(bytes(messages[begin:next_]))
            at = next_
        del messages[:at]

    def _response(self, message: bytes) -> None:
        if not self._busy:
            return
        if message[:1] == _FAILED:
            self._busy = False
            self.heard.ended(pb.ModelStreamInferResponse.FromString(message).error_message)
        elif _FINAL not in message:
            self.heard.responded()
        else:
            # Of no outputs, if it is the end alone.
            if pb.ModelStreamInferResponse.FromString(message).infer_response.outputs:
                self.heard.responded()
            self._busy = False
            self.heard.ended()

    def finished(self, error: str) -> None:
        """The call, or the stream, has ended."""
        self._stream = 0
        self._messages.clear()
        busy, self._busy = self._busy, False
        if busy:
            self.heard.ended(error or ("the server ended the stream" if self._door.streams else ""))

    def close(self) -> None:
        """Hear no more; the connection is the door's."""
        self._busy = False


class _Outgoing:
    """What a stream has to send yet, and how much its receiver takes."""

    def __init__(self, lane: GrpcLane, window: int) -> None:
        self.lane = lane
        self.window = window
        self.read = 0  # bytes since its window was made larger


class Http2Client:
    """A client's side of HTTP/2."""

    def __init__(self, connect: partial[ClientConnection], poller: Poller) -> None:
        self._poller = poller
        self._connection: ClientConnection = connect(self)
        self._streams: dict[int, _Outgoing] = {}
        self._next = 1
        self._out: list[bytes] = []
        self._waiting: deque[tuple[int, memoryview, bool]] = deque()  # for windows
        self._window = self._first_window = h2.DEFAULT_WINDOW
        self._read = 0
        self._largest = h2.SMALLEST_FRAME
        self._rest = b""
        self._block = b""
        # Nothing is kept in tables, so a block means the same each time.
        self._decoder = Decoder()
        self._decoder.header_table_size = 0
        self._known: dict[bytes, str] = {}
        wide = h2.settings(
            {_HEADER_TABLE_SIZE: 0, h2.INITIAL_WINDOW_SIZE: h2.LARGEST_WINDOW, h2.ENABLE_PUSH: 0}
        )
        self._post(h2.PREFACE + wide + _window_update(0, h2.LARGEST_WINDOW - h2.DEFAULT_WINDOW))

    @property
    def open(self) -> bool:
        """Whether calls can be made."""
        return self._connection.open

    def start(self, lane: GrpcLane, head: bytes) -> int:
        """Begin a call; the number of its stream."""
        stream = self._next
        self._next += 2
        self._streams[stream] = _Outgoing(lane, self._first_window)
        self._post(h2.head(len(head), h2.HEADERS, h2.END_HEADERS, stream) + head)
        return stream

    def send(self, stream: int, message: bytes, *, end: bool) -> None:
        """Send a message on a stream, the last if `end`."""
        size = len(message)
        outgoing = self._streams[stream]
        room = min(self._window, outgoing.window, self._largest)
        if size <= room and not self._waiting:
            self._window -= size
            outgoing.window -= size
            flags = h2.END_STREAM if end else 0
            self._post(h2.head(size, h2.DATA, flags, stream) + message)
        else:
            self._waiting.append((stream, memoryview(message), end))
            self._send_waiting()

    def _send_waiting(self) -> None:
        for _ in range(len(self._waiting)):
            stream, message, end = self._waiting.popleft()
            outgoing = self._streams.get(stream)
            if outgoing is None:
                continue  # it has ended meanwhile
            while message and (room := min(self._window, outgoing.window, self._largest)) > 0:
                part, message = message[:room], message[room:]
                self._window -= len(part)
                outgoing.window -= len(part)
                flags = h2.END_STREAM if end and not message else 0
                self._post(h2.head(len(part), h2.DATA, flags, stream) + bytes(part))
            if message:
                self._waiting.append((stream, message, end))

    def _post(self, data: bytes) -> None:
        if not self._out:
            self._poller.soon(self._flush)
        self._out.append(data)

    def _flush(self) -> None:
        out, self._out = self._out, []
        self._connection.write(b"".join(out))

    def received(self, data: bytes) -> None:
        """Frames, or parts of them."""
        data = self._rest + data if self._rest else data
        at, end = 0, len(data)
        while end - at >= h2.HEAD_SIZE:
            high, low, kind, flags, stream = h2.HEAD.unpack_from(data, at)
            next_ = at + h2.HEAD_SIZE + (high << 8 | low)
            if next_ > end:
                break
            self._frame(kind, flags, stream, data[at + h2.HEAD_SIZE : next_])
            at = next_
        self._rest = data[at:]

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if flags & h2.PADDED and kind in (h2.DATA, h2.HEADERS):
            raise Unavailable("the server pads its frames, which is not understood here")
        match kind:
            case h2.DATA:
                self._data(stream, payload)
            case h2.HEADERS | h2.CONTINUATION:
                self._block += payload
                if flags & h2.END_HEADERS:
                    self._head(stream, flags)
            case h2.SETTINGS | h2.PING if not flags & h2.ACK:
                if kind == h2.SETTINGS:
                    self._settings(payload)
                self._post(h2.frame(kind, h2.ACK, 0, payload if kind == h2.PING else b""))
            case h2.WINDOW_UPDATE:
                self._widen(stream, h2.parse_long(payload, "WINDOW_UPDATE"))
            case h2.RST_STREAM:
                self._finish(stream, f"the server reset the call ({int.from_bytes(payload)})")
            case h2.GOAWAY:
                self._connection.close()
                self.lost(f"the server ended a connection: {payload[8:].decode(errors='replace')}")

    def _data(self, stream: int, payload: bytes) -> None:
        size = len(payload)
        self._read += size
        if self._read > _TOP_UP:
            self._post(_window_update(0, self._read))
            self._read = 0
        outgoing = self._streams.get(stream)
        if outgoing is not None:
            outgoing.read += size
            if outgoing.read > _TOP_UP:
                self._post(_window_update(stream, outgoing.read))
                outgoing.read = 0
            outgoing.lane.data(payload)

    def _head(self, stream: int, flags: int) -> None:
        block, self._block = self._block, b""
        error = self._known.get(block)
        if error is None:
            error = self._known[block] = _error_of(self._decoder.decode(block))
        if flags & h2.END_STREAM:
            self._finish(stream, error)

    def _settings(self, payload: bytes) -> None:
        for key, value in h2.parse_settings(payload):
            if key == h2.INITIAL_WINDOW_SIZE:
                for outgoing in self._streams.values():
                    outgoing.window += value - self._first_window
                self._first_window = value
            elif key == h2.MAX_FRAME_SIZE:
                self._largest = value
        self._send_waiting()

    def _widen(self, stream: int, size: int) -> None:
        if not stream:
            self._window += size
        elif stream in self._streams:
            self._streams[stream].window += size
        if self._waiting:
            self._send_waiting()

    def _finish(self, stream: int, error: str) -> None:
        outgoing = self._streams.pop(stream, None)
        if outgoing is not None:
            outgoing.lane.finished(error)

    def lost(self, reason: str) -> None:
        """The connection has ended, and all calls with it."""
        for stream in list(self._streams):
            self._finish(stream, reason)

    def close(self) -> None:
        """Close it."""
        self._connection.close()


def _window_update(stream: int, size: int) -> bytes:
    return h2.frame(h2.WINDOW_UPDATE, 0, stream, h2.pack_long(size))


def _error_of(decoded: Iterable[Any]) -> str:
    """What a response's head or trailers say went wrong; "" for nothing."""
    fields: dict[str, str] = dict(decoded)
    if fields.get("grpc-status", "0") != "0":
        text = unquote(fields.get("grpc-message", ""))
        return f"{text} (gRPC status {fields['grpc-status']})"
    if fields.get(":status", "200") != "200":
        return f"HTTP status {fields[':status']}"
    return ""
