"""The asyncio protocol of HTTP connections: keep-alive and pipelining with one task per connection.

aiohttp's server creates a task, a request, a writer and a response for each request, which is a
third of the cost of a small inference. This protocol uses aiohttp's parser and handles the requests
of a connection in order, in the connection's task. A disconnect cancels the task.

A repeated request does not wake the task: its head equals that of an earlier request on the
connection, and its body differs from an earlier body only in the values of tensors. The request is
begun in `data_received`, and its response is written in a callback. The task waits meanwhile:

    data_received ──> in flight ──response──> written; the task continues if a request has arrived
                         ├──response that needs a task──> the task handles the begun request
                         └──disconnect──> cancelled
"""

from __future__ import annotations

import asyncio
import logging
import os

from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import LineTooLong

from shmserve.errors import InvalidArgument, ShmserveError, Unsupported
from shmserve.gateway.http.incoming import MAX_HEADERS, MAX_LINE_BYTES, RequestReceiver
from shmserve.gateway.http.messages import (
    JSON_HEADER,
    STATUS_LINES,
    TRANSFER_ENCODING,
    BeginRepeatedRequest,
    BegunRequest,
    HttpRequest,
    WholeBody,
    drain_or_abort,
)
from shmserve.gateway.http.routing import App
from shmserve.gateway.listener import Acceptor
from shmserve.gateway.settings import GatewaySettings

logger = logging.getLogger(__name__)


_OK_HEAD_FORMAT = (
    b"%bContent-Length: %%d\r\n%%bX-Content-Type-Options: nosniff\r\n\r\n" % STATUS_LINES[200]
)
_IDLE_TIMEOUT_S = 3600.0  # long, because idle keep-alive connections cost nothing
# The limits of `_linger`: the pause between two pieces, the duration, and the number of bytes.
_LINGER_IDLE_S = 2.0
_LINGER_TIMEOUT_S = 30.0
_MAX_LINGER_BYTES = 4 << 30
_DRAIN_IDLE_S = 0.5  # the idle time after which a draining connection is closed


