"""Flow control of responses by credit (pure): a sender's window, and what its reader gives back.

    SendWindow  ── Responded ──> ReadWindow: read
        └────────── Credit <─────────┘ several small ones at a time

Of a model that gives any number of responses, `FIRST_CREDIT` of one request may be on their way
before its client has credited more, and no more bytes than `MOST_UNREAD_BYTES`, one response
excepted. Where outputs go to places of the client's, each response goes over the one before it:
then it is one.
"""

from __future__ import annotations

from collections import deque

FIRST_CREDIT = 32
MOST_UNREAD_BYTES = 8 << 20

TOGETHER = FIRST_CREDIT // 2
BYTES_TOGETHER = MOST_UNREAD_BYTES // 4


class SendWindow:
    """The responses that a reader takes now: those that are `unread` count, and their bytes.
    `placed`: they go to places of its own."""

    __slots__ = ("_most", "_unread", "_unread_bytes")

    def __init__(self, placed: bool = False) -> None:
        self._most = 1 if placed else FIRST_CREDIT
        self._unread: deque[int] = deque()  # bytes of each, oldest first
        self._unread_bytes = 0

    @property
    def unread(self) -> int:
        """The number of responses sent and not read."""
        return len(self._unread)

    @property
    def is_open(self) -> bool:
        """Whether the reader takes another response."""
        return len(self._unread) < self._most and self._unread_bytes < MOST_UNREAD_BYTES

    def sent(self, byte_size: int) -> None:
        """A response of so many bytes is on its way."""
        self._unread.append(byte_size)
        self._unread_bytes += byte_size

    def read(self, responses: int) -> int:
        """The reader credits so many; how many of them it had been sent."""
        count = min(responses, len(self._unread))
        for _ in range(count):
            self._unread_bytes -= self._unread.popleft()
        return count


class ReadWindow:
    """The responses that were read and not credited yet. `placed`: the next goes over the last."""

    __slots__ = ("_bytes", "_most", "_responses")

    def __init__(self, placed: bool = False) -> None:
        self._most = 1 if placed else TOGETHER
        self._responses = 0
        self._bytes = 0

    def read(self, byte_size: int) -> int:
        """A response of so many bytes was read; how many are to be credited now."""
        self._responses += 1
        self._bytes += byte_size
        if self._responses < self._most and self._bytes < BYTES_TOGETHER:
            return 0
        responses, self._responses, self._bytes = self._responses, 0, 0
        return responses
