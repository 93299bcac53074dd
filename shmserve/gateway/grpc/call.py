"""Calls of a client: unary calls with one message and one response, and streaming calls.

    started ──> message received ──> handler ──> finish or fail ──> `on_ended`: all is sent
      ├──> disconnected, or deadline expired ──> `on_disconnect`, `on_ended`
      └──> late: the message was not received in time

A unary call has no task: its handler is a callback. A task handles a streaming call, which has any
number of messages and responses. A `Carrier` is the connection of a call.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from shmserve.common.tasks import resolve_future
from shmserve.errors import ShmserveError
from shmserve.gateway.grpc.framing import (
    DEADLINE_EXPIRED,
    ENCODINGS,
    INTERNAL_FAILURE,
    LARGE_MESSAGE_BYTES,
    MISSING_REQUEST,
    PREFIX,
    REQUEST_TIMEOUT,
    SUCCEEDED,
    ArrivingMessage,
    Assembly,
    CallHead,
    CreateSink,
    ReceivedMessage,
    Status,
    StatusCode,
    compress_in_pieces,
    compress_message,
    frame_message,
    inflate_message,
    percent_encode,
    release_message,
    status_from_error,
)
from shmserve.gateway.http2.connection import Http2Connection
from shmserve.gateway.http2.header_blocks import STATUS_200, encode_block
from shmserve.gateway.http2.incoming import Limits
from shmserve.gateway.http2.outgoing import ResponseBlocks, Stream
from shmserve.gateway.inference.body_arrival import SLOWEST_RATE, BodyBudget
from shmserve.gateway.listener import ClientIdentity
from shmserve.gateway.settings import GrpcSettings

logger = logging.getLogger(__name__)

_READ_BYTES = 64 * 1024  # initial size of the read buffer in bytes
# The header blocks of responses, which have the same bytes for every client.
_RESPONSE_FIELDS = (
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", ",".join(ENCODINGS).encode()),
)
_RESPONSE_HEAD = STATUS_200 + encode_block(_RESPONSE_FIELDS)
# The header block for each encoding of the messages, and for uncompressed messages (None).
HEADS_BY_ENCODING: dict[str | None, bytes] = {
    None: _RESPONSE_HEAD,
    **{
        name: _RESPONSE_HEAD + encode_block(((b"grpc-encoding", name.encode()),))
        for name in ENCODINGS
    },
}
OK_TRAILERS = encode_block(((b"grpc-status", b"0"),))
_BLOCKS = {name: ResponseBlocks(head, OK_TRAILERS) for name, head in HEADS_BY_ENCODING.items()}

UnaryHandler = Callable[[Any, "UnaryCall"], None]

_MIN_TIME_LEFT_S = 0.005  # a call with less time left counts as expired


@dataclass(frozen=True, slots=True, eq=False)
class GrpcContext:
    """The objects that all connections of a gateway share.

    Attributes:
        begin_call: Begins a call, given its connection, its stream and its head.
        budget: The memory limit of the messages that are arriving.
        body_timeout_s: The time limit for sending a message, and for reading a response.
        header_timeout_s: The time limit for the acknowledgement of the server's settings.
        max_inflated_bytes: The size limit of a decompressed message, in bytes.
        read_buffer: The buffer of all connections. Its content is consumed before the next read.
    """

    settings: GrpcSettings
    begin_call: Callable[[Carrier, Stream, CallHead], Any]
    budget: BodyBudget
    header_timeout_s: float
    body_timeout_s: float
    max_inflated_bytes: int
    tls: ssl.SSLContext | None
    limits: Limits = field(default_factory=Limits)
    read_buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(_READ_BYTES)))


class Carrier(Protocol):
    """The interface of the connection that carries a call."""

    context: GrpcContext
    loop: asyncio.AbstractEventLoop
    client: ClientIdentity
    requires_authorisation: bool  # whether calls of this client need authorisation
    http2: Http2Connection[CallHead]

    def flush(self) -> None:
        """Write the pending frames."""

    def watch(self, call: Any, incoming: ArrivingMessage) -> None:
        """Register a call's incomplete message (`incoming`), to enforce its time limit."""

    def unwatch(self, call: Any) -> None:
        """End the time limit of a call, since its message was received or the call has ended."""

    def record_call_end(self) -> None:
        """Record that a call has ended and that all its frames are sent."""


