"""The process of an HTTP gateway: servers on the listening sockets of the supervisor."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial

from shmserve.common import fd_limits
from shmserve.common.auth_tokens import Authorisation, Restrictions
from shmserve.gateway import process
from shmserve.gateway.api.metrics import MetricsExporter
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.connection import HttpConnection
from shmserve.gateway.http.dashboard import LiveFigures
from shmserve.gateway.http.routes import ROUTES, metrics_routes
from shmserve.gateway.http.routing import App, Cors
from shmserve.gateway.listener import Acceptor, ListenerRules, listener_kind
from shmserve.gateway.settings import GatewayStart


def run(start_record: bytes, *fds: int) -> None:
    """Run an HTTP gateway until the supervisor stops it.

    Args:
        start_record: An encoded `GatewayStart`.
        *fds: The descriptors of the listening sockets.
    """
    process.run(start_record, fds, "gateway http", HttpServer)


class HttpServer(process.ProtocolServer):
    """The HTTP servers of inference and of metrics, on listening sockets."""

    def __init__(
        self, gateway: Gateway, start: GatewayStart, sockets: Sequence[socket.socket]
    ) -> None:
        super().__init__()
        self._gateway = gateway
        self._figures = LiveFigures(gateway, start.run_dir)
        cors_origins = gateway.settings.cors_origins
        self._app = App(gateway, ROUTES, Cors(cors_origins) if cors_origins else None)
        self._http_sockets = sockets[: start.http_sockets]
        self._metrics_sockets = sockets[start.http_sockets :]

    async def open(self) -> None:
        """Create the servers. Metrics are served at once, also before inference is accepted."""
        exporter = MetricsExporter(self._gateway)
        metrics_app = App(self._gateway, metrics_routes(exporter, self._figures))
        for sock in self._metrics_sockets:
            await self._serve_socket(sock, metrics_app, {})
        if self._metrics_sockets:
            self._figures.start_recording()
        await self.accept()
        for sock in self._http_sockets:
            await self._serve_socket(sock, self._app, self._gateway.settings.http_restricted)

    async def _serve_socket(
        self, sock: socket.socket, app: App, restrictions: Restrictions
    ) -> None:
        settings = self._gateway.settings  # read for each socket, since the tokens may change
        rules = Authorisation(settings.tokens, restrictions)
        all_host_names = (settings.http_address, socket.gethostname(), *settings.allowed_hosts)
        lower_names = frozenset(map(str.lower, all_host_names))
        listener = ListenerRules(listener_kind(sock), rules, settings.allow_client_shm, lower_names)
        socket_counts = len(self._http_sockets), len(self._metrics_sockets)
        descriptor_limit = fd_limits.connections_share(*socket_counts)
        if sock in self._metrics_sockets:
            descriptor_limit = fd_limits.scrapes_share()
        create_connection = partial(HttpConnection, app=app, settings=settings)
        max_connections = min(settings.max_connections, descriptor_limit)
        await self.listen(sock, Acceptor(create_connection, listener, max_connections))

    def drain(self, on_notified: Callable[[], None], has_successor: bool) -> None:
        self._figures.end_streams()
        super().drain(on_notified, has_successor)

    def call_when_idle(self, on_idle: Callable[[], None]) -> None:
        self._app.call_when_idle(on_idle)
