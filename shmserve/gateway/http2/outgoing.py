"""The sending half of a connection: frames within the flow-control windows (RFC 9113, 5.2).

Output is collected in `ready` and written together. Data is queued at its stream while a window is
exhausted or the socket is congested (`paused`). Waiting streams are served round-robin.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shmserve.gateway.http2 import frames
from shmserve.gateway.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    LARGEST_WINDOW,
    SMALLEST_FRAME,
    ConnectionFault,
    FaultCode,
    StreamFault,
    pack_long,
)

_pack_start = struct.Struct(">HBBB").pack  # packs a frame header up to the stream id
_OVERFLOW = "a window of more than 2^31-1"
_JOINED = 32 * 1024  # responses up to this size are copied into one buffer
_TURN = 256 * 1024  # bytes that a stream may send before the next stream's turn


class Stream:
    """An open or half-closed stream.

    Attributes:
        call: The call of the stream, which the receiver of the events sets.
        ended: Whether the client has ended its side of the stream.
        finished: Whether all output is queued.
        on_progress: The callback for the time when queued data was sent.
        on_sent: The callback for the time when all output was passed to the socket.
    """

    __slots__ = (
        *("call", "cut", "ended", "finished", "id", "on_progress", "on_sent", "padding", "queued"),
        *("receive_window", "expected", "send_window", "sent", "tag", "trailers", "waiting"),
    )

    def __init__(self, number: int, receive_window: int, send_window: int) -> None:
        self.id = number
        self.tag = pack_long(number)
        self.call: Any = None
        self.ended = False
        self.finished = False
        self.cut = False  # whether the response was cut short
        self.expected = -1  # bytes that its content-length still promises; -1: none given
        self.receive_window = receive_window
        self.padding = 0  # bytes of padding not yet returned to the client's window
        # --- output
        self.send_window = send_window
        self.waiting: deque[memoryview] = deque()
        self.queued = 0  # number of bytes in `waiting`
        self.sent = 0  # total bytes sent
        self.trailers: bytes | None = None  # the trailers to send after the data
        self.on_progress: Callable[[], None] | None = None
        self.on_sent: Callable[[], None] | None = None


class ResponseForm:
    """The header blocks of a complete response, each smaller than a frame.

    `start` and `end` are the headers of their frames up to the stream id.
    """

    __slots__ = ("end", "head", "start", "trailers")

    def __init__(self, head: bytes, trailers: bytes) -> None:
        self.head = head
        self.trailers = trailers
        self.start = _start(len(head), HEADERS, END_HEADERS)
        self.end = _start(len(trailers), HEADERS, END_HEADERS | END_STREAM)


class Outgoing:
    """The sending half of a connection."""

    def __init__(self, close: Callable[[Stream], None]) -> None:
        self._close = close  # called with a stream whose frames are all sent
        self.ready: list[bytes | memoryview] = []
        self.paused = False
        self.window = frames.DEFAULT_WINDOW
        self.initial_window = frames.DEFAULT_WINDOW
        self.largest_frame = SMALLEST_FRAME
        self.waiting: dict[Stream, None] = {}  # streams with unsent data, in turn
        self.frames = 0  # number of data frames
        self.bytes = 0  # number of data bytes
        self.window_grown = False  # whether a window has grown, so that `resume` must be called

    # --- called by the receiver of calls

    def head(self, stream: Stream, block: bytes, *, end: bool = False) -> None:
        """Send a header block."""
        if stream.finished:
            return
        if end:
            self.trailers(stream, block)
        else:
            self._block(stream, block, END_HEADERS)

    def data(self, stream: Stream, piece: bytes | memoryview) -> None:
        """Queue data, and send as much of it as the windows permit."""
        size = len(piece)
        if stream.finished or not size:
            return
        if (
            not stream.queued
            and size <= self.largest_frame
            and size <= stream.send_window
            and size <= self.window
            and not self.paused
        ):
            self._frame(stream, piece, size)
            return
        stream.waiting.append(memoryview(piece))
        stream.queued += size
        self.waiting[stream] = None
        while self._pump(stream):
            pass

    def trailers(self, stream: Stream, block: bytes) -> None:
        """Send a header block that ends the stream, after its data.

        While the socket is congested the block is delayed, so that a client that does not read
        cannot open further streams.
        """
        if stream.finished:
            return
        stream.finished = True
        if stream.queued or self.paused:
            stream.trailers = block
            self.waiting[stream] = None
            return
        self._block(stream, block, END_HEADERS | END_STREAM)
        self._sent_all(stream)

    def respond(self, stream: Stream, form: ResponseForm, pieces: Sequence[bytes]) -> None:
        """Send a complete response with these header blocks; `pieces` are its data."""
        size = sum(map(len, pieces))
        if stream.finished:
            return
        if (
            size > self.largest_frame
            or size > stream.send_window
            or size > self.window
            or self.paused
        ):
            self.head(stream, form.head)
            for piece in pieces:
                self.data(stream, piece)
            self.trailers(stream, form.trailers)
            return
        self.window -= size
        self.frames += 1
        self.bytes += size
        tag, data = stream.tag, _pack_start(size >> 8, size & 0xFF, DATA, 0)
        before = (form.start, tag, form.head, data, tag)
        end = (form.end, tag, form.trailers)
        if size < _JOINED:
            self.ready.append(b"".join((*before, *pieces, *end)))
        else:
            self.ready += (b"".join(before), *pieces, b"".join(end))
        stream.finished = True
        self._close(stream)

    def discard(self, stream: Stream) -> None:
        """Discard the queued data of a stream."""
        stream.cut = stream.cut or bool(stream.queued)
        stream.waiting.clear()
        stream.queued = 0
        self.waiting.pop(stream, None)

    def drop(self, stream: Stream) -> None:
        """Discard all output of a stream."""
        self.discard(stream)
        stream.trailers = None
        stream.finished = True

    # --- called for the client's frames

    def receive_window_update(self, stream: Stream | None, increment: int) -> None:
        """Enlarge the send window of a stream, or of the connection (None), by `increment` bytes.

        Raises:
            StreamFault: The stream's window exceeds the largest one.
            ConnectionFault: The connection's window exceeds the largest one.
        """
        if stream is None:
            self.window += increment
            if self.window > LARGEST_WINDOW:
                raise ConnectionFault(FaultCode.FLOW_CONTROL_ERROR, _OVERFLOW)
            self.window_grown = True
            return
        stream.send_window += increment
        if stream.send_window > LARGEST_WINDOW:
            raise StreamFault(FaultCode.FLOW_CONTROL_ERROR)
        while self._pump(stream):
            pass

    def change_initial_window(self, size: int, streams: Iterable[Stream]) -> None:
        """Apply the client's new initial window to every stream; raise ConnectionFault."""
        increment = size - self.initial_window
        self.initial_window = size
        for stream in streams:
            stream.send_window += increment
            if stream.send_window > LARGEST_WINDOW:
                raise ConnectionFault(FaultCode.FLOW_CONTROL_ERROR, _OVERFLOW)
        if increment > 0:
            self.window_grown = True

    def resume(self) -> None:
        """Send what the windows permit, stream by stream."""
        self.window_grown = False
        sendable = list(self.waiting)
        while sendable and not self.paused:
            # A stream that cannot send because the connection's window is exhausted keeps its turn.
            sendable = [
                stream
                for stream in sendable
                if (self.window > 0 or not stream.queued) and self._pump(stream)
            ]

    # --- frames

    def _pump(self, stream: Stream) -> bool:
        """Send a stream's data for one turn; return whether more could be sent now."""
        if stream not in self.waiting:
            return False
        turn = _TURN
        while stream.queued and turn > 0 and not self.paused:
            allowed = min(self.largest_frame, stream.send_window, self.window)
            if allowed <= 0:
                break
            piece = stream.waiting.popleft()
            if len(piece) > allowed:
                stream.waiting.appendleft(piece[allowed:])
                piece = piece[:allowed]
            size = len(piece)
            stream.queued -= size
            turn -= size
            self._frame(stream, piece, size)
        del self.waiting[stream]
        if stream.queued or self.paused:
            self.waiting[stream] = None  # the stream's next turn comes after all other streams'
        elif stream.trailers is not None:
            self._block(stream, stream.trailers, END_HEADERS | END_STREAM)
            self._sent_all(stream)
        if stream.on_progress is not None:
            stream.on_progress()
        return bool(stream.queued) and turn <= 0

    def _frame(self, stream: Stream, piece: bytes | memoryview, size: int) -> None:
        stream.send_window -= size
        stream.sent += size
        self.window -= size
        self.frames += 1
        self.bytes += size
        self.ready += (_start(size, DATA, 0) + stream.tag, piece)

    def _block(self, stream: Stream, block: bytes, flags: int) -> None:
        if len(block) <= SMALLEST_FRAME:
            self.ready.append(_start(len(block), HEADERS, flags) + stream.tag + block)
            return
        first, remaining = block[:SMALLEST_FRAME], block[SMALLEST_FRAME:]
        self.ready.append(frames.frame(HEADERS, flags & ~END_HEADERS, stream.id, first))
        while remaining:
            piece, remaining = remaining[:SMALLEST_FRAME], remaining[SMALLEST_FRAME:]
            last = 0 if remaining else END_HEADERS
            self.ready.append(frames.frame(frames.CONTINUATION, last, stream.id, piece))

    def _sent_all(self, stream: Stream) -> None:
        stream.finished = True
        self._close(stream)


def _start(size: int, kind: int, flags: int) -> bytes:
    """Return the header of a frame up to the stream id."""
    return _pack_start(size >> 8, size & 0xFF, kind, flags)
