"""The receiving half of a connection: a queue of requests, read timeouts, and back-pressure.

Programs often send requests with equal heads. The last head is therefore cached, and a head with
the same bytes is not parsed again. Its body may arrive with the head or in the next packet.

The parser copies each body into a stream. The tensors of a large body bypass the parser:
`TensorReceiver` receives them into their memory, without a copy.

Writing waits while the client reads more slowly than the server writes. A connection is not read
while the stream of a body is full, or while too many pipelined requests are queued.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import re
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator

from aiohttp import StreamReader
from aiohttp.http import HttpProcessingError, HttpRequestParser, RawRequestMessage

from shmserve.common.auth_tokens import Authorisation
from shmserve.common.tasks import resolve_future
from shmserve.gateway.http.messages import (
    CONTENT_LENGTH,
    EXPECT,
    BeginRepeatedRequest,
    HttpRequest,
    WholeBody,
)
from shmserve.gateway.inference.body_arrival import Arrival
from shmserve.gateway.inference.prepare import ArrivingRequest
from shmserve.gateway.listener import ClientIdentity, LimitedConnection
from shmserve.gateway.settings import GatewaySettings

# The head of a request, and the stream of its body.
ParsedMessage = tuple[RawRequestMessage, StreamReader]

MAX_HEADERS = 128
MAX_LINE_BYTES = 8190
SMALL_BODY_BYTES = 128 * 1024  # large enough for a tensor of 64 KiB with its header
_MAX_CACHED_HEAD_BYTES = 2048  # larger heads are parsed for each request
_MAX_QUEUED_REQUESTS = 32
_READ_AHEAD_BYTES = 256 * 1024  # bytes of an unread body; the parser reads at most twice as much
# Shared by all connections, since a connection consumes the bytes before another one reads.
_READ_BUFFER = memoryview(bytearray(64 * 1024))
# Smaller tensors are copied from `_READ_BUFFER`, since one read per tensor would cost more.
_MIN_DIRECT_BYTES = 16 * 1024

_MAX_PENDING_HEAD_BYTES = 128 * 1024  # a larger malformed head is not parsed again
_FRAMING_HEADER = re.compile(rb"\r\n(?:content-length|transfer-encoding):", re.IGNORECASE)
_LENGTH_HEADER = re.compile(rb"\r\ncontent-length:[ \t]*[0-9]+[ \t]*(?=\r\n)", re.IGNORECASE)
_CHUNKED_HEADER = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked[ \t]*(?=\r\n)", re.IGNORECASE)


def remove_length(request: bytes) -> bytes | None:
    """Return a chunked request of HTTP/1.1 without its Content-Length, or None for another request.

    Chunks override a length (RFC 9112, 6.3). A proxy in front of the server may use the length
    instead, and treat the remaining bytes as another request (request smuggling). The caller
    therefore has to end the connection with this request, so that no later byte is handled as a
    request. Requests with several lengths or codings, or another coding than chunks, are refused.
    """
    head, separator, body = request.partition(b"\r\n\r\n")
    head += b"\r\n"
    counts = [len(p.findall(head)) for p in (_FRAMING_HEADER, _LENGTH_HEADER, _CHUNKED_HEADER)]
    if (
        not separator
        or counts != [2, 1, 1]
        or not head.partition(b"\r\n")[0].endswith(b" HTTP/1.1")
    ):
        return None
    return _LENGTH_HEADER.sub(b"", head) + b"\r\n" + body


class MalformedBody(Exception):
    """The error for a body whose framing violates HTTP."""


class ReadState(enum.Enum):
    """The way in which a connection handles the bytes that it receives."""

    PARSING = enum.auto()  # pass them to the parser
    CONFLICTING_HEAD = enum.auto()  # wait for the rest of a head with a length and chunks
    FAILED = enum.auto()  # drop them, since the connection ends with an earlier request


class RequestReceiver(LimitedConnection, asyncio.Protocol):
    """The receiver of a connection's requests.

    Attributes:
        client: The identity of the client. The subclass sets it and the next attributes.
        _is_handling: Whether a request is being handled.
        _idle_start: The time when the last request ended or, before, the connection began.
    """

    client: ClientIdentity
    _is_handling: bool
    _idle_start: float

    def __init__(self, loop: asyncio.AbstractEventLoop, settings: GatewaySettings) -> None:
        self._loop = loop
        self._settings = settings
        self._parser = self._new_parser()
        self.transport = None  # set once the connection is made
        self._is_closed = False
        # --- received requests
        # Received requests, and at most one error, as the last entry. A request with a cached head
        # is the only entry, and its body is complete.
        self._messages: deque[HttpRequest | HttpProcessingError | ParsedMessage] = deque()
        # Created and awaited by the subclass's task while no request is queued, and resolved here.
        self._waiter: asyncio.Future[None] | None = None
        self._state = ReadState.PARSING
        self._dropped_bytes = 0  # the number of bytes dropped in the state FAILED
        # The received part of an incomplete or malformed head; None: unknown, or no such head.
        self._head: bytes | None = None
        self._ends_request = False  # whether the last received bytes end a head or a chunked body
        self.closes_with_next = False  # whether the connection ends with the next request
        # --- read timeouts
        self._read_timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0  # the time limit of the missing bytes, by the loop's clock
        self._is_head_incomplete = False  # whether the head of the next request is incomplete
        self._body_stream: StreamReader | None = None  # the stream of an incomplete body
        self._awaits_body = False  # whether a small body is awaited
        # --- the cached head
        # The last request, if it had a small body: its head, the sizes of the head and of the whole
        # request, the request, and the access rules under which it was authorised.
        self._cached_head: tuple[bytes, int, int, HttpRequest, Authorisation] | None = None
        # The body object is reused, since at most one request with a cached head is queued.
        self._cached_body = WholeBody()
        self._pending_head = b""  # a head that equals the cached one and whose body has not arrived
        # The missing bytes of the last request. -1: unknown, because one packet contained bytes of
        # two requests; from then on, the parser receives all bytes.
        self._missing_bytes = 0
        self._offers_upgrade = False  # whether the last request offers another protocol (`Upgrade`)
        # --- back-pressure
        # The transport's protocol since the first large body; None before.
        self._receiver: TensorReceiver | None = None
        self.is_writing_paused = False
        self._drain_waiter: asyncio.Future[None] | None = None
        self._is_stream_full = False  # whether the stream of a body has no space
        self._is_queue_full = False  # whether too many requests are queued
        self._is_reading_paused = False

    def _new_parser(self) -> HttpRequestParser:
        # The parser calls `connected`, `pause_reading` and `resume_reading` of its protocol, which
        # aiohttp does not document. pyproject.toml therefore restricts aiohttp to tested versions.
        return HttpRequestParser(
            self,  # type: ignore[arg-type]
            self._loop,
            _READ_AHEAD_BYTES,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            payload_exception=MalformedBody,
            auto_decompress=False,
            max_msg_queue_size=_MAX_QUEUED_REQUESTS,
        )

    @property
    def connected(self) -> bool:
        """Return whether the client is connected."""
        return self.transport is not None

    def force_close(self) -> None:
        self._is_closed = True
        if self._waiter is not None:
            self._waiter.cancel()
            self._waiter = None
        self._close_transport(self._settings.body_timeout_s)
        self.transport = None

    def abort(self) -> None:
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()

    @property
    def is_open(self) -> bool:
        return not self._is_closed

    @property
    def idle_since(self) -> float | None:
        is_busy = self._is_handling or self._pending_head or self._messages
        return None if is_busy else self._idle_start

    @property
    def incomplete_since(self) -> float | None:
        """Return the loop's time when the request before an incomplete one ended, or None."""
        is_incomplete = self._pending_head or (self._is_handling and self._body_stream is not None)
        return self._idle_start if is_incomplete else None

    @abstractmethod
    def _begin_request(self, begin: BeginRepeatedRequest, body: bytes) -> bool:
        """Begin a request whose head equals the cached one, without waking the connection's task.

        Returns:
            Whether the request was begun.
        """

    # --- bytes

    def data_received(self, data: bytes) -> None:
        """Parse the bytes. Bytes that complete no request start the read timeout."""
        pending_head, self._pending_head = self._pending_head, b""
        if pending_head:
            data = pending_head + data
        # Whether no request is being handled, queued or partly received.
        is_between_requests = not (self._missing_bytes or self._is_handling or self._messages)
        # Without a waiter, the task has not started, has ended, or is handling a request.
        waiter = self._waiter
        if waiter is not None and is_between_requests and self._cached_head is not None:
            head, head_size, cached_size, request, authorisation = self._cached_head
            size = len(data)
            if (
                size <= cached_size
                and authorisation is self.client.listener.authorisation
                and data.startswith(head)
            ):
                if size == cached_size:
                    body = data[head_size:]
                    begin = request.begin_repeated
                    if begin is not None and self._begin_request(begin, body):
                        return
                    request.content = self._cached_body
                    request.content.data = body
                    self._messages.append(request)
                    self._waiter = None
                    waiter.set_result(None)
                    return
                if not pending_head:
                    self._pending_head = data
                    self._start_timeout(self._settings.body_timeout_s)
                    return
        self._parse(data, is_between_requests)

    def _parse(self, data: bytes, is_between_requests: bool) -> None:
        """Parse the bytes, and queue the requests or the error that they complete."""
        if self._is_closed or self._state is ReadState.FAILED:
            self._dropped_bytes += len(data)
            return
        if self._state is ReadState.CONFLICTING_HEAD:
            assert self._head is not None
            data, is_between_requests = self._head + data, True
            self._state, self._parser = ReadState.PARSING, self._new_parser()
        if is_between_requests or (
            self._ends_request and not (self._is_handling or self._messages)
        ):
            self._head = b""
        head = None if self._head is None else self._head + data
        # An empty line ends a head or a chunked body; an incomplete head cannot contain it.
        self._head, self._ends_request = None, data.endswith(b"\r\n\r\n")
        unparsed_data = b""
        try:
            messages, is_upgraded, unparsed_data = self._parser.feed_data(data)
        except HttpProcessingError as error:
            if head is not None and self._parse_without_length(head):
                return
            # The parser has dropped the requests before the malformed one; parse them again.
            self._messages += self._parse_complete(head or b"")
            self._messages.append(error)
            self._state, self._head = ReadState.FAILED, head
        else:
            self._messages += messages
            if head is not None and not self._messages and len(head) <= _MAX_PENDING_HEAD_BYTES:
                self._head = head
            if is_upgraded:
                # An offer of WebSocket is ignored, and the connection continues with HTTP.
                self._parser.set_upgraded(False)
            elif self._offers_upgrade and 0 < self._missing_bytes < len(data):
                # After an offer of another protocol, aiohttp's parser drops these bytes.
                unparsed_data = data[self._missing_bytes :]
        self._handle_parsed(data, is_between_requests)
        if unparsed_data:
            self._parse(unparsed_data, False)

    def _handle_parsed(self, data: bytes, is_between_requests: bool) -> None:
        """Notify the connection's task and the body's stream that bytes were parsed.

        Args:
            data: The bytes.
            is_between_requests: Whether no request was handled, queued or partly received before
                these bytes.
        """
        waiter = self._waiter
        if self._messages and waiter is not None:
            self._waiter = None
            waiter.set_result(None)
        # The limit is one less here, since the parser also counts the request that is being handled
        # if its body has just ended.
        if len(self._messages) >= _MAX_QUEUED_REQUESTS - 1:
            self._is_queue_full = True
            self._set_reading()
        if is_between_requests:
            self._cache_head(data)
        elif data:
            self._missing_bytes = (
                max(self._missing_bytes - len(data), -1) if self._missing_bytes else -1
            )
        content = self._body_stream
        if data and self._missing_bytes > SMALL_BODY_BYTES and not self._is_stream_full:
            message = self._messages[-1] if self._messages else None
            stream = message[1] if isinstance(message, tuple) else content
            # Reading pauses after the first bytes of a body, unless the body is complete (CONNECT).
            if stream is not None and 0 < stream.total_bytes <= len(data) and not stream.is_eof():
                self.pause_reading()  # the handler decides where it receives the rest
        if content is not None:
            if content.is_eof():
                self._body_stream = None
                self._parser.message_consumed()
            elif self._messages:
                # The parser queues no request before the end of this body, so the queue contains
                # the parser's error.
                content.set_exception(MalformedBody("malformed body"))
        if self._is_handling or self._messages:
            self._is_head_incomplete = False
        elif data:
            self._start_head_timeout()

    def _parse_without_length(self, head: bytes) -> bool:
        """Parse a malformed request again without its Content-Length; return whether that works."""
        if (
            self.closes_with_next
            or len(head) > _MAX_PENDING_HEAD_BYTES
            or len(_FRAMING_HEADER.findall(head)) < 2
        ):
            return False
        if b"\r\n\r\n" not in head:
            self._state, self._head = ReadState.CONFLICTING_HEAD, head
            self._start_head_timeout()
            return True
        request = remove_length(head)
        if request is None:
            return False
        self.closes_with_next, self._parser = True, self._new_parser()
        self._parse(request, False)
        return True

    def _parse_complete(self, data: bytes) -> list[ParsedMessage]:
        """Return the complete requests before the first malformed one, with a new parser."""
        complete_messages: list[ParsedMessage] = []
        self._parser = self._new_parser()
        with contextlib.suppress(HttpProcessingError):
            # Each head ends with an empty line, and is parsed apart from the bytes after it.
            for head in data.split(b"\r\n\r\n", _MAX_QUEUED_REQUESTS):
                complete_messages += self._parser.feed_data(head + b"\r\n\r\n")[0]
        return [message for message in complete_messages if message[1].is_eof()]

    def _cache_head(self, data: bytes) -> None:
        """Cache the head if `data` is exactly one request, or the start of one.

        The head of a request that offers another protocol is not cached.
        """
        self._cached_head, self._missing_bytes, self._offers_upgrade = None, -1, False
        if len(self._messages) != 1 or self._state is ReadState.FAILED:
            return
        queued_message = self._messages[0]
        head_size = data.find(b"\r\n\r\n") + 4
        if not isinstance(queued_message, tuple) or head_size < 4:
            return
        message, content = queued_message
        length = message.headers.get(CONTENT_LENGTH, "0")
        size = head_size + int(length) if length.isdecimal() else 0
        if message.chunked or len(data) > size:
            return
        self._missing_bytes, self._offers_upgrade = size - len(data), message.upgrade
        closes = message.should_close or message.upgrade or EXPECT in message.headers
        if not closes and int(length) <= SMALL_BODY_BYTES and head_size <= _MAX_CACHED_HEAD_BYTES:
            authorisation = self.client.listener.authorisation
            request = HttpRequest(message, content, self)
            self._cached_head = (data[:head_size], head_size, size, request, authorisation)

    async def _receive_small_body(self, request: HttpRequest, content: StreamReader) -> None:
        """Wait until a small body is complete or has failed, before its handler starts."""
        self._body_stream = content
        headers = request.headers
        if not 0 < int(headers.get(CONTENT_LENGTH, 0)) <= SMALL_BODY_BYTES or EXPECT in headers:
            return
        if content.exception() is not None:
            return
        self._awaits_body = True
        self._start_timeout(self._settings.body_timeout_s)
        try:
            await content.wait_eof()
        except (TimeoutError, MalformedBody):
            return  # the handler receives the exception when it reads the stream
        finally:
            self._awaits_body = False

    def _drop_further_bytes(self) -> None:
        """Drop all bytes that arrive from now on, since the connection ends."""
        self._state = ReadState.FAILED
        self._is_stream_full = self._is_queue_full = False
        self._set_reading()

    def _start_head_timeout(self) -> None:
        """Start the read timeout of an incomplete head, unless it runs."""
        if not self._is_head_incomplete:
            self._is_head_incomplete = True
            self._start_timeout(self._settings.header_timeout_s)

    def _start_timeout(self, timeout_s: float) -> None:
        """Start the read timeout of the missing bytes."""
        # A timer for each request would cost more than one coarse timer for each connection.
        self._deadline = self._loop.time() + timeout_s
        if self._read_timer is not None and self._read_timer.when() > self._deadline:
            self._read_timer.cancel()
            self._read_timer = None
        if self._read_timer is None:
            self._read_timer = self._loop.call_at(self._deadline, self._check_timeout)

    def _check_timeout(self) -> None:
        self._read_timer = None
        if not (self._pending_head or self._is_head_incomplete or self._awaits_body):
            return
        if self._loop.time() < self._deadline:
            self._read_timer = self._loop.call_at(self._deadline, self._check_timeout)
        elif self._pending_head:
            pending_head, self._pending_head = self._pending_head, b""
            self._parse(pending_head, True)
            for message in self._messages:
                if isinstance(message, tuple):
                    message[1].set_exception(TimeoutError())
        elif self._is_head_incomplete:
            self.force_close()
        elif self._body_stream is not None:
            self._body_stream.set_exception(TimeoutError())

    # --- writing

    def pause_writing(self) -> None:
        """Record that the client reads more slowly than the server writes."""
        self.is_writing_paused = True

    def resume_writing(self) -> None:
        """Record that the client has read what was written, or has disconnected."""
        self.is_writing_paused = False
        drain_waiter, self._drain_waiter = self._drain_waiter, None
        resolve_future(drain_waiter, None)

    async def drain(self) -> None:
        """Wait until the client has read what was written.

        Raises:
            ConnectionError: The client has disconnected.
        """
        if self.is_writing_paused and self.transport is not None:
            self._drain_waiter = self._loop.create_future()
            await self._drain_waiter
        if self.transport is None:
            raise ConnectionResetError("the client has disconnected")

    # --- reading, called by the parser and its streams

    def pause_reading(self) -> None:
        """Pause reading, since the stream of a body is full."""
        self._is_stream_full = True
        self._parser.pause_reading()
        self._set_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resume reading, since the stream of a body has ended or has space again."""
        if self._is_stream_full:
            self._is_stream_full = False
            if resume_parser:
                self._parse(b"", False)
            self._set_reading()

    @contextlib.contextmanager
    def receiving(
        self, arriving: ArrivingRequest, arrival: Arrival, missing_bytes: int
    ) -> Iterator[asyncio.Future[None]]:
        """Receive the rest of a body, whose stream is empty, without the parser.

        Args:
            arriving: The request, whose tensors receive the bytes.
            arrival: The arrival of the body, which counts the bytes.
            missing_bytes: The size of the rest.

        Yields:
            A future that is done when the rest was received.
        """
        if self._receiver is None:
            self._receiver = TensorReceiver(self)
            if self.transport is not None and not self.transport.is_closing():
                # uvloop applies a protocol of another kind only when reading is resumed.
                self.transport.pause_reading()
                self.transport.set_protocol(self._receiver)
                self.transport.resume_reading()
        try:
            yield self._receiver.begin(arriving, arrival, missing_bytes)
        finally:
            if self._receiver.end() and self._body_stream is not None:
                self._body_stream.feed_eof()
                self._body_stream, self._missing_bytes = None, 0
                self._parser = self._new_parser()  # the old parser still expects these bytes
            if self.transport is not None and not self.transport.is_closing():
                self.transport.resume_reading()

    def _on_dequeued(self) -> None:
        """Resume reading if the queue, which was full, is short enough."""
        if len(self._messages) <= _MAX_QUEUED_REQUESTS // 2:
            self._is_queue_full = False
            self._parse(b"", False)
            self._set_reading()

    def _set_reading(self) -> None:
        is_paused = self._is_stream_full or self._is_queue_full
        if is_paused is not self._is_reading_paused and self.transport is not None:
            self._is_reading_paused = is_paused
            if is_paused:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()


class TensorReceiver(asyncio.BufferedProtocol):
    """The protocol of a connection from its first large body on.

    Large tensors are received directly into their memory. Other bytes, in pieces of at most 64 KiB,
    and all other events are passed on to the connection.
    """

    def __init__(self, connection: RequestReceiver) -> None:
        self._connection = connection
        self._buffer = _READ_BUFFER
        self._arriving: ArrivingRequest | None = None
        self._arrival: Arrival
        self._missing_bytes = 0
        self._all_received: asyncio.Future[None]
        for callback_name in ("connection_lost", "eof_received", "pause_writing", "resume_writing"):
            setattr(self, callback_name, getattr(connection, callback_name))

    def begin(
        self, arriving: ArrivingRequest, arrival: Arrival, missing_bytes: int
    ) -> asyncio.Future[None]:
        """Receive the next bytes into tensors; return a future that is done after the last one."""
        self._arriving, self._arrival, self._missing_bytes = arriving, arrival, missing_bytes
        self._all_received = asyncio.get_running_loop().create_future()
        return self._all_received

    def end(self) -> bool:
        """Receive no further bytes into tensors; return whether no byte is missing."""
        self._arriving = None
        return not self._missing_bytes

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next bytes."""
        self._buffer = _READ_BUFFER
        if self._arriving is not None:
            # Bytes after the last tensor, or of a request that was released, are dropped.
            buffer = self._arriving.next_buffer(self._missing_bytes)
            if buffer is None or len(buffer) < _MIN_DIRECT_BYTES:
                buffer = _READ_BUFFER[: self._missing_bytes]
            self._buffer = buffer
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Handle the received bytes. Reading stops after the last byte of a tensor."""
        received_data = self._buffer[:nbytes]
        if self._arriving is None:
            self._connection.data_received(bytes(received_data))
            return
        self._missing_bytes -= nbytes
        self._arrival.received_bytes += nbytes
        self._arriving.feed_across_tensors(received_data)
        if not self._missing_bytes:
            if self._connection.transport is not None:
                self._connection.transport.pause_reading()
            resolve_future(self._all_received, None)
