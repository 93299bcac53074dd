"""The asyncio protocol of HTTP connections: keep-alive and pipelining on one task a connection.

aiohttp's server makes a task, a request, a writer and a response for each request, a third of what
a small inference costs here. Ours has aiohttp's parser, and handles one request after the other in
the connection's own task. When the client leaves, that task is cancelled, wherever it is.

What is like the requests before it needs no turn of that task either: it is begun as it comes, and
written as it is answered. The task rests meanwhile, or takes it over:

    data_received ──> under way ──its response──> written; the task goes on, if anything has come
                         ├──a response that takes a task──> the task handles what is begun
                         └──the client leaves──> cancelled
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

from shmserve.errors import InvalidArgument
from shmserve.gateway.connection_limits import Acceptor
from shmserve.gateway.http.connection.aiohttp_parts import (
    HttpProcessingError,
    MalformedBody,
    StreamReader,
)
from shmserve.gateway.http.connection.incoming import SMALL_BODY, Incoming
from shmserve.gateway.http.messages import (
    CONTENT_LENGTH,
    EXPECT,
    BegunRequest,
    HttpRequest,
    HttpResponse,
    Repeat,
    WholeBody,
    drain,
    error_response,
)
from shmserve.gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)


class Application(Protocol):
    """What handles the requests of connections; `active` counts those that are not answered."""

    active: int

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """The response to a request; raises nothing."""

    def left(self) -> None:
        """A request is answered, or its client is gone."""


_IDLE_S = 3600.0  # keep-alive connections that are idle cost nothing
_LINGER_S = 2.0
_GOES_S = 0.5  # for the next request of a client that is told to go by its response


class HttpConnection(Incoming):
    """One client's connection, whose requests are for `app`."""

    def __init__(self, owner: Acceptor, app: Application, settings: GatewaySettings) -> None:
        super().__init__(asyncio.get_running_loop(), settings)
        self._owner = owner
        self._app = app
        self._task: asyncio.Task[None] | None = None
        self._underway: BegunRequest | None = None  # without the task, or to be taken over by it
        self._resting: asyncio.Future[None] | None = None  # the task's, meanwhile
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_s = _IDLE_S

    # --- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register it, and handle its requests from now on."""
        self.attach(transport)
        self.client = self._owner.connection_made(self)
        self._idle_timer = self._loop.call_later(self._idle_s, self._end_if_idle)
        self._task = self._loop.create_task(self._serve_all())

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancel the request that is being handled."""
        self._owner.connection_lost(self)
        self.force_close()
        self.resume_writing()
        for timer in (self._timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        if self._task is not None:
            self._task.cancel()
        underway, self._underway = self._underway, None
        if underway is not None:
            underway.cancel()
            self._app.left()
        self.client.gone()

    def _end_if_idle(self) -> None:
        since = self.idle_since
        left_s = self._idle_s if since is None else since + self._idle_s - self._loop.time()
        if left_s > 0:
            self._idle_timer = self._loop.call_later(left_s, self._end_if_idle)
        else:
            self.force_close()

    def leave(self, after_calls: bool = False) -> None:
        """Have the client go: with its next response, or soon if it asks for nothing."""
        self._idle_s = _GOES_S
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._end_if_idle()

    # --- requests without the task

    def _begin(self, repeat: Repeat, body: bytes) -> bool:
        begun = repeat(body, self._answer)
        if begun is None:
            return False
        self._underway = begun
        self._busy = True
        self._resting, self._waiter = self._waiter, None
        self._app.active += 1
        return True

    def _answer(self, response: bytes | None) -> None:
        resting, self._resting = self._resting, None
        assert resting is not None
        if response is None:
            resting.set_result(None)  # the task takes over
            return
        self._underway = None
        self._busy = False
        self._since = self._loop.time()
        transport = self.transport
        if transport is None or transport.is_closing():
            resting.cancel()  # the task ends with the connection
        else:
            transport.write(response)
            if self._messages or self.writing_paused:
                resting.set_result(None)
            else:
                self._waiter = resting
        self._app.left()

    # --- requests, one after the other

    async def _serve_all(self) -> None:
        """Handle requests until the connection is to end."""
        messages = self._messages
        try:
            while True:
                while not (messages or self._underway):
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
            logger.debug("a client left before its response")
        except asyncio.CancelledError:
            self.force_close()
            raise
        except Exception:
            logger.exception("a connection failed")
        self._busy = False
        self._task = None
        # Pipelined requests behind the last one are dropped.
        messages.clear()
        self._close()

    def _next_request(self) -> HttpRequest | None:
        """The one that is under way, or the first one of the queue, which is handled from now on;
        None: it is no HTTP."""
        underway, self._underway = self._underway, None
        if underway is not None:
            underway.request.begun = underway
            return underway.request
        first = self._messages.popleft()
        if type(first) is HttpRequest:
            self._busy = True
            return first
        if isinstance(first, HttpProcessingError):
            self._refuse(first)
            return None
        self._busy = True
        self._dequeued(len(self._messages))
        return HttpRequest(*first, self)

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
        """Wait for all of a small body, so that handlers find it here, or find why it is not."""
        headers = request.headers
        if not 0 < int(headers.get(CONTENT_LENGTH, 0)) <= SMALL_BODY or EXPECT in headers:
            return
        if content.exception() is not None:
            return
        self._awaiting = True
        self._start_timeout(self._settings.body_timeout_s)
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
