"""The sending half of a connection: frames within the flow-control windows (RFC 9113, 5.2).

Output is collected in `output` and written together. Data is queued at its stream while a window is
exhausted or the socket is congested (`is_paused`). Waiting streams are served round-robin.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shmserve.gateway.http2 import frames
from shmserve.gateway.http2.frames import (
    DATA,
    DEFAULT_MAX_FRAME_SIZE,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    LARGEST_WINDOW,
    ConnectionFault,
    FaultCode,
    StreamFault,
    pack_uint32,
)

_pack_start = struct.Struct(">HBBB").pack  # packs a frame header up to the stream id
_WINDOW_OVERFLOW = "a window of more than 2^31-1"
_MAX_JOINED_BYTES = 32 * 1024  # responses up to this size are copied into one buffer
_TURN_BYTES = 256 * 1024  # bytes that a stream may send before the next stream's turn


class Stream:
    """An open or half-closed stream.

    Attributes:
        call: The call of the stream, which the receiver of the events sets.
        is_half_closed: Whether the client has ended its side of the stream.
        has_all_output: Whether all output is queued.
        on_progress: Called when queued data was sent.
        on_sent: Called when all output was passed to the socket.
    """

    __slots__ = (
        *("call", "is_cut_short", "is_half_closed", "has_all_output", "id", "on_progress"),
        *("on_sent", "padding", "queued_bytes", "receive_window", "expected_bytes", "send_window"),
        *("sent_bytes", "packed_id", "trailers", "queued_pieces"),
    )

    def __init__(self, stream_id: int, receive_window: int, send_window: int) -> None:
        self.id = stream_id
        self.packed_id = pack_uint32(stream_id)
        self.call: Any = None
        self.is_half_closed = False
        self.has_all_output = False  # whether all output is queued
        self.is_cut_short = False  # whether the response was cut short
        self.expected_bytes = -1  # missing bytes of the request's content-length; -1 without one
        self.receive_window = receive_window
        self.padding = 0  # bytes of padding not yet returned to the client's window
        # --- output
        self.send_window = send_window
        self.queued_pieces: deque[memoryview] = deque()
        self.queued_bytes = 0  # the number of bytes in `queued_pieces`
        self.sent_bytes = 0  # the total number of sent bytes
        self.trailers: bytes | None = None  # the trailers to send after the data
        self.on_progress: Callable[[], None] | None = None
        self.on_sent: Callable[[], None] | None = None


class ResponseBlocks:
    """The header blocks of a complete response, each smaller than a frame.

    `head_start` and `trailers_start` are the frame headers of the blocks, up to the stream id.
    """

    __slots__ = ("head", "head_start", "trailers", "trailers_start")

    def __init__(self, head: bytes, trailers: bytes) -> None:
        self.head = head
        self.trailers = trailers
        self.head_start = _encode_frame_start(len(head), HEADERS, END_HEADERS)
        self.trailers_start = _encode_frame_start(len(trailers), HEADERS, END_HEADERS | END_STREAM)


class FrameSender:
    """The sending half of an HTTP/2 connection."""

    def __init__(self, on_sent: Callable[[Stream], None]) -> None:
        self._on_sent = on_sent  # called with a stream whose frames are all sent
        # Encoded frames, until the connection writes them.
        self.output: list[bytes | memoryview] = []
        self.is_paused = False  # whether the client reads too slowly
        self.window = frames.DEFAULT_WINDOW  # the send window of the connection
        self.initial_window = frames.DEFAULT_WINDOW
        self.max_frame_size = DEFAULT_MAX_FRAME_SIZE
        self.waiting_streams: dict[Stream, None] = {}  # streams with unsent data, in turn
        self.data_frames = 0  # number of sent DATA frames
        self.data_bytes = 0  # number of bytes in these frames
        self.has_window_grown = False  # whether a window has grown, so that `resume` must be called

    # --- called by the code that handles requests

    def send_head(self, stream: Stream, block: bytes) -> None:
        """Send the first header block of a stream, which data or trailers follow."""
        if not stream.has_all_output:
            self._send_block(stream, block, END_HEADERS)

    def send_data(self, stream: Stream, piece: bytes | memoryview) -> None:
        """Queue data, and send as much of it as the windows permit."""
        size = len(piece)
        if stream.has_all_output or not size:
            return
        if (
            not stream.queued_bytes
            and size <= self.max_frame_size
            and size <= stream.send_window
            and size <= self.window
            and not self.is_paused
        ):
            self._send_data_frame(stream, piece, size)
            return
        stream.queued_pieces.append(memoryview(piece))
        stream.queued_bytes += size
        self.waiting_streams[stream] = None
        while self._pump(stream):
            pass

    def send_trailers(self, stream: Stream, block: bytes) -> None:
        """Send a header block that ends the stream, after its data or as its only output.

        While the socket is congested the block is delayed, so that a client that does not read
        cannot open further streams.
        """
        if stream.has_all_output:
            return
        stream.has_all_output = True
        if stream.queued_bytes or self.is_paused:
            stream.trailers = block
            self.waiting_streams[stream] = None
            return
        self._send_block(stream, block, END_HEADERS | END_STREAM)
        self._on_sent(stream)

    def send_response(
        self, stream: Stream, blocks: ResponseBlocks, pieces: Sequence[bytes]
    ) -> None:
        """Send a complete response with these header blocks; `pieces` are its data."""
        size = sum(map(len, pieces))
        if stream.has_all_output:
            return
        if (
            size > self.max_frame_size
            or size > stream.send_window
            or size > self.window
            or self.is_paused
        ):
            self.send_head(stream, blocks.head)
            for piece in pieces:
                self.send_data(stream, piece)
            self.send_trailers(stream, blocks.trailers)
            return
        self.window -= size
        self.data_frames += 1
        self.data_bytes += size
        packed_id, data_start = stream.packed_id, _pack_start(size >> 8, size & 0xFF, DATA, 0)
        frame_start = (blocks.head_start, packed_id, blocks.head, data_start, packed_id)
        trailer_parts = (blocks.trailers_start, packed_id, blocks.trailers)
        if size < _MAX_JOINED_BYTES:
            self.output.append(b"".join((*frame_start, *pieces, *trailer_parts)))
        else:
            self.output += (b"".join(frame_start), *pieces, b"".join(trailer_parts))
        stream.has_all_output = True
        self._on_sent(stream)

    def discard_queued(self, stream: Stream) -> None:
        """Discard the data of a stream that has not been sent."""
        stream.is_cut_short = stream.is_cut_short or bool(stream.queued_bytes)
        stream.queued_pieces.clear()
        stream.queued_bytes = 0
        self.waiting_streams.pop(stream, None)

    def discard_output(self, stream: Stream) -> None:
        """Discard the data and the trailers of a stream that have not been sent."""
        self.discard_queued(stream)
        stream.trailers = None
        stream.has_all_output = True

    # --- called when a frame of the client was received

    def receive_window_update(self, stream: Stream | None, increment: int) -> None:
        """Enlarge the send window of a stream, or of the connection (None), by `increment` bytes.

        Raises:
            StreamFault: The stream's window exceeds the largest one.
            ConnectionFault: The connection's window exceeds the largest one.
        """
        if stream is None:
            self.window += increment
            if self.window > LARGEST_WINDOW:
                raise ConnectionFault(FaultCode.FLOW_CONTROL_ERROR, _WINDOW_OVERFLOW)
            self.has_window_grown = True
            return
        stream.send_window += increment
        if stream.send_window > LARGEST_WINDOW:
            raise StreamFault(FaultCode.FLOW_CONTROL_ERROR)
        while self._pump(stream):
            pass

    def change_initial_window(self, size: int, streams: Iterable[Stream]) -> None:
        """Apply the client's new initial window to every stream.

        Raises:
            ConnectionFault: The window of a stream exceeds the largest one.
        """
        increment = size - self.initial_window
        self.initial_window = size
        for stream in streams:
            stream.send_window += increment
            if stream.send_window > LARGEST_WINDOW:
                raise ConnectionFault(FaultCode.FLOW_CONTROL_ERROR, _WINDOW_OVERFLOW)
        if increment > 0:
            self.has_window_grown = True

    def resume(self) -> None:
        """Send as much queued data as the windows permit, stream by stream."""
        self.has_window_grown = False
        sendable_streams = list(self.waiting_streams)
        while sendable_streams and not self.is_paused:
            # A stream that cannot send because the connection's window is exhausted keeps its turn.
            sendable_streams = [
                stream
                for stream in sendable_streams
                if (self.window > 0 or not stream.queued_bytes) and self._pump(stream)
            ]

    # --- frames

    def _pump(self, stream: Stream) -> bool:
        """Send up to `_TURN_BYTES` of a stream's data; return whether more could be sent now."""
        if stream not in self.waiting_streams:
            return False
        remaining_bytes = _TURN_BYTES
        while stream.queued_bytes and remaining_bytes > 0 and not self.is_paused:
            sendable_bytes = min(self.max_frame_size, stream.send_window, self.window)
            if sendable_bytes <= 0:
                break
            piece = stream.queued_pieces.popleft()
            if len(piece) > sendable_bytes:
                stream.queued_pieces.appendleft(piece[sendable_bytes:])
                piece = piece[:sendable_bytes]
            size = len(piece)
            stream.queued_bytes -= size
            remaining_bytes -= size
            self._send_data_frame(stream, piece, size)
        del self.waiting_streams[stream]
        if stream.queued_bytes or self.is_paused:
            # The stream's next turn comes after all other streams'.
            self.waiting_streams[stream] = None
        elif stream.trailers is not None:
            self._send_block(stream, stream.trailers, END_HEADERS | END_STREAM)
            self._on_sent(stream)
        if stream.on_progress is not None:
            stream.on_progress()
        return bool(stream.queued_bytes) and remaining_bytes <= 0

    def _send_data_frame(self, stream: Stream, piece: bytes | memoryview, size: int) -> None:
        stream.send_window -= size
        stream.sent_bytes += size
        self.window -= size
        self.data_frames += 1
        self.data_bytes += size
        self.output += (_encode_frame_start(size, DATA, 0) + stream.packed_id, piece)

    def _send_block(self, stream: Stream, block: bytes, flags: int) -> None:
        if len(block) <= DEFAULT_MAX_FRAME_SIZE:
            frame_start = _encode_frame_start(len(block), HEADERS, flags)
            self.output.append(frame_start + stream.packed_id + block)
            return
        first_part, remaining_block = block[:DEFAULT_MAX_FRAME_SIZE], block[DEFAULT_MAX_FRAME_SIZE:]
        self.output.append(
            frames.encode_frame(HEADERS, flags & ~END_HEADERS, stream.id, first_part)
        )
        while remaining_block:
            piece = remaining_block[:DEFAULT_MAX_FRAME_SIZE]
            remaining_block = remaining_block[DEFAULT_MAX_FRAME_SIZE:]
            end_flag = 0 if remaining_block else END_HEADERS
            self.output.append(frames.encode_frame(frames.CONTINUATION, end_flag, stream.id, piece))


def _encode_frame_start(size: int, frame_type: int, flags: int) -> bytes:
    """Return the header of a frame up to the stream id."""
    return _pack_start(size >> 8, size & 0xFF, frame_type, flags)
