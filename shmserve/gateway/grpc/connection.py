"""A client's connection: transfers bytes between the socket and the HTTP/2 engine; its lifetime.

A flood of frames delays other connections by at most one turn of the event loop. The remaining
frames are handled in the next turn, and nothing is read in the meantime.

`ConnectionLifetime` implements keepalive, limits on pings and age, and the drain. In a drain, a
client receives two GOAWAY frames (RFC 9113, 6.8). The first one announces the end, and does not
affect streams in flight. The second one follows the acknowledgement of a ping, and has the id of
the last stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import time
from collections.abc import Callable

from shmserve.gateway.grpc.call import GrpcCall, GrpcContext
from shmserve.gateway.grpc.framing import ArrivingMessage, CallHead
from shmserve.gateway.http2.connection import Http2Connection
from shmserve.gateway.http2.frames import FaultCode
from shmserve.gateway.http2.incoming import Bytes, Data, StreamOpened, StreamReset
from shmserve.gateway.http2.outgoing import Stream
from shmserve.gateway.inference.body_arrival import SLOWEST_RATE
from shmserve.gateway.listener import Acceptor, ClientIdentity, LimitedConnection

logger = logging.getLogger(__name__)

_MAX_JOINED_BYTES = 64 * 1024  # larger responses are written without joining their pieces
_WRITE_HIGH_WATER_BYTES = 256 * 1024  # unsent bytes above which data is queued
_FREE_FRAMES = 32  # useless frames that a client may send per turn without a pause
_PAUSE_PER_FRAME_S = 0.0005  # the pause for each useless frame above `_FREE_FRAMES`
_CLOSE_AFTER_VIOLATION_S = 0.25  # the time in which the client can read the GOAWAY
_LINGER_S = 0.5  # the time for which a client may send after the last response
_CHECKS_PER_TIMEOUT = 4  # time limits are checked this many times within the shortest limit
_TLS_READ_BYTES = 64 * 1024


class GrpcConnection(LimitedConnection, asyncio.BufferedProtocol):
    """The gRPC connection of one client."""

    def __init__(self, acceptor: Acceptor, context: GrpcContext) -> None:
        self._acceptor = acceptor
        self.context = context
        self.loop = asyncio.get_running_loop()
        self.transport = None
        self.client: ClientIdentity
        self.requires_authorisation = False
        self.http2: Http2Connection[CallHead] = Http2Connection(CallHead, context.limits)
        self.lifetime = ConnectionLifetime(self)
        self._current_buffer = context.read_buffer  # the buffer of the current read
        self._is_handling_data = False
        self._is_closing = False  # whether the server is closing the connection
        self._counted_useless_frames = self.http2.useless_frames  # until the last turn
        self._last_activity = self.loop.time()  # the time of the last activity
        self._tls = None if context.tls is None else TlsLayer(context.tls)
        # --- time limits
        self._check_timer: asyncio.TimerHandle | None = None
        self._arriving_messages: dict[GrpcCall, ArrivingMessage] = {}
        # For each stalled stream, the start of the stall and the number of bytes sent until then.
        self._stalled_streams: dict[Stream, tuple[float, int]] = {}

    # --- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection, and start its timers."""
        attached_transport = self.attach(transport)
        self.client = self._acceptor.connection_made(self)
        rules = self.client.listener.authorisation
        self.requires_authorisation = rules.requires_token or bool(rules.restrictions)
        attached_transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER_BYTES)
        self.lifetime.start()
        self.flush()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancel all calls, since the client has disconnected."""
        self.transport = None
        if self._check_timer is not None:
            self._check_timer.cancel()
        self.lifetime.stop()
        self._disconnect_calls()
        self._acceptor.connection_lost(self)
        self.client.call_disconnect_actions()

    def _disconnect_calls(self) -> None:
        streams = list(self.http2.streams.values())
        self.http2.streams.clear()
        for stream in streams:
            self.http2.sender.discard_output(stream)
            if stream.call is not None:
                stream.call.handle_disconnect()

    @property
    def is_open(self) -> bool:
        """Return whether the connection is neither closed nor closing."""
        transport = self.transport
        return transport is not None and not (self._is_closing or transport.is_closing())

    @property
    def idle_since(self) -> float | None:
        """Return the event loop's time when the last call ended; None while a call is open."""
        return None if self.http2.streams else self._last_activity

    @property
    def incomplete_since(self) -> float | None:
        """Return the loop's time of the last received bytes; None if no message is incomplete."""
        return self._last_activity if self._arriving_messages else None

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def shut_down(self, *, refuses_requests: bool = False) -> None:
        """Notify the client that the connection will be closed after its open calls."""
        self.lifetime.shut_down(refuses_requests=refuses_requests)

    def report_drained(self) -> None:
        """Report that the client was notified, and that no unary call is open."""
        self._acceptor.connection_drained(self)

    def force_close(self) -> None:
        transport = self.transport
        if transport is not None and not transport.is_closing():
            if self._tls is not None:
                self._tls.close()
                transport.write(self._tls.take_ciphertext())
            self._close_transport(self.context.body_timeout_s)

    def close_gracefully(self) -> None:
        """Send the end of the stream, and close once the client disconnects, or after `_LINGER_S`.

        Closing at once would reset the connection of a client that still sends, for example a
        WINDOW_UPDATE frame. The client would lose its last response or the GOAWAY.
        """
        transport = self.transport
        if self.is_open and transport is not None:
            self._is_closing = True
            self.lifetime.stop()
            if self._tls is not None:
                self._tls.close()
                transport.write(self._tls.take_ciphertext())
                self._tls = None
            transport.resume_reading()  # unread bytes would reset the connection when it is closed
            transport.write_eof()
            self.loop.call_later(_LINGER_S, self.force_close)

    # --- bytes

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory for the next bytes.

        The bytes of a large tensor are received into their final memory.
        """
        self._current_buffer = self.context.read_buffer
        http2 = self.http2
        if http2.arriving_bytes >= _MAX_JOINED_BYTES and self._tls is None:
            stream = http2.arriving_stream
            if stream is not None and stream.call is not None:
                next_buffer = stream.call.next_buffer(http2.arriving_bytes)
                self._current_buffer = next_buffer or self._current_buffer
        return self._current_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Handle the received bytes, as many as are permitted in one turn."""
        data: Bytes = self._current_buffer[:nbytes]
        if self._is_closing:
            return
        self._last_activity = self.loop.time()
        if self._tls is not None and data:
            try:
                data = self._tls.receive(data)
            except BrokenTls as error:
                logger.debug("the TLS handshake with a client failed: %s", error)
                self.force_close()
                return
        self._is_handling_data = True
        http2 = self.http2
        new_calls: list[GrpcCall] = []
        for event in http2.receive(data):
            if type(event) is Data:
                if event.stream.call is not None:
                    event.stream.call.receive_data(event.piece, event.is_last)
            elif type(event) is StreamOpened:
                if not event.stream.has_all_output:  # a later frame may have reset the stream
                    self._begin_call(event.stream, event.head, new_calls)
            elif type(event) is StreamReset:
                if event.stream.call is not None:
                    event.stream.call.handle_disconnect()
            else:
                self.lifetime.handle_ping_ack(event.payload)
        for call in new_calls:
            call.expect_message()
        self._is_handling_data = False
        if self.lifetime.counts_received:
            self.lifetime.record_received()
        if http2.sender.output or http2.sender.waiting_streams or self._tls is not None:
            self.flush()
        if http2.is_closing:
            self._close_after_violation()
        else:
            new_frames = http2.useless_frames - self._counted_useless_frames
            self._counted_useless_frames += new_frames
            if new_frames > _FREE_FRAMES or http2.has_pending_frames:
                pause_s = new_frames * _PAUSE_PER_FRAME_S if new_frames > _FREE_FRAMES else 0.0
                self._pause_reading(pause_s)

    def _pause_reading(self, seconds: float) -> None:
        """Pause reading for `seconds`; afterwards, handle the pending frames."""
        if self.transport is not None:
            self.transport.pause_reading()
            self.loop.call_later(seconds, self._resume_reading)

    def _close_after_violation(self) -> None:
        """Close the connection of a client that has violated the protocol.

        The delay makes reconnections expensive, and lets the client read what was sent.
        """
        if self.transport is not None and not self._is_closing:
            self._is_closing = True
            self.transport.pause_reading()
            self._disconnect_calls()
            self.loop.call_later(_CLOSE_AFTER_VIOLATION_S, self.force_close)

    def _resume_reading(self) -> None:
        if self.is_open and self.transport is not None:
            self.transport.resume_reading()
            self.buffer_updated(0)

    def _begin_call(self, stream: Stream, head: CallHead, new_calls: list[GrpcCall]) -> None:
        try:
            call = stream.call = self.context.begin_call(self, stream, head)
        except Exception:
            logger.exception("gRPC call %s could not be started; its stream is reset", head.path)
            self.http2.reset(stream, FaultCode.INTERNAL_ERROR)
        else:
            if not stream.is_half_closed:
                new_calls.append(call)

    def flush(self) -> None:
        """Write the pending frames, or defer them while received data is being handled."""
        if self._is_handling_data:
            return
        sender = self.http2.sender
        output, transport = sender.output, self.transport
        if transport is None:
            return
        if sender.waiting_streams:
            self._schedule_time_limit_check()
        if not output and self._tls is None:
            return
        if self._tls is not None:
            self._flush_encrypted(self._tls, transport)
        else:
            sender.output = []
            first_piece, *other_pieces = output
            if not other_pieces:
                transport.write(first_piece)
            elif sum(map(len, output)) <= _MAX_JOINED_BYTES:
                transport.write(b"".join(output))
            else:
                transport.writelines(output)

    def _flush_encrypted(self, tls: TlsLayer, transport: asyncio.Transport) -> None:
        sender = self.http2.sender
        if tls.is_ready and sender.output:
            output, sender.output = sender.output, []
            is_small = sum(map(len, output)) <= _MAX_JOINED_BYTES
            for piece in (b"".join(output),) if is_small else output:
                tls.send(piece)
        if ciphertext := tls.take_ciphertext():
            transport.write(ciphertext)

    def pause_writing(self) -> None:
        """Queue data, since the client reads too slowly."""
        self.http2.sender.is_paused = True

    def resume_writing(self) -> None:
        """Send queued data, since the client has read enough."""
        sender = self.http2.sender
        sender.is_paused = False
        sender.resume()
        self.flush()

    # --- time limits

    def watch(self, call: GrpcCall, incoming: ArrivingMessage) -> None:
        """Register a call's incomplete message (`incoming`), to enforce its time limit."""
        self._arriving_messages[call] = incoming
        self._schedule_time_limit_check()

    def unwatch(self, call: GrpcCall) -> None:
        """End the time limit of a call, since its message was received or the call has ended."""
        self._arriving_messages.pop(call, None)

    def record_call_end(self) -> None:
        """Record that a call has ended, and that all its frames are sent."""
        if not self.http2.streams:
            self._last_activity = self.loop.time()
        if self.lifetime.is_shutting_down:
            self.lifetime.record_call_end()

    def _schedule_time_limit_check(self) -> None:
        if self._check_timer is None:
            interval_s = self.context.body_timeout_s / _CHECKS_PER_TIMEOUT
            self._check_timer = self.loop.call_later(interval_s, self._check_time_limits)

    def _check_time_limits(self) -> None:
        self._check_timer = None
        now = time.monotonic()
        for call, arriving_message in list(self._arriving_messages.items()):
            if arriving_message.is_overdue(now):
                call.on_timeout()
        time_limit_s = self.context.body_timeout_s
        self._stalled_streams = {
            stream: self._stalled_streams.get(stream, (now, stream.sent_bytes))
            for stream in self.http2.sender.waiting_streams
        }
        for stream, (stalled_at, sent_bytes) in list(self._stalled_streams.items()):
            if now - stalled_at < time_limit_s:
                continue
            if stream.sent_bytes - sent_bytes >= time_limit_s * SLOWEST_RATE:
                self._stalled_streams[stream] = now, stream.sent_bytes
            else:
                self._reset_stalled(stream)
        self.flush()
        if self._arriving_messages or self._stalled_streams:
            self._schedule_time_limit_check()

    def _reset_stalled(self, stream: Stream) -> None:
        """Reset a stream whose data the client does not read."""
        if self.http2.sender.is_paused:
            logger.info("a gRPC client that does not read its responses was disconnected")
            self.abort()
            return
        del self._stalled_streams[stream]
        self.http2.reset(stream, FaultCode.CANCEL)
        if stream.call is not None:
            stream.call.handle_disconnect()


