"""The gateway processes: started on the supervisor's listening sockets, restarted when they die."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from shmserve.common.accelerators import cuda_devices
from shmserve.common.access.auth_tokens import encode_restrictions
from shmserve.config.server import ServerConfig
from shmserve.errors import ShmserveError, Unavailable
from shmserve.gateway.settings import GatewaySettings, GatewayStart, GrpcSettings
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.start import encode
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.host.listeners import Listeners
from shmserve.supervisor.processes.table import Child, RestartBackoff
from shmserve.supervisor.processes.zygote import BOOT_FAILED

logger = logging.getLogger(__name__)

_GRPC = "grpc"
_HTTP_ENTRY = "shmserve.gateway.http.main:run"
_GRPC_ENTRY = "shmserve.gateway.grpc.main:run"


class Gateways:
    """All of them. `snapshot()` gives what a new one must know."""

    def __init__(
        self,
        context: SupervisorContext,
        listeners: Listeners,
        snapshot: Callable[[], Iterable[Any]],
    ) -> None:
        self._context = context
        self._listeners = listeners
        self._snapshot = snapshot
        self._children: dict[str, Child] = {}  # by name: "0", "1", ..., "grpc"
        self._backoffs: defaultdict[str, RestartBackoff] = defaultdict(RestartBackoff)
        self._started: dict[str, float] = {}
        self._drained: dict[int, asyncio.Future[None]] = {}
        self._first_contact: dict[str, asyncio.Future[None]] = {}
        self._stopping = False

    async def start(self) -> None:
        """Start every gateway; returns when all have made contact.

        Raises Unavailable when one cannot run here at all; its log says why.
        """
        names = [str(index) for index in range(self._context.config.gateways)]
        if self._listeners.grpc:
            names.append(_GRPC)
        loop = asyncio.get_running_loop()
        self._first_contact = {name: loop.create_future() for name in names}
        await asyncio.gather(*map(self._start, names))
        await asyncio.gather(*self._first_contact.values())

    async def _start(self, name: str) -> None:
        self._started[name] = time.monotonic()
        sockets = [] if name == _GRPC else [*self._listeners.http, *self._listeners.metrics]
        start = GatewayStart(
            name=name,
            run_dir=self._context.run_dir,
            settings=_settings(self._context.config),
            http_sockets=0 if name == _GRPC else len(self._listeners.http),
            grpc=self._grpc_settings() if name == _GRPC else None,
            log=self._context.log,
        )
        child = await self._context.front_zygote.spawn(
            f"gateway {name}",
            _GRPC_ENTRY if name == _GRPC else _HTTP_ENTRY,
            encode(start),
            [sock.fileno() for sock in sockets],
        )
        self._children[name] = child
        self._context.enrol(child.pid, "gateway", partial(self._from_gateway, name, child))

    def _grpc_settings(self) -> GrpcSettings:
        config = self._context.config.grpc
        assert config is not None
        addresses = tuple(sock.getsockname()[:2] for sock in self._listeners.grpc)
        return GrpcSettings(addresses, config.tls, config.options)

    def _from_gateway(self, name: str, child: Child, message: Any) -> None:
        match message:
            case m.GatewayReady():
                if not self._first_contact[name].done():
                    self._first_contact[name].set_result(None)
                for item in self._snapshot():
                    self._context.control.send(child.pid, item)
            case m.Drained():
                drained = self._drained.get(child.pid)
                if drained is not None and not drained.done():
                    drained.set_result(None)
            case _:
                logger.warning("dropped a %s from a gateway", type(message).__name__)

    def process_exited(self, child: Child) -> None:
        """Start a gateway again if `child` was one; the listening sockets are here, so no
        connection is refused."""
        for name, known in self._children.items():
            if known is child and not self._stopping:
                if self._is_hopeless(name, child):
                    return
                logger.error("%s ended (%s); starting it again", child.title, child.exited.result())
                self._context.background(self._restart(name))

    def _is_hopeless(self, name: str, child: Child) -> bool:
        """Whether a gateway ended by itself before its first contact: then so would the next."""
        first = self._first_contact[name]
        if first.done() or child.exited.result() != f"exit status {BOOT_FAILED}":
            return False
        first.set_exception(Unavailable(f"{child.title} ended at its start"))
        first.exception()  # retrieved, also when nobody waits any more
        return True

    async def _restart(self, name: str) -> None:
        await asyncio.sleep(self._backoffs[name].pause_s(time.monotonic() - self._started[name]))
        if not self._stopping:
            try:
                await self._start(name)
            except (ShmserveError, OSError) as error:  # of no descriptor or memory left, too
                logger.error("gateway %s could not be started: %s", name, error)
                self._context.background(self._restart(name))

    def retire(self) -> None:
        """Start no gateway again."""
        self._stopping = True

    async def drain(self) -> None:
        """Have every gateway finish what is in flight; returns when all are done or gone."""
        self._stopping = True
        loop = asyncio.get_running_loop()
        waits: list[asyncio.Future[Any]] = []
        for child in self._children.values():
            if child.alive and self._context.control.connected(child.pid):
                drained = self._drained[child.pid] = loop.create_future()
                self._context.control.send(child.pid, m.Drain())
                waits.append(asyncio.ensure_future(self._context.either(drained, child.exited)))
        if waits:
            await asyncio.wait(waits)

    async def stop(self) -> None:
        """End every gateway and close the sockets."""
        self._stopping = True
        self._listeners.close()
        for child in self._children.values():
            if self._context.control.connected(child.pid):
                self._context.control.send(child.pid, m.Stop())
            else:
                child.kill()  # it does not hear yet
        await asyncio.gather(*(self._context.end(child, 2.0) for child in self._children.values()))


def _settings(config: ServerConfig) -> GatewaySettings:
    return GatewaySettings(
        id=config.server_id,
        max_input_size=config.http.max_input_size,
        request_timeout_us=config.request_timeout_us,
        arena_byte_size=config.arena_byte_size,
        body_timeout_s=config.http.body_timeout_s,
        http_address=config.http.address,
        tokens=dict(config.tokens),
        http_restricted=encode_restrictions(config.http_restricted),
        grpc_restricted=encode_restrictions(config.grpc_restricted),
        allow_client_shm=config.shm.allow,
        shm_overlap=config.shm.overlap,
        cuda_devices=cuda_devices(config.visible_devices),
        http_header_forward_pattern=config.http_header_forward_pattern,
        grpc_header_forward_pattern=config.grpc_header_forward_pattern,
        counter_latencies=config.metrics.counter_latencies,
        histogram_latencies=config.metrics.histogram_latencies,
        summary_latencies=config.metrics.summary_latencies,
    )
