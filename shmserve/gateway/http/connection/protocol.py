"""HTTP connections: aiohttp's parser under a protocol of our own that creates little.

aiohttp's server makes a task, a request, a writer and a response for each request, a third of what
a small inference costs here. Ours answers one request after the other in the connection's own task.
When the client leaves, that task is cancelled, wherever it is. And a head that is byte for byte the
last one's, as programs send it again and again, is not parsed again, whether its body comes with it
or, as most clients write it, right behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.http.connection.aiohttp_parts import (
    HttpProcessingError,
    MalformedBody,
    RawRequestMessage,
    StreamReader,
)
from shmserve.gateway.http.connection.flow_control import FlowControl
from shmserve.gateway.http.request import CONTENT_LENGTH, EXPECT, Request, WholeBody
from shmserve.gateway.http.response import Reply, error_reply
from shmserve.gateway.settings import Settings

logger = logging.getLogger(__name__)

Handle = Callable[[Request], Awaitable[Reply]]

_IDLE_S = 3600.0  # keep-alive connections that send nothing cost nothing
_LINGER_S = 2.0
_SMALL_BODY = 64 * 1024
_LONGEST_KNOWN_HEAD = 2048


class Owner(Protocol):
    """Who counts connections."""

    def connection_made(self, connection: Connection) -> ClientIdentity:
        """It is here: who is it? It may be ended at once where there are too many."""

    def connection_lost(self, connection: Connection) -> None:
        """It has ended."""


class Connection(FlowControl):
    """One client's connection. `handle` gives the reply to each request, and raises nothing.

    `client` is who that is, once the connection is made.
    """

    __slots__ = (
        *("_handle", "_awaiting", "_busy", "_clock", "_content", "_deadline", "_ended", "_held"),
        *("_idle_timer", "_known_head", "_known_message", "_known_size", "_messages", "_missing"),
        *("_owner", "_settings", "_since", "_starts", "_task", "_understood", "_waiter", "client"),
    )

    client: ClientIdentity

    def __init__(
        self, owner: Owner, loop: asyncio.AbstractEventLoop, handle: Handle, settings: Settings
    ) -> None:
        super().__init__(loop)
        self._owner = owner
        self._handle = handle
        self._settings = settings
        self._task: asyncio.Task[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
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

    # --- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Enter it, and answer from now on."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # it has ended already
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, True)
        self.client = self._owner.connection_made(self)
        self._idle_timer = self._loop.call_later(_IDLE_S, self._end_if_idle)
        self._task = self._loop.create_task(self._serve_all())

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancel who is answering."""
        self._owner.connection_lost(self)
        self.force_close()
        self.resume_writing()
        for timer in (self._clock, self._idle_timer):
            if timer is not None:
                timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self.client.gone()

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

    def _end_if_idle(self) -> None:
        since = self.idle_since
        left_s = _IDLE_S if since is None else since + _IDLE_S - self._loop.time()
        if left_s > 0:
            self._idle_timer = self._loop.call_later(left_s, self._end_if_idle)
        else:
            self.force_close()

    # --- requests, one after the other

    async def _serve_all(self) -> None:
        """Answer requests until the connection is to end."""
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
        self._task = None
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
        if isinstance(message, HttpProcessingError):
            self._refuse(message)
            return False
        if type(content) is not WholeBody:
            self._dequeued(len(self._messages))
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
        reply = await self._handle(request)
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

    def _refuse(self, error: HttpProcessingError) -> None:
        logger.debug("malformed request: %s", error)
        reply = error_reply(400, "malformed HTTP request", close=True)
        if self.transport is not None and not self.transport.is_closing():
            body = b"".join(reply.pieces)
            self.transport.write(reply.head(None, len(body)) + body)

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
        except (TimeoutError, MalformedBody):
            return  # the content raises it again
        finally:
            self._awaiting = False

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
                if isinstance(content, StreamReader):
                    content.set_exception(TimeoutError())
        elif self._starts:
            self.force_close()
        elif self._content is not None:
            self._content.set_exception(TimeoutError())


async def _linger(content: StreamReader | WholeBody) -> None:
    # A client that is still sending would lose the response to a reset if we closed at once.
    with contextlib.suppress(Exception):  # whatever is wrong with the rest, this is the end
        async with asyncio.timeout(_LINGER_S):
            while not content.is_eof():
                await content.readany()
