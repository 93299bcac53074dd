"""HTTP requests and responses as handlers use them, and streams of JSON texts.

A response is written with back-pressure. The pieces of a small response are gathered into one
write, and large pieces are sent without a copy. A chunked response is produced while it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, final

import orjson
from aiohttp import StreamReader
from aiohttp.http import HttpVersion10, RawRequestMessage
from multidict import CIMultiDictProxy, istr

from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.gateway.context import UNLIMITED, TimeLimit
from shmserve.gateway.inference.body_arrival import SLOWEST_RATE, Arrival
from shmserve.gateway.inference.prepare import ArrivingRequest
from shmserve.gateway.listener import ClientIdentity

ACCEPT = istr("Accept")
ACCEPT_ENCODING = istr("Accept-Encoding")
CONTENT_ENCODING = istr("Content-Encoding")
CONTENT_LENGTH = istr("Content-Length")
EXPECT = istr("Expect")
FETCH_SITE = istr("Sec-Fetch-Site")
REQUEST_TIMEOUT_MS = istr("X-Request-Timeout-Ms")
HEADER_LENGTH = istr("Inference-Header-Content-Length")
TRACEPARENT = istr("traceparent")
TRANSFER_ENCODING = istr("Transfer-Encoding")


def read_time_limit(headers: CIMultiDictProxy[str]) -> TimeLimit:
    """Return the time limit that the headers of a request contain.

    Raises:
        InvalidArgument: The header is not a positive integer.
    """
    if REQUEST_TIMEOUT_MS not in headers:
        return UNLIMITED
    header_value = headers[REQUEST_TIMEOUT_MS]
    if not (header_value.isascii() and header_value.isdecimal() and int(header_value[:20])):
        raise InvalidArgument(
            f"header '{REQUEST_TIMEOUT_MS}' must be a number of milliseconds above 0, "
            f"got '{header_value[:40]}'"
        )
    return int(header_value[:20]) * 1000, f"the header '{REQUEST_TIMEOUT_MS}'"


class HttpChannel(Protocol):
    """The interface of the connection that carries a request and its response."""

    transport: asyncio.Transport | None
    client: ClientIdentity

    @property
    def is_writing_paused(self) -> bool:
        """Return whether the client reads more slowly than the server writes."""

    async def drain(self) -> None:
        """Wait until the client has read what was written.

        Raises:
            ConnectionError: The client has disconnected.
        """

    def receiving(
        self, arriving: ArrivingRequest, arrival: Arrival, missing_bytes: int
    ) -> AbstractContextManager[asyncio.Future[None]]:
        """Receive the rest of a body into the memory of its tensors."""


@final
class WholeBody:
    """A body that was received in one piece with its head.

    It has the methods of aiohttp's StreamReader that handlers use. `data` is the part that was not
    read yet.
    """

    __slots__ = ("data",)

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def is_eof(self) -> bool:
        """Return whether the body has ended."""
        return True

    def read_nowait(self) -> bytes:
        """Return the unread bytes of the body."""
        data, self.data = self.data, b""
        return data

    async def readany(self) -> bytes:
        """Return the unread bytes of the body, or b"" at its end."""
        return self.read_nowait()


class BegunRequest(Protocol):
    """An in-flight HTTP request that was begun without a task."""

    http_request: HttpRequest

    async def response(self) -> Any:
        """Wait for the response, and return it."""

    def cancel(self) -> None:
        """Cancel the request, since the client has disconnected."""


class WriteResponse(Protocol):
    """The callback that sends the response of a request that no task handles."""

    def __call__(self, body: bytes | None, headers: bytes = ...) -> None:
        """Write a response of status 200 with these headers, by default for JSON.

        If `body` is None, a task creates the response with `BegunRequest.response`.
        """


# Begins a request with this body, or returns None if a handler is needed. `WriteResponse` is called
# once: after the return, or, if the request fails at once, before the return and without a body.
BeginRepeatedRequest = Callable[[bytes, WriteResponse], BegunRequest | None]


@final
class HttpRequest:
    """An HTTP request: method, target (path and query as sent), headers, and the body's stream.

    A connection reuses the object, with another body, for requests whose heads are equal.

    Attributes:
        route_match: The route and the parts of the path, once the client was authorised.
        begin_repeated: Begins the next request with the same head, without a task.
        begun_request: The request that was begun without a task, if a task must send its response.
        is_http10: Whether the client uses HTTP/1.0, without chunks or keep-alive by default.
        closes_connection: Whether the connection ends with this request.
    """

    __slots__ = (
        *("begun_request", "closes_connection", "connection", "content", "headers", "is_http10"),
        *("route_match", "method", "begin_repeated", "target"),
    )

    def __init__(
        self, message: RawRequestMessage, content: StreamReader | WholeBody, connection: HttpChannel
    ) -> None:
        self.method: str = message.method
        self.target: str = message.path
        self.headers: CIMultiDictProxy[str] = message.headers
        self.is_http10: bool = message.version <= HttpVersion10
        self.closes_connection: bool = message.should_close
        self.content = content
        self.connection = connection
        self.route_match: Any = None
        self.begin_repeated: BeginRepeatedRequest | None = None
        self.begun_request: BegunRequest | None = None


# A larger response is written in pieces, as fast as the client reads.
_MAX_JOINED_BYTES = 256 * 1024
_PIECE_BYTES = 1024 * 1024

JSON_HEADER = b"Content-Type: application/json\r\n"

STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
    for status in http.HTTPStatus
}


@dataclass(slots=True, eq=False)
class HttpResponse:
    """A complete response.

    `headers` contains complete header lines. `on_sent` runs once `pieces` are no longer needed.
    """

    status: int = 200
    pieces: Sequence[bytes | memoryview] = ()
    headers: bytes = b""
    closes_connection: bool = field(default=False, kw_only=True)
    on_sent: Callable[[], None] | None = field(default=None, kw_only=True)

    def head(self, request: HttpRequest | None, framing: bytes) -> bytes:
        """Return the status line and the headers.

        Args:
            request: The request; None for malformed HTTP.
            framing: The header line that delimits the body; b"" if the connection's end does.
        """
        connection = b""
        if self.closes_connection:
            connection = b"Connection: close\r\n"
        elif request is not None and request.is_http10:
            connection = b"Connection: keep-alive\r\n"
        head_values = (STATUS_LINES[self.status], framing, connection, self.headers)
        return b"%b%b%b%bX-Content-Type-Options: nosniff\r\n\r\n" % head_values

    async def send(self, request: HttpRequest, stall_timeout_s: float) -> None:
        """Write the response, and disconnect a client that reads it too slowly.

        Raises:
            ConnectionError: The client has disconnected.
        """
        transport = _open_transport(request)
        size = sum(map(len, self.pieces))
        head = self.head(request, b"Content-Length: %d\r\n" % size)
        if request.method == "HEAD":
            transport.write(head)
        elif size <= _MAX_JOINED_BYTES:
            transport.write(b"".join((head, *self.pieces)))
        else:
            # With the high-water mark 0, `drain` returns once the socket has all bytes. The memory
            # of the pieces may then be released.
            transport.set_write_buffer_limits(high=0)
            try:
                transport.write(head)
                for piece in self.pieces:
                    for offset in range(0, len(piece), _PIECE_BYTES):
                        transport.write(piece[offset : offset + _PIECE_BYTES])
                        if request.connection.is_writing_paused:
                            await drain_or_abort(request.connection, transport, stall_timeout_s)
            finally:
                if not transport.is_closing():
                    transport.set_write_buffer_limits()
        if request.connection.is_writing_paused:
            await drain_or_abort(request.connection, transport, stall_timeout_s)


class ChunkedResponse(HttpResponse):
    """A response whose body is produced in chunks while it is sent, with back-pressure.

    `batches` yields chunks that are written together, once the client has read the chunks before.
    A client of HTTP/1.0 receives the bytes without chunks, followed by the connection's end.
    """

    __slots__ = ("_batches",)

    def __init__(
        self, status: int, batches: AsyncGenerator[Sequence[bytes], None], headers: bytes = b""
    ) -> None:
        super().__init__(status, (), headers)
        self._batches = batches

    async def send(self, request: HttpRequest, stall_timeout_s: float) -> None:
        """Write the chunks as they are produced; their generator's exceptions are raised."""
        transport = _open_transport(request)
        is_chunked = not request.is_http10
        self.closes_connection = self.closes_connection or not is_chunked
        transport.write(self.head(request, b"Transfer-Encoding: chunked\r\n" * is_chunked))
        async with contextlib.aclosing(self._batches) as batches:
            if request.method == "HEAD":
                return
            async for chunks in batches:
                encoded_chunks = map(_encode_chunk, filter(None, chunks)) if is_chunked else chunks
                transport.write(b"".join(encoded_chunks))
                if request.connection.is_writing_paused:
                    await drain_or_abort(request.connection, transport, stall_timeout_s)
        if is_chunked:
            transport.write(b"0\r\n\r\n")


