"""The deployment's class: a replica is a node's server, and passes requests on to it."""

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
    """The server of this node. args: as for `shmserve.ray.app`."""

    # Ray awaits it, in the event loop in which all else of a replica runs.
    async def __init__(self, args: Mapping[str, Any]) -> None:  # type: ignore[misc]
        self._server = NodeServer(args)
        await self._server.wait_ready()

    async def check_health(self) -> None:
        """Ray ends the replica and starts another one when this raises RuntimeError."""
        await self._server.check()

    async def __call__(self, request: Request) -> Response:
        """Pass a request of HTTP on; the response is passed back as it comes. What only a node
        itself can do is refused with 501; without its server a node answers 503."""
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
        """Ray calls it once no request is in flight here any more."""
        if server := getattr(self, "_server", None):
            server.stop()


async def _parts(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    # A client that leaves ends this early, which closes the connection: shmserve cancels.
    async with response:
        async for part in response.content.iter_any():
            yield part


# What holds for one connection alone (RFC 9110, 7.6.1).
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
    """The path and query of a request (ASGI's scope) below the application's prefix, as its client
    has spelled them."""
    found = scope["raw_path"].decode("latin-1").removeprefix(scope["root_path"])
    query = scope["query_string"].decode("latin-1")
    return f"{found}?{query}" if query else found


def refusal(path: str) -> str:
    """Why this request is not for whichever node comes next; empty if it is."""
    for pattern, reason in _OF_ONE_NODE.items():
        if re.match(pattern, path.partition("?")[0]):
            return f"{reason}: not through Ray's proxy, ask that node's server"
    return ""


def passed_on(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The headers that are for the other end."""
    return [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]
