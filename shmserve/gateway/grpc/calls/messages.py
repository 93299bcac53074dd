"""The messages of gRPC: their assembly from data, decompression, framing and compression.

A message has a byte that indicates compression, four bytes for its size, and its content. Messages
are received in pieces of any size.
"""

from __future__ import annotations

import asyncio
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.gateway.compression import WBITS_BY_ENCODING, Inflater
from shmserve.gateway.grpc.calls.headers import CallHead, Ending, StatusCode
from shmserve.gateway.grpc.wire.request import RequestSink
from shmserve.gateway.grpc.wire.response import LARGEST_MESSAGE
from shmserve.gateway.inference.body_arrival import SLOWEST_RATE, Arrival, BodyBudget
from shmserve.gateway.inference.prepare import ArrivingRequest

# Messages of at least this size are received into their final memory if possible.
LARGE_MESSAGE_BYTES = 64 * 1024
PREFIX = struct.Struct(">BI")

_EMPTY_VIEW = memoryview(b"")


class BrokenMessage(Exception):
    """The error for data that is not a valid message; `ending` is the status of the call."""

    def __init__(self, code: StatusCode, text: str) -> None:
        super().__init__(text)
        self.ending: Ending = (code, text, ())


# The bytes of a message, or an inference request whose tensors were received into the arena.
MessageContent = bytes | ArrivingRequest


# Returns the destination of a call's next message, given its size. None: the message is assembled.
Sinks = Callable[[CallHead, int], RequestSink | None]


def release_message(message: MessageContent) -> None:
    """Release the memory of a message."""
    if not isinstance(message, bytes):
        message.release()


class ReceivedMessage(NamedTuple):
    """A complete message; `beyond_window` is the number of its bytes that exceeded the window."""

    data: MessageContent
    compressed: bool
    beyond_window: int


class ArrivingMessage(Arrival):
    """An incomplete message and its time limit.

    `on_evicted` is called when other messages need its memory.
    """

    def __init__(self, limit_s: float, budget: BodyBudget, on_evicted: Callable[[], None]) -> None:
        super().__init__(limit_s, budget)
        self._on_evicted = on_evicted
        self.time_limit_s = limit_s
        self.started_at = time.monotonic()

    def is_overdue(self, now: float) -> bool:
        """Return whether the time limit has expired."""
        return now > self.started_at + self.time_limit_s + self.received_bytes / SLOWEST_RATE

    def _total_wait_s(self, now: float) -> float:
        return now - self.started_at

    def evict(self) -> None:
        """Release the memory and end the call."""
        super().evict()
        self._on_evicted()


@dataclass(slots=True, eq=False)
class Assembly:
    """The assembly of one call's messages: `feed` receives data, `take_message` returns messages.

    Clients may send `_permitted_bytes` bytes of a message without a window update.
    """

    _permitted_bytes: int
    _head: CallHead
    _sinks: Sinks | None
    sink: RequestSink | None = None
    _piece: memoryview = _EMPTY_VIEW  # received data, of which `_position` bytes are consumed
    _position: int = 0
    _is_piece_copied: bool = True  # whether the piece was copied out of the read buffer
    # Data that was received after the piece.
    _buffered_data: bytearray = field(default_factory=bytearray)
    _prefix: bytes = b""
    _size: int = 0
    # The received part of a message without a sink.
    _message: bytearray = field(default_factory=bytearray)
    _compressed: bool = False
    missing_bytes: int = 0  # bytes that the incomplete message lacks
    beyond_window: int = 0  # bytes of the message that need a window update
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
        """Receive bytes."""
        if self._position == len(self._piece) and not self._buffered_data:
            self._piece, self._position, self._is_piece_copied = piece, 0, False
        else:
            self._buffered_data += piece

    def keep_piece(self) -> None:
        """Copy the unconsumed data out of the read buffer, which is about to be reused."""
        if not self._is_piece_copied:
            self._piece, self._position = memoryview(bytes(self._piece[self._position :])), 0
            self._is_piece_copied = True

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
                    return ReceivedMessage(b"", self._compressed, 0)
                continue
            part = self._piece[self._position : self._position + self.missing_bytes]
            self._position += len(part)
            self.missing_bytes -= len(part)
            if self.sink is None:
                self._message += part
            else:
                self.sink.feed(part)
            if not self.missing_bytes:
                data = self._finish_content()
                permitted, self._permitted_beyond, self.beyond_window = self._permitted_beyond, 0, 0
                return ReceivedMessage(data, self._compressed, permitted)
        return None

    def permit_rest(self) -> int:
        """Permit the bytes of the message that exceed the window; return how many these are."""
        permitted, self.beyond_window = self.beyond_window, 0
        self._permitted_beyond += permitted
        return permitted

    def _next_piece(self) -> bool:
        self._piece = memoryview(bytes(self._buffered_data))
        self._position = 0
        self._is_piece_copied = True
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
        """Discard the received data."""
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
        self._compressed = bool(flag)
        self._size = self.missing_bytes = size
        self.beyond_window = max(0, size + PREFIX.size - self._permitted_bytes)
        if size >= LARGE_MESSAGE_BYTES and not flag and self._sinks is not None:
            self.sink = self._sinks(self._head, size)
        return bool(size)


