"""A server's HTTP/2 connection without IO: bytes in, events out (RFC 9113).

`receive` parses bytes and returns events; the bytes to send are in `sending.ready`. The work of one
call is bounded, so that other connections are not delayed. If frames are left, `pending` is true
and `receive(b"")` continues.

The states of a stream:

    HEADERS ──> open ── its END_STREAM ──> ended ──┐
                 └──── all of ours is sent ────────┴──> closed
    RST_STREAM of either side ──────────────────────────> closed at once
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
    pack_long,
)
from shmserve.gateway.http2.header_blocks import Fields, HeaderDecoder, T
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
from shmserve.gateway.http2.outgoing import Outgoing, Stream

# Streams that the server has reset and clients may still send frames for.
_MOST_RESETS_RECORDED = 1024
_RESET_DEBT = 4  # a reset stream counts as this many useless control frames
_EARNED = 4  # useless control frames that each call, and each sent frame of data, permits
# Bytes of sent data that permit one more control frame: a frame may hold many messages, and some
# clients send a window update for each message, long after its arrival.
_EARNING = 32
_MOST_SAVED = 1 << 16
_NOTHING = memoryview(b"")


class Http2Connection(FrameReader[T]):
    """The server's end of an HTTP/2 connection.

    Args:
        read_head: Converts the header fields of a request.
        limits: The limits of the connection.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        read_head: Callable[[Fields], T],
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(limits)
        self._headers = HeaderDecoder(read_head, limits.header_list)
        self._resets = Budget(limits.resets, limits.resets_per_s, clock, "streams given up")
        self._control = Budget(
            limits.control, limits.control_per_s, clock, "too many frames without effect"
        )
        self.sending = Outgoing(self._finished)
        self.streams: dict[int, Stream] = {}
        self.last = 0  # the highest stream that the client has opened
        self.acknowledged = False  # whether the client has acknowledged the server's SETTINGS
        self._credited = 0, 0  # frames and bytes of data already credited to the budget
        self._earned_control = 0  # earned control frames that are not needed yet
        self.pings = 0  # total number of PINGs from the client
        self._refusing = False  # whether GOAWAY was sent, so that new streams are refused
        self._promised = STREAM_BITS  # the last stream id in the server's GOAWAY
        # Reset by the server before the client's end of the stream.
        self._reset_streams: dict[int, None] = {}
        self._window = LARGEST_WINDOW  # the receive window of the connection
        self.sending.ready.append(
            frames.settings(
                {
                    frames.MAX_CONCURRENT_STREAMS: limits.streams,
                    frames.INITIAL_WINDOW_SIZE: limits.window,
                    frames.MAX_FRAME_SIZE: limits.frame,
                    frames.MAX_HEADER_LIST_SIZE: limits.header_list,
                }
            )
            + frames.frame(WINDOW_UPDATE, 0, 0, pack_long(LARGEST_WINDOW - DEFAULT_WINDOW))
        )

    def receive(self, data: Bytes) -> Sequence[Event[T]]:
        """Process these bytes and any pending frames.

        A client that violates the protocol receives a GOAWAY, and the connection is `closing`.
        """
        events = super().receive(data)
        if self.sending.window_grown:
            self.sending.resume()
        return events

    @property
    def debt(self) -> int:
        """Return the amount of useless work that the client has caused."""
        return -self._control.tokens - _RESET_DEBT * self._resets.tokens

    # --- data

    def _data_begins(self, number: int, size: int, padding: int, events: list[Event[T]]) -> None:
        self._window -= size
        if self._window < LARGEST_WINDOW // 2:  # sent early, so that the window is never exhausted
            increment, self._window = LARGEST_WINDOW - self._window, LARGEST_WINDOW
            self.sending.ready.append(frames.frame(WINDOW_UPDATE, 0, 0, pack_long(increment)))
        stream = self.streams.get(number)
        if stream is None or stream.ended:
            self._check_closed(number, stream)
            stream = None
            self._control.spend()
        else:
            stream.receive_window -= size
            if stream.receive_window < 0:
                self._fail_stream(number, FaultCode.FLOW_CONTROL_ERROR, events)
                stream = None
            elif stream.expected >= 0 and not self._is_expected(stream):
                self._fail_stream(number, FaultCode.PROTOCOL_ERROR, events)
                stream = None
            elif padding:
                self._pad(stream, padding)
        self.arriving_for = stream
        if not self.arriving:
            if not self._piece_ends:
                self._control.spend()
            if stream is not None:
                self._pass_data(stream, _NOTHING, events)

    def _is_expected(self, stream: Stream) -> bool:
        """Check whether a DATA frame that begins conforms to the request's content-length."""
        stream.expected -= self.arriving
        return stream.expected == 0 if self._piece_ends else stream.expected >= 0

    def _pad(self, stream: Stream, size: int) -> None:
        """Account for padding, which uses the stream's window but is not passed to its receiver."""
        stream.padding += size
        if stream.padding > self._limits.window // 4:
            padding, stream.padding = stream.padding, 0
            self.send_window_update(stream, padding)

    def _pass_data(self, stream: Stream, piece: memoryview, events: list[Event[T]]) -> None:
        last = self._piece_ends and not self.arriving
        if last:
            stream.ended = True
        events.append(Data(stream, piece, last))

    # --- other frames

    def _frame(
        self, kind: int, flags: int, number: int, payload: bytes, events: list[Event[T]]
    ) -> None:
        if self._block is not None and (kind != CONTINUATION or number != self._block_stream):
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "a header block was interrupted")
        if not self.ready and (kind != SETTINGS or flags & ACK):
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "SETTINGS must come first")
        if kind == HEADERS:
            self._begin_block(flags, number, payload, events)
        elif kind == CONTINUATION:
            self._continue_block(flags, payload, events)
        elif kind == WINDOW_UPDATE:
            self._window_update(number, payload)
        elif kind == RST_STREAM:
            self._reset_by_client(number, payload, events)
        elif kind == SETTINGS:
            self._control.spend()
            self._settings(flags, number, payload)
        elif kind == PING:
            self._control.spend()
            self._ping(flags, number, payload, events)
        elif kind == GOAWAY:
            self._control.spend()
            if number:
                raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "GOAWAY on a stream other than 0")
            if len(payload) < 8:
                raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, "GOAWAY of an invalid length")
        elif kind == PUSH_PROMISE:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:
            self._control.spend()
            if kind == PRIORITY:
                _check_priority(number, payload)

    def _handle_headers(
        self, number: int, flags: int, block: bytes, events: list[Event[T]]
    ) -> None:
        if number <= self.last:
            self._trailers(number, flags, block, events)
            return
        self.last = number
        ended = bool(flags & END_STREAM)
        if self._refusing or len(self.streams) >= self._limits.streams:
            self._headers.skip(block)
            raise StreamFault(FaultCode.REFUSED_STREAM)
        head = self._headers.request(block)
        stream = Stream(number, self._limits.window, self.sending.initial_window)
        stream.expected = head.data_size
        self.streams[number] = stream
        if self._control.tokens < self._limits.control:
            self._control.earn(_EARNED)
        events.append(StreamOpened(stream, head))
        if ended:
            if stream.expected > 0:
                raise StreamFault(FaultCode.PROTOCOL_ERROR)
            stream.ended = True
            events.append(Data(stream, _NOTHING, True))

    def _trailers(self, number: int, flags: int, block: bytes, events: list[Event[T]]) -> None:
        stream = self.streams.get(number)
        if stream is None or stream.ended:
            self._headers.skip(block)
            self._check_closed(number, stream)
            self._control.spend()
            return
        self._headers.trailers(block)
        if not flags & END_STREAM or stream.expected > 0:
            raise StreamFault(FaultCode.PROTOCOL_ERROR)
        stream.ended = True
        events.append(Data(stream, _NOTHING, True))

    def _check_closed(self, number: int, stream: Stream | None) -> None:
        """Raise a fault unless a frame is permitted on a closed or unknown stream.

        The frame is permitted if this server has ended the stream and the client may not have been
        notified yet.
        """
        self._check_begun(number, "a frame")
        if stream is not None or number not in self._reset_streams:
            raise ConnectionFault(FaultCode.STREAM_CLOSED, "a frame on a closed stream")

    def _window_update(self, number: int, payload: bytes) -> None:
        increment = frames.parse_long(payload, "WINDOW_UPDATE") & STREAM_BITS
        stream = self.streams.get(number)
        if number and stream is None:
            self._check_begun(number, "WINDOW_UPDATE")
            self._control.spend()
            return
        if not increment:
            if not number:
                raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "WINDOW_UPDATE by nothing")
            raise StreamFault(FaultCode.PROTOCOL_ERROR)
        self._earn_for_data()
        self._control.spend()
        self.sending.receive_window_update(stream, increment)

    def _earn_for_data(self) -> None:
        sending, (frames_before, bytes_before) = self.sending, self._credited
        self._credited = sending.frames, sending.bytes
        sent = sending.frames - frames_before
        self._resets.earn(sent)
        earned = _EARNED * sent + (sending.bytes - bytes_before) // _EARNING
        saved = min(self._earned_control + earned, _MOST_SAVED)
        needed = min(saved, self._control.debt)
        self._earned_control = saved - needed
        self._control.earn(needed)

    def _reset_by_client(self, number: int, payload: bytes, events: list[Event[T]]) -> None:
        frames.parse_long(payload, "RST_STREAM")
        stream = self.streams.get(number)
        if stream is None:  # The frame crossed the server's end of the stream.
            self._check_begun(number, "RST_STREAM")
            self._control.spend()
            return
        self._earn_for_data()
        self._resets.spend()
        self._remove(stream)
        events.append(StreamReset(stream))

    def _check_begun(self, number: int, frame_name: str) -> None:
        if number > self.last or not number & 1:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, f"{frame_name} on an idle stream")

    def _settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "SETTINGS on a stream other than 0")
        if flags & ACK:
            if payload:
                raise ConnectionFault(
                    FaultCode.FRAME_SIZE_ERROR, "SETTINGS acknowledgement with a payload"
                )
            self.acknowledged = True
            return
        settings = dict(frames.parse_settings(payload))  # the last value of each setting applies
        window = settings.get(frames.INITIAL_WINDOW_SIZE)
        if window is not None:
            self.sending.change_initial_window(window, self.streams.values())
        self.sending.largest_frame = settings.get(frames.MAX_FRAME_SIZE, self.sending.largest_frame)
        self.ready = True
        self.sending.ready.append(_SETTINGS_ACK)

    def _ping(self, flags: int, number: int, payload: bytes, events: list[Event[T]]) -> None:
        if number:
            raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "PING on a stream other than 0")
        if len(payload) != 8:
            raise ConnectionFault(FaultCode.FRAME_SIZE_ERROR, "PING of an invalid length")
        if flags & ACK:
            events.append(PingAcknowledged(payload))
            return
        self.pings += 1
        self.sending.ready.append(frames.frame(PING, ACK, 0, payload))

    # --- ends of streams and of the connection

    def _fail_stream(self, number: int, code: FaultCode, events: list[Event[T]]) -> None:
        """Reset a stream on which the client has violated the protocol."""
        self._resets.spend()
        stream = self.streams.get(number)
        if number > self.last:
            raise ConnectionFault(code, "a malformed frame on an idle stream")
        if stream is None:
            self._record_reset(number)
            self.sending.ready.append(frames.frame(RST_STREAM, 0, number, pack_long(code)))
        else:
            self.reset(stream, code)
            events.append(StreamReset(stream))

    def reset(self, stream: Stream, code: FaultCode) -> None:
        """End a stream at once, in both directions."""
        if self.streams.get(stream.id) is stream:
            if not stream.ended:
                self._record_reset(stream.id)
            self._remove(stream)
            self.sending.ready.append(frames.frame(RST_STREAM, 0, stream.id, pack_long(code)))

    def _remove(self, stream: Stream) -> None:
        stream.ended = True
        self.sending.drop(stream)
        self.streams.pop(stream.id, None)
        if self.arriving_for is stream:
            self.arriving_for = None

    def _record_reset(self, number: int) -> None:
        self._reset_streams[number] = None
        if len(self._reset_streams) > _MOST_RESETS_RECORDED:
            del self._reset_streams[next(iter(self._reset_streams))]

    def _finished(self, stream: Stream) -> None:
        """Close a stream whose frames are all sent."""
        if stream.ended:
            self.streams.pop(stream.id, None)
        else:
            # The rest of the request is not needed (RFC 9113, 8.1). If the response was cut short,
            # CANCEL reports that even to a client that does not read.
            self.reset(stream, FaultCode.CANCEL if stream.cut else FaultCode.NO_ERROR)
        if stream.on_sent is not None:
            stream.on_sent()

    def send_window_update(self, stream: Stream, increment: int) -> None:
        """Permit the client to send `increment` bytes of the stream's data."""
        if increment > 0 and not stream.ended:
            stream.receive_window += increment
            update = frames.frame(WINDOW_UPDATE, 0, stream.id, pack_long(increment))
            self.sending.ready.append(update)

    def fail(self, code: FaultCode, text: str = "") -> None:
        """Send GOAWAY and close the connection."""
        if not self.closing:
            super().fail(code, text)
            last = min(self.last, self._promised)
            self.sending.ready.append(frames.goaway(last, code, text))

    def send_goaway(self, *, final: bool) -> None:
        """Send GOAWAY, which announces the end of the connection.

        The first GOAWAY permits new streams, which may be in flight. A `final` GOAWAY permits no
        stream above the last one that was received.
        """
        if final and not self._refusing:
            self._refusing = True
            self._promised = self.last
        self.sending.ready.append(frames.goaway(self._promised, FaultCode.NO_ERROR))

    def ping(self, payload: bytes) -> None:
        """Send a PING with eight bytes; a `PingAcknowledged` event follows."""
        self.sending.ready.append(frames.frame(PING, 0, 0, payload))


_SETTINGS_ACK = frames.frame(SETTINGS, ACK, 0)


def _check_priority(number: int, payload: bytes) -> None:
    if not number:
        raise ConnectionFault(FaultCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
    if len(payload) != 5:
        raise StreamFault(FaultCode.FRAME_SIZE_ERROR)
