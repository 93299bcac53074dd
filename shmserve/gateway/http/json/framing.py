"""The framing of streams of JSON texts: server-sent events, or newline-delimited JSON (pure)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import orjson


class Framing(NamedTuple):
    """A framing of JSON texts in a stream; none has a line break in it."""

    content_type: bytes
    prefix: bytes
    suffix: bytes

    def frame(self, json: bytes) -> bytes:
        """One of them."""
        return b"%b%b%b" % (self.prefix, json, self.suffix)

    def error(self, message: str) -> bytes:
        """One that says what went wrong."""
        return self.frame(error_json(message))


SERVER_SENT_EVENTS = Framing(b"text/event-stream; charset=utf-8", b"data: ", b"\n\n")
JSON_LINES = Framing(b"application/x-ndjson", b"", b"\n")
_BY_TYPE = {"text/event-stream": SERVER_SENT_EVENTS, "application/x-ndjson": JSON_LINES}


def error_json(message: str) -> bytes:
    """{"error": message}. Bytes of a request's head that are not UTF-8 may be in the message, as
    surrogates: each is a question mark."""
    try:
        return orjson.dumps({"error": message})
    except TypeError:
        return orjson.dumps({"error": message.encode(errors="replace").decode()})


@lru_cache(maxsize=64)
def accepted(header: str) -> Framing | None:
    """The first stream of JSON that an Accept header names, if it names one."""
    for entry in header.lower().split(","):
        media_type, *parameters = (part.strip() for part in entry.split(";"))
        framing = _BY_TYPE.get(media_type)
        if framing is not None and not any(_is_zero(parameter) for parameter in parameters):
            return framing
    return None


def _is_zero(parameter: str) -> bool:
    """Whether it says "not this one": a quality of 0."""
    name, _, value = parameter.partition("=")
    return name.strip() == "q" and not value.strip().strip("0.")
