"""The asyncio protocol of HTTP connections: keep-alive and pipelining with one task per connection.

aiohttp's server creates a task, a request, a writer and a response for each request, which is a
third of the cost of a small inference. This protocol uses aiohttp's parser and handles the requests
of a connection in order, in the connection's task. A disconnect cancels the task.

A request that equals an earlier request does not wake the task. Such a request is begun in
`data_received`, and its response is written in the callback. The task waits meanwhile:

    data_received ──> in flight ──response──> written; the task continues if a request has arrived
                         ├──response that needs a task──> the task handles the begun request
                         └──disconnect──> cancelled
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from aiohttp import StreamReader
from aiohttp.http import HttpProcessingError

from shmserve.errors import InvalidArgument
from shmserve.gateway.http.incoming import SMALL_BODY, Incoming, MalformedBody
from shmserve.gateway.http.messages import (
    CONTENT_LENGTH,
    EXPECT,
    JSON,
    STATUS_LINES,
    BegunRequest,
    HttpRequest,
    Repeat,
    WholeBody,
    drain,
    error_response,
)
from shmserve.gateway.http.routing import App
from shmserve.gateway.listener import Acceptor
from shmserve.gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)


_OK = b"%b%%d\r\n%%bX-Content-Type-Options: nosniff\r\n\r\n" % STATUS_LINES[200]
_IDLE_S = 3600.0  # long, because idle keep-alive connections cost nothing
_LINGER_S = 2.0
_LAST_REQUEST_S = 0.5  # the time for a last request, whose response closes the connection


class HttpConnection(Incoming):
    """One client's connection, whose requests are for `app`."""

    def __init__(self, owner: Acceptor, app: App, settings: GatewaySettings) -> None:
        super().__init__(asyncio.get_running_loop(), settings)
        self._owner = owner
        self._app = app
        self._task: asyncio.Task[None] | None = None
        # A request in flight that was begun without the task, or that the task has to finish.
        self._begun: BegunRequest | None = None
        # A future that the task awaits while a request is handled without the task.
        self._idle_waiter: asyncio.Future[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_s = _IDLE_S

    # --- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection and start the task that handles its requests."""
        self.attach(transport)
        self.client = self._owner.connection_made(self)
        self._idle_timer = self._loop.call_later(self._idle_s, self._end_if_idle)
        self._task = self._loop.create_task(self._serve_all())

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancel the request in flight and deregister the connection."""
        self._owner.connection_lost(self)
        self.force_close()
        self.resume_writing()
        for timer in (self._timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        if self._task is not None:
            self._task.cancel()
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.cancel()
            self._app.decrement()
        self.client.call_disconnect_actions()

    def _end_if_idle(self) -> None:
        since = self.idle_since
        left_s = self._idle_s if since is None else since + self._idle_s - self._loop.time()
        if left_s > 0:
            self._idle_timer = self._loop.call_later(left_s, self._end_if_idle)
        else:
            self.force_close()

    def shut_down(self, *, refuses: bool = False) -> None:
        """Close the connection with its next response, or soon if it is idle."""
        self._idle_s = _LAST_REQUEST_S
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._end_if_idle()

    # --- requests without the task

    def _begin(self, repeat: Repeat, body: bytes) -> bool:
        # The request may fail before `repeat` returns. The task then takes over the request.
        waiter = self._idle_waiter = self._waiter
        self._waiter = None
        begun = repeat(body, self._write_response)
        if begun is None:
            self._idle_waiter, self._waiter = None, waiter
            return False
        self._begun = begun
        self._busy = True
        self._app.active += 1
        return True

    def _write_response(self, body: bytes | None, headers: bytes = JSON) -> None:
        waiter, self._idle_waiter = self._idle_waiter, None
        assert waiter is not None
        if body is None:
            waiter.set_result(None)  # the task handles the request from now on
            return
        self._begun = None
        self._busy = False
        self._since = self._loop.time()
        transport = self.transport
        if transport is None or transport.is_closing():
            waiter.cancel()  # the task ends, because the connection has ended
        else:
            transport.write(_OK % (len(body), headers) + body)
            if self._messages or self.writing_paused:
                waiter.set_result(None)
            else:
                self._waiter = waiter
        self._app.decrement()

    # --- requests, one after the other

    async def _serve_all(self) -> None:
        """Handle requests until the connection is to end."""
        messages = self._messages
        try:
            while True:
                while not (messages or self._begun):
                    self._waiter = self._loop.create_future()
                    await self._waiter
                    if self.writing_paused and self.transport is not None:
                        await drain(self, self.transport, self._settings.body_timeout_s)
                request = self._next_request()
                if request is None or not await self._serve(request):
                    break
                self._busy = False
                self._since = self._loop.time()
                if messages:
                    # Fairness: pipelined requests alone would never wait for a turn of the loop.
                    await asyncio.sleep(0)
        except ConnectionError:
            logger.debug("a client disconnected before its response")
        except asyncio.CancelledError:
            self.force_close()
            raise
        except Exception:
            logger.exception("a connection failed")
        self._busy = False
        self._task = None
        # Pipelined requests after the last one are dropped.
        messages.clear()
        self._close()

    def _next_request(self) -> HttpRequest | None:
        """Return the request in flight or the first in the queue, or None for invalid HTTP."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.request.begun = begun
            return begun.request
        first = self._messages.popleft()
        if type(first) is HttpRequest:
            self._busy = True
            return first
        if isinstance(first, HttpProcessingError):
            self._refuse(first)
            return None
        self._busy = True
        self._on_dequeued(len(self._messages))
        request = HttpRequest(*first, self)
        request.closes |= self.closes_next
        if first[0].upgrade:
            # aiohttp's parser drops the bytes after a request with an Upgrade header. If
            # `_missing` does not give the size of the body, the next request cannot be found.
            request.closes |= self._missing < 0 or request.method == "CONNECT"
        return request

    async def _serve(self, request: HttpRequest) -> bool:
        content = request.content
        if type(content) is not WholeBody and not content.is_eof():
            self._content = content
            await self._await_small(request, content)
        response = await self._app.handle(request)
        if request.closes or (type(content) is not WholeBody and not content.is_eof()):
            response.close = True
        try:
            await response.send(request, self._settings.body_timeout_s)
        finally:
            if response.on_sent is not None:
                response.on_sent()
        if response.close:
            await _linger(content)
            return False
        return True

    def _refuse(self, error: HttpProcessingError) -> None:
        logger.debug("malformed request: %s", error)
        response = error_response(InvalidArgument("malformed HTTP request"), close=True)
        if self.transport is not None and not self.transport.is_closing():
            body = b"".join(response.pieces)
            self.transport.write(response.head(None, len(body)) + body)

    async def _await_small(self, request: HttpRequest, content: StreamReader) -> None:
        """Wait until a small body is complete or has failed, before its handler starts."""
        headers = request.headers
        if not 0 < int(headers.get(CONTENT_LENGTH, 0)) <= SMALL_BODY or EXPECT in headers:
            return
        if content.exception() is not None:
            return
        self._awaits_body = True
        self._start_timeout(self._settings.body_timeout_s)
        try:
            await content.wait_eof()
        except (TimeoutError, MalformedBody):
            return  # The stream raises the exception again when it is read.
        finally:
            self._awaits_body = False


async def _linger(content: StreamReader | WholeBody) -> None:
    # Closing at once would reset the connection of a client that still sends its request, and the
    # client would lose the response.
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_LINGER_S):
            while not content.is_eof():
                await content.readany()
