"""The receiving half of a connection: the parsing of frames, their events, and their limits.

Data is passed on in pieces as it arrives and is never collected here. All other frames are
processed once they are complete, and header blocks once all their frames have arrived (RFC 9113,
3.4, 4 and 6.10).

Two budgets limit the frames that cost the server more work than the client. They are large enough
for any legitimate program, and refill over time:

    resets      streams that the client has reset (rapid reset), or that the server has reset after
                a violation (MadeYouReset). Sent data refills the budget, so that clients with short
                deadlines may cancel as many calls as they complete.
    control     frames without payload for the application: PING, SETTINGS, PRIORITY,
                WINDOW_UPDATE, empty DATA, unknown types. Calls and sent data refill the budget.

A client that exceeds a budget receives GOAWAY with ENHANCE_YOUR_CALM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, final

from shmserve.gateway.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    FRAME_HEADER_SIZE,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    PREFACE,
    STREAM_BITS,
    ConnectionFault,
    FaultCode,
    StreamFault,
    length_fault,
)
from shmserve.gateway.http2.header_blocks import HeadT
from shmserve.gateway.http2.outgoing import Stream


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a connection.

    Attributes:
        max_streams: The maximum number of concurrent streams.
        header_list_bytes: The maximum size of a header list as counted by HPACK, the same as
            grpcio's. A larger list ends its stream. A list of more than four times this size ends
            the connection.
        header_block_bytes: The maximum size of a header block on the wire, since Huffman decoding
            takes most of a microsecond per byte. A larger block ends the connection.
        max_continuations: The maximum number of CONTINUATION frames of a block.
        resets: The budget of stream resets.
        resets_per_s: The refill rate of that budget.
        control_frames: The budget of control frames.
        control_frames_per_s: The refill rate of that budget.
        frames_per_call: The maximum work of one call of `FrameReader.receive`, in frames.
        stream_cost_frames: The work of opening a stream, in frames.
        window_bytes: The initial receive window of a stream in bytes.
        frame_bytes: The maximum payload of a DATA, HEADERS or CONTINUATION frame in bytes.
    """

    max_streams: int = 512
    header_list_bytes: int = 16 * 1024
    header_block_bytes: int = 64 * 1024
    max_continuations: int = 8
    resets: int = 1024  # capacity of the token bucket of stream resets
    resets_per_s: float = 64.0
    control_frames: int = 2048  # capacity of the token bucket of control frames
    control_frames_per_s: float = 256.0
    frames_per_call: int = 256  # maximum work of a call of `receive`
    stream_cost_frames: int = 8  # the work of opening a stream, in frames
    window_bytes: int = 1024 * 1024
    frame_bytes: int = 1024 * 1024


class Budget:
    """A token bucket, which refills at a constant rate.

    Args:
        capacity: The number of tokens of a full bucket.
        tokens_per_s: The number of tokens that are added per second.
        clock: Returns the time in seconds.
        event_name: The name of the events that cost a token each, for the error.
    """

    __slots__ = ("_capacity", "_clock", "_event_name", "_refilled_at", "_tokens_per_s", "tokens")

    def __init__(
        self, capacity: int, tokens_per_s: float, clock: Callable[[], float], event_name: str
    ) -> None:
        self._capacity = capacity
        self.tokens = capacity
        self._tokens_per_s = tokens_per_s
        self._clock = clock
        self._refilled_at = clock()
        self._event_name = event_name

    @property
    def missing_tokens(self) -> int:
        """Return the number of tokens that are missing from a full bucket."""
        return self._capacity - self.tokens

    def take_token(self) -> None:
        """Spend a token; raise ConnectionFault if none is left."""
        self.tokens -= 1
        if self.tokens < 0:
            now = self._clock()
            refilled_tokens = int((now - self._refilled_at) * self._tokens_per_s)
            if refilled_tokens:
                self._refilled_at = now
                self.tokens = min(self.tokens + refilled_tokens, self._capacity)
            if self.tokens < 0:
                text = f"too many {self._event_name} (allowed: {self._tokens_per_s:g} per second)"
                raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, text)

    def add_tokens(self, count: int) -> None:
        """Add tokens for useful work of the client, up to the capacity."""
        if self.tokens < self._capacity:
            self.tokens = min(self.tokens + count, self._capacity)


Bytes = bytes | memoryview

_MAX_CONTROL_BYTES = 16384  # the limit of a frame that is buffered, except header blocks
_CONTROL_FRAME_COST = 3  # additional cost of a control frame, in frames
_SIZE_SHIFT = 4  # 2**4 bytes of a payload cost as much as a frame


@final
@dataclass(slots=True, eq=False)
class StreamOpened(Generic[HeadT]):
    """A stream was opened; `head` is the converted head of its request."""

    stream: Stream
    head: HeadT


