"""An HTTP request as handlers see it: head, body stream, connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, final

from multidict import CIMultiDictProxy, istr

from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.http.connection.aiohttp_parts import (
    HttpVersion10,
    RawRequestMessage,
    StreamReader,
)

ACCEPT = istr("Accept")
ACCEPT_ENCODING = istr("Accept-Encoding")
CONTENT_ENCODING = istr("Content-Encoding")
CONTENT_LENGTH = istr("Content-Length")
EXPECT = istr("Expect")
FETCH_SITE = istr("Sec-Fetch-Site")
HEADER_LENGTH = istr("Inference-Header-Content-Length")
TRACEPARENT = istr("traceparent")
TRANSFER_ENCODING = istr("Transfer-Encoding")


class HttpChannel(Protocol):
    """The connection as a request and its response need it."""

    transport: asyncio.Transport | None
    client: ClientIdentity

    @property
    def writing_paused(self) -> bool:
        """Whether the client reads more slowly than we write."""

    async def drain(self) -> None:
        """Wait until it has caught up; raises ConnectionError when it is gone."""


@final
class WholeBody:
    """A body that came in one piece with its head: of an aiohttp.StreamReader, what is used of one
    that has ended. `data` is the rest of it."""

    __slots__ = ("data",)

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def is_eof(self) -> bool:
        """Whether nothing more comes."""
        return True

    def read_nowait(self) -> bytes:
        """The rest of it."""
        data, self.data = self.data, b""
        return data

    async def readany(self) -> bytes:
        """The rest of it; b"" at the end."""
        return self.read_nowait()


class BegunRequest(Protocol):
    """A request that is under way without a task."""

    request: HttpRequest

    async def response(self) -> Any:
        """Its response, as a handler gives it, once it has come."""

    def cancel(self) -> None:
        """The client is gone."""


# Has the response written: its bytes. None: they are to be made by a task, as
# `BegunRequest.response`.
Answer = Callable[[bytes | None], None]
# Begins a request with this body, which is answered once, later; None: a handler is to do it.
Repeat = Callable[[bytes, Answer], BegunRequest | None]


@final
class HttpRequest:
    """Method, target (path and query as sent), headers, and the stream of the body.

    A connection gives the same one, with another body, to requests whose heads are the same.
    `match` is the route that the head was found to ask for, once its client was authorised, and the
    parts of the path (routing.py). `repeat` begins those of its requests that are like earlier ones
    at once, without a task; one that needs a task all the same is handled as it is `begun`.
    `is_http10`: the client knows neither chunks nor keep-alive by default. `closes`: the
    connection ends with it.
    """

    __slots__ = (
        *("begun", "closes", "connection", "content", "headers", "is_http10", "match", "method"),
        *("repeat", "target"),
    )

    def __init__(
        self,
        message: RawRequestMessage,
        content: StreamReader | WholeBody,
        connection: HttpChannel,
    ) -> None:
        self.method: str = message.method
        self.target: str = message.path
        self.headers: CIMultiDictProxy[str] = message.headers
        self.is_http10: bool = message.version <= HttpVersion10
        self.closes: bool = message.should_close or message.upgrade
        self.content = content
        self.connection = connection
        self.match: Any = None
        self.repeat: Repeat | None = None
        self.begun: BegunRequest | None = None
