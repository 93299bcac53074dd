"""Errors as OpenAI's interface has them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re

import orjson

from shmserve.errors import InvalidArgument, NotFound, QueueFull, ShmserveError

# Texts about one field begin with its name.
_FIELD = re.compile(r"(?:\[request id: .*?\] )?([a-z][a-z_.\[\]0-9]*): ")


class TooManyRequests(QueueFull):
    """The queue of a model is full, in the words of this interface."""

    status = 429


def openai_error(error: ShmserveError) -> bytes:
    """The body of an error's response."""
    kind = "invalid_request_error" if isinstance(error, InvalidArgument) else "server_error"
    code: str | None = None
    if isinstance(error, NotFound):
        kind, code = "invalid_request_error", "model_not_found"
    elif isinstance(error, TooManyRequests):
        kind, code = "rate_limit_error", "rate_limit_exceeded"
    field = _FIELD.match(error.message) if isinstance(error, InvalidArgument) else None
    message = error.message.encode(errors="replace").decode()
    param = None if field is None else field[1]
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})