def _encode_chunk(chunk: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(chunk), chunk)


def _open_transport(request: HttpRequest) -> asyncio.Transport:
    transport = request.connection.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client has disconnected")
    return transport


async def drain_or_abort(
    channel: HttpChannel, transport: asyncio.Transport, stall_timeout_s: float
) -> None:
    """Wait until the client has read what was written.

    A client that reads at less than `SLOWEST_RATE` for `stall_timeout_s` seconds is disconnected,
    and the call raises ConnectionResetError.
    """
    min_bytes = stall_timeout_s * SLOWEST_RATE
    while True:
        unread_bytes = transport.get_write_buffer_size()
        try:
            async with asyncio.timeout(stall_timeout_s):
                return await channel.drain()
        except TimeoutError:
            if unread_bytes - transport.get_write_buffer_size() < min_bytes:
                transport.abort()
                raise ConnectionResetError("the client does not read its response") from None


def json_response(value: Any) -> HttpResponse:
    """Return a response with `value` as JSON."""
    return HttpResponse(200, (orjson.dumps(value),), JSON_HEADER)


# Encodes an error as the body of a response.
ErrorEncoder = Callable[[ShmserveError], bytes]


def encode_triton_error(error: ShmserveError) -> bytes:
    """Return {"error": message}, the body of Triton's API."""
    return encode_error_json(error.message)


