"""The lifetime of a connection: signs of life asked of a silent client, patience with one that asks
for too many, the age at which it is to come anew, and the drain.

Who is told to go (GOAWAY) is told twice: first that no streams are to be begun, which those on
their way do not break; then, when a ping has come back, which was the last (RFC 9113, 6.8).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from shmserve.gateway.grpc.calls.call import Carrier
from shmserve.gateway.http2.frames import FaultCode

_ALIVE, _LEAVING = b"alive?\0\0", b"leaving\0"
_SPREAD = 0.1  # of an age, so that not all come anew at once
_GOES_S = 1.0  # for a client to answer the ping of its first GOAWAY


class ConnectionLifetime:
    """The timers of one connection."""

    def __init__(self, connection: Carrier) -> None:
        self._connection = connection
        self._settings = connection.front.settings
        self._loop = connection.loop
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._frames = 0  # that had come at the last look
        self._pings_sent = 0  # in a row, without data
        self._data_sent = 0
        self._pings = 0
        self._last_ping = float("-inf")
        self._strikes = 0
        self.leaving = False
        self._stays_for = 0  # its calls up to this number come before it is told to go
        self._told = False
        self.listens = bool(self._settings.max_ping_strikes)  # `received` is to be called

    def begin(self) -> None:
        """The connection is there."""
        settings = self._settings
        self._later("alive", settings.keepalive_time_ms / 1000, self._ask)
        if settings.max_connection_age_ms:
            spread = random.uniform(1 - _SPREAD, 1 + _SPREAD)
            self._later("age", settings.max_connection_age_ms / 1000 * spread, self._too_old)

    def end(self) -> None:
        """It is gone."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _later(self, name: str, after_s: float, action: Callable[[], None]) -> None:
        if (before := self._timers.pop(name, None)) is not None:
            before.cancel()
        self._timers[name] = self._loop.call_later(after_s, action)

    # --- signs of life

    def _ask(self) -> None:
        """Ask a client for a sign of life that has given none since the last look."""
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
        """The client has answered a ping."""
        if payload == _LEAVING and self.leaving:
            self._leave_now()

    def received(self) -> None:
        """Something came."""
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
        """Have the client go when its calls are over, without losing one that is on its way.
        `after_calls`: it is told once those are over that are here, whatever comes meanwhile."""
        if not self.leaving:
            self.leaving = True
            self._stays_for = self._connection.http2.last if after_calls else 0
            self._tell()
        else:
            self.over()

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
        """No stream that the client could have begun before it was told is still to come."""
        timer = self._timers.pop("leave", None)
        if timer is not None:
            timer.cancel()
            self._connection.http2.refuse_more(finally_=True)
            self._connection.flush()
        self._loop.call_soon(self._settle)  # what a call ends with is not written yet

    def _settle(self) -> None:
        calls = [stream.call for stream in self._connection.http2.streams.values()]
        if not calls:
            self._connection.force_close()
        if not any(call is not None and call.awaited for call in calls):
            self._connection.settled()

    def over(self) -> None:
        """A call is over."""
        if self.leaving and not self._told:
            self._tell()
        elif self._told and "leave" not in self._timers:
            self._leave_now()
