"""Credit-based flow control of the responses to one request (no I/O).

    SendWindow  ── Responded ──> ReadWindow: read
        └────────── Credit <─────────┘ for several small responses at a time

A decoupled model may send `FIRST_CREDIT` responses to a request before the client grants credit. A
response is sent only while less than `MAX_UNREAD_BYTES` bytes are in flight. If outputs are written
to the client's memory, each response overwrites the previous one. In this case only one response is
in flight.
"""

from __future__ import annotations

from collections import deque

FIRST_CREDIT = 32  # the number of responses that may be sent before the first `Credit`
MAX_UNREAD_BYTES = 8 << 20

# A reader sends credit after this many responses, or after `BYTES_PER_CREDIT` bytes.
RESPONSES_PER_CREDIT = FIRST_CREDIT // 2
BYTES_PER_CREDIT = MAX_UNREAD_BYTES // 4


class SendWindow:
    """The sender's flow-control window, which limits the number and the bytes of unread responses.

    The sender may send a response while the window is open.
    """

    __slots__ = ("_max_unread", "_unread", "_unread_bytes")

    def __init__(self, in_client_memory: bool = False) -> None:
        """Create an open window.

        Args:
            in_client_memory: Whether the outputs are written to the client's memory.
        """
        self._max_unread = 1 if in_client_memory else FIRST_CREDIT
        self._unread: deque[int] = deque()  # bytes of each unread response, oldest first
        self._unread_bytes = 0

    @property
    def is_open(self) -> bool:
        """Return whether another response may be sent."""
        return len(self._unread) < self._max_unread and self._unread_bytes < MAX_UNREAD_BYTES

    def record_sent(self, byte_size: int) -> None:
        """Record that a response of `byte_size` bytes was sent."""
        self._unread.append(byte_size)
        self._unread_bytes += byte_size

    def record_credit(self, responses: int) -> int:
        """Record that the reader has read `responses` responses, the oldest first.

        Returns:
            The number of these responses that were unread; excess credit is ignored.
        """
        count = min(responses, len(self._unread))
        for _ in range(count):
            self._unread_bytes -= self._unread.popleft()
        return count


class ReadWindow:
    """The reader's flow-control window, which counts the responses read since the last credit."""

    __slots__ = ("_responses_per_credit", "_uncredited_bytes", "_uncredited_count")

    def __init__(self, in_client_memory: bool = False) -> None:
        """Create a window without responses.

        Args:
            in_client_memory: Whether responses overwrite each other in the client's memory.
        """
        self._responses_per_credit = 1 if in_client_memory else RESPONSES_PER_CREDIT
        self._uncredited_count = 0
        self._uncredited_bytes = 0

    def record_read(self, byte_size: int) -> int:
        """Record that a response of `byte_size` bytes was read.

        Returns:
            The number of responses to credit now.
        """
        self._uncredited_count = count = self._uncredited_count + 1
        self._uncredited_bytes += byte_size
        if count < self._responses_per_credit and self._uncredited_bytes < BYTES_PER_CREDIT:
            return 0
        self._uncredited_count = self._uncredited_bytes = 0
        return count
