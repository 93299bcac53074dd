"""The gateways: started on the supervisor's listening sockets, told everything, started again when
they die."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from shmserve.errors import ShmserveError, Unavailable
from shmserve.gateway.grpc.settings import GrpcSettings
from shmserve.gateway.settings import GatewayStart, Settings
from shmserve.ipc import messages as m
from shmserve.ipc.messages.start import encode
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.host.listeners import close
from shmserve.supervisor.processes.restart_backoff import RestartBackoff
from shmserve.supervisor.processes.table import Child
from shmserve.supervisor.processes.zygote import BOOT_FAILED

logger = logging.getLogger(__name__)

_GRPC = "grpc"
_HTTP_ENTRY = "shmserve.gateway.http.main:run"
_GRPC_ENTRY = "shmserve.gateway.grpc.main:run"


class Gateways:
    """All of them. `snapshot()` gives what a new one must know; `on_message(pid, message)`
    takes requests from them."""

    def __init__(
        self,
        host: SupervisorContext,
        http: list[socket.socket],
        metrics: list[socket.socket],
        grpc: list[socket.socket],
        snapshot: Callable[[], Iterable[Any]],
        on_message: Callable[[int, Any], None],
    ) -> None:
        self._host = host
        self._http = http
        self._metrics = metrics
        self._grpc = grpc
        self._snapshot = snapshot
        self._on_message = on_message
        self._children: dict[str, Child] = {}  # by name: "0", "1", ..., "grpc"
        self._rows: defaultdict[str, RestartBackoff] = defaultdict(RestartBackoff)
        self._started: dict[str, float] = {}
        self._drained: dict[int, asyncio.Future[None]] = {}
        self._first_contact: dict[str, asyncio.Future[None]] = {}
        self.stopping = False

    async def start(self) -> None:
        """Start every gateway; returns when all have made contact.

        Raises Unavailable when one cannot run here at all; its log says why.
        """
        names = [str(index) for index in range(self._host.config.gateways)]
        if self._grpc:
            names.append(_GRPC)
        loop = asyncio.get_running_loop()
        self._first_contact = {name: loop.create_future() for name in names}
        await asyncio.gather(*map(self._start, names))
        await asyncio.gather(*self._first_contact.values())

    async def _start(self, name: str) -> None:
        self._started[name] = time.monotonic()
        sockets = [] if name == _GRPC else [*self._http, *self._metrics]
        start = GatewayStart(
            name=name,
            run_dir=self._host.run_dir,
            settings=Settings(**self._host.config.gateway_settings()),
            http_sockets=0 if name == _GRPC else len(self._http),
            grpc=self._grpc_settings() if name == _GRPC else None,
            log=self._host.log,
        )
        child = await self._host.front_zygote.spawn(
            f"gateway {name}",
            _GRPC_ENTRY if name == _GRPC else _HTTP_ENTRY,
            encode(start),
            [sock.fileno() for sock in sockets],
        )
        self._children[name] = child
        self._host.enrol(
            child.pid, "gateway", lambda message: self._from_gateway(name, child, message)
        )

    def _grpc_settings(self) -> GrpcSettings:
        config = self._host.config.grpc
        assert config is not None
        addresses = tuple(sock.getsockname()[:2] for sock in self._grpc)
        return GrpcSettings(addresses, config.tls, config.options)

    def _from_gateway(self, name: str, child: Child, message: Any) -> None:
        match message:
            case m.GatewayReady():
                if not self._first_contact[name].done():
                    self._first_contact[name].set_result(None)
                for item in self._snapshot():
                    self._host.control.send(child.pid, item)
            case m.Acknowledged(number):
                self._host.acknowledgements.acknowledged(child.pid, number)
            case m.Drained():
                drained = self._drained.get(child.pid)
                if drained is not None and not drained.done():
                    drained.set_result(None)
            case _:
                self._on_message(child.pid, message)

    def pids(self) -> list[int]:
        """The gateways that have made contact."""
        return self._host.role_pids("gateway")

    async def publish(self, make: Callable[[int], Any]) -> None:
        """Send what `make(number)` gives to every gateway; returns once it holds in each that
        lives."""
        pids = self.pids()
        number, done = self._host.acknowledgements.begin(set(pids))
        message = make(number)
        for pid in pids:
            self._host.control.send(pid, message)
        await done

    def tell(self, message: Any) -> None:
        """Send news of models, or of the server's health, to every gateway and local client."""
        self._host.broadcast(message, "gateway", "guest")

    async def publish_model(self, make: Callable[[int], Any]) -> None:
        """`publish`, to local clients as well; one that is stopped is not waited for."""
        local_clients = self._host.local_clients
        told = [self.publish(make), *([local_clients.publish(make)] if local_clients else [])]
        await asyncio.gather(*told)

    def process_exited(self, child: Child) -> None:
        """Start a gateway again if `child` was one; the listening sockets are here, so no
        connection is refused."""
        for name, known in self._children.items():
            if known is child and not self.stopping:
                if self._is_hopeless(name, child):
                    return
                logger.error("%s ended (%s); starting it again", child.title, child.exited.result())
                self._host.background(self._restart(name))

    def _is_hopeless(self, name: str, child: Child) -> bool:
        """Whether a gateway ended by itself before its first contact: then so would the next."""
        first = self._first_contact[name]
        if first.done() or child.exited.result() != f"exit status {BOOT_FAILED}":
            return False
        first.set_exception(Unavailable(f"{child.title} ended at its start"))
        first.exception()  # retrieved, also when nobody waits any more
        return True

    async def _restart(self, name: str) -> None:
        await asyncio.sleep(self._rows[name].pause_s(time.monotonic() - self._started[name]))
        if not self.stopping:
            try:
                await self._start(name)
            except (ShmserveError, OSError) as error:  # of no descriptor or memory left, too
                logger.error("gateway %s could not be started: %s", name, error)
                self._host.background(self._restart(name))

    async def drain(self) -> None:
        """Have every gateway finish what is in flight; returns when all are done or gone."""
        self.stopping = True
        loop = asyncio.get_running_loop()
        waits: list[asyncio.Future[Any]] = []
        for child in self._children.values():
            if child.alive and self._host.control.connected(child.pid):
                drained = self._drained[child.pid] = loop.create_future()
                self._host.control.send(child.pid, m.Drain())
                waits.append(asyncio.ensure_future(self._host.either(drained, child.exited)))
        if waits:
            await asyncio.wait(waits)

    async def stop(self) -> None:
        """End every gateway and close the sockets."""
        self.stopping = True
        for sock in (*self._http, *self._metrics, *self._grpc):
            close(sock)
        for child in self._children.values():
            if self._host.control.connected(child.pid):
                self._host.control.send(child.pid, m.Stop())
            else:
                child.kill()  # it does not hear yet
        await asyncio.gather(*(self._host.end(child, 2.0) for child in self._children.values()))
