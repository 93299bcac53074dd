"""An HTTP request as handlers see it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from aiohttp.http import HttpVersion, RawRequestMessage
from aiohttp.streams import StreamReader
from multidict import CIMultiDictProxy, istr

from shmserve.gateway.callers import Caller

if TYPE_CHECKING:
    from shmserve.gateway.connections import WholeBody

ACCEPT_ENCODING = istr("Accept-Encoding")
CONTENT_ENCODING = istr("Content-Encoding")
CONTENT_LENGTH = istr("Content-Length")
EXPECT = istr("Expect")
FETCH_SITE = istr("Sec-Fetch-Site")
HEADER_LENGTH = istr("Inference-Header-Content-Length")
TRANSFER_ENCODING = istr("Transfer-Encoding")


class Channel(Protocol):
    """What a request and its reply need of their connection."""

    transport: asyncio.Transport | None
    caller: Caller

    @property
    def writing_paused(self) -> bool:
        """Whether the client reads more slowly than we write."""

    async def drain(self) -> None:
        """Wait until it has caught up; raises ConnectionError when it is gone."""


class Request:
    """Method, target (path and query as sent), headers, and the stream of the body."""

    __slots__ = ("connection", "content", "headers", "method", "target", "version")

    def __init__(
        self,
        message: RawRequestMessage,
        content: StreamReader | WholeBody,
        connection: Channel,
    ) -> None:
        self.method: str = message.method
        self.target: str = message.path
        self.headers: CIMultiDictProxy[str] = message.headers
        self.version: HttpVersion = message.version
        self.content = content
        self.connection = connection
