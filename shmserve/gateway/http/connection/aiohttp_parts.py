"""An adapter to aiohttp: its HTTP parser, and the stream that this puts a body into.

They are exported by `aiohttp.http` and `aiohttp`, but what they want of a protocol is written down
nowhere: `connected`, `pause_reading` and `resume_reading`. So the versions are bound in
pyproject.toml to those that were tested, and `check` tries them out before anybody connects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import aiohttp

from shmserve.errors import Unavailable

try:
    from aiohttp import StreamReader
    from aiohttp.http import (
        HttpProcessingError,
        HttpRequestParser,
        HttpVersion,
        HttpVersion10,
        RawRequestMessage,
    )
except ImportError as error:  # `check` tells, in words, where a gateway starts
    _not_there = str(error)
    HttpRequestParser = StreamReader = None  # type: ignore[misc, assignment]
    HttpProcessingError = HttpVersion = RawRequestMessage = None  # type: ignore[misc, assignment]
    HttpVersion10 = None  # type: ignore[assignment]
else:
    _not_there = ""

__all__ = (
    "HttpProcessingError",
    "HttpVersion",
    "HttpVersion10",
    "MalformedBody",
    "Message",
    "Parser",
    "RawRequestMessage",
    "StreamReader",
    "check",
    "make_parser",
)

_TESTED = "aiohttp>=3.14.5,<3.15"
_MOST_HEADERS = 128
_LONGEST_LINE = 8190
_READ_AHEAD = 256 * 1024  # of a body that nobody reads; twice as much is the most
_READER = (
    *("exception", "is_eof", "read_nowait", "readany", "readchunk", "set_exception", "wait_eof"),
    "total_bytes",
)
_PARSER = ("feed_data", "message_consumed", "pause_reading")
_PROBE = (
    b"POST /a?b HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}GET / HTTP/1.1\r\nHost: h\r\n\r\n"
)

# A request's head and its body.
Message = tuple[RawRequestMessage, StreamReader]


class MalformedBody(Exception):
    """A body is not framed as HTTP says."""


class ReadControl(Protocol):
    """The flow control that the parser and its streams ask of a connection."""

    @property
    def connected(self) -> bool:
        """Whether more may come."""

    def pause_reading(self) -> None:
        """A stream is full."""

    def resume_reading(self, resume_parser: bool = True) -> None:
        """A stream is not full any more, or has ended."""


class Parser(Protocol):
    """aiohttp's parser of requests, as far as it is used."""

    def feed_data(self, data: bytes) -> tuple[Sequence[Message], bool, bytes]:
        """The requests whose heads are complete with this, and whether the connection goes on in
        another protocol; raises HttpProcessingError for what is no HTTP."""

    def pause_reading(self) -> None:
        """Parse no more of a body than what is parsed now, until `feed_data` comes again."""

    def message_consumed(self) -> None:
        """A request was taken from the queue: there is room for one more."""


def make_parser(
    connection: ReadControl, loop: asyncio.AbstractEventLoop, most_queued: int
) -> Parser:
    """The parser of a connection, which gives at most so many requests that are not consumed."""
    parser: Parser = HttpRequestParser(
        connection,  # type: ignore[arg-type]
        loop,
        _READ_AHEAD,
        max_line_size=_LONGEST_LINE,
        max_field_size=_LONGEST_LINE,
        max_headers=_MOST_HEADERS,
        payload_exception=MalformedBody,
        auto_decompress=False,
        max_msg_queue_size=most_queued,
    )
    return parser


def check() -> None:
    """Raise Unavailable when the aiohttp that is installed is not like those that were tested."""
    if _not_there:
        raise _unfit(_not_there)
    missing = [
        f"{kind.__name__}.{name}"
        for kind, names in ((HttpRequestParser, _PARSER), (StreamReader, _READER))
        for name in names
        if not hasattr(kind, name)
    ]
    if missing:
        raise _unfit(f"it has no {', '.join(missing)}")
    try:
        found = _probe()
    except Exception as error:
        raise _unfit(f"it raises {type(error).__name__}: {error}") from None
    if found != [("POST", "/a?b", "2", b"{}"), ("GET", "/", "", b"")]:
        raise _unfit("it reads requests in another way")


def _probe() -> list[tuple[str, str, str, bytes]]:
    class Silent:
        connected = True

        def pause_reading(self) -> None:
            raise AssertionError("two bytes are too much")

        def resume_reading(self, resume_parser: bool = True) -> None:
            pass

    loop: Any = object()  # nothing is waited for
    messages, upgraded, _ = make_parser(Silent(), loop, 8).feed_data(_PROBE)
    return [
        (head.method, head.path, head.headers.get("Content-Length", ""), body.read_nowait())
        for head, body in messages
        if body.is_eof()
        and not (upgraded or head.should_close or head.upgrade or head.chunked)
        and head.version == HttpVersion(1, 1)
    ]


def _unfit(why: str) -> Unavailable:
    return Unavailable(
        f"aiohttp {aiohttp.__version__} does not fit the HTTP gateway: {why} "
        f"(pip install '{_TESTED}')"
    )
