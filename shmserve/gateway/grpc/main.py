"""The process of the gRPC gateway: a grpc.aio server, some of whose calls are taken from its core.

gRPC makes the listening sockets itself, on the addresses that the supervisor holds for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from shmserve.common import fd_limits
from shmserve.common.access.auth_tokens import Authorisation, decode_restrictions
from shmserve.common.access.peer_credentials import is_loopback
from shmserve.common.tls import Tls
from shmserve.gateway import process
from shmserve.gateway.client_identity import ListenerKind, ListenerRules
from shmserve.gateway.context import Gateway
from shmserve.gateway.grpc.client_identity import Access
from shmserve.gateway.grpc.core import readers
from shmserve.gateway.grpc.core.call_watchdog import Calls, client_left
from shmserve.gateway.grpc.core.connection_limits import ConnectionLimits
from shmserve.gateway.grpc.core.core_call import acceptors
from shmserve.gateway.grpc.infer import Inferences
from shmserve.gateway.grpc.service import MODEL_INFER, MODEL_STREAM_INFER, Service
from shmserve.gateway.grpc.wire.response import LARGEST_MESSAGE
from shmserve.gateway.settings import GatewayStart, GrpcSettings
from shmserve.ipc.messages.start import decode

logger = logging.getLogger(__name__)

_STOP_S = 0.2
# gRPC's core queues calls until we ask for them, all clients' in one queue. A client that begins
# calls and resets them without end fills it, and where it is full the core refuses calls at random,
# whoever sent them (from the 1000th on, if not told otherwise). So a connection has its share, past
# which its own calls wait at the client or are refused, and the queue has room for many shares.
# Calls that have ended are a share of their own until they are cleared away: a client that begins
# the next call as soon as one has its response does not wait for that.
_MOST_CALLS = 512
_MOST_QUEUED = 128 * _MOST_CALLS
# So much of a call's messages is taken before anybody asks for them; one that is asked for comes as
# fast as it can. gRPC's own measure is how much arrives while a ping is answered: that grows to
# hundreds of megabytes with a client on this host as soon as we are slow, and what was taken stays
# until the call is over. It is also how it finds that frames may be large.
_AHEAD = 4 * 1024 * 1024


def run(data: bytes) -> None:
    """Be the gRPC gateway until told to stop; `data` is an encoded `GatewayStart`."""
    start = decode(GatewayStart, data)
    process.prepare("gateway grpc", "gateway grpc", start.log)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)
    ours = start.grpc
    assert ours is not None
    readers.run(process.serve(start, partial(GrpcFrontend, settings=ours)))


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record of gRPC's is worth a line: a client that has left before its response was
    sent, which it reports with a traceback, is not."""
    error = record.exc_info[1] if record.exc_info else None
    return error is None or not client_left(error)


class GrpcFrontend(process.Frontend):
    """A gRPC server."""

    def __init__(self, gateway: Gateway, settings: GrpcSettings) -> None:
        self._settings = settings
        self._header_timeout_s = gateway.settings.header_timeout_s
        self._most = min(gateway.settings.max_connections, fd_limits.for_connections(1))
        self._inferences = Inferences(gateway)
        self._calls = Calls(gateway.settings.body_timeout_s)
        listener = _listener(gateway, settings)
        self._service = Service(gateway, self._inferences, Access(listener), self._calls)
        ports = {port for _, port in settings.addresses}
        self._limits = ConnectionLimits(self._calls, listener.kind, ports, self._most)
        self._server: Any = None

    async def open(self) -> None:
        """Listen and accept calls."""
        settings = self._settings
        timeout_ms = int(self._header_timeout_s * 1000)
        server = grpc.aio.server(
            handlers=(self._service,),
            options=(
                ("grpc.so_reuseport", 0),  # the port is ours alone
                # Who connects and says nothing, or half of it, is shown out.
                ("grpc.server_handshake_timeout_ms", timeout_ms),
                ("grpc.http2.settings_timeout", timeout_ms),
                # More are turned away until others have made room (connection_limits.py): what is
                # here needs descriptors of its own to go on.
                ("grpc.max_allowed_incoming_connections", self._most),
                ("grpc.max_concurrent_streams", _MOST_CALLS),
                ("grpc.http2.max_deallocating_streams", _MOST_CALLS),
                ("grpc.server.max_pending_requests", _MOST_QUEUED),
                ("grpc.server.max_pending_requests_hard_limit", _MOST_QUEUED),
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", _AHEAD),
                ("grpc.http2.max_frame_size", _AHEAD),
                ("grpc.max_send_message_length", LARGEST_MESSAGE),
                ("grpc.max_receive_message_length", LARGEST_MESSAGE),
                *settings.options,
            ),
        )
        for host, port in settings.addresses:
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            if settings.tls is None:
                server.add_insecure_port(address)
            else:
                _add_secure_port(server, address, settings.tls)
        service, inference = self._service, self._service.inference
        direct = acceptors(
            server,
            {
                MODEL_INFER: (service.infer_handler, inference.begin_infer),
                MODEL_STREAM_INFER: (inference.stream_handler, inference.begin_stream),
            },
        )
        await server.start()
        self._server = server
        self._limits.open()
        for accepting in direct:
            accepting.open()

    def health_changed(self) -> None:
        """Notify the Watch calls."""
        self._service.health_changed()

    def drain(self, drained: Callable[[], None]) -> None:
        """Every request counts, in a stream or not; a stream without any, or a Watch, does not."""
        self._limits.let_nobody_in(tls=self._settings.tls is not None)
        self._inferences.when_idle(drained)

    async def close(self) -> None:
        """Stop: what is written is still sent; streams that wait for requests are cut off."""
        self._limits.close()
        if self._server is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._server.stop(_STOP_S)


def _listener(gateway: Gateway, settings: GrpcSettings) -> ListenerRules:
    """One for all addresses: gRPC does not say to which of them a client has connected."""
    told = gateway.settings
    here = all(is_loopback(host) for host, _ in settings.addresses)
    return ListenerRules(
        ListenerKind.LOOPBACK if here else ListenerKind.REMOTE,
        Authorisation(told.tokens, decode_restrictions(told.grpc_restricted), "protocol"),
        told.allow_client_shm,
    )


def _add_secure_port(server: Any, address: str, tls: Tls) -> None:
    """Raises InvalidArgument in words for the operator when the files are no good: they may have
    changed since the last gateway read them."""
    tls.check()
    credentials = grpc.ssl_server_credentials(
        [(Path(tls.server_key).read_bytes(), Path(tls.server_cert).read_bytes())],
        None if tls.root_cert is None else Path(tls.root_cert).read_bytes(),
        require_client_auth=tls.root_cert is not None,
    )
    try:
        server.add_secure_port(address, credentials)
    except RuntimeError:  # the address itself is held for us
        raise tls.refused() from None
