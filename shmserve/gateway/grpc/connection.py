"""A client's connection: bytes to and from the HTTP/2 engine, what its events mean for calls, and
patience with a client that sends or reads too slowly.

Whoever floods one has the others wait no longer than for a turn: what is left over is handled in
the next, and nothing is read meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time

from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.connection_limits import Acceptor, LimitedConnection
from shmserve.gateway.grpc.calls.call import GrpcCall, GrpcFront
from shmserve.gateway.grpc.calls.headers import CallHead
from shmserve.gateway.grpc.calls.messages import ArrivingMessage
from shmserve.gateway.grpc.connection_lifetime import ConnectionLifetime
from shmserve.gateway.http2.connection import Http2Connection
from shmserve.gateway.http2.frames import FaultCode
from shmserve.gateway.http2.incoming import Begun, Bytes, Data, StreamReset
from shmserve.gateway.http2.outgoing import Stream
from shmserve.gateway.inference.body_arrival import SLOWEST_RATE

logger = logging.getLogger(__name__)


_LARGE = 64 * 1024  # of what is larger the pieces are handed to the socket as they are
_HIGH_WATER = 256 * 1024  # bytes that the socket has not taken, above which data waits
_FREE_DEBT = 32  # of a turn
_REST_S = 0.0005  # for each that is owed
_LINGER_S = 0.25
_LOOKS = 4  # at a call that waits, while its client has patience left
_READ = 64 * 1024


class GrpcConnection(LimitedConnection, asyncio.BufferedProtocol):
    """One client's connection, whose identity is `client`."""

    def __init__(self, owner: Acceptor, front: GrpcFront) -> None:
        self._owner = owner
        self.front = front
        self.loop = asyncio.get_running_loop()
        self.transport = None
        self.client: ClientIdentity
        self.guarded = False
        self.http2: Http2Connection[CallHead] = Http2Connection(CallHead, front.limits)
        self.lifetime = ConnectionLifetime(self)
        self._reading = front.read_buffer  # where what comes is read to
        self._handling = False
        self._ended = False  # by us
        self._debt = self.http2.debt  # as the engine had it at the end of the last turn
        self._since = self.loop.time()  # something came, or a call was over
        self._tls = None if front.tls is None else TlsLayer(front.tls)
        self._opening: asyncio.TimerHandle | None = None
        # --- patience
        self._looking: asyncio.TimerHandle | None = None
        self._arriving: dict[GrpcCall, ArrivingMessage] = {}
        self._stalled: dict[Stream, tuple[float, int]] = {}  # since when, and what it had sent

    # --- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register it; a client that says nothing is shown out."""
        made = self.attach(transport)
        self.client = self._owner.connection_made(self)
        rules = self.client.listener.authorisation
        self.guarded = rules.asks_for_tokens or bool(rules.restrictions)
        self._opening = self.loop.call_later(self.front.header_timeout_s, self._not_opened)
        made.set_write_buffer_limits(high=_HIGH_WATER)
        self.lifetime.begin()
        self.flush()

    def _not_opened(self) -> None:
        self._opening = None
        if not self.http2.acknowledged:
            self.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client is gone, and with it what it has asked for."""
        self.transport = None
        if self._looking is not None:
            self._looking.cancel()
        if self._opening is not None:
            self._opening.cancel()
        self.lifetime.end()
        self._drop_calls()
        self._owner.connection_lost(self)
        self.client.gone()

    def _drop_calls(self) -> None:
        streams = list(self.http2.streams.values())
        self.http2.streams.clear()
        for stream in streams:
            self.http2.sending.drop(stream)
            if stream.call is not None:
                stream.call.gone()

    @property
    def open(self) -> bool:
        """Whether it is not on its way out."""
        transport = self.transport
        return transport is not None and not (self._ended or transport.is_closing())

    @property
    def idle_since(self) -> float | None:
        """Since when no call is on it, by the loop's time; None when there is one."""
        return None if self.http2.streams else self._since

    @property
    def sending_since(self) -> float | None:
        """Since when the rest of a message is missing; None when none is."""
        return self._since if self._arriving else None

    def abort(self) -> None:
        """End it now, whatever is not flushed."""
        if self.transport is not None:
            self.transport.abort()

    def leave(self, after_calls: bool = False) -> None:
        """Have the client go when its calls are over."""
        self.lifetime.leave(after_calls)

    def settled(self) -> None:
        """It knows that it is to go, and no unary call is here."""
        self._owner.settled(self)

    def force_close(self) -> None:
        """End it; what is written already may still be flushed."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            if self._tls is not None:
                self._tls.close()
                transport.write(self._tls.outgoing())
            transport.close()
            if transport.get_write_buffer_size():
                self.loop.call_later(self.front.body_timeout_s, transport.abort)

    # --- bytes

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes are read to: to their place, where a large tensor arrives."""
        self._reading = self.front.read_buffer
        http2 = self.http2
        if http2.arriving >= _LARGE and self._tls is None:
            stream = http2.arriving_for
            if stream is not None and stream.call is not None:
                self._reading = stream.call.place(http2.arriving) or self._reading
        return self._reading

    def buffer_updated(self, nbytes: int) -> None:
        """Handle what came, as far as it has its turn."""
        data: Bytes = self._reading[:nbytes]
        self._since = self.loop.time()
        if self._tls is not None and data:
            try:
                data = self._tls.receive(data)
            except BrokenTls as broken:
                logger.debug("no TLS with a client: %s", broken)
                self.force_close()
                return
        self._handling = True
        http2 = self.http2
        fresh: list[GrpcCall] = []
        for event in http2.receive(data):
            if type(event) is Data:
                if event.stream.call is not None:
                    event.stream.call.data(event.piece, event.ended)
            elif type(event) is Begun:
                if not event.stream.finished:  # given up by what came behind it
                    self._begin(event.stream, event.head, fresh)
            elif type(event) is StreamReset:
                if event.stream.call is not None:
                    event.stream.call.gone()
            else:
                self.lifetime.acknowledged(event.payload)
        for call in fresh:
            call.check_message()
        self._handling = False
        if self.lifetime.listens:
            self.lifetime.received()
        if http2.sending.ready or http2.sending.waiting or self._tls is not None:
            self.flush()
        if http2.closing:
            self._show_out()
        else:
            owed = http2.debt - self._debt
            self._debt += owed
            if owed > _FREE_DEBT or http2.pending:
                self._rest(owed * _REST_S if owed > _FREE_DEBT else 0.0)

    def _rest(self, seconds: float) -> None:
        """Read nothing until then: others have their turn, and who wastes our time waits longer."""
        if self.transport is not None:
            self.transport.pause_reading()
            self.loop.call_later(seconds, self._go_on)

    def _show_out(self) -> None:
        """The client has broken a rule, and was told: it ends, but not so soon that coming again is
        cheap, or that what was sent is lost to what was not read."""
        if self.transport is not None and not self._ended:
            self._ended = True
            self.transport.pause_reading()
            self._drop_calls()
            self.loop.call_later(_LINGER_S, self.force_close)

    def _go_on(self) -> None:
        if self.open and self.transport is not None:
            self.transport.resume_reading()
            self.buffer_updated(0)

    def _begin(self, stream: Stream, head: CallHead, fresh: list[GrpcCall]) -> None:
        try:
            call = stream.call = self.front.begin(self, stream, head)
        except Exception:
            logger.exception("a call could not begin")
            self.http2.reset(stream, FaultCode.INTERNAL_ERROR)
        else:
            if not stream.ended:
                fresh.append(call)

    def flush(self) -> None:
        """Write what is ready, unless that happens soon in any case."""
        if self._handling:
            return
        sending = self.http2.sending
        ready, transport = sending.ready, self.transport
        if transport is None:
            return
        if sending.waiting:
            self._look_soon()
        if not ready and self._tls is None:
            return
        if self._tls is not None:
            self._flush_encrypted(self._tls, transport)
        else:
            sending.ready = []
            first, *rest = ready
            if not rest:
                transport.write(first)
            elif sum(map(len, ready)) <= _LARGE:
                transport.write(b"".join(ready))
            else:
                transport.writelines(ready)

    def _flush_encrypted(self, tls: TlsLayer, transport: asyncio.Transport) -> None:
        sending = self.http2.sending
        if tls.ready and sending.ready:
            ready, sending.ready = sending.ready, []
            for piece in (b"".join(ready),) if sum(map(len, ready)) <= _LARGE else ready:
                tls.send(piece)
        if encrypted := tls.outgoing():
            transport.write(encrypted)

    def pause_writing(self) -> None:
        """The client reads more slowly than we write: data waits."""
        self.http2.sending.paused = True

    def resume_writing(self) -> None:
        """The client has caught up."""
        sending = self.http2.sending
        sending.paused = False
        sending.resume()
        self.flush()

    # --- patience

    def watch(self, call: GrpcCall, arriving: ArrivingMessage) -> None:
        """Have an eye on a call whose message is not here."""
        self._arriving[call] = arriving
        self._look_soon()

    def unwatch(self, call: GrpcCall) -> None:
        """Its message is here, or it is over."""
        self._arriving.pop(call, None)

    def over(self) -> None:
        """A call is over, and all of it is sent."""
        if not self.http2.streams:
            self._since = self.loop.time()
        if self.lifetime.leaving:
            self.lifetime.over()

    def _look_soon(self) -> None:
        if self._looking is None:
            self._looking = self.loop.call_later(self.front.body_timeout_s / _LOOKS, self._look)

    def _look(self) -> None:
        self._looking = None
        now = time.monotonic()
        for call, arriving in list(self._arriving.items()):
            if arriving.overdue(now):
                call.late()
        blocked = tuple(self.http2.sending.waiting)
        patience_s = self.front.body_timeout_s
        self._stalled = {
            stream: self._stalled.get(stream, (now, stream.sent)) for stream in blocked
        }
        for stream, (since, sent) in list(self._stalled.items()):
            if now - since < patience_s:
                continue
            if stream.sent - sent >= patience_s * SLOWEST_RATE:
                self._stalled[stream] = now, stream.sent
            else:
                self._give_up(stream)
        self.flush()
        if self._arriving or self._stalled:
            self._look_soon()

    def _give_up(self, stream: Stream) -> None:
        """The client does not take this stream's data."""
        if self.http2.sending.paused:
            logger.info("a client that does not read its responses was disconnected")
            self.abort()
            return
        del self._stalled[stream]
        self.http2.reset(stream, FaultCode.CANCEL)
        if stream.call is not None:
            stream.call.gone()


