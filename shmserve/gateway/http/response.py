"""HTTP responses, written with back-pressure: whole ones, whose pieces are gathered into one write
if they are small, else sent zero-copy; and chunked ones, whose body is made while it is sent."""

from __future__ import annotations

import asyncio
import contextlib
import http
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from shmserve.errors import ShmserveError
from shmserve.gateway.http.json.framing import error_json
from shmserve.gateway.http.request import HttpChannel, HttpRequest

# What is larger goes to the socket piece by piece, as fast as the client reads.
_WHOLE = 256 * 1024
_PIECE = 1024 * 1024

JSON = b"Content-Type: application/json\r\n"

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Length: ".encode()
    for status in http.HTTPStatus
}


@dataclass(slots=True, eq=False)
class HttpResponse:
    """A whole response.

    `headers` are complete lines; `on_sent` runs once nobody needs `pieces` any more.
    """

    status: int = 200
    pieces: Sequence[bytes | memoryview] = ()
    headers: bytes = b""
    close: bool = field(default=False, kw_only=True)
    on_sent: Callable[[], None] | None = field(default=None, kw_only=True)

    def head(self, request: HttpRequest | None, size: int) -> bytes:
        """Status line and headers for a body of `size` bytes; no `request`: it was malformed."""
        connection = b""
        if self.close:
            connection = b"Connection: close\r\n"
        elif request is not None and request.is_http10:
            connection = b"Connection: keep-alive\r\n"
        values = (_STATUS_LINES[self.status], size, connection, self.headers)
        return b"%b%d\r\n%b%bX-Content-Type-Options: nosniff\r\n\r\n" % values

    async def send(self, request: HttpRequest, stall_s: float) -> None:
        """Write it; a client that reads nothing for `stall_s` seconds is cut off.

        Raises ConnectionError when the client is gone.
        """
        transport = _open_transport(request)
        size = sum(map(len, self.pieces))
        head = self.head(request, size)
        if request.method == "HEAD":
            transport.write(head)
        elif size <= _WHOLE:
            transport.write(b"".join((head, *self.pieces)))
        else:
            await self._stream(request, transport, head, stall_s)
        if request.connection.writing_paused:
            await drain(request.connection, transport, stall_s)

    async def _stream(
        self, request: HttpRequest, transport: asyncio.Transport, head: bytes, stall_s: float
    ) -> None:
        # Nothing may stay queued in the transport: the pieces' memory is given back after the last.
        transport.set_write_buffer_limits(high=0)
        try:
            transport.write(head)
            for piece in self.pieces:
                for at in range(0, len(piece), _PIECE):
                    transport.write(piece[at : at + _PIECE])
                    if request.connection.writing_paused:
                        await drain(request.connection, transport, stall_s)
        finally:
            transport.set_write_buffer_limits()


class ChunkedResponse(HttpResponse):
    """A response whose body is made while it is sent, in chunks, with back-pressure: `batches` is
    asked for the next chunks, which are written together, once the client has taken those before.

    A client of HTTP/1.0 gets no chunks but their bytes, and the connection's end.
    """

    __slots__ = ("_batches",)

    def __init__(
        self, status: int, batches: AsyncGenerator[Sequence[bytes], None], headers: bytes = b""
    ) -> None:
        super().__init__(status, (), headers)
        self._batches = batches

    async def send(self, request: HttpRequest, stall_s: float) -> None:
        """As `HttpResponse.send`; what `batches` raises ends the connection."""
        transport = _open_transport(request)
        chunked = not request.is_http10
        self.close = self.close or not chunked
        transport.write(self._head(chunked=chunked))
        async with contextlib.aclosing(self._batches) as batches:
            async for chunks in batches:
                framed = map(_framed, filter(None, chunks)) if chunked else chunks
                transport.write(b"".join(framed))
                if request.connection.writing_paused:
                    await drain(request.connection, transport, stall_s)
        if chunked:
            transport.write(b"0\r\n\r\n")

    def _head(self, *, chunked: bool) -> bytes:
        phrase = http.HTTPStatus(self.status).phrase.encode()
        lines = [b"HTTP/1.1 %d %b\r\n" % (self.status, phrase)]
        if chunked:
            lines.append(b"Transfer-Encoding: chunked\r\n")
        if self.close:
            lines.append(b"Connection: close\r\n")
        return b"".join((*lines, self.headers, b"X-Content-Type-Options: nosniff\r\n\r\n"))


def _framed(chunk: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(chunk), chunk)


def _open_transport(request: HttpRequest) -> asyncio.Transport:
    transport = request.connection.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client is gone")
    return transport


async def drain(channel: HttpChannel, transport: asyncio.Transport, stall_s: float) -> None:
    """Wait until the client has read what was written; one that reads nothing is cut off."""
    try:
        async with asyncio.timeout(stall_s):
            await channel.drain()
    except TimeoutError:
        transport.abort()
        raise ConnectionResetError("the client does not read its response") from None


_OK = b"%b%%d\r\n%%bX-Content-Type-Options: nosniff\r\n\r\n" % _STATUS_LINES[200]


def written(headers: bytes, pieces: Sequence[bytes | memoryview]) -> bytes:
    """All that is written of an `HttpResponse` of these to a client that stays."""
    return b"".join((_OK % (sum(map(len, pieces)), headers), *pieces))


def json_response(value: Any) -> HttpResponse:
    """`value` as JSON."""
    return HttpResponse(200, (orjson.dumps(value),), JSON)


# The body of a response of an error, as an API has it.
ErrorForm = Callable[[ShmserveError], bytes]


def triton_error(error: ShmserveError) -> bytes:
    """{"error": message}, as Triton's API has it."""
    return error_json(error.message)


def traced(traceparent: str) -> bytes:
    """The header by which a client finds the trace of its request."""
    return b"traceparent: %b\r\n" % traceparent.encode()


def error_response(
    error: ShmserveError,
    form: ErrorForm = triton_error,
    *,
    headers: bytes = b"",
    close: bool = False,
) -> HttpResponse:
    """The response of an error, with a body in this form."""
    return HttpResponse(error.status, (form(error),), JSON + headers, close=close)
