"""Limits on work that costs the server more than its client: budgets that refill over time.

A budget is large enough for any legitimate program, but a flood exhausts it at once.

    resets      streams reset by the client (rapid reset), or by the server after a deliberate
                violation (MadeYouReset). Sent data earns some back, so that clients with short
                deadlines may miss as many as they meet
    control     frames without payload for the application: PING, SETTINGS, PRIORITY,
                WINDOW_UPDATE, empty DATA, unknown types. Calls and sent data earn some back

A client that exceeds a budget receives GOAWAY with ENHANCE_YOUR_CALM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shmserve.gateway.http2.frames import ConnectionFault, FaultCode


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a connection.

    Attributes:
        streams: The maximum number of concurrent streams.
        header_list: Bytes of a header list as counted by HPACK.
        header_block: Bytes of a header block on the wire. Huffman decoding takes most of a
            microsecond per byte, so this is no more than grpcio accepts.
        continuations: The maximum number of CONTINUATION frames of a block.
        resets: The budget of stream resets.
        resets_per_s: The refill rate of that budget.
        control: The budget of control frames.
        control_per_s: The refill rate of that budget.
        frames: Work per call of `receive`, in frames.
        begin: The cost of opening a stream, in frames.
        window: The initial receive window of a stream in bytes.
        frame: The maximum payload of a DATA frame in bytes.
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
    """A token bucket of `most` tokens that refills at `per_s` per second; `left` are available."""

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
        """Return the number of tokens spent and not earned back."""
        return self._most - self.left

    def spend(self) -> None:
        """Spend a token; raise ConnectionFault if none is left."""
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
        """Return tokens for useful work of the client."""
        if self.left < self._most:
            self.left = min(self.left + count, self._most)
