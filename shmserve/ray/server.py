"""The server of a node: started or found, asked by its unix socket, ended."""

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
    """The command line of flags by their names: a list where one repeats."""
    found = []
    for name, value in flags.items():
        for each in value if isinstance(value, list) else [value]:
            text = str(each).lower() if isinstance(each, bool) else str(each)
            found.append(f"--{name}={text}")
    return found


def check(flags: Mapping[str, Any]) -> None:
    """Raises InvalidArgument, naming what is wrong with flags as far as one can tell without the
    node's files."""
    node_flags = {name: value for name, value in flags.items() if name != "config"}
    command_line.parse(arguments(node_flags))


class NodeServer:
    """args: as for `shmserve.ray.app`. What it starts ends when this process does."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = args.get("server") or self._start(args)
        # Requests wait in shmserve's queues and not for a connection; how long is said there, too.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(self._socket, limit=0),
            timeout=aiohttp.ClientTimeout(),
            auto_decompress=False,
            skip_auto_headers=["Accept", "Accept-Encoding", "Content-Type", "User-Agent"],
        )

    def _start(self, flags: Mapping[str, Any]) -> str:
        folder = Path(tempfile.mkdtemp(prefix="shmserve-ray-"))
        ours = {"allow-http": False, "http-unix-socket": folder / "http.sock"}
        # In a session of its own: who ends `serve run` by Ctrl-C leaves its end to us.
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
        """Return once it is ready. Raises RuntimeError if it ends before."""
        while not await self._answers("/v2/health/ready"):
            self._check_process()
            await asyncio.sleep(_ASKED_EACH_S)

    async def check(self) -> None:
        """Raises RuntimeError if it has ended or does not answer. One that is not ready stays: it
        may be loading a model, and says so to who asks for that one."""
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
        """Its response, whose body is to be read. Raises aiohttp.ClientConnectionError where there
        is no server any more."""
        url = URL(f"http://localhost{path}", encoded=True)
        return await self._session.request(
            method, url, headers=headers, data=await body() or None, allow_redirects=False
        )

    def stop(self) -> None:
        """End what was started: what it was asked it answers, within --exit-timeout-secs."""
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
