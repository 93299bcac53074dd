"""The stream of a request body, read within limits of size, and no further than is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from shmserve.errors import InvalidArgument
from shmserve.gateway.compression import Inflater, UnsupportedEncoding, check_encoding
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.connection.aiohttp_parts import MalformedBody, StreamReader
from shmserve.gateway.http.json.parser import loads
from shmserve.gateway.http.request import (
    CONTENT_ENCODING,
    CONTENT_LENGTH,
    EXPECT,
    TRANSFER_ENCODING,
    HttpRequest,
)
from shmserve.gateway.inference.body_arrival import Arrival, BodyBudget
from shmserve.gateway.settings import GatewaySettings
from shmserve.ipc.tensors.ranges import LARGEST

JSON_TOO_LARGE = (
    "request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes. "
    "Use --http-max-input-size to increase the limit."
)
_MOST_CHUNKS = 65536
_TOGETHER = 1024


class BrokenBody(InvalidArgument):
    """The body is not framed as HTTP says; the connection cannot go on."""


async def read_json(gateway: Gateway, request: HttpRequest, *, required: bool = False) -> Any:
    """A request's body as JSON; an empty body is an empty object, unless one is `required`.

    Raises JsonFault for what is not JSON.
    """
    body = Body(request, gateway.settings, gateway.body_budget)
    if body.compressed():
        raw = await body.inflate()
    else:
        raw = await body.read(gateway.settings.max_input_size, JSON_TOO_LARGE)
    return loads(raw) if raw or required else {}


class Body:
    """One request's body, as a stream with back-pressure: nothing is read before it is asked for.

    `declared` is its size in bytes, -1 if unknown. What of it is here while the rest is arriving
    counts in `budget`.
    """

    def __init__(self, request: HttpRequest, settings: GatewaySettings, budget: BodyBudget) -> None:
        self._request = request
        self._content = request.content
        self._max_input_size = settings.max_input_size
        self._arrival = Arrival(settings.body_timeout_s, budget)
        self._chunks = 0
        self._chunked = TRANSFER_ENCODING in request.headers
        self.declared = -1 if self._chunked else int(request.headers.get(CONTENT_LENGTH, 0))

    def here(self) -> bytes | None:
        """The whole body if it has arrived already, as small ones have.

        Raises BrokenBody for a size that the parser does not count with.
        """
        if self.declared > LARGEST:
            raise BrokenBody("malformed HTTP request body")
        return self._content.read_nowait() if self._content.is_eof() else None

    def compressed(self) -> bool:
        """Whether the body is compressed; raises UnsupportedEncoding."""
        encodings = self._request.headers.getall(CONTENT_ENCODING, ())
        if not encodings:
            return False
        if len(encodings) > 1:
            raise UnsupportedEncoding("Unsupported compression type")
        return check_encoding(encodings[0])

    # --- pieces of it

    async def next(self) -> bytes:
        """The next bytes; b"" at the end. Raises BodyTimeout, BrokenBody or InvalidArgument."""
        if self._arrival.received == 0 and not self._content.is_eof():
            self._invite()
        read = self._next_chunks() if self._chunked else self._content.readany()
        try:
            return await self._arrival.next(read)
        except MalformedBody:
            raise BrokenBody("malformed HTTP request body") from None

    def _invite(self) -> None:
        """The interim response that some clients wait for before they send a body."""
        if self._request.headers.get(EXPECT, "").lower() == "100-continue":
            transport = self._request.connection.transport
            if transport is not None:
                transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _next_chunks(self) -> bytes:
        # Those that are here go together: one by one, tiny ones keep everybody else waiting.
        content = self._content
        assert isinstance(content, StreamReader)  # one that came whole was not in chunks
        received = self._arrival.received
        pieces: list[bytes] = []
        size = 0
        while True:
            data, ends = await content.readchunk()
            self._chunks += ends and bool(data)
            if self._chunks > _MOST_CHUNKS:
                raise BrokenBody(
                    f"Chunked request body exceeds maximum of {_MOST_CHUNKS} non-empty chunks. "
                    "Send fewer or larger HTTP chunks."
                )
            pieces.append(data)
            size += len(data)
            all_here = content.total_bytes <= received + size or len(pieces) >= _TOGETHER
            if (size and all_here) or not (data or ends):
                return b"".join(pieces)

    # --- the whole of it

    async def read(self, limit: int, too_large: str) -> bytes:
        """The whole body, of at most `limit` bytes.

        Raises InvalidArgument with `too_large`, {size} and {limit} filled in, when it is more, and
        Unavailable when too much of others' is here.
        """
        if self.declared > limit:
            raise InvalidArgument(too_large.format(size=self.declared, limit=limit))
        whole = self.here()
        if whole is None:
            pieces: list[bytes] = []
            size = 0
            try:
                while size <= limit and (piece := await self.next()):
                    pieces.append(piece)
                    size += len(piece)
                    self._arrival.hold(len(piece))
                whole = b"".join(pieces)
            finally:
                self._arrival.give_back()
        if len(whole) > limit:
            raise InvalidArgument(too_large.format(size=len(whole), limit=limit))
        return whole

    async def inflate(self) -> bytes:
        """The decompressed body, of at most `max_input_size` bytes; raises as `read`."""
        inflater = Inflater(self._max_input_size)
        pieces: list[bytes] = []
        try:
            while chunk := await self.next():
                for piece in inflater.feed(chunk):
                    pieces.append(piece)
                    self._arrival.hold(len(piece))
                    await asyncio.sleep(0)
            inflater.finish()
            return b"".join(pieces)
        finally:
            self._arrival.give_back()

    # --- a part of it, and the rest into memory that is there already

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """A block in which the bytes of `read_start` count: the rest may be long in coming."""
        try:
            yield
        finally:
            self._arrival.give_back()

    def keeping(self, release: Callable[[], None]) -> AbstractContextManager[None]:
        """While this runs, it has a block of the arena, which eviction frees with `release`."""
        return self._arrival.keeping(release)

    async def read_start(self, size: int) -> bytes:
        """The first `size` bytes and what came with them; fewer at the end. While the body is
        `arriving`; raises as `read`."""
        start = bytearray()
        while len(start) < size and (piece := await self.next()):
            start += piece
            self._arrival.hold(len(piece))
        return bytes(start)

    async def read_into(self, views: Sequence[memoryview], start: bytes = b"") -> bool:
        """Fill `views`, one after the other, with `start` and then with what comes.

        False when the body ends before they are full.
        """
        piece = memoryview(start)
        for view in views:
            at = 0
            while at < len(view):
                if not piece:
                    piece = memoryview(await self.next())
                    if not piece:
                        return False
                taken = min(len(piece), len(view) - at)
                view[at : at + taken] = piece[:taken]
                at += taken
                piece = piece[taken:]
        return True
