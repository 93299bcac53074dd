"""The server of a node, and the deployment's class, whose replica forwards requests to it.

The server is either an existing one that listens at a unix socket, or is started by `NodeServer`.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from yarl import URL

from shmserve.config import command_line

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


_CHECK_TIMEOUT_S = 5.0
_READY_POLL_S = 0.1


def arguments(flags: Mapping[str, Any]) -> list[str]:
    """Return the command line of flags by name; a list is a repeated flag."""
    flag_arguments = []
    for name, value in flags.items():
        for element in value if isinstance(value, list) else [value]:
            text = str(element).lower() if isinstance(element, bool) else str(element)
            flag_arguments.append(f"--{name}={text}")
    return flag_arguments


def check(flags: Mapping[str, Any]) -> None:
    """Check flags as far as possible without the files of the node.

    Raises:
        InvalidArgument: A flag is unknown or invalid.
    """
    node_flags = {name: value for name, value in flags.items() if name != "config"}
    command_line.parse(arguments(node_flags))


class NodeServer:
    """The server of a node; `args` are those of `shmserve.ray.app`.

    A server that this object has started stops when this process exits.
    """

    def __init__(self, args: Mapping[str, Any]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = args.get("server") or self._start(args)
        # Neither connections nor time are limited: requests wait in shmserve's queues, within its
        # timeouts.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(self._socket, limit=0),
            timeout=aiohttp.ClientTimeout(),
            auto_decompress=False,
            skip_auto_headers=["Accept", "Accept-Encoding", "Content-Type", "User-Agent"],
        )

    def _start(self, flags: Mapping[str, Any]) -> str:
        folder = Path(tempfile.mkdtemp(prefix="shmserve-ray-"))
        default_flags = {"allow-http": False, "http-unix-socket": folder / "http.sock"}
        # In a new session, so that Ctrl-C in `serve run` does not end the server.
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "shmserve.ray.launch", str(os.getpid()), str(folder)),
                *("serve", *arguments({**default_flags, **flags})),
            ],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        return str(flags.get("http-unix-socket", default_flags["http-unix-socket"]))

    async def wait_ready(self) -> None:
        """Wait until the server is ready. Raises RuntimeError if it exits before."""
        while not await self._returns_ok("/v2/health/ready"):
            self._check_process()
            await asyncio.sleep(_READY_POLL_S)

    async def check(self) -> None:
        """Check that the server runs and responds, even if it is still loading models.

        Raises:
            RuntimeError: The server has exited, or does not respond.
        """
        self._check_process()
        if not await self._returns_ok("/v2/health/live"):
            raise RuntimeError(f"no server responds at {self._socket}")

    async def request(
        self,
        method: str,
        path: str,
        headers: list[tuple[str, str]],
        read_body: Callable[[], Awaitable[bytes]],
    ) -> aiohttp.ClientResponse:
        """Send a request, and return the response with an unread body.

        Raises:
            aiohttp.ClientConnectionError: The server has exited.
        """
        url = URL(f"http://localhost{path}", encoded=True)
        return await self._session.request(
            method, url, headers=headers, data=await read_body() or None, allow_redirects=False
        )

    def stop(self) -> None:
        """Stop a started server, which finishes its requests within --exit-timeout-secs."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _check_process(self) -> None:
        if self._process is not None and (status := self._process.poll()) is not None:
            text = f"shmserve serve exited with status {status}; see the log of this replica"
            raise RuntimeError(text)

    async def _returns_ok(self, path: str) -> bool:
        timeout = aiohttp.ClientTimeout(_CHECK_TIMEOUT_S)
        try:
            async with self._session.get(f"http://localhost{path}", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


class Node:
    """The replica of Ray Serve on this node; `args` are those of `shmserve.ray.app`."""

    # Ray awaits the constructor in the event loop of the replica.
    async def __init__(self, args: Mapping[str, Any]) -> None:  # type: ignore[misc]
        self._server = NodeServer(args)
        await self._server.wait_ready()

    async def check_health(self) -> None:
        """Raise RuntimeError if the server does not respond: Ray then replaces the replica."""
        await self._server.check()

    async def __call__(self, request: Request) -> Response:
        """Forward an HTTP request to the server, and stream its response.

        A request that only a certain node can serve is rejected with 501. If the server has exited,
        the response is 503.
        """
        from starlette.responses import JSONResponse, StreamingResponse

        path = path_of(request.scope)
        if reason := find_rejection_reason(path):
            return JSONResponse({"error": reason}, 501)
        try:
            response = await self._server.request(
                request.method, path, end_to_end_headers(request.headers.items()), request.body
            )
        except aiohttp.ClientConnectionError:
            return JSONResponse({"error": "the server of this node has exited"}, 503)
        headers = dict(end_to_end_headers(response.headers.items()))
        return StreamingResponse(_read_chunks(response), response.status, headers)

    def __del__(self) -> None:
        """Stop the server. Ray calls this when no request is in flight any more."""
        if server := getattr(self, "_server", None):
            server.stop()


async def _read_chunks(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    # If the client disconnects, the connection to the server is closed, which cancels the request.
    async with response:
        async for chunk in response.content.iter_any():
            yield chunk


# The headers of a single connection (RFC 9110, 7.6.1).
_HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
    *("upgrade", "host"),
}
_REJECTION_REASONS = {
    r"/v2/(system|cuda)sharedmemory\b": "memory is shared with the server of the client's own node",
    r"/v2/repository/models/.*/(un)?load$": "each node's server loads models separately",
    r"/v2/(logging|trace/setting|models/.*/trace/setting)$": "each server has its own settings",
}


def path_of(scope: Mapping[str, Any]) -> str:
    """Return the path and query of an ASGI request below the application's prefix, undecoded."""
    path = scope["raw_path"].decode("latin-1").removeprefix(scope["root_path"])
    query = scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def find_rejection_reason(path: str) -> str:
    """Return why only a certain node can serve this path, or "" if any node can."""
    for pattern, reason in _REJECTION_REASONS.items():
        if re.match(pattern, path.partition("?")[0]):
            return f"{reason}; send this request to the server of a node, not to Ray's proxy"
    return ""


def end_to_end_headers(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the headers without those that apply to a single connection."""
    return [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]
