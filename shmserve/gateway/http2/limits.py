"""Limits on what costs a server more than its client: budgets that time refills.

A budget is generous to programs and lets a flood run out of it at once. What each is for:

    resets      streams begun and given up: by the client (rapid reset), or by us because it broke a
                rule on purpose (MadeYouReset); data that is sent earns some back: who has deadlines
                may miss as many as it meets
    control     frames that carry nothing: PING, SETTINGS, PRIORITY, WINDOW_UPDATE, empty DATA,
                frames of unknown kinds; calls and data that is sent earn some back

A client that exceeds one is told to go with ENHANCE_YOUR_CALM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shmserve.gateway.http2.frames import ConnectionFault, FaultCode


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a connection.

    `header_list` is in bytes as HPACK counts them, `header_block` in bytes on the wire: as much as
    grpcio takes, for a block in Huffman's code takes most of a microsecond a byte. `frames` is how
    much work is done before others have their turn, in frames; one that begins a stream counts as
    `begin`. `window` is how many bytes of a stream's data may come unasked, `frame` how many in
    one frame.
    """

    streams: int = 512
    header_list: int = 16 * 1024
    header_block: int = 16 * 1024
    continuations: int = 8
    resets: int = 1024
    resets_per_s: float = 64.0
    control: int = 2048
    control_per_s: float = 256.0
    frames: int = 256
    begin: int = 8
    window: int = 1024 * 1024
    frame: int = 1024 * 1024


class Budget:
    """So many of something at once, and so many more a second; so many are `left`."""

    __slots__ = ("_at", "_clock", "_most", "_per_s", "_what", "left")

    def __init__(self, most: int, per_s: float, clock: Callable[[], float], what: str) -> None:
        self._most = most
        self.left = most
        self._per_s = per_s
        self._clock = clock
        self._at = clock()
        self._what = what

    @property
    def debt(self) -> int:
        """How many were spent and not earned again."""
        return self._most - self.left

    def spend(self) -> None:
        """One more; raises ConnectionFault when that is too many."""
        self.left -= 1
        if self.left < 0:
            now = self._clock()
            earned = int((now - self._at) * self._per_s)
            if earned:
                self._at = now
                self.left = min(self.left + earned, self._most)
            if self.left < 0:
                raise ConnectionFault(FaultCode.ENHANCE_YOUR_CALM, f"too many {self._what}")

    def earn(self, count: int) -> None:
        """The client did what it is here for."""
        if self.left < self._most:
            self.left = min(self.left + count, self._most)
