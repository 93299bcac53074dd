"""gRPC over HTTP/2: the head and the status of a call, and its messages.

All calls of a connection whose header fields are the same bytes share one head
(http2/header_blocks.py). Errors are mapped to gRPC's status code, details and trailing metadata.

A message has a byte that indicates compression, four bytes for its size, and its content. Messages
are received in pieces of any size.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple
from urllib.parse import quote

from shmserve.errors import Internal, InvalidArgument, QueueFull, ShmserveError
from shmserve.gateway.compression import WBITS_BY_ENCODING, Inflater
from shmserve.gateway.grpc.wire.request import RequestSink
from shmserve.gateway.grpc.wire.response import LARGEST_MESSAGE
from shmserve.gateway.http2.header_blocks import Fields, parse_content_length
from shmserve.gateway.inference.body_arrival import Arrival, BodyBudget
from shmserve.gateway.inference.prepare import ArrivingRequest


class StatusCode(IntEnum):
    """The status codes of gRPC."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class Status(NamedTuple):
    """The status with which a call ends: the code, the details and the trailing metadata."""

    code: StatusCode
    details: str
    metadata: Sequence[tuple[str, str]] = ()


SUCCEEDED = Status(StatusCode.OK, "")
INTERNAL_FAILURE = Status(StatusCode.INTERNAL, Internal().message)
REQUEST_TIMEOUT = Status(StatusCode.UNAVAILABLE, "the request did not arrive in time")
MISSING_REQUEST = Status(StatusCode.INTERNAL, "Unable to parse request")  # Triton's text
UNKNOWN_METHOD = Status(StatusCode.UNIMPLEMENTED, "Method not found!")
DEADLINE_EXPIRED = Status(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

# The statuses by the server's error codes. Most of these codes have gRPC's names.
_STATUS_BY_CODE = {
    **StatusCode.__members__,
    "INVALID_ARG": StatusCode.INVALID_ARGUMENT,
    "UNSUPPORTED": StatusCode.UNIMPLEMENTED,
}
_MAX_DETAILS_BYTES = 7000  # maximum size of the percent-encoded details in bytes
_UNESCAPED = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")  # not percent-encoded

Metadata = Sequence[tuple[str, str | bytes]]

# The names of the supported encodings of messages.
ENCODINGS = ("identity", "deflate", "gzip")

_PROTOCOL_FIELDS = frozenset((b"te", b"content-type", b"content-length", b"accept-encoding"))
_match_timeout = re.compile(rb"([0-9]+)([HMSmun])").fullmatch
_ENDS_ON_ERROR_FIELD = (b"triton_grpc_error", b"true")
_SECONDS_BY_UNIT = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MAX_TIMEOUT_S = 1e9  # longer timeouts are reduced to this one
_MAX_TIMEOUT_DIGITS = 30  # maximum number of digits of a timeout
_MAX_NAME_LENGTH = 64  # characters of an unknown encoding's name in an error


class CallHead:
    """The head of a call.

    Attributes:
        timeout_s: The time until the deadline, or None.
        encoding: The encoding of the request's messages.
        response_encoding: The encoding of compressed responses; None if the client accepts none.
        data_size: The content-length of the request, or -1.
        traceparent: The W3C trace context, or "".
        ends_on_error: Whether the first failed request of a ModelStreamInfer ends the call.
        refusal: The status of a head that is invalid or requires an unsupported feature.
        http_status: The HTTP status of the response.
    """

    __slots__ = (
        *("_fields", "_metadata", "data_size", "encoding", "path", "refusal", "response_encoding"),
        *("ends_on_error", "http_status", "timeout_s", "traceparent"),
    )

    def __init__(self, fields: Fields) -> None:
        self.data_size = parse_content_length(fields)
        self._fields = fields
        self._metadata: Metadata | None = None
        self.http_status = 200
        self.refusal: Status | None = None  # the status with which the call is refused
        values = dict(fields)
        self.path = values[b":path"].decode("latin-1")
        content_type = values.get(b"content-type", b"")
        if values[b":method"] != b"POST":
            self._set_refusal(405, StatusCode.UNIMPLEMENTED, "the method must be POST")
        elif not content_type.startswith(b"application/grpc") or content_type.startswith(
            b"application/grpc-web"
        ):
            self._set_refusal(415, StatusCode.UNKNOWN, "the content-type is not application/grpc")
        self.timeout_s = self._parse_timeout(values.get(b"grpc-timeout"))
        self.encoding = values.get(b"grpc-encoding", b"identity").decode("latin-1")
        if self.encoding not in ENCODINGS:
            details = f"compression algorithm '{self.encoding[:_MAX_NAME_LENGTH]}' is not supported"
            self._set_refusal(200, StatusCode.UNIMPLEMENTED, details)
        self.traceparent = values.get(b"traceparent", b"").decode("latin-1")
        self.ends_on_error = _ENDS_ON_ERROR_FIELD in fields  # whether an error ends a stream
        accept_encoding = values.get(b"grpc-accept-encoding", b"").decode("latin-1")
        accepted_encodings = {name.strip() for name in accept_encoding.split(",")}
        encodings = (name for name in WBITS_BY_ENCODING if name in accepted_encodings)
        self.response_encoding = next(encodings, None)

    def _set_refusal(self, http_status: int, code: StatusCode, details: str) -> None:
        if self.refusal is None:
            self.http_status, self.refusal = http_status, Status(code, details)

    def _parse_timeout(self, value: bytes | None) -> float | None:
        if value is None:
            return None
        match = _match_timeout(value)
        if match is None or len(value) > _MAX_TIMEOUT_DIGITS:
            details = "malformed grpc-timeout: expected digits and a unit (H, M, S, m, u or n)"
            self._set_refusal(200, StatusCode.INTERNAL, details)
            return None
        return min(int(match[1]) * _SECONDS_BY_UNIT[match[2]], _MAX_TIMEOUT_S)

    @property
    def metadata(self) -> Metadata:
        """Return the client's metadata in order. Values of keys that end in "-bin" are bytes."""
        if self._metadata is None:
            self._metadata = [
                item
                for name, value in self._fields
                if name[:1] != b":"
                and name not in _PROTOCOL_FIELDS
                and not name.startswith(b"grpc-")
                for item in _metadata_items(name, value)
            ]
        return self._metadata


def _metadata_items(name: bytes, value: bytes) -> Metadata:
    key = name.decode("latin-1")
    if not key.endswith("-bin"):
        return [(key, _decode_text(value))]
    # Some clients join several values by commas.
    parts = map(_decode_binary, value.split(b","))
    return [(key, decoded_part) for decoded_part in parts if decoded_part is not None]


def _decode_text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _decode_binary(value: bytes) -> bytes | None:
    """Decode base64 with optional padding; return None for other bytes."""
    try:
        return base64.b64decode(value.strip() + b"=" * (-len(value.strip()) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


def status_from_error(error: ShmserveError) -> Status:
    """Return the status of a call that failed with this error."""
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, QueueFull):
        # The equivalent of HTTP's Retry-After.
        metadata = (("grpc-retry-pushback-ms", str(error.retry_after_s * 1000)),)
    if error.traceparent:
        metadata += (("traceparent", error.traceparent),)
    return Status(_STATUS_BY_CODE[error.code], _shorten_details(error.message), metadata)


def percent_encode(text: str) -> bytes:
    """Return the details of a status as gRPC sends them."""
    return quote(text, safe=_UNESCAPED).encode()


def _shorten_details(details: str) -> str:
    """Return the text, shortened so that the trailers fit into the 8 KB that clients accept."""
    # Each character has at most four bytes, each written as %XX.
    if len(details) * 12 <= _MAX_DETAILS_BYTES:
        return details
    size = 0
    for index, char in enumerate(details):
        size += len(quote(char, safe=_UNESCAPED))
        if size > _MAX_DETAILS_BYTES:
            return f"{details[:index]}..."
    return details


# --- messages

# Messages of at least this size are received into their final memory if possible.
LARGE_MESSAGE_BYTES = 64 * 1024
PREFIX = struct.Struct(">BI")  # of a message: whether it is compressed, and its length

_EMPTY_VIEW = memoryview(b"")


class BrokenMessage(ShmserveError):
    """The error for data that is not a valid message, with the code of the call's status."""

    def __init__(self, code: StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code.name


# The bytes of a message, or an inference request whose tensors were received into the arena.
MessageContent = bytes | ArrivingRequest


# Returns the receiver of a call's next message, given the call's head and the message's size, or
# None if the message should be assembled as bytes.
CreateSink = Callable[[CallHead, int], RequestSink | None]


def release_message(message: MessageContent) -> None:
    """Release the memory of a message."""
    if not isinstance(message, bytes):
        message.release()


class ReceivedMessage(NamedTuple):
    """A complete message; `bytes_beyond_window` of its bytes exceeded the window."""

    data: MessageContent
    is_compressed: bool
    bytes_beyond_window: int


class ArrivingMessage(Arrival):
    """An incomplete message and its time limit.

    `on_evicted` is called when other messages need its memory.
    """

    def __init__(
        self, timeout_s: float, budget: BodyBudget, on_evicted: Callable[[], None]
    ) -> None:
        super().__init__(timeout_s, budget)
        self._on_evicted = on_evicted

    def is_overdue(self, now: float) -> bool:
        """Return whether the time limit of the message has expired."""
        return now > self.started_at + self._time_limit_s

    def _total_wait_s(self, now: float) -> float:
        return now - self.started_at

    def evict(self) -> None:
        """Release the memory of the message, and end its call."""
        super().evict()
        self._on_evicted()


@dataclass(slots=True, eq=False)
class Assembly:
    """The assembly of one call's messages: `feed` receives data, `take_message` returns messages.

    Clients may send `_permitted_bytes` bytes of a message without a window update.
    """

    _permitted_bytes: int
    _head: CallHead
    _create_sink: CreateSink | None
    sink: RequestSink | None = None
    _piece: memoryview = _EMPTY_VIEW  # received data, of which `_position` bytes are consumed
    _position: int = 0
    # Data that was received after the piece.
    _buffered_data: bytearray = field(default_factory=bytearray)
    _prefix: bytes = b""  # the received part of the next message's prefix
    _size: int = 0  # the size of the incomplete message
    # The received part of a message without a sink.
    _message: bytearray = field(default_factory=bytearray)
    _is_compressed: bool = False
    missing_bytes: int = 0  # bytes that the incomplete message lacks
    bytes_beyond_window: int = 0  # bytes of the message that need a window update
    _permitted_beyond: int = 0  # bytes of the message that a window update has permitted

    @property
    def received_bytes(self) -> int:
        """Return the number of received bytes of the incomplete message.

        The result is valid once `take_message` has returned None.
        """
        if self.missing_bytes:
            return PREFIX.size + self._size - self.missing_bytes
        return len(self._prefix)

    @property
    def heap_bytes(self) -> int:
        """Return the number of `received_bytes` outside of the arena."""
        return self.received_bytes if self.sink is None else self.sink.collected_bytes

    def next_buffer(self, byte_limit: int) -> memoryview | None:
        """Return the memory for the next bytes, at most `byte_limit` bytes.

        Returns:
            None if the caller has to receive the bytes into a buffer of its own.
        """
        if self.sink is None or self._position < len(self._piece) or self._buffered_data:
            return None
        return self.sink.next_buffer(min(byte_limit, self.missing_bytes))

    def feed(self, piece: memoryview) -> None:
        """Receive the next bytes of the call's messages; `take_message` returns complete ones."""
        if self._position == len(self._piece) and not self._buffered_data:
            self._piece, self._position = piece, 0
        else:
            self._buffered_data += piece

    def keep_piece(self) -> None:
        """Copy the unconsumed data out of the read buffer, which is about to be reused."""
        if type(self._piece.obj) is not bytes:  # bytes are a copy already
            self._piece, self._position = memoryview(bytes(self._piece[self._position :])), 0

    def take_message(self) -> ReceivedMessage | None:
        """Return the next complete message, or None.

        Raises:
            BrokenMessage: The data is not a message, or the message is too large.
        """
        while self._position < len(self._piece) or self._next_piece():
            if not self.missing_bytes:
                size = PREFIX.size - len(self._prefix)
                self._prefix += self._piece[self._position : self._position + size]
                self._position = min(self._position + size, len(self._piece))
                if len(self._prefix) < PREFIX.size:
                    continue
                if not self._start_message():
                    return ReceivedMessage(b"", self._is_compressed, 0)
                continue
            message_part = self._piece[self._position : self._position + self.missing_bytes]
            self._position += len(message_part)
            self.missing_bytes -= len(message_part)
            if self.sink is None:
                self._message += message_part
            else:
                self.sink.feed(message_part)
            if not self.missing_bytes:
                data = self._finish_content()
                message = ReceivedMessage(data, self._is_compressed, self._permitted_beyond)
                self._permitted_beyond = self.bytes_beyond_window = 0
                return message
        return None

    def permit_rest(self) -> int:
        """Permit the bytes of the message beyond the flow-control window; return their number."""
        permitted_bytes, self.bytes_beyond_window = self.bytes_beyond_window, 0
        self._permitted_beyond += permitted_bytes
        return permitted_bytes

    def _next_piece(self) -> bool:
        self._piece = memoryview(bytes(self._buffered_data))
        self._position = 0
        self._buffered_data.clear()
        return bool(self._piece)

    def _finish_content(self) -> MessageContent:
        sink, self.sink = self.sink, None
        if sink is not None:
            return sink.finish()
        data = bytes(self._message)
        self._message = bytearray()
        return data

    def discard(self) -> None:
        """Discard the incomplete message, and release its memory in the arena."""
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.discard()

    def _start_message(self) -> bool:
        flag, size = PREFIX.unpack(self._prefix)
        self._prefix = b""
        if flag > 1:
            raise BrokenMessage(
                StatusCode.INTERNAL, f"malformed message: compression flag {flag} (allowed: 0, 1)"
            )
        if size > LARGEST_MESSAGE:
            text = f"Received message larger than max ({size} vs. {LARGEST_MESSAGE})"
            raise BrokenMessage(StatusCode.RESOURCE_EXHAUSTED, text)
        self._is_compressed = bool(flag)
        self._size = self.missing_bytes = size
        self.bytes_beyond_window = max(0, size + PREFIX.size - self._permitted_bytes)
        if size >= LARGE_MESSAGE_BYTES and not flag and self._create_sink is not None:
            self.sink = self._create_sink(self._head, size)
        return bool(size)


async def inflate_message(data: bytes, encoding: str, limit: int, budget: BodyBudget) -> bytes:
    """Inflate a message in several turns of the event loop.

    The inflated bytes count in `budget`, since several messages may be inflated at the same time.

    Raises:
        BrokenMessage: The message is malformed, or larger than `limit`.
        Unavailable: The memory for messages is exhausted.
    """
    if encoding == "identity":
        text = "a compressed message in a call without grpc-encoding"
        raise BrokenMessage(StatusCode.INTERNAL, text)
    inflater = Inflater(limit)
    pieces: list[bytes] = []
    arrival = Arrival(0.0, budget)
    try:
        for piece in inflater.feed(data):
            arrival.reserve(len(piece))
            pieces.append(piece)
            if len(pieces) % 4 == 0:
                await asyncio.sleep(0)
        inflater.finish()
    except InvalidArgument as error:
        raise BrokenMessage(StatusCode.RESOURCE_EXHAUSTED, error.message) from None
    finally:
        arrival.release_budget()
    return b"".join(pieces)


def frame_message(data: bytes) -> tuple[bytes, bytes]:
    """Return gRPC's prefix of a message, and the message."""
    return PREFIX.pack(0, len(data)), data


def compress_message(data: bytes, encoding: str, level: int) -> tuple[bytes, bytes]:
    """Return gRPC's prefix and the content of a message, compressed if that is shorter."""
    compressor = zlib.compressobj(level, wbits=WBITS_BY_ENCODING[encoding])
    return _frame_shorter(data, compressor.compress(data) + compressor.flush())


async def compress_in_pieces(data: bytes, encoding: str, level: int) -> tuple[bytes, bytes]:
    """Return a message as `compress_message` does; a large one takes several turns of the loop."""
    if len(data) < LARGE_MESSAGE_BYTES:
        return compress_message(data, encoding, level)
    compressor = zlib.compressobj(level, wbits=WBITS_BY_ENCODING[encoding])
    pieces: list[bytes] = []
    view = memoryview(data)
    for offset in range(0, len(data), LARGE_MESSAGE_BYTES):
        pieces.append(compressor.compress(view[offset : offset + LARGE_MESSAGE_BYTES]))
        await asyncio.sleep(0)
    pieces.append(compressor.flush())
    return _frame_shorter(data, b"".join(pieces))


def _frame_shorter(data: bytes, compressed_data: bytes) -> tuple[bytes, bytes]:
    if len(compressed_data) >= len(data):
        return frame_message(data)
    return PREFIX.pack(1, len(compressed_data)), compressed_data
