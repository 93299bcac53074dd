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

_ALIVE, _LEAVING = b"alive?\0\0", b"leaving\0"
_SPREAD = 0.1  # of an age, so that clients do not reconnect at the same time
_GOES_S = 1.0  # the time limit of the ping after the first GOAWAY


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
        self.leaving = False
        self._stays_for = 0  # the last stream that ends before the first GOAWAY
        self._told = False
        self.listens = bool(self._settings.max_ping_strikes)  # `received` must be called

    def begin(self) -> None:
        """Start the timers."""
        settings = self._settings
        self._later("alive", settings.keepalive_time_ms / 1000, self._ask)
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

    def _ask(self) -> None:
        """Send a ping if no frame was received since the last check."""
        http2, settings = self._connection.http2, self._settings
        silent, self._frames = http2.frames_in == self._frames, http2.frames_in
        self._later("alive", settings.keepalive_time_ms / 1000, self._ask)
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
        self.listens = True
        self._later("answer", settings.keepalive_timeout_ms / 1000, self._connection.abort)

    def acknowledged(self, payload: bytes) -> None:
        """Handle the acknowledgement of a ping."""
        if payload == _LEAVING and self.leaving:
            self._leave_now()

    def received(self) -> None:
        """Handle the receipt of bytes."""
        answer = self._timers.pop("answer", None)
        if answer is not None:
            answer.cancel()
        if self._settings.max_ping_strikes:
            self._count_pings()
        if self._told and not self._connection.http2.streams and "leave" not in self._timers:
            self._leave_now()

    def _count_pings(self) -> None:
        http2, settings = self._connection.http2, self._settings
        came, self._pings = http2.pings - self._pings, http2.pings
        if not came:
            return
        if http2.sending.frames != self._data_sent:
            self._data_sent, self._strikes = http2.sending.frames, 0
            self._last_ping = float("-inf")
        now = self._loop.time()
        soon = now - self._last_ping < settings.min_ping_interval_ms / 1000
        self._strikes += came if soon else came - 1
        self._last_ping = now
        if self._strikes > settings.max_ping_strikes:
            http2.fail(FaultCode.ENHANCE_YOUR_CALM, "too_many_pings")

    # --- ends

    def _too_old(self) -> None:
        self.leave()
        grace_ms = self._settings.max_connection_age_grace_ms
        if grace_ms:
            self._later("grace", grace_ms / 1000, self._connection.abort)

    def leave(self, after_calls: bool = False) -> None:
        """Close the connection after its calls, including those in flight.

        With `after_calls`, the client is notified once the calls that are open now have ended.
        """
        if not self.leaving:
            self.leaving = True
            self._stays_for = self._connection.http2.last if after_calls else 0
            self._tell()
        else:
            self.call_ended()

    def _tell(self) -> None:
        http2 = self._connection.http2
        calls = [each.call for each in http2.streams.values() if each.id <= self._stays_for]
        if self._told or any(call is not None and call.awaited for call in calls):
            return
        self._told = self.listens = True
        http2.refuse_more(finally_=False)
        http2.ping(_LEAVING)
        self._later("leave", _GOES_S, self._leave_now)
        self._connection.flush()

    def _leave_now(self) -> None:
        """Send the second GOAWAY, since no earlier stream can arrive any more."""
        timer = self._timers.pop("leave", None)
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
        if self.leaving and not self._told:
            self._tell()
        elif self._told and "leave" not in self._timers:
            self._leave_now()