def encode_response_start(http_status: int) -> bytes:
    """Return the beginning of the header block of a response that has no messages."""
    if http_status == 200:
        return _RESPONSE_HEAD
    return encode_block(((b":status", str(http_status).encode()), *_RESPONSE_FIELDS))


def encode_trailers(status: Status) -> bytes:
    """Return the trailers of a response."""
    code, details, metadata = status
    if code is StatusCode.OK and not (details or metadata):
        return OK_TRAILERS
    fields = [(b"grpc-status", str(code.value).encode())]
    if details:
        fields.append((b"grpc-message", percent_encode(details)))
    fields += [(key.encode(), value.encode()) for key, value in metadata]
    return encode_block(fields)


class GrpcCall(ABC):
    """A client's call, the base class of unary and streaming calls.

    Attributes:
        delays_drain: Whether a drain waits for the end of the call.
        is_done: Whether the status is queued or sent.
        on_disconnect: Called when the client disconnects, sends malformed data or sends too slowly,
            or when the deadline expires.
        on_ended: Called once all frames are sent.
    """

    delays_drain: ClassVar[bool]  # whether a drain waits for the end of the call
    _window_share: ClassVar[float]  # the share of the flow-control window that one message may use
    __slots__ = (
        *("_arriving_message", "_assembly", "_is_head_sent", "_response_encoding", "_connection"),
        *("_deadline", "_create_sink", "_stream", "_deadline_timer", "client", "is_done", "head"),
        *("on_disconnect", "on_ended"),
    )

    def __init__(
        self,
        connection: Carrier,
        stream: Stream,
        head: CallHead,
        create_sink: CreateSink | None = None,
    ) -> None:
        self._connection = connection
        self._stream = stream
        self.head = head
        self.client: ClientIdentity = connection.client
        self._create_sink = create_sink  # creates the receiver of a large message
        self.is_done = False
        self.on_disconnect: Callable[[], object] | None = None
        self.on_ended: Callable[[], None] | None = None
        self._assembly: Assembly | None = None
        self._arriving_message: ArrivingMessage | None = None
        self._is_head_sent = False  # whether the head of the response is sent
        self._response_encoding: str | None = None
        self._deadline = 0.0  # on the monotonic clock; 0: none
        self._deadline_timer: asyncio.TimerHandle | None = None
        if connection.context.settings.compression_level:
            self._response_encoding = head.response_encoding
        if head.timeout_s is not None:
            self._deadline = time.monotonic() + head.timeout_s
            self._deadline_timer = connection.loop.call_later(head.timeout_s, self._on_deadline)

    # --- for the handler of the call

    def remaining_us(self) -> int:
        """Return the microseconds until the call's deadline, at least 1; 0 without a deadline."""
        return max(1, int((self._deadline - time.monotonic()) * 1e6)) if self._deadline else 0

    def is_out_of_time(self) -> bool:
        """Return whether the deadline has expired, or is too soon for a response."""
        return bool(self._deadline) and self._deadline - time.monotonic() < _MIN_TIME_LEFT_S

    def fail(self, status: Status) -> None:
        """End the call with an error status; discard the responses that are not sent yet."""
        if self.is_done:
            return
        self._mark_done()
        self._send_status(status)

    def _send_status(self, status: Status) -> None:
        sender = self._connection.http2.sender
        block = encode_trailers(status)
        self._stream.on_sent = self._on_all_sent
        if not self._is_head_sent:  # the response consists of its trailers only
            block = encode_response_start(self.head.http_status) + block
        elif status.code is not StatusCode.OK:
            sender.discard_queued(self._stream)
        sender.send_trailers(self._stream, block)
        self._connection.flush()

    # --- for the connection of the call

    def receive_data(self, piece: memoryview, is_last: bool) -> None:
        """Receive data; `is_last` marks the last piece."""
        if self.is_done:
            return
        try:
            if len(piece):
                self._assemble(piece)
            if is_last and not self.is_done:
                self._handle_half_close()
        except ShmserveError as error:
            self._abort(status_from_error(error))
        except Exception:
            text = "a message of gRPC call %s could not be handled; the call fails with INTERNAL"
            logger.exception(text, self.head.path)
            self._abort(INTERNAL_FAILURE)

    def _assemble(self, piece: memoryview) -> None:
        assembly = self._assembly
        if assembly is None:
            window_share = self._connection.context.limits.window_bytes * self._window_share
            assembly = self._assembly = Assembly(int(window_share), self.head, self._create_sink)
        assembly.feed(piece)
        self._take_messages(assembly, len(piece))

    def next_buffer(self, byte_limit: int) -> memoryview | None:
        """Return the memory for the next bytes, at most `byte_limit` bytes.

        Returns:
            None if the caller has to receive the bytes into a buffer of its own.
        """
        assembly = self._assembly
        return None if assembly is None or self.is_done else assembly.next_buffer(byte_limit)

    def _take_messages(self, assembly: Assembly, size: int) -> None:
        """Handle the messages that the last `size` received bytes have completed."""
        while (message := assembly.take_message()) is not None:
            self._end_arrival()
            self._handle_message(message)
            if self.is_done or self._is_queue_full():
                return
        if not assembly.received_bytes:
            return
        new_bytes = assembly.received_bytes if self._arriving_message is None else size
        arriving_message = self.start_time_limit()
        arriving_message.received_bytes += new_bytes
        arriving_message.reserve(assembly.heap_bytes - arriving_message.heap_bytes)
        if assembly.sink is not None:
            arriving_message.register_block(assembly.sink.discard)
        self._enlarge_window(assembly)

    def _enlarge_window(self, assembly: Assembly) -> None:
        """Enlarge the window for the rest of a large message."""
        self._connection.http2.send_window_update(self._stream, assembly.permit_rest())

    def expect_message(self) -> None:  # noqa: B027
        """Start the time limit of a unary call's message, unless it arrived with the head."""

    def start_time_limit(self) -> ArrivingMessage:
        """Start the time limit of a message that is incomplete or missing."""
        if self._arriving_message is None:
            context = self._connection.context
            timeout_s = context.body_timeout_s
            self._arriving_message = ArrivingMessage(timeout_s, context.budget, self.on_timeout)
            self._connection.watch(self, self._arriving_message)
        return self._arriving_message

    def _end_arrival(self) -> None:
        """End the time limit of the message, which is complete or is not awaited any more."""
        if self._arriving_message is not None:
            self._arriving_message.release_budget()
            self._arriving_message = None
            self._connection.unwatch(self)

    def on_timeout(self) -> None:
        """End the call, since its message was not received in time."""
        self._abort(REQUEST_TIMEOUT)

    def handle_disconnect(self) -> None:
        """End the call, since the client has disconnected or violated the protocol."""
        if not self.is_done:
            self._mark_done()
            self._notify_disconnected()
        self._on_all_sent()

    def _on_deadline(self) -> None:
        """End the call, since its deadline has expired."""
        self._abort(DEADLINE_EXPIRED)

    def _abort(self, status: Status) -> None:
        """End the call with an error status, and cancel its requests in flight."""
        if not self.is_done:
            self._mark_done()
            self._notify_disconnected()
            self._send_status(status)

    def _notify_disconnected(self) -> None:
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        if on_disconnect is not None:
            on_disconnect()

    def _mark_done(self) -> None:
        self.is_done = True
        if self._arriving_message is not None:
            self._end_arrival()
        if self._assembly is not None:
            self._assembly.discard()
            self._assembly = None
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None

    def _on_all_sent(self) -> None:
        self._stream.on_sent = None
        on_ended, self.on_ended = self.on_ended, None
        if on_ended is not None:
            on_ended()
        self._connection.record_call_end()

    # --- for subclasses

    def _is_queue_full(self) -> bool:
        """Return whether the queue of unread messages is full, which delays further messages."""
        return False

    @abstractmethod
    def _handle_message(self, message: ReceivedMessage) -> None:
        """Handle a complete message."""

    @abstractmethod
    def _handle_half_close(self) -> None:
        """Handle the end of the client's data."""

    async def _inflate_message(self, message: ReceivedMessage) -> bytes:
        data, context = message.data, self._connection.context
        assert isinstance(data, bytes)
        return await inflate_message(
            data, self.head.encoding, context.max_inflated_bytes, context.budget
        )


