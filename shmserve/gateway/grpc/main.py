"""The process of a gRPC gateway: connections on the listening sockets of the supervisor."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import uvloop

from shmserve.common import fd_limits
from shmserve.common.access.auth_tokens import Authorisation, decode_restrictions
from shmserve.common.grpc_settings import GrpcSettings
from shmserve.gateway import process
from shmserve.gateway.client_identity import ListenerRules, listener_kind
from shmserve.gateway.connection_limits import Acceptor
from shmserve.gateway.context import Gateway
from shmserve.gateway.grpc.calls.front import GrpcFront
from shmserve.gateway.grpc.calls.messages import Deflater
from shmserve.gateway.grpc.connection.protocol import GrpcConnection
from shmserve.gateway.grpc.infer import Inferences
from shmserve.gateway.grpc.service import Service
from shmserve.gateway.settings import GatewayStart
from shmserve.ipc.messages.start import decode

_BACKLOG = 1024


def run(data: bytes, *fds: int) -> None:
    """Be a gRPC gateway until told to stop; `data` is an encoded `GatewayStart`, `fds` its
    sockets."""
    start = decode(GatewayStart, data)
    process.prepare(f"gateway {start.name}", f"gateway {start.name}", start.log)
    settings = start.grpc
    assert settings is not None
    sockets = [socket.socket(fileno=fd) for fd in fds]
    uvloop.run(process.serve(start, partial(GrpcFrontend, settings=settings, sockets=sockets)))


class GrpcFrontend(process.Frontend):
    """gRPC connections, on sockets that listen already."""

    def __init__(
        self, gateway: Gateway, settings: GrpcSettings, sockets: Sequence[socket.socket]
    ) -> None:
        super().__init__()
        told = gateway.settings
        self._gateway = gateway
        self._sockets = sockets
        self._inferences = Inferences(gateway)
        self._service = Service(gateway, self._inferences)
        level = settings.compression_level
        self._front = GrpcFront(
            settings=settings,
            begin=self._service.begin,
            budget=gateway.body_budget,
            header_timeout_s=told.header_timeout_s,
            body_timeout_s=told.body_timeout_s,
            largest_inflated=told.max_input_size,
            tls=None if settings.tls is None else settings.tls.context(),
            deflater=Deflater(level) if level else None,
        )
        self._accepting: list[asyncio.Server] = []
        self._acceptors: list[Acceptor] = []

    async def open(self) -> None:
        """Accept connections."""
        told = self._gateway.settings
        rules = Authorisation(told.tokens, decode_restrictions(told.grpc_restricted), "protocol")
        most = min(told.max_connections, fd_limits.for_connections(len(self._sockets)))
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            listener = ListenerRules(listener_kind(sock), rules, told.allow_client_shm)
            self.listeners.append(listener)
            is_unix = sock.family == socket.AF_UNIX
            front = replace(self._front, tls=None) if is_unix else self._front
            acceptor = Acceptor(partial(GrpcConnection, front=front), listener, most)
            create = loop.create_unix_server if is_unix else loop.create_server
            self._accepting.append(await create(acceptor, sock=sock, backlog=_BACKLOG))
            self._acceptors.append(acceptor)

    def health_changed(self) -> None:
        """Notify the Watch calls."""
        self._service.health_changed()

    def drain(self, drained: Callable[[], None]) -> None:
        """Every request counts, in a stream or not; a stream without any, or a Watch, does not. Who
        has a connection without a call is told to go; a request on one that has calls is for others
        to refuse."""
        self._refuse_connections()
        for connection in self._connections():
            if connection.idle_since is not None:
                connection.leave()
        self._inferences.when_idle(drained)

    def _refuse_connections(self) -> None:
        for accepting in self._accepting:
            accepting.close()

    def _connections(self) -> list[GrpcConnection]:
        return [
            connection
            for acceptor in self._acceptors
            for connection in acceptor.connections
            if isinstance(connection, GrpcConnection)
        ]

    async def close(self) -> None:
        """Stop: what is written is still sent; streams that wait for requests are cut off."""
        self._refuse_connections()
        for connection in self._connections():
            connection.force_close()
