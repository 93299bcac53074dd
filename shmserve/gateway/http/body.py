"""Reading request bodies: within a size, within a time, and no more of them than is asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.gateway.http.compression import Inflater, UnsupportedEncoding, check_encoding
from shmserve.gateway.http.connection.aiohttp_parts import MalformedBody, StreamReader
from shmserve.gateway.http.request import (
    CONTENT_ENCODING,
    CONTENT_LENGTH,
    EXPECT,
    TRANSFER_ENCODING,
    Request,
)
from shmserve.gateway.inference import malloc_trim
from shmserve.gateway.inference.body_budget import SLOWEST_RATE, BodyBudget
from shmserve.gateway.settings import Settings
from shmserve.ipc.tensors.ranges import LARGEST

JSON_TOO_LARGE = (
    "request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes. "
    "Use --http-max-input-size to increase the limit."
)
_MOST_CHUNKS = 65536
_TOGETHER = 1024
# Where memory is full, a body gives up its own that was waited for for this part of
# `body_timeout_s`, with less than so many bytes a second. What it waited for us does not count.
_GRACE = 1 / 30
_SLOW_RATE = 1024 * 1024


class BodyTimeout(ShmserveError):
    """The client did not send its body in time."""

    code = "UNAVAILABLE"
    status = 408


class BrokenBody(InvalidArgument):
    """The body is not framed as HTTP says; the connection cannot go on."""


class Body:
    """One request's body.

    Nothing is read before it is asked for; `declared` is its size in bytes, -1 if unknown. What of
    it is here while the rest is arriving counts in `budget`.
    """

    def __init__(self, request: Request, settings: Settings, budget: BodyBudget) -> None:
        self._request = request
        self._content = request.content
        self._settings = settings
        self._budget = budget
        self._began = time.monotonic()
        self._received = 0
        self._chunks = 0
        self._waiting: asyncio.Timeout | None = None
        self._since = 0.0  # when that began
        self._waited_s = 0.0  # before
        self._release: Callable[[], None] | None = None
        self._dismissed = False
        self.held = 0  # bytes outside of the arena
        self._chunked = TRANSFER_ENCODING in request.headers
        self.declared = -1 if self._chunked else int(request.headers.get(CONTENT_LENGTH, 0))

    def here(self) -> bytes | None:
        """The whole body if it has arrived already, as small ones have.

        Raises BrokenBody for a size that the parser does not count with.
        """
        if self.declared > LARGEST:
            raise BrokenBody("malformed HTTP request body")
        return self._content.read_nowait() if self._content.is_eof() else None

    async def next(self) -> bytes:
        """The next bytes; b"" at the end. Raises BodyTimeout, BrokenBody or InvalidArgument."""
        if self._received == 0 and not self._content.is_eof():
            self._invite()
        limit = self._began + self._settings.body_timeout_s + self._received / SLOWEST_RATE
        self._since = time.monotonic()
        try:
            async with asyncio.timeout(limit - self._since) as self._waiting:
                data = await self._next_chunks() if self._chunked else await self._content.readany()
        except TimeoutError:
            self.check()
            raise BodyTimeout("the request body did not arrive in time") from None
        except MalformedBody:
            raise BrokenBody("malformed HTTP request body") from None
        finally:
            self._waited_s = self._waited(time.monotonic())
            self._waiting = None
        self.check()
        self._received += len(data)
        return data

    # --- giving way to others

    def rate(self, now: float) -> float:
        """Bytes for each second that was waited until now."""
        return self._received / max(self._waited(now), 1e-9)

    def is_slow(self, now: float) -> bool:
        """Whether it must give way when memory is full."""
        grace_s = _GRACE * self._settings.body_timeout_s
        return self._waited(now) > grace_s and self.rate(now) < _SLOW_RATE

    def _waited(self, now: float) -> float:
        return self._waited_s + (now - self._since if self._waiting is not None else 0.0)

    def check(self) -> None:
        """Raise BodyTimeout if it had to give way; then no byte of its memory is its own."""
        if self._dismissed:
            raise BodyTimeout("the request body came too slowly: others need the memory for it")

    def dismiss(self) -> None:
        """Give its memory back now; who waits for the rest is told."""
        self._dismissed = True
        self._budget.give(self)
        if self._release is not None:
            self._release()
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(0)

    @property
    def has_block(self) -> bool:
        """Whether `dismiss` gives back a block of the arena."""
        return self._release is not None

    @contextmanager
    def keeping(self, release: Callable[[], None]) -> Iterator[None]:
        """It has a block that `release` gives back, which `dismiss` may do while this runs."""
        self._release = release
        self._budget.keep(self)
        try:
            yield
        finally:
            self._release = None

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """What `read_start` gave counts as long as this runs: the rest may be long in coming."""
        try:
            yield
        finally:
            size = self.held
            self._budget.give(self)
            malloc_trim.soon(size)

    # --- the whole of it

    async def _next_chunks(self) -> bytes:
        # Those that are here go together: one by one, tiny ones keep everybody else waiting.
        content = self._content
        assert isinstance(content, StreamReader)  # one that came whole was not in chunks
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
            all_here = content.total_bytes <= self._received + size or len(pieces) >= _TOGETHER
            if (size and all_here) or not (data or ends):
                return b"".join(pieces)

    def _invite(self) -> None:
        if self._request.headers.get(EXPECT, "").lower() == "100-continue":
            transport = self._request.connection.transport
            if transport is not None:
                transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def read(self, limit: int, too_large: str) -> bytes:
        """All of it, of at most `limit` bytes.

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
                    self._budget.take(self, len(piece))
                whole = b"".join(pieces)
            finally:
                self._budget.give(self)
                malloc_trim.soon(size)
        if len(whole) > limit:
            raise InvalidArgument(too_large.format(size=len(whole), limit=limit))
        return whole

    async def read_start(self, size: int) -> bytes:
        """The first `size` bytes and what came with them; fewer at the end. While the body is
        `arriving`; raises as `read`."""
        start = bytearray()
        while len(start) < size and (piece := await self.next()):
            start += piece
            self._budget.take(self, len(piece))
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

    async def inflate(self) -> bytes:
        """The decompressed body, of at most `max_input_size` bytes; raises as `read`."""
        inflater = Inflater(self._settings.max_input_size)
        pieces: list[bytes] = []
        size = 0
        try:
            while chunk := await self.next():
                for piece in inflater.feed(chunk):
                    pieces.append(piece)
                    size += len(piece)
                    self._budget.take(self, len(piece))
                    await asyncio.sleep(0)
            inflater.finish()
            return b"".join(pieces)
        finally:
            self._budget.give(self)
            malloc_trim.soon(size)

    def compressed(self) -> bool:
        """Whether the body is compressed; raises UnsupportedEncoding."""
        encodings = self._request.headers.getall(CONTENT_ENCODING, ())
        if not encodings:
            return False
        if len(encodings) > 1:
            raise UnsupportedEncoding("Unsupported compression type")
        return check_encoding(encodings[0])
