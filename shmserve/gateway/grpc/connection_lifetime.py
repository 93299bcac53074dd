"""The lifetime of a connection: keepalive, the limit of the client's pings, the age, and the drain.

A client receives two GOAWAY frames (RFC 9113, 6.8). The first one announces the end, and does not
affect streams in flight. The second one follows the acknowledgement of a ping, and has the id of
the last stream.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from shmserve.gateway.grpc.calls.call import Carrier
from shmserve.gateway.http2.frames import FaultCode

_ALIVE, _SHUTTING_DOWN = b"alive?\0\0", b"leaving\0"
_SPREAD = 0.1  # of an age, so that clients do not reconnect at the same time
_PING_LIMIT_S = 1.0  # the time limit of the ping after the first GOAWAY


class ConnectionLifetime:
    """The timers of one connection."""

    def __init__(self, connection: Carrier) -> None:
        self._connection = connection
        self._settings = connection.front.settings
        self._loop = connection.loop
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._frames = 0  # received frames at the last check
        self._pings_sent = 0  # since the last data
        self._data_sent = 0
        self._pings = 0
        self._last_ping = float("-inf")
        self._strikes = 0
        self.shutting_down = False
        self.needs_received = bool(self._settings.max_ping_strikes)  # Call `received`.

    def begin(self) -> None:
        """Start the timers."""
        settings = self._settings
        self._later("alive", settings.keepalive_time_ms / 1000, self._check_alive)
        if settings.max_connection_age_ms:
            spread = random.uniform(1 - _SPREAD, 1 + _SPREAD)
            self._later("age", settings.max_connection_age_ms / 1000 * spread, self._too_old)

    def end(self) -> None:
        """Stop the timers, since the connection is closed."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _later(self, name: str, after_s: float, action: Callable[[], None]) -> None:
        if (before := self._timers.pop(name, None)) is not None:
            before.cancel()
        self._timers[name] = self._loop.call_later(after_s, action)

    # --- keepalive

    def _check_alive(self) -> None:
        """Send a ping if no frame was received since the last check."""
        http2, settings = self._connection.http2, self._settings
        silent, self._frames = http2.frames_in == self._frames, http2.frames_in
        self._later("alive", settings.keepalive_time_ms / 1000, self._check_alive)
        if not silent or not (http2.streams or settings.keepalive_permit_without_calls):
            return
        sent = http2.sending.frames
        if sent != self._data_sent:
            self._data_sent, self._pings_sent = sent, 0
        if settings.max_pings_without_data and self._pings_sent >= settings.max_pings_without_data:
            return
        self._pings_sent += 1
        http2.ping(_ALIVE)
        self._connection.flush()
        self.needs_received = True
        self._later("pong", settings.keepalive_timeout_ms / 1000, self._connection.abort)

    def acknowledged(self, payload: bytes) -> None:
        """Handle the acknowledgement of a ping."""
        if payload == _SHUTTING_DOWN and self.shutting_down:
            self._refuse_streams()

    def received(self) -> None:
        """Handle the receipt of bytes."""
        pong = self._timers.pop("pong", None)
        if pong is not None:
            pong.cancel()
        if self._settings.max_ping_strikes:
            self._count_pings()
        if not self._connection.http2.streams:
            self.call_ended()

    def _count_pings(self) -> None:
        http2, settings = self._connection.http2, self._settings
        received, self._pings = http2.pings - self._pings, http2.pings
        if not received:
            return
        if http2.sending.frames != self._data_sent:
            self._data_sent, self._strikes = http2.sending.frames, 0
            self._last_ping = float("-inf")
        now = self._loop.time()
        soon = now - self._last_ping < settings.min_ping_interval_ms / 1000
        self._strikes += received if soon else received - 1
        self._last_ping = now
        if self._strikes > settings.max_ping_strikes:
            http2.fail(FaultCode.ENHANCE_YOUR_CALM, "too_many_pings")

    # --- ends

    def _too_old(self) -> None:
        self.shut_down()
        grace_ms = self._settings.max_connection_age_grace_ms
        if grace_ms:
            self._later("grace", grace_ms / 1000, self._connection.abort)

    def shut_down(self, *, refuses: bool = False) -> None:
        """Notify the client, and close the connection after its calls.

        With `refuses`, calls that cross the GOAWAY are refused (REFUSED_STREAM), which clients
        repeat on another connection.
        """
        if self.shutting_down:
            self.call_ended()
            return
        self.shutting_down = self.needs_received = True
        self._connection.http2.refuse_more(finally_=False)
        if refuses:
            self._connection.http2.refuse_more(finally_=True)
        self._connection.http2.ping(_SHUTTING_DOWN)
        self._later("ping", _PING_LIMIT_S, self._refuse_streams)
        self._connection.flush()

    def _refuse_streams(self) -> None:
        """Send the second GOAWAY, since no earlier stream can arrive any more."""
        timer = self._timers.pop("ping", None)
        if timer is not None:
            timer.cancel()
            self._connection.http2.refuse_more(finally_=True)
            self._connection.flush()
        self._loop.call_soon(self._settle)  # the end of a call is not written yet

    def _settle(self) -> None:
        calls = [stream.call for stream in self._connection.http2.streams.values()]
        if not calls:
            self._connection.force_close()
        if not any(call is not None and call.awaited for call in calls):
            self._connection.settled()

    def call_ended(self) -> None:
        """Handle the end of a call."""
        if self.shutting_down and "ping" not in self._timers:
            self._refuse_streams()
