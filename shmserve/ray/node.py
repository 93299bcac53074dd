"""The deployment's class. A replica is the server of a node, and forwards requests to it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import aiohttp

from shmserve.ray.server import NodeServer

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


class Node:
    """The replica of this node; `args` are those of `shmserve.ray.app`."""

    # Ray awaits the constructor in the event loop of the replica.
    async def __init__(self, args: Mapping[str, Any]) -> None:  # type: ignore[misc]
        self._server = NodeServer(args)
        await self._server.wait_ready()

    async def check_health(self) -> None:
        """Raise RuntimeError if the server has exited: Ray then replaces the replica."""
        await self._server.check()

    async def __call__(self, request: Request) -> Response:
        """Forward an HTTP request to the server, and stream its response.

        A request that only a certain node can serve is rejected with 501. If the server has exited,
        the response is 503.
        """
        from starlette.responses import JSONResponse, StreamingResponse

        path = path_of(request.scope)
        if reason := refusal(path):
            return JSONResponse({"error": reason}, 501)
        try:
            response = await self._server.request(
                request.method, path, passed_on(request.headers.items()), request.body
            )
        except aiohttp.ClientConnectionError:
            return JSONResponse({"error": "the server of this node has ended"}, 503)
        headers = dict(passed_on(response.headers.items()))
        return StreamingResponse(_parts(response), response.status, headers)

    def __del__(self) -> None:
        """Stop the server. Ray calls this when no request is in flight any more."""
        if server := getattr(self, "_server", None):
            server.stop()


async def _parts(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    # If the client disconnects, the connection to the server is closed, which cancels the request.
    async with response:
        async for part in response.content.iter_any():
            yield part


# The headers of a single connection (RFC 9110, 7.6.1).
_HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
    *("upgrade", "host"),
}
_OF_ONE_NODE = {
    r"/v2/(system|cuda)sharedmemory\b": "memory is shared with the server of the client's own node",
    r"/v2/repository/models/.*/(un)?load$": "each node loads what its server's flags say",
    r"/v2/(logging|trace/setting|models/.*/trace/setting)$": "settings are those of one node",
}


def path_of(scope: Mapping[str, Any]) -> str:
    """Return the path and query of an ASGI request below the application's prefix, undecoded."""
    found = scope["raw_path"].decode("latin-1").removeprefix(scope["root_path"])
    query = scope["query_string"].decode("latin-1")
    return f"{found}?{query}" if query else found


def refusal(path: str) -> str:
    """Return why only a certain node can serve this path, or "" if any node can."""
    for pattern, reason in _OF_ONE_NODE.items():
        if re.match(pattern, path.partition("?")[0]):
            return f"{reason}: not through Ray's proxy, ask that node's server"
    return ""


def passed_on(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the end-to-end headers."""
    return [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]