async def inflate_message(data: bytes, encoding: str, limit: int, budget: BodyBudget) -> bytes:
    """Inflate a message in several turns of the event loop.

    The inflated part counts in `budget`, since other messages are inflated in the same turns.

    Raises:
        BrokenMessage: The message cannot be inflated within the limits.
    """
    if encoding == "identity":
        text = "a compressed message in a call without grpc-encoding"
        raise BrokenMessage(StatusCode.INTERNAL, text)
    inflater = Inflater(limit)
    pieces: list[bytes] = []
    reservation = Arrival(0.0, budget)
    try:
        for piece in inflater.feed(data):
            reservation.reserve(len(piece))
            pieces.append(piece)
            if len(pieces) % 4 == 0:
                await asyncio.sleep(0)
        inflater.finish()
    except InvalidArgument as error:
        raise BrokenMessage(StatusCode.RESOURCE_EXHAUSTED, error.message) from None
    except Unavailable as error:
        raise BrokenMessage(StatusCode.UNAVAILABLE, error.message) from None
    finally:
        reservation.release_budget()
    return b"".join(pieces)


def frame_message(data: bytes) -> tuple[bytes, bytes]:
    """Return gRPC's prefix of a message, and the message."""
    return PREFIX.pack(0, len(data)), data


class Deflater:
    """The compressor of responses, with a zlib compression level."""

    def __init__(self, level: int) -> None:
        self._level = level

    def select_encoding(self, accepts: frozenset[str]) -> str | None:
        """Return the encoding for a client that accepts these encodings, or None."""
        return next((name for name in WBITS_BY_ENCODING if name in accepts), None)

    def frame(self, data: bytes, encoding: str) -> tuple[bytes, bytes]:
        """Return gRPC's prefix and the content of a message, compressed if that is shorter."""
        compressor = zlib.compressobj(self._level, wbits=WBITS_BY_ENCODING[encoding])
        return _frame_shorter(data, compressor.compress(data) + compressor.flush())

    async def frame_in_turns(self, data: bytes, encoding: str) -> tuple[bytes, bytes]:
        """Return prefix and content like `frame`; compress in several turns of the event loop."""
        compressor = zlib.compressobj(self._level, wbits=WBITS_BY_ENCODING[encoding])
        pieces: list[bytes] = []
        view = memoryview(data)
        for offset in range(0, len(data), LARGE_MESSAGE_BYTES):
            pieces.append(compressor.compress(view[offset : offset + LARGE_MESSAGE_BYTES]))
            await asyncio.sleep(0)
        pieces.append(compressor.flush())
        return _frame_shorter(data, b"".join(pieces))


def _frame_shorter(data: bytes, compressed: bytes) -> tuple[bytes, bytes]:
    if len(compressed) >= len(data):
        return frame_message(data)
    return PREFIX.pack(1, len(compressed)), compressed
