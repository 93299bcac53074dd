"""Bodies that are JSON, of requests beside inference."""

from __future__ import annotations

from typing import Any

from shmserve.gateway.context import Gateway
from shmserve.gateway.http.body.reader import JSON_TOO_LARGE, Body
from shmserve.gateway.http.json.parser import JsonFault, loads
from shmserve.gateway.http.request import HttpRequest


async def read_json(gateway: Gateway, request: HttpRequest, *, required: bool = False) -> Any:
    """The body as JSON; an empty body is an empty object, unless one is `required`.

    Raises JsonFault for what is not JSON.
    """
    body = Body(request, gateway.settings, gateway.body_budget)
    if body.compressed():
        raw = await body.inflate()
    else:
        raw = await body.read(gateway.settings.max_input_size, JSON_TOO_LARGE)
    return loads(raw) if raw or required else {}


def mistyped(kind: str) -> JsonFault:
    """The text for a value that is not a `kind`: "string", "boolean", "unsigned-integer"."""
    return JsonFault(f"attempt to access JSON non-{kind} as {kind}")