class UnaryCall(GrpcCall):
    """A call with one message and one response.

    `on_message` is called with the message, and calls `finish` or `fail` once, at any time.
    """

    delays_drain = True
    _window_share = 3 / 4  # padding may use the remaining quarter of the window
    __slots__ = ("_has_message", "_task", "on_message")

    def __init__(
        self,
        connection: Carrier,
        stream: Stream,
        head: CallHead,
        on_message: UnaryHandler,
        create_sink: CreateSink | None = None,
    ) -> None:
        super().__init__(connection, stream, head, create_sink)
        self.on_message = on_message
        self._has_message = False  # whether the message was received
        self._task: asyncio.Task[None] | None = None

    def expect_message(self) -> None:
        """Start the time limit of the message if it was not received yet."""
        if not (self._has_message or self.is_done):
            self.start_time_limit()

    def receive_data(self, piece: memoryview, is_last: bool) -> None:
        """Receive data, which is nearly always the complete message."""
        size = len(piece)
        if (
            PREFIX.size <= size < LARGE_MESSAGE_BYTES
            and self._assembly is None
            and not self._has_message
        ):
            flag, length = PREFIX.unpack_from(piece)
            if not flag and length == size - PREFIX.size and not self.is_done:
                self._has_message = True
                if self._arriving_message is not None:
                    self._end_arrival()
                self.on_message(bytes(piece[PREFIX.size :]), self)
                return
        super().receive_data(piece, is_last)

    def finish(self, response: bytes) -> None:
        """End the call with its response."""
        if self._response_encoding is None:
            self._send_response((PREFIX.pack(0, len(response)), response))
            return
        options = (self._response_encoding, self._connection.context.settings.compression_level)
        if len(response) < LARGE_MESSAGE_BYTES:
            self._send_response(compress_message(response, *options))
        else:
            self.on_disconnect = None  # the inference has ended, and cannot be cancelled
            self._task = asyncio.ensure_future(self._finish_in_pieces(response, *options))

    async def _finish_in_pieces(self, response: bytes, encoding: str, level: int) -> None:
        self._send_response(await compress_in_pieces(response, encoding, level))

    def _send_response(self, pieces: tuple[bytes, bytes]) -> None:  # prefix and message
        if self.is_done:
            return
        self._mark_done()
        self._stream.on_sent = self._on_all_sent
        connection = self._connection
        response_blocks = _BLOCKS[self._response_encoding]
        connection.http2.sender.send_response(self._stream, response_blocks, pieces)
        connection.flush()

    def _handle_message(self, message: ReceivedMessage) -> None:
        if self._has_message:
            release_message(message.data)
            text = "more than one message in a unary call"
            self._abort(Status(StatusCode.INTERNAL, text))
            return
        self._has_message = True
        if message.is_compressed:
            self._task = asyncio.ensure_future(self._inflate(message))
        else:
            self.on_message(message.data, self)

    async def _inflate(self, message: ReceivedMessage) -> None:
        try:
            data = await self._inflate_message(message)
        except ShmserveError as error:
            self.fail(status_from_error(error))
            return
        if not self.is_done:
            self.on_message(data, self)

    def _handle_half_close(self) -> None:
        if not self._has_message:
            self.fail(MISSING_REQUEST)