class BrokenTls(Exception):
    """The client speaks no TLS, or not the one that is asked for."""


class TlsLayer:
    """TLS of one connection. `ready` once the client has shown what it must, and speaks HTTP/2."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.ready = False
        self._closed = False

    def receive(self, data: bytes | memoryview) -> bytes:
        """The plaintext in these bytes; `outgoing` has what is to be sent, in any case. Raises
        BrokenTls."""
        self._incoming.write(data)
        pieces: list[bytes] = []
        try:
            if not self.ready:
                self._tls.do_handshake()
                if self._tls.selected_alpn_protocol() != "h2":
                    raise BrokenTls("a client that does not speak HTTP/2")
                self.ready = True
            while piece := self._tls.read(_READ):
                pieces.append(piece)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            pass  # the client says that it is done; the socket's end follows
        except ssl.SSLError as error:
            raise BrokenTls(str(error)) from None
        return b"".join(pieces)

    def send(self, data: bytes | memoryview) -> None:
        """Encrypt these; `outgoing` has them, unless all was said to have been sent."""
        if not self._closed:
            self._tls.write(data)

    def close(self) -> None:
        """Say that nothing more comes."""
        self._closed = True
        with contextlib.suppress(ssl.SSLError):  # the client has not said so yet
            self._tls.unwrap()

    def outgoing(self) -> bytes:
        """The ciphertext that is to be sent."""
        return self._outgoing.read()
