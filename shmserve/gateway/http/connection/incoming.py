"""What comes on a connection: bytes -> requests that wait for their turn, and clocks for what is
missing of them.

A head that is byte for byte the last one's, as programs send it again and again, is not parsed
again, whether its body comes with it or, as most clients write it, right behind.
"""

from __future__ import annotations

import asyncio
from collections import deque

from shmserve.gateway.http.connection.aiohttp_parts import (
    HttpProcessingError,
    MalformedBody,
    RawRequestMessage,
    StreamReader,
)
from shmserve.gateway.http.connection.flow_control import FlowControl
from shmserve.gateway.http.request import CONTENT_LENGTH, EXPECT, WholeBody
from shmserve.gateway.settings import Settings

SMALL_BODY = 64 * 1024
_LONGEST_KNOWN_HEAD = 2048


class Incoming(FlowControl):
    """The requests of a connection, as their bytes come."""

    __slots__ = (
        *("_awaiting", "_busy", "_clock", "_content", "_deadline", "_ended", "_held"),
        *("_known_head", "_known_message", "_known_size", "_messages", "_missing", "_settings"),
        *("_since", "_starts", "_understood", "_waiter"),
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, settings: Settings) -> None:
        super().__init__(loop)
        self._settings = settings
        self._ended = False
        # --- what has come
        # Requests that wait for their turn; an error, behind which nothing is understood.
        self._messages: deque[
            tuple[RawRequestMessage | HttpProcessingError, StreamReader | WholeBody]
        ] = deque()
        self._waiter: asyncio.Future[None] | None = None  # of who answers, for a request
        self._understood = True  # what follows; not behind an error, or in another protocol
        # --- what is missing
        self._clock: asyncio.TimerHandle | None = None
        self._deadline = 0.0  # of what is missing now, by the loop's clock
        self._busy = False  # a request is being answered
        self._starts = False  # bytes of the next one are here, but not its whole head
        self._content: StreamReader | None = None  # a body that is not all here
        self._awaiting = False  # it is small, and awaited
        # --- what is known
        self._known_head = b""  # of the last request with a small body
        self._known_size = 0  # of that request, with its body
        self._known_message: RawRequestMessage | None = None
        self._held = b""  # a known head, whose body should come next
        # Bytes of the last request that are not here yet; -1: nobody knows where the next begins,
        # as after bytes of two requests in one piece. Then, for good, all goes to the parser.
        self._missing = 0
        self._since = loop.time()  # the last request was answered, or the connection made

    def force_close(self) -> None:
        """End it, now."""
        self._ended = True
        if self._waiter is not None:
            self._waiter.cancel()
        if self.transport is not None:
            self.transport.close()
            self.transport = None

    @property
    def open(self) -> bool:
        """Whether it is not on its way out."""
        return not self._ended

    @property
    def idle_since(self) -> float | None:
        """Since when no request is here, not even the whole head of one; None when one is."""
        return None if self._busy or self._held or self._messages else self._since

    @property
    def sending_since(self) -> float | None:
        """The same for the body of a request whose head is here; None when no body is missing."""
        sending = self._held or (self._busy and self._content is not None)
        return self._since if sending else None

    # --- bytes

    def data_received(self, data: bytes) -> None:
        """Parse; bytes that complete no request start a clock."""
        held, self._held = self._held, b""
        if held:
            data = held + data
        # Nothing is on its way: not a request that is answered, nor a part of one.
        between = not (self._missing or self._busy or self._messages)
        waiter = self._waiter
        if waiter is None or waiter.done():
            pass  # the task has not begun, or has ended
        elif between and len(data) <= self._known_size and data.startswith(self._known_head):
            if len(data) == self._known_size:
                assert self._known_message is not None
                self._messages.append(
                    (self._known_message, WholeBody(data[len(self._known_head) :]))
                )
                waiter.set_result(None)
                return
            if not held:
                self._held = data
                self._start_clock(self._settings.body_timeout_s)
                return
        self._parse(data, between)

    def _parse_rest(self) -> int:
        self._parse(b"", False)
        return len(self._messages)

    def _parse(self, data: bytes, between: bool) -> None:
        if self._ended or not self._understood:
            return
        try:
            messages, upgraded, _ = self._parser.feed_data(data)
        except HttpProcessingError as error:
            self._messages.append((error, WholeBody(b"")))
            self._understood = False
        else:
            self._messages += messages
            self._understood = not upgraded
        waiter = self._waiter
        if self._messages and waiter is not None and not waiter.done():
            waiter.set_result(None)
        self._queued(len(self._messages))
        if between:
            self._remember(data)
        elif data:
            self._missing = max(self._missing - len(data), -1) if self._missing else -1
        content = self._content
        if content is not None:
            if content.is_eof():
                self._content = None
            elif self._messages:
                # What follows is no part of the body and no request: the parser gave up.
                content.set_exception(MalformedBody("malformed body"))
        if self._busy or self._messages:
            self._starts = False
        elif data and not self._starts:
            self._starts = True
            self._start_clock(self._settings.header_timeout_s)

    def _remember(self, data: bytes) -> None:
        """Know the head of a request again, if `data` is the head of one and nothing behind it."""
        self._known_size, self._missing = 0, -1
        if len(self._messages) != 1 or not self._understood:
            return
        message, _ = self._messages[0]
        head_size = data.find(b"\r\n\r\n", 0, _LONGEST_KNOWN_HEAD) + 4
        if not isinstance(message, RawRequestMessage) or head_size < 4:
            return
        said = message.headers.get(CONTENT_LENGTH, "0")
        size = head_size + int(said) if said.isdecimal() else 0
        if message.chunked or message.upgrade or len(data) > size:
            return
        self._missing = size - len(data)
        if not message.should_close and EXPECT not in message.headers and int(said) <= SMALL_BODY:
            self._known_head, self._known_message = data[:head_size], message
            self._known_size = size

    def _start_clock(self, patience_s: float) -> None:
        """What is missing from now on has so long to come."""
        # One coarse timer a connection, which looks at what it finds: one a request costs more.
        self._deadline = self._loop.time() + patience_s
        if self._clock is not None and self._clock.when() > self._deadline:
            self._clock.cancel()
            self._clock = None
        if self._clock is None:
            self._clock = self._loop.call_at(self._deadline, self._tick)

    def _tick(self) -> None:
        self._clock = None
        if not (self._held or self._starts or self._awaiting):
            return
        if self._loop.time() < self._deadline:
            self._clock = self._loop.call_at(self._deadline, self._tick)
        elif self._held:
            held, self._held = self._held, b""
            self._parse(held, True)
            for _, content in self._messages:
                if isinstance(content, StreamReader):
                    content.set_exception(TimeoutError())
        elif self._starts:
            self.force_close()
        elif self._content is not None:
            self._content.set_exception(TimeoutError())