class HttpConnection(RequestReceiver):
    """One client's connection. `app` handles its requests."""

    def __init__(self, acceptor: Acceptor, app: App, settings: GatewaySettings) -> None:
        super().__init__(asyncio.get_running_loop(), settings)
        self._is_handling = False
        self._idle_start = self._loop.time()
        self._acceptor = acceptor
        self._app = app
        self._task: asyncio.Task[None] | None = None
        # The request that `_begin_request` has begun without the task. The task sends its response
        # only if the callback cannot.
        self._begun_request: BegunRequest | None = None
        # The future that wakes the task (`_waiter`). It is withheld here while a request is handled
        # without the task, so that further bytes do not wake the task.
        self._withheld_waiter: asyncio.Future[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_s = _IDLE_TIMEOUT_S

    # --- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection and start the task that handles its requests."""
        self.attach(transport)
        self.client = self._acceptor.connection_made(self)
        self._idle_timer = self._loop.call_later(self._idle_s, self._close_if_idle)
        self._task = self._loop.create_task(self._serve_requests())

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancel the request in flight and deregister the connection."""
        self._acceptor.connection_lost(self)
        self.force_close()
        self.resume_writing()
        for timer in (self._read_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        if self._task is not None:
            self._task.cancel()
        begun_request, self._begun_request = self._begun_request, None
        if begun_request is not None:
            begun_request.cancel()
            self._app.decrement()
        self.client.call_disconnect_actions()

    def _close_if_idle(self) -> None:
        since = self.idle_since
        remaining_s = self._idle_s if since is None else since + self._idle_s - self._loop.time()
        if remaining_s > 0:
            self._idle_timer = self._loop.call_later(remaining_s, self._close_if_idle)
        else:
            self.force_close()

    def shut_down(self, *, refuses_requests: bool = False) -> None:
        """Close the connection with its next response, or soon if it is idle."""
        self._idle_s = _DRAIN_IDLE_S
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._close_if_idle()

    # --- requests without the task

    def _begin_request(self, begin: BeginRepeatedRequest, body: bytes) -> bool:
        # The request may fail before `begin` returns; the task then handles it.
        waiter = self._withheld_waiter = self._waiter
        self._waiter = None
        begun_request = begin(body, self._write_response)
        if begun_request is None:
            self._withheld_waiter, self._waiter = None, waiter
            return False
        self._begun_request = begun_request
        self._is_handling = True
        self._app.active_count += 1
        return True

    def _write_response(self, body: bytes | None, headers: bytes = JSON_HEADER) -> None:
        waiter, self._withheld_waiter = self._withheld_waiter, None
        assert waiter is not None
        if body is None:
            waiter.set_result(None)  # the task handles the request from now on
            return
        self._begun_request = None
        self._is_handling = False
        self._idle_start = self._loop.time()
        transport = self.transport
        if transport is None or transport.is_closing():
            waiter.cancel()  # the task ends, because the connection has ended
        else:
            transport.write(_OK_HEAD_FORMAT % (len(body), headers) + body)
            if self._messages or self.is_writing_paused:
                waiter.set_result(None)
            else:
                self._waiter = waiter
        self._app.decrement()

    # --- requests in the task

    async def _serve_requests(self) -> None:
        """Handle requests in order until the last one, then close the connection."""
        messages = self._messages
        try:
            while True:
                while not (messages or self._begun_request):
                    self._waiter = self._loop.create_future()
                    await self._waiter
                    if self.is_writing_paused and self.transport is not None:
                        await drain_or_abort(self, self.transport, self._settings.body_timeout_s)
                request = self._next_request()
                if request is None or not await self._serve_request(request):
                    break
                self._is_handling = False
                self._idle_start = self._loop.time()
                if messages:
                    # A pipelined request would otherwise be handled at once, and a long pipeline
                    # would delay all other connections.
                    await asyncio.sleep(0)
            self._is_handling = False
            # Pipelined requests after the last handled request are dropped.
            messages.clear()
            await self._linger()
        except ConnectionError:
            logger.debug("a client disconnected before its response")
        except asyncio.CancelledError:
            self.force_close()
            raise
        except Exception:
            logger.exception("an HTTP connection failed and is closed")
        self._is_handling = False
        self._task = None
        messages.clear()
        self._close_transport(self._settings.body_timeout_s)

    def _next_request(self) -> HttpRequest | None:
        """Return the request in flight or the first in the queue, or None for invalid HTTP."""
        begun_request, self._begun_request = self._begun_request, None
        if begun_request is not None:
            begun_request.http_request.begun_request = begun_request
            return begun_request.http_request
        message = self._messages.popleft()
        if type(message) is HttpRequest:
            self._is_handling = True
            return message
        if isinstance(message, HttpProcessingError):
            logger.debug("malformed HTTP request: %s", message)
            head_bytes = self._head or b""
            reason = _describe_error(message)
            if head_bytes.startswith(b"PRI * HTTP/2"):
                grpc_port = self._settings.grpc_port
                grpc_hint = f"the gRPC port is {grpc_port}" if grpc_port else "gRPC has no TCP port"
                reason = f"this port supports HTTP/1.1, not HTTP/2 or gRPC ({grpc_hint})"
            self._refuse(InvalidArgument(f"malformed HTTP request: {reason}"), head_bytes)
            return None
        head = message[0]
        if head.chunked and head.headers[TRANSFER_ENCODING].strip().lower() != "chunked":
            text = "unsupported Transfer-Encoding: the only supported transfer coding is 'chunked'"
            self._refuse(Unsupported(text), os.fsencode(f"{head.method} {head.path} "))
            return None
        self._is_handling = True
        if message[1].is_eof():  # otherwise, this happens when the body has ended
            self._parser.message_consumed()  # lowers the parser's count of queued requests
        if self._is_queue_full:
            self._on_dequeued()
        request = HttpRequest(*message, self)
        request.closes_connection |= self.closes_with_next
        if head.upgrade:
            # aiohttp's parser drops the bytes after a request with an Upgrade header. If
            # `_missing_bytes` does not give the size of the body, the next request cannot be found.
            request.closes_connection |= self._missing_bytes < 0 or request.method == "CONNECT"
        return request

    async def _serve_request(self, request: HttpRequest) -> bool:
        content = request.content
        if type(content) is not WholeBody and not content.is_eof():
            await self._receive_small_body(request, content)
        response = await self._app.handle(request)
        if request.closes_connection or (type(content) is not WholeBody and not content.is_eof()):
            response.closes_connection = True
        try:
            await response.send(request, self._settings.body_timeout_s)
        finally:
            if response.on_sent is not None:
                response.on_sent()
        return not response.closes_connection

    async def _linger(self) -> None:
        """Send the end of the stream, and drop further bytes until the client disconnects.

        Closing at once would reset the connection of a client that still sends. The client would
        then lose the responses that it has not read (RFC 9112, 9.6).
        """
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        self._idle_start = self._loop.time()
        transport.write_eof()
        self._drop_further_bytes()
        end, dropped_bytes = self._idle_start + _LINGER_TIMEOUT_S, -1
        while dropped_bytes < self._dropped_bytes < _MAX_LINGER_BYTES and self._loop.time() < end:
            dropped_bytes = self._dropped_bytes
            await asyncio.sleep(_LINGER_IDLE_S)

    def _refuse(self, error: ShmserveError, head: bytes) -> None:
        response = self._app.malformed_response(error, head)
        if self.transport is not None and not self.transport.is_closing():
            body = b"".join(response.pieces)
            self.transport.write(response.head(None, b"Content-Length: %d\r\n" % len(body)) + body)


def _describe_error(error: HttpProcessingError) -> str:
    """Return why the parser has rejected a request, in one line without the request's bytes."""
    if isinstance(error, LineTooLong):
        return f"the request line or a header has more than {MAX_LINE_BYTES} bytes"
    summary = error.message.partition("\n\n")[0]
    reason = " ".join(summary.split()).rstrip(":")
    return f"{reason} (allowed: {MAX_HEADERS})" if reason.startswith("Too many headers") else reason
