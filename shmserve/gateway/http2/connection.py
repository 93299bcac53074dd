"""A server's HTTP/2 connection without IO, which converts received bytes to events (RFC 9113).

`receive` parses bytes and returns events. The bytes to send are in `sender.output`. The work of
one call is bounded, so that other connections are not delayed. If frames are left,
`has_pending_frames` is true, and `receive(b"")` continues.

The states of a stream:

    HEADERS ──> open ── client's END_STREAM ──> half-closed ──┐
                 └───── server's END_STREAM is sent ──────────┴──> closed
    RST_STREAM of either side ────────────────────────────────> closed at once
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from shmserve.gateway.http2 import frames
from shmserve.gateway.http2.frames import (
    ACK,
    CONTINUATION,
    DEFAULT_WINDOW,
    END_STREAM,
    GOAWAY,
    HEADERS,
    LARGEST_WINDOW,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    STREAM_BITS,
    WINDOW_UPDATE,
    ConnectionFault,
    FaultCode,
    StreamFault,
    pack_uint32,
)
from shmserve.gateway.http2.header_blocks import Fields, HeaderDecoder, HeadT
from shmserve.gateway.http2.incoming import (
    Budget,
    Bytes,
    Data,
    Event,
    FrameReader,
    Limits,
    PingAcknowledged,
    StreamOpened,
    StreamReset,
)
from shmserve.gateway.http2.outgoing import FrameSender, Stream

# The maximum number of streams whose reset by the server is recorded, because the client may still
# send frames for them.
_MAX_RECORDED_RESETS = 1024
_FRAMES_PER_RESET = 4  # a reset stream counts as this many useless control frames
# The number of control frames that the client may send for each new call and each sent DATA frame.
_EARNED_PER_FRAME = 4
# The client may send one more control frame for this many bytes of sent data. A DATA frame may
# contain many messages, and some clients send a window update for each, long after its arrival.
_BYTES_PER_EARNED_FRAME = 32
_MAX_SAVED_FRAMES = 1 << 16  # maximum number of control frames that a client can save up
_EMPTY_VIEW = memoryview(b"")
# The names of the frames that apply to the whole connection.
_CONNECTION_FRAME_NAMES = {SETTINGS: "SETTINGS", PING: "PING", GOAWAY: "GOAWAY"}


class Http2Connection(FrameReader[HeadT]):
    """The server's end of an HTTP/2 connection.

    Args:
        read_head: Converts the header fields of a request.
        limits: The limits of the connection.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        read_head: Callable[[Fields], HeadT],
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(limits)
        self._headers = HeaderDecoder(read_head, limits.header_list_bytes)
        self._reset_budget = Budget(limits.resets, limits.resets_per_s, clock, "stream resets")
        self._control_budget = Budget(
            limits.control_frames, limits.control_frames_per_s, clock, "frames without effect"
        )
        self.sender = FrameSender(self._on_output_sent)
        self.streams: dict[int, Stream] = {}
        self.last_stream_id = 0  # the highest id of a stream that the client has opened
        # Whether the client has acknowledged the server's SETTINGS.
        self.is_settings_acknowledged = False
        self._credited_output = 0, 0  # frames and bytes of data already credited to the budget
        self._saved_control_frames = 0  # earned control frames that are not needed yet
        self.ping_count = 0  # total number of PINGs from the client
        self._is_refusing = False  # whether GOAWAY was sent, so that new streams are refused
        self._goaway_stream_id = STREAM_BITS  # the last stream id in the server's GOAWAY
        # The streams that the server has reset before the client ended them.
        self._reset_streams: dict[int, None] = {}
        self._receive_window = LARGEST_WINDOW  # the receive window of the connection
        settings = {
            frames.MAX_CONCURRENT_STREAMS: limits.max_streams,
            frames.INITIAL_WINDOW_SIZE: limits.window_bytes,
            frames.MAX_FRAME_SIZE: limits.frame_bytes,
            frames.MAX_HEADER_LIST_SIZE: limits.header_list_bytes,
        }
        increment = pack_uint32(LARGEST_WINDOW - DEFAULT_WINDOW)
        window_update = frames.encode_frame(WINDOW_UPDATE, 0, 0, increment)
        self.sender.output.append(frames.encode_settings(settings) + window_update)

    def receive(self, data: Bytes) -> Sequence[Event[HeadT]]:
        events = super().receive(data)
        if self.sender.has_window_grown:
            self.sender.resume()
        return events

    @property
    def useless_frames(self) -> int:
        """Return how much useless work the client has caused, in units of control frames.

        Only the difference of two results is meaningful.
        """
        return -self._control_budget.tokens - _FRAMES_PER_RESET * self._reset_budget.tokens

    # --- data

    def _handle_data_start(self, stream_id: int, size: int, padding: int) -> None:
        self._receive_window -= size
        # The update is sent early, so that the window is never exhausted.
        if self._receive_window < LARGEST_WINDOW // 2:
            increment, self._receive_window = LARGEST_WINDOW - self._receive_window, LARGEST_WINDOW
            update = frames.encode_frame(WINDOW_UPDATE, 0, 0, pack_uint32(increment))
            self.sender.output.append(update)
        stream = self.streams.get(stream_id)
        if stream is None or stream.is_half_closed:
            self._check_closed(stream_id, stream)
            stream = None
            self._control_budget.take_token()
        else:
            stream.receive_window -= size
            if stream.receive_window < 0:
                self._fail_stream(stream_id, FaultCode.FLOW_CONTROL_ERROR)
                stream = None
            elif stream.expected_bytes >= 0 and not self._is_expected(stream):
                self._fail_stream(stream_id, FaultCode.PROTOCOL_ERROR)
                stream = None
            elif padding:
                self._count_padding(stream, padding)
        self.arriving_stream = stream
        if not self.arriving_bytes:
            if not self._frame_ends_stream:
                self._control_budget.take_token()
            if stream is not None:
                self._pass_data(stream, _EMPTY_VIEW)

    def _is_expected(self, stream: Stream) -> bool:
        """Count a DATA frame that begins; return whether the content-length permits it."""
        stream.expected_bytes -= self.arriving_bytes
        return stream.expected_bytes == 0 if self._frame_ends_stream else stream.expected_bytes >= 0

    def _count_padding(self, stream: Stream, size: int) -> None:
        """Account for padding, which uses the stream's window but is not passed to its receiver."""
        stream.padding += size
        if stream.padding > self._limits.window_bytes // 4:
            padding, stream.padding = stream.padding, 0
            self.send_window_update(stream, padding)

    def _pass_data(self, stream: Stream, piece: memoryview) -> None:
        is_last = self._frame_ends_stream and not self.arriving_bytes
        if is_last:
            stream.is_half_closed = True
        self._events.append(Data(stream, piece, is_last))

    # --- other frames

    def _handle_frame(self, frame_type: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is not None and (
            frame_type != CONTINUATION or stream_id != self._block_stream_id
        ):
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "another frame within a header block")
        if not self.has_client_settings and (frame_type != SETTINGS or flags & ACK):
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if stream_id and frame_type in _CONNECTION_FRAME_NAMES:
            text = f"{_CONNECTION_FRAME_NAMES[frame_type]} on a stream other than 0"
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, text)
        if frame_type == HEADERS:
            self._start_block(flags, stream_id, payload)
        elif frame_type == CONTINUATION:
            self._continue_block(flags, payload)
        elif frame_type == WINDOW_UPDATE:
            self._handle_window_update(stream_id, payload)
        elif frame_type == RST_STREAM:
            self._handle_reset(stream_id, payload)
        elif frame_type == PUSH_PROMISE:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:
            self._control_budget.take_token()
            if frame_type == SETTINGS:
                self._handle_settings(flags, payload)
            elif frame_type == PING:
                self._handle_ping(flags, payload)
            elif frame_type == GOAWAY and len(payload) < 8:
                raise frames.length_fault("GOAWAY", len(payload), "at least 8")
            elif frame_type == PRIORITY:
                _check_priority(stream_id, payload)

    def _handle_headers(self, stream_id: int, flags: int, block: bytes) -> None:
        if stream_id <= self.last_stream_id:
            self._handle_trailers(stream_id, flags, block)
            return
        self.last_stream_id = stream_id
        has_ended = bool(flags & END_STREAM)
        if self._is_refusing or len(self.streams) >= self._limits.max_streams:
            self._headers.skip_block(block)
            raise StreamFault(FaultCode.REFUSED_STREAM)
        head = self._headers.decode_request(block)
        stream = Stream(stream_id, self._limits.window_bytes, self.sender.initial_window)
        stream.expected_bytes = head.data_size
        self.streams[stream_id] = stream
        if self._control_budget.tokens < self._limits.control_frames:
            self._control_budget.add_tokens(_EARNED_PER_FRAME)
        self._events.append(StreamOpened(stream, head))
        if has_ended:
            if stream.expected_bytes > 0:
                raise StreamFault(FaultCode.PROTOCOL_ERROR)
            stream.is_half_closed = True
            self._events.append(Data(stream, _EMPTY_VIEW, True))

    def _handle_trailers(self, stream_id: int, flags: int, block: bytes) -> None:
        stream = self.streams.get(stream_id)
        if stream is None or stream.is_half_closed:
            self._headers.skip_block(block)
            self._check_closed(stream_id, stream)
            self._control_budget.take_token()
            return
        self._headers.decode_trailers(block)
        if not flags & END_STREAM or stream.expected_bytes > 0:
            raise StreamFault(FaultCode.PROTOCOL_ERROR)
        stream.is_half_closed = True
        self._events.append(Data(stream, _EMPTY_VIEW, True))

    def _check_closed(self, stream_id: int, stream: Stream | None) -> None:
        """Raise ConnectionFault unless a frame is permitted on a closed or unknown stream.

        The frame is permitted if this server has ended the stream and the client may not have been
        notified yet.
        """
        self._check_not_idle(stream_id, "a frame")
        if stream is not None or stream_id not in self._reset_streams:
            raise ConnectionFault(FaultCode.STREAM_CLOSED, f"a frame on closed stream {stream_id}")

    def _handle_window_update(self, stream_id: int, payload: bytes) -> None:
        increment = frames.parse_uint32(payload, "WINDOW_UPDATE") & STREAM_BITS
        stream = self.streams.get(stream_id)
        if stream_id and stream is None:
            self._check_not_idle(stream_id, "WINDOW_UPDATE")
            self._control_budget.take_token()
            return
        if not increment:
            if not stream_id:
                raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0 bytes")
            raise StreamFault(FaultCode.PROTOCOL_ERROR)
        self._earn_tokens_for_data()
        self._control_budget.take_token()
        self.sender.receive_window_update(stream, increment)

    def _earn_tokens_for_data(self) -> None:
        sender, (frames_before, bytes_before) = self.sender, self._credited_output
        self._credited_output = sender.data_frames, sender.data_bytes
        sent_frames = sender.data_frames - frames_before
        self._reset_budget.add_tokens(sent_frames)
        earned_by_data = (sender.data_bytes - bytes_before) // _BYTES_PER_EARNED_FRAME
        earned_frames = _EARNED_PER_FRAME * sent_frames + earned_by_data
        saved_frames = min(self._saved_control_frames + earned_frames, _MAX_SAVED_FRAMES)
        needed_frames = min(saved_frames, self._control_budget.missing_tokens)
        self._saved_control_frames = saved_frames - needed_frames
        self._control_budget.add_tokens(needed_frames)

    def _handle_reset(self, stream_id: int, payload: bytes) -> None:
        frames.parse_uint32(payload, "RST_STREAM")
        stream = self.streams.get(stream_id)
        if stream is None:  # the server ended the stream while the frame was in flight
            self._check_not_idle(stream_id, "RST_STREAM")
            self._control_budget.take_token()
            return
        self._earn_tokens_for_data()
        self._reset_budget.take_token()
        self._remove(stream)
        self._events.append(StreamReset(stream))

    def _check_not_idle(self, stream_id: int, frame_name: str) -> None:
        if stream_id > self.last_stream_id or not stream_id & 1:
            text = f"{frame_name} on idle stream {stream_id}"
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, text)

    def _handle_settings(self, flags: int, payload: bytes) -> None:
        if flags & ACK:
            if payload:
                text = "SETTINGS acknowledgement with a payload"
                raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, text)
            self.is_settings_acknowledged = True
            return
        settings = dict(frames.parse_settings(payload))  # the last value of each setting applies
        sender, initial_window = self.sender, settings.get(frames.INITIAL_WINDOW_SIZE)
        if initial_window is not None:
            sender.change_initial_window(initial_window, self.streams.values())
        sender.max_frame_size = settings.get(frames.MAX_FRAME_SIZE, sender.max_frame_size)
        self.has_client_settings = True
        sender.output.append(_SETTINGS_ACK)

    def _handle_ping(self, flags: int, payload: bytes) -> None:
        if len(payload) != 8:
            raise frames.length_fault("PING", len(payload), "8")
        if flags & ACK:
            self._events.append(PingAcknowledged(payload))
            return
        self.ping_count += 1
        self.sender.output.append(frames.encode_frame(PING, ACK, 0, payload))

    # --- ends of streams and of the connection

    def _fail_stream(self, stream_id: int, code: FaultCode) -> None:
        """Reset a stream on which the client has violated the protocol."""
        self._reset_budget.take_token()
        stream = self.streams.get(stream_id)
        if stream_id > self.last_stream_id:
            raise ConnectionFault(code, f"a malformed frame on idle stream {stream_id}")
        if stream is None:
            self._record_reset(stream_id)
            self._queue_reset(stream_id, code)
        else:
            self.reset(stream, code)
            self._events.append(StreamReset(stream))

    def reset(self, stream: Stream, code: FaultCode) -> None:
        """End a stream at once, in both directions."""
        if self.streams.get(stream.id) is stream:
            if not stream.is_half_closed:
                self._record_reset(stream.id)
            self._remove(stream)
            self._queue_reset(stream.id, code)

    def _queue_reset(self, stream_id: int, code: FaultCode) -> None:
        self.sender.output.append(frames.encode_frame(RST_STREAM, 0, stream_id, pack_uint32(code)))

    def _remove(self, stream: Stream) -> None:
        stream.is_half_closed = True
        self.sender.discard_output(stream)
        self.streams.pop(stream.id, None)
        if self.arriving_stream is stream:
            self.arriving_stream = None

    def _record_reset(self, stream_id: int) -> None:
        self._reset_streams[stream_id] = None
        if len(self._reset_streams) > _MAX_RECORDED_RESETS:
            del self._reset_streams[next(iter(self._reset_streams))]

    def _on_output_sent(self, stream: Stream) -> None:
        """Close a stream whose frames are all sent."""
        if stream.is_half_closed:
            self.streams.pop(stream.id, None)
        else:
            # The server does not need the rest of the request (RFC 9113, 8.1). CANCEL reports a
            # response that was cut short, even to a client that does not read the trailers.
            self.reset(stream, FaultCode.CANCEL if stream.is_cut_short else FaultCode.NO_ERROR)
        if stream.on_sent is not None:
            stream.on_sent()

    def send_window_update(self, stream: Stream, increment: int) -> None:
        """Permit the client to send `increment` bytes of the stream's data."""
        if increment > 0 and not stream.is_half_closed:
            stream.receive_window += increment
            update = frames.encode_frame(WINDOW_UPDATE, 0, stream.id, pack_uint32(increment))
            self.sender.output.append(update)

    def fail(self, code: FaultCode, reason: str = "") -> None:
        """Send GOAWAY and close the connection."""
        if not self.is_closing:
            super().fail(code, reason)
            last_stream = min(self.last_stream_id, self._goaway_stream_id)
            self.sender.output.append(frames.encode_goaway(last_stream, code, reason))

    def send_goaway(self, *, is_final: bool) -> None:
        """Send GOAWAY, which announces the end of the connection.

        The first GOAWAY permits new streams, which may be in flight. A final GOAWAY permits no
        stream above the last one that was received.
        """
        if is_final and not self._is_refusing:
            self._is_refusing = True
            self._goaway_stream_id = self.last_stream_id
        self.sender.output.append(frames.encode_goaway(self._goaway_stream_id, FaultCode.NO_ERROR))

    def ping(self, payload: bytes) -> None:
        """Send a PING with eight bytes; a `PingAcknowledged` event follows."""
        self.sender.output.append(frames.encode_frame(PING, 0, 0, payload))


_SETTINGS_ACK = frames.encode_frame(SETTINGS, ACK, 0)


def _check_priority(stream_id: int, payload: bytes) -> None:
    if not stream_id:
        raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
    if len(payload) != 5:
        raise StreamFault(FaultCode.FRAME_SIZE_ERROR)
