"""The process of an HTTP gateway: servers on the listening sockets of the supervisor."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import uvloop

from shmserve.common import fd_limits
from shmserve.common.auth_tokens import Authorisation, decode_restrictions
from shmserve.gateway import process
from shmserve.gateway.api.metrics import MetricsExporter
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.connection import HttpConnection
from shmserve.gateway.http.dashboard import LiveFigures
from shmserve.gateway.http.routes import ROUTES, metrics_routes
from shmserve.gateway.http.routing import App, Cors
from shmserve.gateway.listener import Acceptor, ListenerRules, listener_kind
from shmserve.gateway.settings import GatewayStart
from shmserve.ipc.messages.supervision import decode_start


def run(data: bytes, *fds: int) -> None:
    """Run an HTTP gateway until the supervisor stops it.

    Args:
        data: An encoded `GatewayStart`.
        *fds: The descriptors of the listening sockets.
    """
    start = decode_start(GatewayStart, data)
    process.prepare_process(f"gateway {start.name}", f"gateway http {start.name}", start.log)
    sockets = [socket.socket(fileno=fd) for fd in fds]
    http, scrapes = sockets[: start.http_sockets], sockets[start.http_sockets :]
    front = partial(HttpFrontend, http=http, scrapes=scrapes, run_dir=start.run_dir)
    uvloop.run(process.serve(start, front))


class HttpFrontend(process.Frontend):
    """The HTTP servers of inference and of metrics, on listening sockets."""

    def __init__(
        self,
        gateway: Gateway,
        http: Sequence[socket.socket],
        scrapes: Sequence[socket.socket],
        run_dir: Path,
    ) -> None:
        super().__init__()
        self._gateway = gateway
        self._live = LiveFigures(gateway, run_dir)
        origins = gateway.settings.cors_origins
        self._app = App(gateway, ROUTES, Cors(origins) if origins else None)
        self._http = http
        self._scrapes = scrapes

    async def open(self) -> None:
        """Create the servers. Metrics are served while models are loaded."""
        settings = self._gateway.settings
        restrictions = decode_restrictions(settings.http_restricted)
        http = Authorisation(settings.tokens, restrictions)
        scrapes = Authorisation(settings.tokens, {})
        exporter = MetricsExporter(self._gateway)
        metrics = App(self._gateway, metrics_routes(exporter, self._live))
        for sock in self._scrapes:
            await self._serve(sock, metrics, scrapes)
        if self._scrapes:
            self._live.begin()
        await self.accept()
        for sock in self._http:
            await self._serve(sock, self._app, http)

    async def _serve(self, sock: socket.socket, app: App, rules: Authorisation) -> None:
        settings = self._gateway.settings
        named = (settings.http_address, socket.gethostname(), *settings.allowed_hosts)
        names = frozenset(map(str.lower, named))
        listener = ListenerRules(listener_kind(sock), rules, settings.allow_client_shm, names)
        self.listeners.append(listener)
        spared = fd_limits.for_connections(len(self._http), len(self._scrapes))
        if sock in self._scrapes:
            spared = fd_limits.for_scrapes()
        make = partial(HttpConnection, app=app, settings=settings)
        await self.listen(sock, Acceptor(make, listener, min(settings.max_connections, spared)))

    def drain(self, on_notified: Callable[[], None], followed: bool) -> None:
        self._live.end()
        super().drain(on_notified, followed)

    def call_when_idle(self, drained: Callable[[], None]) -> None:
        self._app.call_when_idle(drained)
