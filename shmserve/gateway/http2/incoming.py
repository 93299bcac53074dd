"""The receiving half of a connection: the parsing of frames, their events, and their limits.

Data is passed on in pieces as it arrives and is never collected here. All other frames are
processed once they are complete, and header blocks once all their frames have arrived (RFC 9113,
3.4, 4 and 6.10).

Two budgets limit the frames that cost the server more work than the client. They are large enough
for any legitimate program, and refill over time:

    resets      streams reset by the client (rapid reset), or by the server after a deliberate
                violation (MadeYouReset). Sent data earns resets back, so that clients with short
                deadlines may cancel as many calls as they complete.
    control     frames without payload for the application: PING, SETTINGS, PRIORITY,
                WINDOW_UPDATE, empty DATA, unknown types. Calls and sent data earn them back.

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
    HAS_PRIORITY,
    HEAD,
    HEAD_SIZE,
    HEADERS,
    PADDED,
    PREFACE,
    STREAM_BITS,
    ConnectionFault,
    FaultCode,
    StreamFault,
)
from shmserve.gateway.http2.header_blocks import T
from shmserve.gateway.http2.outgoing import Stream


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a connection.

    Attributes:
        streams: The maximum number of concurrent streams.
        header_list: Bytes of a header list as counted by HPACK, as many as grpcio accepts. A
            larger one is refused; one larger than `header_block` closes the connection.
        header_block: Bytes of a header block on the wire. Huffman decoding takes most of a
            microsecond per byte.
        continuations: The maximum number of CONTINUATION frames of a block.
        resets: The budget of stream resets.
        resets_per_s: The refill rate of that budget.
        control: The budget of control frames.
        control_per_s: The refill rate of that budget.
        frames: Work per call of `receive`, in frames.
        begin: The cost of opening a stream, in frames.
        window: The initial receive window of a stream in bytes.
        frame: The maximum payload of a DATA frame in bytes.
    """

    streams: int = 512
    header_list: int = 16 * 1024
    header_block: int = 64 * 1024
    continuations: int = 8
    resets: int = 1024
    resets_per_s: float = 64.0
    control: int = 2048
    control_per_s: float = 256.0
    frames: int = 256
    begin: int = 8
    window: int = 1024 * 1024
    frame: int = 1024 * 1024


class Budget:
    """A token bucket, which refills at a constant rate.

    Args:
        capacity: The number of tokens of a full bucket.
        per_s: The number of tokens that are added per second.
        clock: Returns the time in seconds.
        noun: The events that cost a token each, for the error.
    """

    __slots__ = ("_at", "_capacity", "_clock", "_noun", "_per_s", "tokens")

    def __init__(self, capacity: int, per_s: float, clock: Callable[[], float], noun: str) -> None:
        self._capacity = capacity
        self.tokens = capacity
        self._per_s = per_s
        self._clock = clock
        self._at = clock()
        self._noun = noun

    @property
    def debt(self) -> int:
        """Return the number of tokens spent and not earned back."""
        return self._capacity - self.tokens

    def spend(self) -> None:
        """Spend a token; raise ConnectionFault if none is left."""
        self.tokens -= 1
        if self.tokens < 0:
            now = self._clock()
            earned = int((now - self._at) * self._per_s)
            if earned:
                self._at = now
                self.tokens = min(self.tokens + earned, self._capacity)
            if self.tokens < 0:
                raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, f"too many {self._noun}")

    def earn(self, count: int) -> None:
        """Add tokens for useful work of the client, up to the capacity."""
        if self.tokens < self._capacity:
            self.tokens = min(self.tokens + count, self._capacity)


Bytes = bytes | memoryview

_LARGEST_CONTROL = 16384  # the limit of a frame that is buffered, except header blocks
_CONTROL_WORK = 3  # additional cost of a control frame, in frames
_SIZE_SHIFT = 4  # this many bytes (as a power of two) cost as much as a frame


@final
@dataclass(slots=True, eq=False)
class StreamOpened(Generic[T]):
    """A stream was opened; `head` is the converted head of its request."""

    stream: Stream
    head: T


