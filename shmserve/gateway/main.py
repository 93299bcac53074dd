"""The process of a gateway: built on the supervisor's sockets, told everything, told when to end.

GatewayReady ──> the supervisor says what there is, last HealthChanged ──> connections accepted
Drain ──> inferences are refused, what is in flight finishes ──> Drained ──> Stop
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
from pathlib import Path
from typing import Any

import uvloop

from shmserve import logs
from shmserve.gateway import metrics
from shmserve.gateway.app import App
from shmserve.gateway.authorisation import Authorisation, decode_restrictions
from shmserve.gateway.callers import Door, door_kind
from shmserve.gateway.connections import Answer, Server
from shmserve.gateway.dispatch import Dispatcher
from shmserve.gateway.models import ModelTable
from shmserve.gateway.regions import RegionTable
from shmserve.gateway.settings import Settings
from shmserve.gateway.state import Gateway
from shmserve.gateway.supervisor import Supervisor
from shmserve.ipc import endpoints
from shmserve.ipc import messages as m
from shmserve.ipc.arena import Arena
from shmserve.ipc.processes import name_process
from shmserve.ipc.regions import Mappings

logger = logging.getLogger(__name__)

_BACKLOG = 1024


def run(args: dict[str, Any]) -> None:
    """Be gateway `args["index"]` until told to stop.

    `args["fds"]` are the listening sockets, the first `http_count` for HTTP, the others for
    metrics; `settings` is decoded by `Settings`; `run_dir` is where the supervisor's socket is.
    """
    settings = Settings.decode(args["settings"])
    logs.configure(f"gateway {args['index']}", settings.verbose)
    name_process(f"gateway http {args['index']}")
    # The supervisor decides when this ends; a Ctrl-C reaches the whole process group.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sockets = [socket.socket(fileno=fd) for fd in args["fds"]]
    count = args["http_count"]
    uvloop.run(_Process(args, settings, sockets[:count], sockets[count:]).run())


class _Process:
    def __init__(
        self,
        args: dict[str, Any],
        settings: Settings,
        http: list[socket.socket],
        metrics_: list[socket.socket],
    ) -> None:
        self._index: int = args["index"]
        self._run_dir = Path(args["run_dir"])
        self._settings = settings
        self._http = http
        self._metrics = metrics_

    async def run(self) -> None:
        """Serve until `Stop`."""
        self._informed = asyncio.Event()
        self._stopped = asyncio.Event()
        self._listeners: list[asyncio.Server] = []
        self._servers: list[Server] = []
        dispatcher = Dispatcher()
        supervisor = Supervisor(
            endpoints.control(self._run_dir),
            f"gateway.{self._index}.{os.getpid()}",
            self._take,
        )
        self._gateway = Gateway(
            settings=self._settings,
            dispatcher=dispatcher,
            models=ModelTable(dispatcher),
            regions=RegionTable(
                lambda memory_id: supervisor.tell(m.RegionReleased(memory_id)),
                self._settings.shm_overlap,
            ),
            supervisor=supervisor,
            arena=Arena(self._settings.arena_byte_size),
            mappings=Mappings(),
            health=m.HealthChanged(live=True, ready=False, exiting=False),
        )
        self._app = App(self._gateway)
        supervisor.tell(m.GatewayReady(os.getpid()))
        try:
            # A gateway that takes over from one that died would answer 404 before it knows the
            # models.
            await self._informed.wait()
            await self._listen()
            await self._stopped.wait()
        finally:
            self._close()

    async def _listen(self) -> None:
        settings = self._settings
        restrictions = decode_restrictions(settings.http_restricted)
        http = Authorisation(settings.tokens, restrictions)
        scrapes = Authorisation(settings.tokens, {})
        page = functools.partial(metrics.metrics, self._gateway)
        for sock in self._http:
            await self._serve(sock, self._app.handle, http)
        for sock in self._metrics:
            await self._serve(sock, page, scrapes)

    async def _serve(self, sock: socket.socket, answer: Answer, rules: Authorisation) -> None:
        settings = self._settings
        names = frozenset(map(str.lower, (settings.http_address, socket.gethostname())))
        door = Door(door_kind(sock), rules, settings.allow_client_shm, names)
        server = Server(answer, settings, door)
        make = asyncio.get_running_loop()
        if sock.family == socket.AF_UNIX:
            listener = await make.create_unix_server(server, sock=sock, backlog=_BACKLOG)
        else:
            listener = await make.create_server(server, sock=sock, backlog=_BACKLOG)
        self._listeners.append(listener)
        self._servers.append(server)

    def _close(self) -> None:
        for listener in self._listeners:
            listener.close()
        for server in self._servers:
            for connection in server.connections:
                connection.force_close()
        self._gateway.supervisor.close()
        self._gateway.dispatcher.close()

    def _take(self, message: Any) -> None:
        gateway = self._gateway
        match message:
            case m.ModelPublished():
                gateway.models.publish(message)
                self._acknowledge(message.acknowledge)
            case m.ModelWithdrawn(name, version, acknowledge):
                gateway.models.withdraw(name, version)
                self._acknowledge(acknowledge)
            case m.SchedulerLost(endpoint, successor):
                gateway.dispatcher.lost(endpoint, successor)
            case m.RegionPublished():
                gateway.regions.publish(message)
                self._acknowledge(message.acknowledge)
            case m.RegionWithdrawn(memory_id=memory_id, acknowledge=acknowledge):
                gateway.regions.withdraw(memory_id)
                self._acknowledge(acknowledge)
            case m.HealthChanged():
                gateway.health = message
                self._informed.set()
            case m.ProcessExited(pid):
                gateway.mappings.drop_process(pid)
            case m.Drain():
                gateway.draining = True
                self._app.on_idle = self._drained
                if not self._app.active:
                    self._drained()
            case m.Stop():
                self._stopped.set()
            case _:
                logger.warning("the supervisor sent a %s", type(message).__name__)

    def _acknowledge(self, number: int) -> None:
        if number > 0:
            self._gateway.supervisor.tell(m.Acknowledged(number))

    def _drained(self) -> None:
        self._app.on_idle = None
        self._gateway.supervisor.tell(m.Drained())
