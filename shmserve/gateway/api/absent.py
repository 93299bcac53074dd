"""Extensions of Triton's that this server does not have: each is refused by its name."""

from __future__ import annotations

from shmserve.errors import Unavailable, Unsupported
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.request import Request
from shmserve.gateway.http.response import Reply


def no_trace() -> Unavailable:
    """What Triton says when it was built without tracing."""
    return Unavailable("the server does not support trace")


async def trace(gateway: Gateway, request: Request, name: str = "") -> Reply:
    """GET and POST /v2/trace/setting and /v2/models/NAME/trace/setting."""
    raise no_trace()


async def generate(gateway: Gateway, request: Request, name: str, version: str | None) -> Reply:
    """POST /v2/models/NAME/generate and /generate_stream."""
    raise Unsupported("the server does not support generate")