class BrokenTls(Exception):
    """The error for a client without TLS, or without the required protocol or certificate."""


class TlsLayer:
    """The TLS layer of one connection; `is_ready` is true after the handshake."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._tls_input = ssl.MemoryBIO()
        self._tls_output = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._tls_input, self._tls_output, server_side=True)
        self.is_ready = False
        self._is_closed = False

    def receive(self, data: bytes | memoryview) -> bytes:
        """Return the plaintext of received bytes.

        The caller then sends the bytes of `take_ciphertext`, also after an error.

        Raises:
            BrokenTls: The handshake failed, or the bytes are invalid.
        """
        self._tls_input.write(data)
        pieces: list[bytes] = []
        try:
            if not self.is_ready:
                self._tls.do_handshake()
                if self._tls.selected_alpn_protocol() != "h2":
                    raise BrokenTls("the client does not use HTTP/2")
                self.is_ready = True
            while piece := self._tls.read(_TLS_READ_BYTES):
                pieces.append(piece)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            pass  # the client has closed TLS; the end of the socket follows
        except ssl.SSLError as error:
            raise BrokenTls(str(error)) from None
        return b"".join(pieces)

    def send(self, data: bytes | memoryview) -> None:
        """Encrypt bytes, which `take_ciphertext` returns, unless TLS is closed."""
        if not self._is_closed:
            self._tls.write(data)

    def close(self) -> None:
        """End TLS; `take_ciphertext` then returns the close_notify alert for the client."""
        self._is_closed = True
        with contextlib.suppress(ssl.SSLError):  # the client has not closed TLS yet
            self._tls.unwrap()

    def take_ciphertext(self) -> bytes:
        """Return the ciphertext that has to be sent."""
        return self._tls_output.read()


_ALIVE_PAYLOAD, _DRAIN_PAYLOAD = b"alive?\0\0", b"leaving\0"  # of PING frames
_AGE_SPREAD = 0.1  # a random part of the age, so that clients do not reconnect at the same time
_PING_LIMIT_S = 1.0  # the time limit of the ping after the first GOAWAY


class ConnectionLifetime:
    """The timers of one connection: its opening, keepalive, age limit and drain."""

    def __init__(self, connection: GrpcConnection) -> None:
        self._connection = connection
        self._settings = connection.context.settings
        self._loop = connection.loop
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._checked_frames = 0  # received frames at the last check
        self._pings_sent = 0  # pings that were sent since the last data
        # The number of sent DATA frames at the last count of the server's pings, and at the last
        # count of the client's pings.
        self._data_frames_at_ping = self._data_frames_at_client_ping = 0
        self._counted_pings = 0  # the client's pings at their last count
        self._last_ping = float("-inf")  # the time of the client's last ping
        self._strike_count = 0  # number of the client's pings that came too early
        self.is_shutting_down = False
        # Whether the connection must call `record_received`, which counts pings.
        self.counts_received = bool(self._settings.max_ping_strikes)

    def start(self) -> None:
        """Start the timers."""
        settings, connection = self._settings, self._connection
        self._start_timer("opening", connection.context.header_timeout_s, self._check_opened)
        self._start_timer("alive", settings.keepalive_time_ms / 1000, self._check_alive)
        if settings.max_connection_age_ms:
            random_factor = random.uniform(1 - _AGE_SPREAD, 1 + _AGE_SPREAD)
            age_s = settings.max_connection_age_ms / 1000 * random_factor
            self._start_timer("age", age_s, self._on_max_age)

    def stop(self) -> None:
        """Stop the timers, since the connection is closed."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _start_timer(self, name: str, delay_s: float, action: Callable[[], None]) -> None:
        if (previous_timer := self._timers.pop(name, None)) is not None:
            previous_timer.cancel()
        self._timers[name] = self._loop.call_later(delay_s, action)

    def _check_opened(self) -> None:
        """Disconnect a client that has not sent its first frames in time."""
        if not self._connection.http2.is_settings_acknowledged:
            self._connection.abort()

    # --- keepalive

    def _check_alive(self) -> None:
        """Send a ping if no frame was received since the last check."""
        http2, settings = self._connection.http2, self._settings
        is_silent = http2.received_frames == self._checked_frames
        self._checked_frames = http2.received_frames
        self._start_timer("alive", settings.keepalive_time_ms / 1000, self._check_alive)
        if not is_silent or not (http2.streams or settings.keepalive_permit_without_calls):
            return
        data_frames = http2.sender.data_frames
        if data_frames != self._data_frames_at_ping:
            self._data_frames_at_ping, self._pings_sent = data_frames, 0
        if settings.max_pings_without_data and self._pings_sent >= settings.max_pings_without_data:
            return
        self._pings_sent += 1
        http2.ping(_ALIVE_PAYLOAD)
        self._connection.flush()
        self.counts_received = True
        self._start_timer("pong", settings.keepalive_timeout_ms / 1000, self._connection.abort)

    def handle_ping_ack(self, payload: bytes) -> None:
        """Handle the acknowledgement of a ping."""
        if payload == _DRAIN_PAYLOAD and self.is_shutting_down:
            self._refuse_streams()

    def record_received(self) -> None:
        """Record that bytes were received."""
        pong_timer = self._timers.pop("pong", None)
        if pong_timer is not None:
            pong_timer.cancel()
        if self._settings.max_ping_strikes:
            self._count_pings()
        if not self._connection.http2.streams:
            self.record_call_end()

    def _count_pings(self) -> None:
        http2, settings = self._connection.http2, self._settings
        new_pings, self._counted_pings = http2.ping_count - self._counted_pings, http2.ping_count
        if not new_pings:
            return
        if http2.sender.data_frames != self._data_frames_at_client_ping:
            self._data_frames_at_client_ping, self._strike_count = http2.sender.data_frames, 0
            self._last_ping = float("-inf")
        now = self._loop.time()
        is_early = now - self._last_ping < settings.min_ping_interval_ms / 1000
        self._strike_count += new_pings if is_early else new_pings - 1
        self._last_ping = now
        if self._strike_count > settings.max_ping_strikes:
            http2.fail(FaultCode.ENHANCE_YOUR_CALM, "too_many_pings")

    # --- ends

    def _on_max_age(self) -> None:
        self.shut_down()
        grace_ms = self._settings.max_connection_age_grace_ms
        if grace_ms:
            self._start_timer("grace", grace_ms / 1000, self._connection.abort)

    def shut_down(self, *, refuses_requests: bool = False) -> None:
        """Notify the client, and close the connection after its calls.

        With `refuses_requests`, calls that the client sends before it receives the GOAWAY are
        refused (REFUSED_STREAM). Clients repeat such calls on another connection.
        """
        if self.is_shutting_down:
            self.record_call_end()
            return
        self.is_shutting_down = self.counts_received = True
        self._connection.http2.send_goaway(is_final=False)
        if refuses_requests:
            self._connection.http2.send_goaway(is_final=True)
        self._connection.http2.ping(_DRAIN_PAYLOAD)
        self._start_timer("ping", _PING_LIMIT_S, self._refuse_streams)
        self._connection.flush()

    def _refuse_streams(self) -> None:
        """Send the second GOAWAY; streams from before the first GOAWAY have arrived by now."""
        timer = self._timers.pop("ping", None)
        if timer is not None:
            timer.cancel()
            self._connection.http2.send_goaway(is_final=True)
            self._connection.flush()
        # The report is deferred, so that the last frames of the call are written first.
        self._loop.call_soon(self._report_if_drained)

    def _report_if_drained(self) -> None:
        calls = [stream.call for stream in self._connection.http2.streams.values()]
        if not calls:
            self._connection.close_gracefully()  # the end of the connection reports the drain
        elif not any(call is not None and call.delays_drain for call in calls):
            self._connection.report_drained()

    def record_call_end(self) -> None:
        """Record the end of a call, after which a draining connection may close."""
        if self.is_shutting_down and "ping" not in self._timers:
            self._refuse_streams()
