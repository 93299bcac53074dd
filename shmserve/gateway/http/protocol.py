"""HTTP connections: aiohttp's protocol and parser, with a loop that creates little.

aiohttp's loop makes a task, a request, a writer and a response for each request, a third of what a
small inference costs here. Ours answers one request after the other in the connection's own task.
When the client leaves, that task is cancelled, wherever it is. And a head that is byte for byte the
last one's, as programs send it again and again, is not parsed again, whether its body comes with it
or, as most clients write it, right behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import StreamReader

from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.http.request import CONTENT_LENGTH, EXPECT, Request, WholeBody
from shmserve.gateway.http.response import Reply, error_reply
from shmserve.gateway.settings import Settings

logger = logging.getLogger(__name__)

Answer = Callable[[Request], Awaitable[Reply]]

_MOST_HEADERS = 128
_LONGEST_LINE = 8190
_IDLE_S = 3600.0  # keep-alive connections that send nothing cost nothing
_LINGER_S = 2.0
_SMALL_BODY = 64 * 1024
_LONGEST_KNOWN_HEAD = 2048


class Connection(web.RequestHandler):
    """One client's connection. `answer` gives the reply to each request, and raises nothing.

    `client` is the client, once the connection is made.
    """

    __slots__ = (
        "_answer",
        "_awaiting",
        "_busy",
        "_clock",
        "_content",
        "_deadline",
        "_held",
        "_known_head",
        "_known_message",
        "_known_size",
        "_missing",
        "_settings",
        "_since",
        "_starts",
        "client",
    )

    client: ClientIdentity

    def __init__(
        self,
        manager: web.Server,
        loop: asyncio.AbstractEventLoop,
        answer: Answer,
        settings: Settings,
    ) -> None:
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=_IDLE_S,
            access_log=None,  # type: ignore[arg-type]
            logger=logger,
            max_line_size=_LONGEST_LINE,
            max_field_size=_LONGEST_LINE,
            max_headers=_MOST_HEADERS,
            auto_decompress=False,
        )
        self._answer = answer
        self._settings = settings
        self._clock: asyncio.TimerHandle | None = None
        self._deadline = 0.0  # of what is missing now, by the loop's clock
        self._busy = False  # a request is being answered
        self._starts = False  # bytes of the next one are here, but not its whole head
        self._content: StreamReader | None = None  # a body that is not all here
        self._awaiting = False  # it is small, and awaited
        self._known_head = b""  # of the last request with a small body
        self._known_size = 0  # of that request, with its body
        self._held = b""  # a known head, whose body should come next
        # Bytes of the last request that are not here yet; -1: nobody knows where the next begins,
        # as after bytes of two requests in one piece. Then, for good, all goes to the parser.
        self._missing = 0
        self._known_message: RawRequestMessage | None = None
        self._since = loop.time()  # the last request was answered, or the connection made

    async def start(self) -> None:
        """Answer requests until the connection is to end; replaces aiohttp's loop."""
        try:
            while await self._serve_next():
                self._since = self._loop.time()
                if self._messages:
                    await asyncio.sleep(0)  # others' turn: who asks on and on never waits for one
        except ConnectionError:
            logger.debug("a client left before its response")
        except asyncio.CancelledError:
            self.force_close()
            raise
        except Exception:
            logger.exception("a connection failed")
        self._task_handler = None
        # What is behind the last one is not answered: the connection is idle until it is closed,
        # which takes as long as its client does not read the rest.
        self._messages.clear()
        if self.transport is not None:
            self.transport.close()

    async def _serve_next(self) -> bool:
        if not self._messages:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message, content = self._messages.popleft()
        if self._parser is not None:
            self._parser.message_consumed()
        if self._buffer_paused and len(self._messages) <= self._msg_queue_resume_size:
            self._resume_reading_if_drained()
        if not isinstance(message, RawRequestMessage):
            self._refuse(message)
            return False
        self._busy = True
        try:
            return await self._serve(message, content)
        finally:
            self._busy = False

    async def _serve(self, message: RawRequestMessage, content: StreamReader | WholeBody) -> bool:
        request = Request(message, content, self)
        if not content.is_eof():
            assert isinstance(content, StreamReader)
            self._content = content
            await self._await_small(request, content)
        reply = await self._answer(request)
        if message.should_close or message.upgrade or not content.is_eof():
            reply.close = True
        try:
            await reply.send(request, self._settings.body_timeout_s)
        finally:
            if reply.on_sent is not None:
                reply.on_sent()
        if reply.close:
            await _linger(content)
            return False
        return True

    def _refuse(self, error: Any) -> None:
        logger.debug("malformed request: %s", error.exc)
        reply = error_reply(400, "malformed HTTP request", close=True)
        if self.transport is not None and not self.transport.is_closing():
            body = b"".join(reply.pieces)
            self.transport.write(reply.head(None, len(body)) + body)

    async def drain(self) -> None:
        """Wait until the client has read what was written."""
        await self._drain_helper()

    async def _await_small(self, request: Request, content: StreamReader) -> None:
        """Wait for all of a small body, so that handlers find it here, or find why it is not."""
        headers = request.headers
        if not 0 < int(headers.get(CONTENT_LENGTH, 0)) <= _SMALL_BODY or EXPECT in headers:
            return
        if content.exception() is not None:
            return
        self._awaiting = True
        self._start_clock(self._settings.body_timeout_s)
        try:
            await content.wait_eof()
        except (TimeoutError, HttpProcessingError):
            return  # the content raises it again
        finally:
            self._awaiting = False

    def data_received(self, data: bytes) -> None:
        """Parse; bytes that complete no request start a clock."""
        held, self._held = self._held, b""
        if held:
            data = held + data
        # Nothing is on its way: not a request that is answered, nor a part of one.
        between = not (self._missing or self._busy or self._messages or self._close)
        waiter = self._waiter
        if waiter is None or waiter.done():
            pass  # the task has not begun, or has ended
        elif between and len(data) <= self._known_size and data.startswith(self._known_head):
            if len(data) == self._known_size:
                self._request_count += 1
                body: Any = WholeBody(data[len(self._known_head) :])
                self._messages.append((self._known_message, body))  # type: ignore[arg-type]
                waiter.set_result(None)
                return
            if not held:
                self._held = data
                self._start_clock(self._settings.body_timeout_s)
                return
        self._parse(data, between)

    def _parse(self, data: bytes, between: bool) -> None:
        super().data_received(data)
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
                content.set_exception(HttpProcessingError(message="malformed body"))
        if data and not self._busy and not self._messages:
            if not self._starts:
                self._starts = True
                self._start_clock(self._settings.header_timeout_s)
        else:
            self._starts = False

    def _remember(self, data: bytes) -> None:
        """Know the head of a request again, if `data` is the head of one and nothing behind it."""
        self._known_size, self._missing = 0, -1
        if len(self._messages) != 1 or self._upgraded:
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
        if not message.should_close and EXPECT not in message.headers and int(said) <= _SMALL_BODY:
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
                content.set_exception(TimeoutError())
        elif self._starts:
            self.force_close()
        elif self._content is not None:
            self._content.set_exception(TimeoutError())

    @property
    def open(self) -> bool:
        """Whether it is not on its way out."""
        return not self._force_close

    @property
    def idle_since(self) -> float | None:
        """Since when no request is here, not even the whole head of one; None when one is."""
        return None if self._busy or self._held or self._messages else self._since

    @property
    def sending_since(self) -> float | None:
        """The same for the body of a request whose head is here; None when no body is missing."""
        sending = self._held or (self._busy and self._content is not None)
        return self._since if sending else None

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the clock too."""
        if self._clock is not None:
            self._clock.cancel()
        super().connection_lost(exc)
        self.client.gone()


async def _linger(content: StreamReader | WholeBody) -> None:
    # A client that is still sending would lose the response to a reset if we closed at once.
    with contextlib.suppress(Exception):  # whatever is wrong with the rest, this is the end
        async with asyncio.timeout(_LINGER_S):
            while not content.is_eof():
                await content.readany()
