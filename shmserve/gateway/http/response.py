"""HTTP responses: a status, header lines and the pieces of a body, gathered into one write if
small, else streamed zero-copy, with back-pressure."""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from shmserve.gateway.http.json.events import error_json
from shmserve.gateway.http.request import HttpRequest

# What is larger goes to the socket piece by piece, as fast as the client reads.
_WHOLE = 256 * 1024
_PIECE = 1024 * 1024

JSON = b"Content-Type: application/json\r\n"

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Length: ".encode()
    for status in http.HTTPStatus
}


class HttpResponse:
    """A whole response.

    `headers` are complete lines; `on_sent` runs once nobody needs `pieces` any more.
    """

    __slots__ = ("close", "headers", "on_sent", "pieces", "status")

    def __init__(
        self,
        status: int = 200,
        pieces: Sequence[bytes | memoryview] = (),
        headers: bytes = b"",
        *,
        close: bool = False,
    ) -> None:
        self.status = status
        self.pieces = pieces
        self.headers = headers
        self.close = close
        self.on_sent: Callable[[], None] | None = None

    def head(self, request: HttpRequest | None, size: int) -> bytes:
        """Status line and headers for a body of `size` bytes; no `request`: it was malformed."""
        connection = b""
        if self.close:
            connection = b"Connection: close\r\n"
        elif request is not None and request.is_http10:
            connection = b"Connection: keep-alive\r\n"
        return b"%b%d\r\n%b%bX-Content-Type-Options: nosniff\r\n\r\n" % (
            *(_STATUS_LINES[self.status], size, connection, self.headers),
        )

    async def send(self, request: HttpRequest, stall_s: float) -> None:
        """Write it; a client that reads nothing for `stall_s` seconds is cut off.

        Raises ConnectionError when the client is gone.
        """
        transport = request.connection.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        size = sum(map(len, self.pieces))
        head = self.head(request, size)
        if request.method == "HEAD":
            transport.write(head)
        elif size <= _WHOLE:
            transport.write(b"".join((head, *self.pieces)))
        else:
            await self._stream(request, transport, head, stall_s)
        if request.connection.writing_paused:
            await drain(request, transport, stall_s)

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
                        await drain(request, transport, stall_s)
        finally:
            transport.set_write_buffer_limits()


async def drain(request: HttpRequest, transport: asyncio.Transport, stall_s: float) -> None:
    """Wait until the client has read what was written; one that reads nothing is cut off."""
    try:
        async with asyncio.timeout(stall_s):
            await request.connection.drain()
    except TimeoutError:
        transport.abort()
        raise ConnectionResetError("the client does not read its response") from None


def json_response(value: Any, status: int = 200) -> HttpResponse:
    """`value` as JSON."""
    return HttpResponse(status, (orjson.dumps(value),), JSON)


def error_response(
    status: int, message: str, *, headers: bytes = b"", close: bool = False
) -> HttpResponse:
    """{"error": message}."""
    return HttpResponse(status, (error_json(message),), JSON + headers, close=close)
