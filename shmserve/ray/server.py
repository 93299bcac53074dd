"""The server of a node, which is started or exists already, behind its unix socket."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from shmserve.config import command_line

_CHECK_S = 5.0
_ASKED_EACH_S = 0.1


def arguments(flags: Mapping[str, Any]) -> list[str]:
    """Return the command line of flags by name; a list is a repeated flag."""
    found = []
    for name, value in flags.items():
        for each in value if isinstance(value, list) else [value]:
            text = str(each).lower() if isinstance(each, bool) else str(each)
            found.append(f"--{name}={text}")
    return found


def check(flags: Mapping[str, Any]) -> None:
    """Check flags as far as possible without the files of the node.

    Raises:
        InvalidArgument: A flag is unknown or invalid.
    """
    node_flags = {name: value for name, value in flags.items() if name != "config"}
    command_line.parse(arguments(node_flags))


class NodeServer:
    """The server of a node; `args` are those of `shmserve.ray.app`.

    A server that it starts ends with this process.
    """

    def __init__(self, args: Mapping[str, Any]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = args.get("server") or self._start(args)
        # Requests wait in shmserve's queues, with its timeouts, and not for a connection.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(self._socket, limit=0),
            timeout=aiohttp.ClientTimeout(),
            auto_decompress=False,
            skip_auto_headers=["Accept", "Accept-Encoding", "Content-Type", "User-Agent"],
        )

    def _start(self, flags: Mapping[str, Any]) -> str:
        folder = Path(tempfile.mkdtemp(prefix="shmserve-ray-"))
        ours = {"allow-http": False, "http-unix-socket": folder / "http.sock"}
        # In a session of its own, so that Ctrl-C in `serve run` does not end it.
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "shmserve.ray.launch", str(os.getpid()), str(folder)),
                *("serve", *arguments({**ours, **flags})),
            ],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        return str(flags.get("http-unix-socket", ours["http-unix-socket"]))

    async def wait_ready(self) -> None:
        """Wait until the server is ready. Raises RuntimeError if it exits before."""
        while not await self._answers("/v2/health/ready"):
            self._check_process()
            await asyncio.sleep(_ASKED_EACH_S)

    async def check(self) -> None:
        """Check that the server runs and responds; it need not be ready, since a load is normal.

        Raises:
            RuntimeError: The server has exited, or does not respond.
        """
        self._check_process()
        if not await self._answers("/v2/health/live"):
            raise RuntimeError(f"no server answers at {self._socket}")

    async def request(
        self,
        method: str,
        path: str,
        headers: list[tuple[str, str]],
        body: Callable[[], Awaitable[bytes]],
    ) -> aiohttp.ClientResponse:
        """Send a request, and return the response with an unread body.

        Raises:
            aiohttp.ClientConnectionError: The server has exited.
        """
        url = URL(f"http://localhost{path}", encoded=True)
        return await self._session.request(
            method, url, headers=headers, data=await body() or None, allow_redirects=False
        )

    def stop(self) -> None:
        """Stop a started server, which finishes its requests within --exit-timeout-secs."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _check_process(self) -> None:
        if self._process is not None and (status := self._process.poll()) is not None:
            raise RuntimeError(f"shmserve serve ended with {status}; this replica's log has why")

    async def _answers(self, path: str) -> bool:
        timeout = aiohttp.ClientTimeout(_CHECK_S)
        try:
            async with self._session.get(f"http://localhost{path}", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False
