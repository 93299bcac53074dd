"""The process of an HTTP gateway, on the supervisor's listening sockets."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from shmserve.gateway import metrics, process
from shmserve.gateway.app import App
from shmserve.gateway.connections import Server
from shmserve.gateway.settings import Settings
from shmserve.gateway.state import Gateway

_BACKLOG = 1024


def run(args: dict[str, Any]) -> None:
    """Be gateway `args["index"]` until told to stop.

    `args["fds"]` are the listening sockets, the first `http_count` for HTTP, the others for
    metrics; `settings` is decoded by `Settings`; `run_dir` is where the supervisor's socket is.
    """
    settings = Settings.decode(args["settings"])
    index = args["index"]
    process.prepare(f"gateway {index}", f"gateway http {index}", settings)
    sockets = [socket.socket(fileno=fd) for fd in args["fds"]]
    count = args["http_count"]
    uvloop.run(
        process.serve(
            str(index),
            Path(args["run_dir"]),
            settings,
            lambda gateway: HttpDoor(gateway, sockets[:count], sockets[count:]),
        )
    )


class HttpDoor(process.Door):
    """HTTP connections, and those that scrape metrics, on sockets that listen already."""

    def __init__(
        self, gateway: Gateway, http: Sequence[socket.socket], scrapes: Sequence[socket.socket]
    ) -> None:
        self._app = App(gateway)
        self._servers = [
            (Server(self._app.handle, gateway.settings), http),
            (Server(functools.partial(metrics.metrics, gateway), gateway.settings), scrapes),
        ]
        self._listeners: list[asyncio.Server] = []

    async def open(self) -> None:
        """Accept connections."""
        loop = asyncio.get_running_loop()
        for server, sockets in self._servers:
            for sock in sockets:
                listener = await loop.create_server(server, sock=sock, backlog=_BACKLOG)
                self._listeners.append(listener)

    def drain(self, drained: Callable[[], None]) -> None:
        """Every request counts: the last one to be answered ends the wait."""

        def idle() -> None:
            self._app.on_idle = None
            drained()

        self._app.on_idle = idle
        if not self._app.active:
            idle()

    async def close(self) -> None:
        """Drop listeners and connections."""
        for listener in self._listeners:
            listener.close()
        for server, _ in self._servers:
            for connection in server.connections:
                connection.force_close()
