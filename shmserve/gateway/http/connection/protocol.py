"""HTTP connections: aiohttp's parser under a protocol of our own that creates little.

aiohttp's server makes a task, a request, a writer and a response for each request, a third of what
a small inference costs here. Ours answers one request after the other in the connection's own task.
When the client leaves, that task is cancelled, wherever it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.http.connection.aiohttp_parts import (
    HttpProcessingError,
    MalformedBody,
    RawRequestMessage,
    StreamReader,
)
from shmserve.gateway.http.connection.incoming import SMALL_BODY, Incoming
from shmserve.gateway.http.request import CONTENT_LENGTH, EXPECT, Request, WholeBody
from shmserve.gateway.http.response import Reply, error_reply
from shmserve.gateway.settings import Settings

logger = logging.getLogger(__name__)

Handle = Callable[[Request], Awaitable[Reply]]

_IDLE_S = 3600.0  # keep-alive connections that send nothing cost nothing
_LINGER_S = 2.0


class Owner(Protocol):
    """Who counts connections."""

    def connection_made(self, connection: Connection) -> ClientIdentity:
        """It is here: who is it? It may be ended at once where there are too many."""

    def connection_lost(self, connection: Connection) -> None:
        """It has ended."""


class Connection(Incoming):
    """One client's connection. `handle` gives the reply to each request, and raises nothing.

    `client` is who that is, once the connection is made.
    """

    __slots__ = ("_handle", "_idle_timer", "_owner", "_task", "client")

    client: ClientIdentity

    def __init__(
        self, owner: Owner, loop: asyncio.AbstractEventLoop, handle: Handle, settings: Settings
    ) -> None:
        super().__init__(loop, settings)
        self._owner = owner
        self._handle = handle
        self._task: asyncio.Task[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

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
        if not 0 < int(headers.get(CONTENT_LENGTH, 0)) <= SMALL_BODY or EXPECT in headers:
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


async def _linger(content: StreamReader | WholeBody) -> None:
    # A client that is still sending would lose the response to a reset if we closed at once.
    with contextlib.suppress(Exception):  # whatever is wrong with the rest, this is the end
        async with asyncio.timeout(_LINGER_S):
            while not content.is_eof():
                await content.readany()
