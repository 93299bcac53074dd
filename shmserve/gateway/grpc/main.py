"""The process of a gRPC gateway: connections on the listening sockets of the supervisor."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from shmserve.common import fd_limits
from shmserve.common.auth_tokens import Authorisation
from shmserve.gateway import process
from shmserve.gateway.context import Gateway
from shmserve.gateway.grpc.call import GrpcContext
from shmserve.gateway.grpc.connection import GrpcConnection
from shmserve.gateway.grpc.infer import Inferences
from shmserve.gateway.grpc.service import Service
from shmserve.gateway.listener import Acceptor, ListenerRules, listener_kind
from shmserve.gateway.settings import GatewayStart


def run(start_record: bytes, *fds: int) -> None:
    """Run a gRPC gateway until the supervisor stops it.

    Args:
        start_record: An encoded `GatewayStart`.
        *fds: The descriptors of the listening sockets.
    """
    process.run(start_record, fds, "gateway", GrpcServer)


class GrpcServer(process.ProtocolServer):
    """The protocol server of a gRPC gateway: an HTTP/2 server for each listening socket."""

    refuses_while_busy = True

    def __init__(
        self, gateway: Gateway, start: GatewayStart, sockets: Sequence[socket.socket]
    ) -> None:
        super().__init__()
        settings, gateway_settings = start.grpc, gateway.settings
        assert settings is not None
        self._gateway = gateway
        self._sockets = sockets
        self._inferences = Inferences(gateway)
        self._context = GrpcContext(
            settings=settings,
            begin_call=Service(gateway, self._inferences).begin_call,
            budget=gateway.body_budget,
            header_timeout_s=gateway_settings.header_timeout_s,
            body_timeout_s=gateway_settings.body_timeout_s,
            max_inflated_bytes=gateway_settings.max_input_size,
            tls=None if settings.tls is None else settings.tls.context(),
        )

    async def open(self) -> None:
        """Create a server, which accepts no connections yet, for each listening socket."""
        connection_share = fd_limits.connections_share(len(self._sockets))
        for sock in self._sockets:
            settings = self._gateway.settings  # read for each socket, since the tokens may change
            rules = Authorisation(settings.tokens, settings.grpc_restricted, "protocol")
            listener = ListenerRules(listener_kind(sock), rules, settings.allow_client_shm)
            max_connections = min(settings.max_connections, connection_share)
            is_unix = sock.family == socket.AF_UNIX
            context = replace(self._context, tls=None) if is_unix else self._context
            await self.listen(
                sock, Acceptor(partial(GrpcConnection, context=context), listener, max_connections)
            )

    def call_when_idle(self, on_idle: Callable[[], None]) -> None:
        # The gateway is idle when no request is in flight. Streams without requests may be open.
        self._drain_acceptors(partial(self._inferences.call_when_idle, on_idle))
