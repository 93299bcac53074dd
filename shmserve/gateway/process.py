"""The life of a gateway process, whatever its protocol: start-up, readiness, drain, stop.

Started ──> told what there is, last HealthChanged ──> GatewayReady ──> (held: Accept ──>) clients
are let in
Drain ──> nobody is let in ──> clients are told to go, what they have asked is answered ──> Drained
──> Stop
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from shmserve import logs
from shmserve.gateway.client_identity import ListenerRules
from shmserve.gateway.connection_limits import Acceptor
from shmserve.gateway.context import Gateway
from shmserve.gateway.inference.body_arrival import BodyBudget, MallocTrim
from shmserve.gateway.links import RequestDispatcher, SupervisorLink
from shmserve.gateway.model_table import ModelTable
from shmserve.gateway.region_table import RegionTable
from shmserve.gateway.settings import GatewayStart
from shmserve.gateway.tracer import Tracer
from shmserve.ipc import endpoints
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.control_requests import RegionReleased
from shmserve.ipc.messages.publications import (
    HealthChanged,
    ModelOnDemand,
    ModelPublished,
    ModelWithdrawn,
    ProcessExited,
    ReadinessChanged,
    RegionDrained,
    RegionPublished,
    RegionWithdrawn,
    SchedulerLost,
)
from shmserve.ipc.processes import name_process
from shmserve.logs import LogSettings

logger = logging.getLogger(__name__)


_LAST_RESPONSES_S = 1.0
_BACKLOG = 1024


class Frontend(ABC):
    """The protocol server of a gateway: its listeners and connections. `keeps_busy`: with nobody to
    go to, a connection stays while a call is in flight on it, and says why it takes no more."""

    keeps_busy: ClassVar[bool] = False

    def __init__(self) -> None:
        self._accepting: list[asyncio.Server] = []
        self._acceptors: list[Acceptor] = []
        self._refuses = False
        self.listeners: list[ListenerRules] = []

    @abstractmethod
    async def open(self) -> None:
        """Make a server of each listener; the gateway has been told of all models and regions."""

    async def listen(self, sock: socket.socket, acceptor: Acceptor) -> None:
        """Have this make the connections of a listening socket, once they are accepted."""
        loop = asyncio.get_running_loop()
        create = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
        self._accepting.append(
            await create(acceptor, sock=sock, backlog=_BACKLOG, start_serving=False)
        )
        self._acceptors.append(acceptor)

    async def accept(self) -> None:
        """Accept connections, unless they are refused by now."""
        for server in self._accepting:
            if not self._refuses:
                await server.start_serving()

    def health_changed(self) -> None:  # noqa: B027
        """The gateway's `health` has changed."""

    def drain(self, told: Callable[[], None], followed: bool) -> None:
        """Let nobody in any more, and tell who is here to go; `told` is called once no request can
        come but in streams, and on connections that stay. `followed`: there is another server."""
        self._refuse_connections()
        left = ActiveCount()

        def leave() -> None:
            left.active = len(self._acceptors)  # now: they may be being opened
            for acceptor in self._acceptors:
                acceptor.leave(left.left, idle_only=self.keeps_busy and not followed)
            left.when_idle(told)

        # Those that are accepted already are made in this turn of the loop.
        asyncio.get_running_loop().call_soon(leave)

    @abstractmethod
    def when_idle(self, drained: Callable[[], None]) -> None:
        """Call `drained` once no response is to be sent."""

    def _refuse_connections(self) -> None:
        self._refuses = True
        for server in self._accepting:
            server.close()

    async def close(self) -> None:
        """Stop: what is written is still sent; streams that wait for requests are cut off."""
        self._refuse_connections()
        for acceptor in self._acceptors:
            for connection in acceptor.connections:
                connection.force_close()


class ActiveCount:
    """A count of what is under way, `active`, by which a drain knows when that is over."""

    def __init__(self) -> None:
        self.active = 0
        self._idle: Callable[[], None] | None = None

    def left(self) -> None:
        """One less."""
        self.active -= 1
        if not self.active and self._idle is not None:
            self.when_idle(self._idle)

    def when_idle(self, then: Callable[[], None]) -> None:
        """Call `then` once, as soon as nothing is under way: every response is sent."""
        self._idle = then if self.active else None
        if not self.active:
            then()


def prepare(role: str, title: str, log: LogSettings) -> None:
    """Set up this process: its log, its title for `ps`; signals that end it are ignored."""
    logs.configure(role, log)
    name_process(title)
    # The supervisor decides when this ends; a Ctrl-C reaches the whole process group.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