StreamHandler = Callable[["StreamingCall"], Coroutine[Any, Any, Status | None]]

_MAX_JOINED_BYTES = 64 * 1024  # bytes of small messages that are joined in one frame
# The limit of unread messages of a stream: small messages use more memory than their bytes.
_MAX_QUEUED_MESSAGES = 256


class StreamingCall(GrpcCall):
    """A call with any number of messages and responses.

    A task handles the call. A disconnect cancels the task.
    """

    delays_drain = False
    _window_share = 1 / 2  # earlier messages may use the other half of the window
    __slots__ = (
        *("_is_half_closed", "_consumed_bytes", "_has_unparsed_data", "_message_waiter", "_queue"),
        *("_task", "_write_waiter"),
    )

    def __init__(
        self,
        connection: Carrier,
        stream: Stream,
        head: CallHead,
        create_sink: CreateSink | None = None,
    ) -> None:
        super().__init__(connection, stream, head, create_sink)
        self._queue: deque[ReceivedMessage] = deque()
        self._has_unparsed_data = False  # whether received data may contain more messages
        self._is_half_closed = False  # whether the client has half-closed the stream
        self._message_waiter: asyncio.Future[None] | None = None
        self._write_waiter: asyncio.Future[None] | None = None
        self._consumed_bytes = 0  # bytes that were read since the last window update
        self._task: asyncio.Task[None] | None = None

    def run(self, handler: StreamHandler) -> None:
        """Start the handler, whose result is the status of the call."""
        self.on_disconnect = self._cancel
        self._task = asyncio.ensure_future(self._run(handler))

    async def _run(self, handler: StreamHandler) -> None:
        try:
            final_status = await handler(self)
        except ShmserveError as error:
            final_status = status_from_error(error)
        except Exception:
            logger.exception("gRPC call %s failed", self.head.path)
            final_status = INTERNAL_FAILURE
        if not self.is_done:
            status = final_status or SUCCEEDED
            if not self._is_head_sent and status.code is StatusCode.OK:
                self._send_head()
            self._mark_done()
            self._send_status(status)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _mark_done(self) -> None:
        super()._mark_done()
        self._has_unparsed_data = False
        while self._queue:
            release_message(self._queue.popleft().data)
        resolve_future(self._message_waiter, None)
        resolve_future(self._write_waiter, None)

    async def read_messages(self) -> AsyncIterator[Any]:
        """Yield the messages. The consumer releases them.

        Raises:
            BrokenMessage: The data is not a message.
            Unavailable: The memory for messages is exhausted.
        """
        while True:
            while not self._queue:
                if self._has_unparsed_data:
                    self._take_more_messages()
                    continue
                if self._is_half_closed or self.is_done:
                    return
                self._update_window()
                self._message_waiter = self._connection.loop.create_future()
                await self._message_waiter
                self._message_waiter = None
            message = self._queue.popleft()
            self._consumed_bytes += len(message.data) + PREFIX.size - message.bytes_beyond_window
            self._update_window()
            yield (await self._inflate_message(message) if message.is_compressed else message.data)

    def _update_window(self) -> None:
        if self._consumed_bytes > self._connection.context.limits.window_bytes // 4:
            consumed_bytes, self._consumed_bytes = self._consumed_bytes, 0
            self._connection.http2.send_window_update(self._stream, consumed_bytes)
        if not self._queue and self._assembly is not None:
            self._enlarge_window(self._assembly)
        self._connection.flush()

    def _enlarge_window(self, assembly: Assembly) -> None:
        if not self._queue:  # the client may send more once the queued messages were read
            self._connection.http2.send_window_update(self._stream, assembly.permit_rest())

    def _is_queue_full(self) -> bool:
        return len(self._queue) >= _MAX_QUEUED_MESSAGES

    def _take_messages(self, assembly: Assembly, size: int) -> None:
        if not self._is_queue_full():
            super()._take_messages(assembly, size)
        self._has_unparsed_data = self._is_queue_full()
        if self._has_unparsed_data:
            assembly.keep_piece()

    def _take_more_messages(self) -> None:
        self._has_unparsed_data = False
        if self._assembly is not None:
            self._take_messages(self._assembly, 0)

    def _handle_message(self, message: ReceivedMessage) -> None:
        self._queue.append(message)
        resolve_future(self._message_waiter, None)

    def _handle_half_close(self) -> None:
        self._is_half_closed = True
        resolve_future(self._message_waiter, None)

    def _send_head(self) -> None:
        self._is_head_sent = True
        self._connection.http2.sender.send_head(
            self._stream, HEADS_BY_ENCODING[self._response_encoding]
        )

    async def write_all(self, responses: Sequence[bytes], stall_s: float | None = None) -> None:
        """Write responses; wait until the windows permit the last one or the client disconnects.

        Raises:
            TimeoutError: The client reads at less than `SLOWEST_RATE` for `stall_s` seconds.
        """
        if self.is_done or not responses:
            return
        if not self._is_head_sent:
            self._send_head()
        pieces: list[bytes] = []
        for response in responses:
            if self._response_encoding is None:
                pieces += frame_message(response)
            else:
                level = self._connection.context.settings.compression_level
                pieces += await compress_in_pieces(response, self._response_encoding, level)
        if self.is_done:
            return
        sender = self._connection.http2.sender
        if sum(map(len, pieces)) <= _MAX_JOINED_BYTES:
            sender.send_data(self._stream, b"".join(pieces))
        else:
            for piece in pieces:
                sender.send_data(self._stream, piece)
        self._connection.flush()
        if not self._stream.queued_bytes:
            await asyncio.sleep(0)  # sends the responses before the caller produces the next ones
            return
        self._stream.on_progress = self._on_progress
        waiter = self._write_waiter = self._connection.loop.create_future()
        while not waiter.done():
            min_bytes = self._stream.sent_bytes + (stall_s or 0.0) * SLOWEST_RATE
            await asyncio.wait((waiter,), timeout=stall_s)
            if not waiter.done() and self._stream.sent_bytes < min_bytes:
                raise TimeoutError

    def _on_progress(self) -> None:
        if not self._stream.queued_bytes:
            resolve_future(self._write_waiter, None)