@final
@dataclass(slots=True, eq=False)
class Data:
    """A piece of a stream's data of any size; `ended` marks the last one, which may be empty."""

    stream: Stream
    piece: memoryview
    ended: bool


@final
@dataclass(slots=True, eq=False)
class StreamReset:
    """A stream was reset by the client, or after a protocol violation on it."""

    stream: Stream


@final
@dataclass(slots=True, eq=False)
class PingAcknowledged:
    """The client acknowledged a PING."""

    payload: bytes


Event = StreamOpened[T] | Data | StreamReset | PingAcknowledged


class FrameReader(ABC, Generic[T]):
    """The receiving half of a connection, whose subclass handles the frames.

    Attributes:
        closing: Whether the connection ends after pending output is written.
        frames_in: The number of received frames, for detecting idle clients.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.closing = False
        self.ready = False  # whether the client's SETTINGS have arrived
        self.frames_in = 0
        self._buffer = bytearray()  # the start of an incomplete frame
        self._needed = 0  # bytes that the buffer needs before parsing continues
        self._opened = False  # whether the connection preface has arrived
        self._block: bytearray | None = None  # an incomplete header block
        self._block_stream = 0
        self._block_flags = 0
        self._block_frames = 0
        self.arriving = 0  # remaining bytes of the current DATA frame, ignored or not
        self.arriving_for: Stream | None = None
        self._padding_left = 0
        self._piece_ends = False
        self.pending = False  # whether received frames remain to be processed

    def receive(self, data: Bytes) -> Sequence[Event[T]]:
        """Process these bytes and any pending frames.

        A client that violates the protocol receives a GOAWAY, and the connection is `closing`. The
        reader keeps no reference to `data`; events refer to it.
        """
        if self.closing:
            return ()
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needed:
                return ()
            data = bytes(self._buffer)
            self._buffer.clear()
        self.pending = False
        events: list[Event[T]] = []
        try:
            at = self._handle(data, events)
        except ConnectionFault as fault:
            self.fail(fault.code, fault.text)
            return events
        if at < len(data):
            self._buffer += memoryview(data)[at:]
            self.pending = len(self._buffer) >= self._needed
        return events

    def fail(self, code: FaultCode, text: str = "") -> None:
        """Send GOAWAY and close the connection."""
        self.closing = True
        self.pending = False
        self._buffer.clear()

    def _handle(self, data: Bytes, events: list[Event[T]]) -> int:
        """Process the frames in `data`, up to the limit per call; return the offset reached."""
        at, end = 0, len(data)
        if not self._opened:
            at = self._open(data)
            if not self._opened:
                return at
        view = memoryview(data)
        work = self._limits.frames
        unpack = HEAD.unpack_from
        while True:
            if self.arriving or self._padding_left:
                if at == end:
                    break
                at = self._take_piece(view, at, end, events)
                continue
            if work <= 0:
                self._needed = 1
                break
            if end - at < HEAD_SIZE:
                self._needed = HEAD_SIZE
                break
            high, low, kind, flags, number = unpack(data, at)
            size = high << 8 | low
            number &= STREAM_BITS
            work -= 1
            if kind == DATA and self._block is None and self.ready:
                if flags & PADDED and size and end - at == HEAD_SIZE:
                    self._needed = HEAD_SIZE + 1
                    break
                at += HEAD_SIZE
                self.frames_in += 1
                at += self._begin_data(number, flags, size, data, at, events)
                continue
            if size > _LARGEST_CONTROL:
                self._check_size(kind, size)
            if end - at < HEAD_SIZE + size:
                self._needed = HEAD_SIZE + size
                break
            at += HEAD_SIZE
            self.frames_in += 1
            work -= self._limits.begin if kind == HEADERS else _CONTROL_WORK
            work -= size >> _SIZE_SHIFT
            payload = bytes(view[at : at + size])
            try:
                if kind == HEADERS and self._block is None and self.ready:
                    self._begin_block(flags, number, payload, events)
                else:
                    self._frame(kind, flags, number, payload, events)
            except StreamFault as fault:
                self._fail_stream(number, fault.code, events)
            at += size
        return at

    def _open(self, data: Bytes) -> int:
        if not PREFACE.startswith(bytes(data[: len(PREFACE)])):
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "not HTTP/2")
        if len(data) < len(PREFACE):
            self._needed = len(PREFACE)
            return 0
        self._opened = True
        return len(PREFACE)

    def _check_size(self, kind: int, size: int) -> None:
        if size > self._limits.frame or kind not in (HEADERS, CONTINUATION):
            raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, "too large a frame")
        if size > self._limits.header_block:
            raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, "too large a header block")

    # --- data

    def _begin_data(
        self, number: int, flags: int, size: int, data: Bytes, at: int, events: list[Event[T]]
    ) -> int:
        """Process the header of a DATA frame; return the size of its padding length field."""
        if size > self._limits.frame:
            raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, "frame too large")
        padding = padding_field = 0
        if flags & PADDED:
            if not size:
                raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, "DATA of an invalid length")
            padding, padding_field = data[at], 1
            if padding >= size:
                raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "padding longer than the frame")
        self.arriving = size - padding_field - padding
        self._padding_left = padding
        self._piece_ends = bool(flags & END_STREAM)
        self._data_begins(number, size, padding + padding_field, events)
        return padding_field

    def _take_piece(self, view: memoryview, at: int, end: int, events: list[Event[T]]) -> int:
        """Consume the available bytes of a DATA frame; return the offset of their end."""
        if self.arriving:
            size = self.arriving
            if size > end - at:
                size = end - at
            self.arriving -= size
            if self.arriving_for is not None:
                self._pass_data(self.arriving_for, view[at : at + size], events)
            return at + size
        size = min(self._padding_left, end - at)
        self._padding_left -= size
        return at + size

    # --- header blocks

    def _begin_block(self, flags: int, number: int, payload: bytes, events: list[Event[T]]) -> None:
        if not number & 1:
            raise ConnectionFault(
                FaultCode.PROTOCOL_ERROR, "HEADERS on a stream that no client may open"
            )
        if flags & (PADDED | HAS_PRIORITY):
            payload = _block_of(flags, payload)
        if flags & END_HEADERS:
            self._handle_headers(number, flags, payload, events)
        else:
            self._block = bytearray(payload)
            self._block_stream, self._block_flags, self._block_frames = number, flags, 0

    def _continue_block(self, flags: int, payload: bytes, events: list[Event[T]]) -> None:
        if self._block is None:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self._block += payload
        self._block_frames += 1
        if (
            self._block_frames > self._limits.continuations
            or len(self._block) > self._limits.header_block
        ):
            raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, "header block too large")
        if flags & END_HEADERS:
            block, self._block = bytes(self._block), None
            self._handle_headers(self._block_stream, self._block_flags, block, events)

    # --- implemented by the subclass

    @abstractmethod
    def _data_begins(self, number: int, size: int, padding: int, events: list[Event[T]]) -> None:
        """Handle the start of a DATA frame of `size` bytes, including padding.

        Set `arriving_for`.
        """

    @abstractmethod
    def _pass_data(self, stream: Stream, piece: memoryview, events: list[Event[T]]) -> None:
        """Handle a piece of data."""

    @abstractmethod
    def _handle_headers(
        self, number: int, flags: int, block: bytes, events: list[Event[T]]
    ) -> None:
        """Handle a complete header block."""

    @abstractmethod
    def _frame(
        self, kind: int, flags: int, number: int, payload: bytes, events: list[Event[T]]
    ) -> None:
        """Handle a complete frame other than DATA."""

    @abstractmethod
    def _fail_stream(self, number: int, code: FaultCode, events: list[Event[T]]) -> None:
        """Handle a protocol violation on a stream."""


def _block_of(flags: int, payload: bytes) -> bytes:
    """Return the header block of a HEADERS frame with padding or a priority."""
    start, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, "HEADERS of an invalid length")
        start, end = 1, end - payload[0]
    if flags & HAS_PRIORITY:
        if len(payload) - start < 5:
            raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, "HEADERS of an invalid length")
        start += 5
    if end < start:
        raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "padding longer than the frame")
    return payload[start:end]