def traceparent_header(traceparent: str) -> bytes:
    """Return the response header that identifies the trace of a request."""
    return b"traceparent: %b\r\n" % traceparent.encode()


def error_response(
    error: ShmserveError,
    encode_error: ErrorEncoder = encode_triton_error,
    *,
    headers: bytes = b"",
    closes_connection: bool = False,
) -> HttpResponse:
    """Return the response for an error.

    Args:
        error: The error, which determines the status.
        encode_error: Encodes the body in the format of the route's API.
        headers: Further header lines.
        closes_connection: Whether the connection ends with this response.
    """
    response_fields = (error.status, (encode_error(error),), JSON_HEADER + headers)
    return HttpResponse(*response_fields, closes_connection=closes_connection)


class Framing(NamedTuple):
    """A framing of JSON texts, which contain no line breaks, in a stream."""

    content_type: bytes
    prefix: bytes
    suffix: bytes

    @property
    def headers(self) -> bytes:
        """Return the headers of a stream. X-Accel-Buffering prevents that nginx buffers it."""
        return b"Content-Type: %b\r\nX-Accel-Buffering: no\r\n" % self.content_type

    def frame(self, json: bytes) -> bytes:
        """Return a JSON text with the prefix and the suffix of this framing."""
        return b"%b%b%b" % (self.prefix, json, self.suffix)


SERVER_SENT_EVENTS = Framing(b"text/event-stream; charset=utf-8", b"data: ", b"\n\n")
JSON_LINES = Framing(b"application/x-ndjson", b"", b"\n")
_FRAMINGS_BY_TYPE = {"text/event-stream": SERVER_SENT_EVENTS, "application/x-ndjson": JSON_LINES}


def encode_error_json(message: str) -> bytes:
    """Return {"error": message}.

    Surrogates, which represent bytes of a request's head that are not UTF-8, become question marks.
    """
    try:
        return orjson.dumps({"error": message})
    except TypeError:
        return orjson.dumps({"error": message.encode(errors="replace").decode()})


@lru_cache(maxsize=64)
def find_accepted_framing(header: str) -> Framing | None:
    """Return the first framing that an Accept header names, or None."""
    for entry in header.lower().split(","):
        media_type, *parameters = (part.strip() for part in entry.split(";"))
        framing = _FRAMINGS_BY_TYPE.get(media_type)
        if framing is not None and not any(_has_zero_weight(parameter) for parameter in parameters):
            return framing
    return None


def _has_zero_weight(parameter: str) -> bool:
    """Return whether a parameter of a media type is `q=0`, which excludes the type."""
    name, _, value = parameter.partition("=")
    return name.strip() == "q" and not value.strip().strip("0.")