async def serve(start: GatewayStart, make_front: Callable[[Gateway], Frontend]) -> None:
    """Be a gateway until the supervisor says `Stop`."""
    await _Process(start, make_front).run()


class _Process:
    """A gateway, wired; a state machine driven by the supervisor's messages."""

    def __init__(self, start: GatewayStart, make_front: Callable[[Gateway], Frontend]) -> None:
        settings = start.settings
        self._informed = asyncio.Event()
        self._accepted = asyncio.Event()
        self._stopped = asyncio.Event()
        if not start.held:
            self._accepted.set()
        dispatcher = RequestDispatcher()
        trim = MallocTrim()
        supervisor = SupervisorLink(
            endpoints.control(start.run_dir),
            f"gateway.{start.name}.{os.getpid()}",
            self._take,
        )
        self._gateway = Gateway(
            settings=settings,
            dispatcher=dispatcher,
            models=ModelTable(dispatcher),
            regions=RegionTable(self._region_released, settings.shm_overlap),
            supervisor=supervisor,
            arena=Arena(settings.arena_byte_size),
            body_budget=BodyBudget(max(settings.arena_byte_size, settings.max_input_size), trim),
            malloc_trim=trim,
            mappings=Mappings(),
            health=HealthChanged(live=True, ready=False, exiting=False),
            tracer=Tracer(settings.slow_request_ms, "HTTP" if start.grpc is None else "GRPC"),
        )
        self._front = make_front(self._gateway)

    async def run(self) -> None:
        """Serve until `Stop`."""
        gateway = self._gateway
        gateway.supervisor.post(m.Started())
        try:
            # A gateway that takes over from one that died would answer 404 before it knows the
            # models.
            await self._informed.wait()
            await self._front.open()
            gateway.supervisor.post(m.GatewayReady())
            await self._accepted.wait()
            if not gateway.draining:
                await self._front.accept()
            await self._stopped.wait()
        finally:
            await self._front.close()
            gateway.tracer.close()
            gateway.supervisor.close()
            gateway.dispatcher.close()

    def _take(self, message: Any) -> None:
        gateway = self._gateway
        match message:
            case ModelPublished():
                gateway.models.publish(message)
                self._acknowledge(message.acknowledge)
            case ModelOnDemand(name, acknowledge):
                gateway.models.on_demand.add(name)
                self._acknowledge(acknowledge)
            case ReadinessChanged(name, version, ready):
                gateway.models.set_ready(name, version, ready)
            case ModelWithdrawn(name, version, acknowledge):
                gateway.models.withdraw(name, version)
                self._acknowledge(acknowledge)
            case SchedulerLost(endpoint, successor):
                gateway.dispatcher.lost(endpoint, successor)
            case RegionPublished():
                gateway.regions.publish(message)
                self._acknowledge(message.acknowledge)
            case RegionWithdrawn(memory_id=memory_id, acknowledge=acknowledge):
                gateway.regions.withdraw(memory_id)
                self._acknowledge(acknowledge)
            case RegionDrained(memory_id, acknowledge):
                gateway.regions.drained(memory_id)
                self._acknowledge(acknowledge)
            case HealthChanged():
                gateway.health = message
                self._front.health_changed()
                self._informed.set()
            case ProcessExited(process=pid):
                # Responses of it may be here, and still to be read: they lie in its memory.
                later = asyncio.get_running_loop().call_later
                later(_LAST_RESPONSES_S, gateway.mappings.drop_process, pid)
            case m.SetLogging(settings):
                logs.apply(LogSettings(**settings))
            case m.SetTracing(settings):
                gateway.tracer.use(settings)
            case m.RequestTraced():
                gateway.tracer.take(message)
            case m.SetTokens(tokens):
                gateway.settings = replace(gateway.settings, tokens=tokens)
                for listener in self._front.listeners:
                    listener.authorisation = listener.authorisation.with_tokens(tokens)
            case m.Ping(number):
                self._acknowledge(number)
            case m.Accept():
                self._accepted.set()
            case m.Drain(followed=followed):
                gateway.draining = True
                self._accepted.set()
                self._front.drain(self._told, followed)
            case m.Stop():
                gateway.draining = True
                self._accepted.set()
                self._stopped.set()
            case _:
                logger.warning("the supervisor sent a %s", type(message).__name__)

    def _region_released(self, memory_id: int) -> None:
        self._gateway.supervisor.post(RegionReleased(memory_id))

    def _acknowledge(self, number: int) -> None:
        if number > 0:
            self._gateway.supervisor.post(m.Acknowledged(number))

    def _told(self) -> None:
        self._gateway.refusing = True
        self._front.when_idle(self._drained)

    def _drained(self) -> None:
        self._gateway.supervisor.post(m.Drained())