@final
@dataclass(slots=True, eq=False)
class Data:
    """A piece of a stream's data of any size; `is_last` marks the last one, which may be empty."""

    stream: Stream
    piece: memoryview
    is_last: bool


@final
@dataclass(slots=True, eq=False)
class StreamReset:
    """A stream was reset by the client, or by the server after a protocol violation."""

    stream: Stream


@final
@dataclass(slots=True, eq=False)
class PingAcknowledged:
    """The client acknowledged a PING."""

    payload: bytes


Event = StreamOpened[HeadT] | Data | StreamReset | PingAcknowledged


class FrameReader(ABC, Generic[HeadT]):
    """The receiving half of a connection, whose subclass handles the frames.

    Attributes:
        is_closing: Whether the connection ends after pending output is written.
        received_frames: The number of received frames, for detecting idle clients.
        arriving_stream: The stream of the current DATA frame; None if its data is ignored.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.is_closing = False
        self.has_client_settings = False  # whether the client's SETTINGS have arrived
        self.received_frames = 0
        self._buffer = bytearray()  # the start of an incomplete frame
        self._min_buffered_bytes = 0  # the buffer size from which parsing continues
        self._has_preface = False  # whether the connection preface has arrived
        self._block: bytearray | None = None  # an incomplete header block
        self._block_stream_id = 0
        self._block_flags = 0  # the flags of its HEADERS frame
        self._block_frames = 0  # number of its CONTINUATION frames
        self.arriving_bytes = 0  # remaining bytes of the current DATA frame, ignored or not
        self.arriving_stream: Stream | None = None
        self._missing_padding = 0
        self._frame_ends_stream = False
        self.has_pending_frames = False  # whether received frames remain to be processed
        self._events: list[Event[HeadT]] = []  # the events of the current call of `receive`

    def receive(self, data: Bytes) -> Sequence[Event[HeadT]]:
        """Process these bytes and any pending frames.

        A client that violates the protocol receives a GOAWAY, and the connection `is_closing`. The
        reader keeps no reference to `data`; events refer to it.
        """
        if self.is_closing:
            return ()
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._min_buffered_bytes:
                return ()
            data = bytes(self._buffer)
            self._buffer.clear()
        self.has_pending_frames = False
        new_events = self._events = []
        try:
            position = self._process_frames(data)
        except ConnectionFault as fault:
            self.fail(fault.code, fault.reason)
            return new_events
        finally:
            self._events = []  # drops the references to `data`
        if position < len(data):
            self._buffer += memoryview(data)[position:]
            self.has_pending_frames = len(self._buffer) >= self._min_buffered_bytes
        return new_events

    def fail(self, code: FaultCode, reason: str = "") -> None:
        """Process no further frames, since the connection ends; the subclass sends GOAWAY."""
        self.is_closing = True
        self.has_pending_frames = False
        self._buffer.clear()

    def _process_frames(self, data: Bytes) -> int:
        """Process the frames in `data`, up to the limit per call; return the offset reached."""
        position, data_size = 0, len(data)
        if not self._has_preface:
            position = self._read_preface(data)
            if not self._has_preface:
                return position
        view = memoryview(data)
        remaining_work = self._limits.frames_per_call
        unpack_header = FRAME_HEADER.unpack_from
        while True:
            if self.arriving_bytes or self._missing_padding:
                if position == data_size:
                    break
                position = self._consume_data(view, position, data_size)
                continue
            if remaining_work <= 0:
                self._min_buffered_bytes = 1
                break
            if data_size - position < FRAME_HEADER_SIZE:
                self._min_buffered_bytes = FRAME_HEADER_SIZE
                break
            size_high, size_low, frame_type, flags, stream_id = unpack_header(data, position)
            size = size_high << 8 | size_low
            stream_id &= STREAM_BITS
            remaining_work -= 1
            if frame_type == DATA and self._block is None and self.has_client_settings:
                if flags & PADDED and size and data_size - position == FRAME_HEADER_SIZE:
                    self._min_buffered_bytes = FRAME_HEADER_SIZE + 1
                    break
                position += FRAME_HEADER_SIZE
                self.received_frames += 1
                position += self._start_data(stream_id, flags, size, data, position)
                continue
            if size > _MAX_CONTROL_BYTES:
                self._check_size(frame_type, size)
            if data_size - position < FRAME_HEADER_SIZE + size:
                self._min_buffered_bytes = FRAME_HEADER_SIZE + size
                break
            position += FRAME_HEADER_SIZE
            self.received_frames += 1
            work = self._limits.stream_cost_frames if frame_type == HEADERS else _CONTROL_FRAME_COST
            remaining_work -= work
            remaining_work -= size >> _SIZE_SHIFT
            payload = bytes(view[position : position + size])
            try:
                if frame_type == HEADERS and self._block is None and self.has_client_settings:
                    self._start_block(flags, stream_id, payload)
                else:
                    self._handle_frame(frame_type, flags, stream_id, payload)
            except StreamFault as fault:
                self._fail_stream(stream_id, fault.code)
            position += size
        return position

    def _read_preface(self, data: Bytes) -> int:
        if not PREFACE.startswith(bytes(data[: len(PREFACE)])):
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "no connection preface of HTTP/2")
        if len(data) < len(PREFACE):
            self._min_buffered_bytes = len(PREFACE)
            return 0
        self._has_preface = True
        return len(PREFACE)

    def _check_size(self, frame_type: int, size: int) -> None:
        is_header_block = frame_type in (HEADERS, CONTINUATION)
        limit = self._limits.frame_bytes if is_header_block else _MAX_CONTROL_BYTES
        if size > limit:
            raise length_fault(f"frame of type {frame_type}", size, f"at most {limit}")
        self._check_block_size(size)

    def _check_block_size(self, size: int) -> None:
        if size > (limit := self._limits.header_block_bytes):
            text = f"header block of {size} bytes (maximum: {limit})"
            raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, text)

    # --- data

    def _start_data(self, stream_id: int, flags: int, size: int, data: Bytes, position: int) -> int:
        """Process the header of a DATA frame; return the size of its padding length field."""
        if size > self._limits.frame_bytes:
            raise length_fault("DATA", size, f"at most {self._limits.frame_bytes}")
        padding = padding_field = 0  # bytes of the padding, and of its length field
        if flags & PADDED:
            if not size:
                raise length_fault("padded DATA", 0, "at least 1")
            padding, padding_field = data[position], 1
            if padding >= size:
                raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "padding longer than the frame")
        self.arriving_bytes = size - padding_field - padding
        self._missing_padding = padding
        self._frame_ends_stream = bool(flags & END_STREAM)
        self._handle_data_start(stream_id, size, padding + padding_field)
        return padding_field

    def _consume_data(self, view: memoryview, position: int, end: int) -> int:
        """Consume the available bytes of a DATA frame; return the offset of their end."""
        if self.arriving_bytes:
            size = self.arriving_bytes
            if size > end - position:
                size = end - position
            self.arriving_bytes -= size
            if self.arriving_stream is not None:
                self._pass_data(self.arriving_stream, view[position : position + size])
            return position + size
        size = min(self._missing_padding, end - position)
        self._missing_padding -= size
        return position + size

    # --- header blocks

    def _start_block(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id & 1:
            text = "HEADERS on a stream that no client may open"
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, text)
        if flags & (PADDED | HAS_PRIORITY):
            payload = _strip_block(flags, payload)
        if flags & END_HEADERS:
            self._handle_headers(stream_id, flags, payload)
        else:
            self._block = bytearray(payload)
            self._block_stream_id, self._block_flags, self._block_frames = stream_id, flags, 0

    def _continue_block(self, flags: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(
                FaultCode.PROTOCOL_ERROR, "CONTINUATION without a preceding HEADERS frame"
            )
        self._block += payload
        self._block_frames += 1
        if self._block_frames > (limit := self._limits.max_continuations):
            text = f"header block in more than {limit} CONTINUATION frames"
            raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, text)
        self._check_block_size(len(self._block))
        if flags & END_HEADERS:
            block, self._block = bytes(self._block), None
            self._handle_headers(self._block_stream_id, self._block_flags, block)

    # --- implemented by the subclass

    @abstractmethod
    def _handle_data_start(self, stream_id: int, size: int, padding: int) -> None:
        """Handle the start of a DATA frame of `size` bytes, including padding.

        Set `arriving_stream`.
        """

    @abstractmethod
    def _pass_data(self, stream: Stream, piece: memoryview) -> None:
        """Handle a piece of the data of a stream."""

    @abstractmethod
    def _handle_headers(self, stream_id: int, flags: int, block: bytes) -> None:
        """Handle a complete header block."""

    @abstractmethod
    def _handle_frame(self, frame_type: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle a complete frame other than DATA."""

    @abstractmethod
    def _fail_stream(self, stream_id: int, code: FaultCode) -> None:
        """Handle a protocol violation on a stream."""


def _strip_block(flags: int, payload: bytes) -> bytes:
    """Return the header block of a HEADERS frame, without padding and priority."""
    start, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise length_fault("padded HEADERS", 0, "at least 1")
        start, end = 1, end - payload[0]
    if flags & HAS_PRIORITY:
        if len(payload) - start < 5:
            raise length_fault("HEADERS with priority", len(payload), f"at least {start + 5}")
        start += 5
    if end < start:
        raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "padding longer than the frame")
    return payload[start:end]
