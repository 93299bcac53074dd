"""What the rooms of the supervisor share: its processes, its socket, its settings."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shmserve import logs
from shmserve.common.tasks import in_background
from shmserve.config.server import ServerConfig
from shmserve.ipc import messages as m
from shmserve.ipc.capabilities import Capabilities
from shmserve.logs import LogSettings
from shmserve.supervisor.events.publisher import EventPublisher
from shmserve.supervisor.local_clients.server import LocalClientServer
from shmserve.supervisor.processes.acknowledgements import Acknowledgements
from shmserve.supervisor.processes.control_socket import Control
from shmserve.supervisor.processes.table import Child, ProcessTable
from shmserve.supervisor.processes.zygote_client import Zygote

logger = logging.getLogger(__name__)

_FIRST_WORDS = m.GatewayReady | m.SchedulerReady | m.WorkerStarted


@dataclass(slots=True, eq=False)
class SupervisorContext:
    """`front_zygote` forks gateways and schedulers, `worker_zygote`, which has torch, workers."""

    config: ServerConfig
    run_dir: Path
    children: ProcessTable
    control: Control
    front_zygote: Zygote
    worker_zygote: Zygote
    capabilities: Capabilities
    log: LogSettings
    local_clients: LocalClientServer | None = None
    acknowledgements: Acknowledgements = field(default_factory=Acknowledgements)
    _handlers: dict[int, tuple[str, Callable[[Any], None]]] = field(default_factory=dict)
    events: EventPublisher = field(default_factory=EventPublisher)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def enrol(self, pid: int, role: str, handler: Callable[[Any], None]) -> None:
        """Give what process `pid` says to `handler`; `role` is "gateway", "scheduler" or
        "worker"."""
        self._handlers[pid] = (role, handler)
        self.control.admit(pid)

    def dismiss(self, pid: int) -> None:
        """The process is gone; what it has said, why it ends for one, is heard before that is
        known."""
        self.control.hear()
        self._handlers.pop(pid, None)
        self.control.forget(pid)

    def knows(self, pid: int) -> bool:
        """Whether `pid` is one of our processes."""
        return pid in self._handlers

    def dispatch(self, pid: int, message: Any) -> None:
        """Hand a message to whoever looks after its sender."""
        entry = self._handlers.get(pid)
        if entry is None:
            return
        if isinstance(message, _FIRST_WORDS):  # what it was started with may have been changed
            self.control.send(pid, m.SetLogging(asdict(self.log)))
        entry[1](message)

    def role_pids(self, *roles: str) -> list[int]:
        """The processes with one of these roles that have made contact."""
        return [
            pid
            for pid, (role, _) in self._handlers.items()
            if role in roles and self.control.connected(pid)
        ]

    def broadcast(self, message: Any, *roles: str) -> None:
        """Send a message to every process with one of these roles; "guest": to every program that
        is one."""
        if "guest" in roles and self.local_clients is not None:
            self.local_clients.tell(message)
        for pid in self.role_pids(*roles):
            self.control.send(pid, message)

    def change_logging(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Log in another way, in every process that there is and will be; the settings, by
        name."""
        settings = replace(self.log, **changes)
        if settings != self.log:
            logger.info("log settings: %s", changes)
            self.log = settings
            logs.apply(settings)
            self.broadcast(m.SetLogging(asdict(settings)), "gateway", "scheduler", "worker")
        return asdict(settings)

    def background(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine for as long as the server does not end."""
        return in_background(coroutine, self.tasks)

    @staticmethod
    async def either(*futures: asyncio.Future[Any]) -> None:
        """Wait until one of the futures is done."""
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)

    async def end(self, child: Child | None, patience_s: float) -> None:
        """Wait for a process that was told to stop; kill it when `patience_s` seconds are over."""
        if child is None or not child.alive:
            return
        try:
            await asyncio.wait_for(child.gone(), patience_s)
        except TimeoutError:
            child.kill()
            await child.gone()
