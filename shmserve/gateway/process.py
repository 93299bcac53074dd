"""A gateway process of any protocol: its listeners and its lifecycle.

Started ──> models and regions, then HealthChanged ──> GatewayReady ──> clients are
accepted (after Accept if the gateway was started as `waits_for_accept`)
Drain ──> clients are no longer accepted ──> clients are notified, requests in flight end ──>
Drained ──> Stop
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import uvloop

from shmserve import logs
from shmserve.gateway.context import Gateway, ModelTable
from shmserve.gateway.inference.body_arrival import BodyBudget, MallocTrim
from shmserve.gateway.links import GatewaySchedulers, GatewaySupervisorLink
from shmserve.gateway.listener import Acceptor, ActiveCount
from shmserve.gateway.region_table import RegionTable
from shmserve.gateway.settings import GatewayStart
from shmserve.gateway.tracer import Tracer
from shmserve.ipc import endpoints, processes
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.publications import (
    Acknowledged,
    HealthChanged,
    ModelOnDemand,
    ModelPublished,
    ModelWithdrawn,
    ProcessExited,
    ReadinessChanged,
    RegionDrained,
    RegionPublished,
    RegionRetired,
    RegionWithdrawn,
    SchedulerLost,
)
from shmserve.logs import LogSettings

logger = logging.getLogger(__name__)


_UNMAP_DELAY_S = 1.0  # the memory of an exited process is unmapped after this time
_LISTEN_BACKLOG = 1024


class ProtocolServer(ABC):
    """The protocol server of a gateway: its listeners and connections.

    Attributes:
        refuses_while_busy: Whether a drain without a successor refuses requests on connections
            that have calls in flight.
    """

    refuses_while_busy: ClassVar[bool] = False  # see `drain`

    def __init__(self) -> None:
        self._accepting_servers: list[asyncio.Server] = []
        self.acceptors: list[Acceptor] = []
        self._refuses_connections = False

    @abstractmethod
    async def open(self) -> None:
        """Create a server for each listener, after all models and regions were received."""

    async def listen(self, sock: socket.socket, acceptor: Acceptor) -> None:
        """Create the server of a listening socket, which accepts connections later."""
        self.acceptors.append(acceptor)
        loop = asyncio.get_running_loop()
        is_unix = sock.family == socket.AF_UNIX
        create: Callable[..., Any] = loop.create_unix_server if is_unix else loop.create_server
        # From Python 3.13 a loop deletes the path of a closed socket, which a successor may use.
        options = {"cleanup_socket": False} if is_unix and sys.version_info >= (3, 13) else {}
        self._accepting_servers.append(
            await create(
                acceptor, sock=sock, backlog=_LISTEN_BACKLOG, start_serving=False, **options
            )
        )

    async def accept(self) -> None:
        """Accept connections, unless the gateway drains."""
        for server in self._accepting_servers:
            if not self._refuses_connections:
                await server.start_serving()

    def drain(self, on_notified: Callable[[], None], has_successor: bool) -> None:
        """Accept no more connections, and notify the clients that the server drains.

        Args:
            on_notified: Called once no further request can arrive, except in streams and on
                connections that stay open.
            has_successor: Whether a successor accepts connections.
        """
        self._refuse_connections()
        refuses_requests = self.refuses_while_busy and not has_successor
        # Deferred, because asyncio may still create connections in this iteration of the loop.
        asyncio.get_running_loop().call_soon(self._drain_acceptors, on_notified, refuses_requests)

    def _drain_acceptors(
        self, on_drained: Callable[[], None], refuses_requests: bool = False
    ) -> None:
        """Drain all acceptors, and call `on_drained` once; see `Acceptor.drain`."""
        draining_listeners = ActiveCount()
        draining_listeners.active_count = len(self.acceptors)
        for acceptor in self.acceptors:
            acceptor.drain(draining_listeners.decrement, refuses_requests=refuses_requests)
        draining_listeners.call_when_idle(on_drained)

    @abstractmethod
    def call_when_idle(self, on_idle: Callable[[], None]) -> None:
        """Call `on_idle` once all responses are sent."""

    def _refuse_connections(self) -> None:
        self._refuses_connections = True
        for server in self._accepting_servers:
            server.close()

    async def close(self) -> None:
        """Close all connections. Written bytes are still sent."""
        self._refuse_connections()
        for acceptor in self.acceptors:
            for connection in acceptor.connections:
                connection.force_close()


# Returns the protocol server of a gateway for its listening sockets.
CreateServer = Callable[[Gateway, GatewayStart, Sequence[socket.socket]], ProtocolServer]


def run(start_record: bytes, fds: Sequence[int], title: str, create_server: CreateServer) -> None:
    """Run a gateway process until the supervisor sends `Stop`.

    Args:
        start_record: An encoded `GatewayStart`.
        fds: The descriptors of the listening sockets.
        title: The title of the process, to which the name of the gateway is appended.
        create_server: Creates the protocol server.
    """
    start = m.decode_start(GatewayStart, start_record)
    name = start.gateway_name
    processes.set_up(f"gateway {name}", f"{title} {name}", start.log)
    processes.keep_freed_blocks()
    sockets = [socket.socket(fileno=fd) for fd in fds]
    uvloop.run(_serve(start, sockets, create_server))


async def _serve(
    start: GatewayStart, sockets: Sequence[socket.socket], create_server: CreateServer
) -> None:
    await _Process(start, sockets, create_server).run()


class _Process:
    """A gateway process: a state machine driven by the supervisor's messages."""

    def __init__(
        self, start: GatewayStart, sockets: Sequence[socket.socket], create_server: CreateServer
    ) -> None:
        settings = start.settings
        self._state_received = asyncio.Event()  # models, regions and health
        self._accept_received = asyncio.Event()
        self._stop_received = asyncio.Event()
        if not start.waits_for_accept:
            self._accept_received.set()
        schedulers = GatewaySchedulers()
        malloc_trim = MallocTrim()
        identity = f"gateway.{start.gateway_name}.{os.getpid()}"
        control_endpoint = endpoints.control(start.run_dir)
        supervisor = GatewaySupervisorLink(control_endpoint, identity, self._handle_message)
        self._gateway = Gateway(
            settings=settings,
            schedulers=schedulers,
            models=ModelTable(schedulers),
            regions=RegionTable(supervisor.post, settings.shm_overlap),
            supervisor=supervisor,
            arena=Arena(settings.arena_byte_size),
            body_budget=BodyBudget(
                max(settings.arena_byte_size, settings.max_input_size), malloc_trim
            ),
            malloc_trim=malloc_trim,
            mappings=Mappings(),
            health=HealthChanged(live=True, ready=False, exiting=False),
            tracer=Tracer(settings.slow_request_ms, "HTTP" if start.grpc is None else "GRPC"),
        )
        self._server = create_server(self._gateway, start, sockets)

    async def run(self) -> None:
        """Serve until `Stop`."""
        gateway = self._gateway
        gateway.supervisor.post(m.Started())
        try:
            # The successor of a crashed gateway would respond with 404 before it has received the
            # models.
            await self._state_received.wait()
            await self._server.open()
            gateway.supervisor.post(m.GatewayReady())
            await self._accept_received.wait()
            if not gateway.is_draining:
                await self._server.accept()
            await self._stop_received.wait()
        finally:
            await self._server.close()
            gateway.tracer.close()
            gateway.supervisor.close()
            gateway.schedulers.close()

    def _handle_message(self, message: Any) -> None:
        try:
            self._apply(message)
        finally:  # without this response, a model that cannot be registered would block all loads
            if ack_number := getattr(message, "ack_number", 0):
                self._gateway.supervisor.post(Acknowledged(ack_number))

    def _apply(self, message: Any) -> None:
        gateway = self._gateway
        match message:
            case ModelPublished():
                gateway.models.publish(message)
            case ModelOnDemand(name):
                gateway.models.on_demand_names.add(name)
            case ReadinessChanged(name, version, ready):
                gateway.models.set_ready(name, version, ready)
            case ModelWithdrawn(name, version):
                gateway.models.withdraw(name, version)
            case SchedulerLost(endpoint, successor):
                gateway.schedulers.fail_over(endpoint, successor)
            case RegionPublished():
                gateway.regions.publish(message)
            case RegionRetired(memory_id):
                gateway.regions.retire(memory_id)
            case RegionWithdrawn(memory_id=memory_id):
                gateway.regions.withdraw(memory_id)
            case RegionDrained(memory_id):
                gateway.regions.remove_drained(memory_id)
            case HealthChanged():
                gateway.health = message
                gateway.models.is_server_live = message.live
                gateway.health_changed.set()
                gateway.health_changed = asyncio.Event()
                self._state_received.set()
            case m.LoadsFailed():
                gateway.failures = message
            case ProcessExited(process=pid):
                # Unread responses of the process may refer to its memory, so it is unmapped later.
                loop = asyncio.get_running_loop()
                loop.call_later(_UNMAP_DELAY_S, gateway.mappings.unmap_process, pid)
            case m.SetLogging(settings):
                logs.apply(LogSettings(**settings))
            case m.SetTracing(settings):
                gateway.tracer.apply_settings(settings)
            case m.RequestTraced():
                gateway.tracer.record_local_request(message)
            case m.SetTokens(tokens):
                gateway.settings = replace(gateway.settings, tokens=tokens)
                for listener in [acceptor.listener for acceptor in self._server.acceptors]:
                    listener.authorisation = listener.authorisation.with_tokens(tokens)
            case m.Ping():
                pass
            case m.Accept():
                self._accept_received.set()
            case m.Drain(has_successor=has_successor):
                gateway.is_draining = True
                self._accept_received.set()
                self._server.drain(self._on_clients_notified, has_successor)
            case m.Stop():
                gateway.is_draining = True
                self._accept_received.set()
                self._stop_received.set()
            case _:
                logger.warning("unexpected message %s from the supervisor", type(message).__name__)

    def _on_clients_notified(self) -> None:
        self._gateway.refuses_requests = True
        self._server.call_when_idle(self._on_idle)

    def _on_idle(self) -> None:
        self._gateway.supervisor.post(m.Drained())
