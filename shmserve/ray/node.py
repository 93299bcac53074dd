"""The deployment's class: a replica is a node's server, and passes requests on to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import aiohttp

from shmserve.ray import routes
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

        path = routes.path(request.scope)
        if refusal := routes.refusal(path):
            return JSONResponse({"error": refusal}, 501)
        try:
            response = await self._server.request(
                request.method, path, routes.passed_on(request.headers.items()), request.body
            )
        except aiohttp.ClientConnectionError:
            return JSONResponse({"error": "the server of this node has ended"}, 503)
        headers = dict(routes.passed_on(response.headers.items()))
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
