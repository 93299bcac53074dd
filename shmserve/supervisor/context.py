"""The objects that every part of the supervisor is given, in one record: the settings, the control
socket, the zygotes that fork processes, shared resources, background tasks; and who is sent what.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmserve.common.tasks import in_background
from shmserve.config.server import ServerConfig
from shmserve.ipc.capabilities import Capabilities
from shmserve.ipc.messages.supervision import ModelPublished
from shmserve.logs import LogSettings
from shmserve.supervisor.events.feed import EventPublisher
from shmserve.supervisor.local_clients.server import LocalClientServer
from shmserve.supervisor.processes.control_socket import Address, ControlSocket
from shmserve.supervisor.processes.log_control import LogControl
from shmserve.supervisor.processes.scheduler_hosts import SchedulerHosts
from shmserve.supervisor.processes.table import Child
from shmserve.supervisor.processes.zygote_client import Zygote
from shmserve.supervisor.resources.cache_shares import CacheShares
from shmserve.supervisor.resources.tickets import Tickets
from shmserve.supervisor.resources.workspaces import Workspaces

LOCAL_CLIENT = "local client"


def _callers(news: Any) -> tuple[str, ...]:
    """The roles that are sent a message besides local clients. Ensembles hear of models that serve,
    not of those that are withdrawn: they finish what they have begun there."""
    return ("gateway", "ensemble") if isinstance(news, ModelPublished) else ("gateway",)


@dataclass(frozen=True, slots=True, eq=False)
class SupervisorContext:
    """`front_zygote` forks gateways and schedulers, `worker_zygote`, which has torch, workers.
    `numbers` are those of schedulers."""

    config: ServerConfig
    run_dir: Path
    control: ControlSocket
    front_zygote: Zygote
    worker_zygote: Zygote
    capabilities: Capabilities
    logging: LogControl
    local_clients: LocalClientServer
    events: EventPublisher
    cache_shares: CacheShares
    tickets: Tickets
    workspaces: Workspaces
    hosts: SchedulerHosts
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def log(self) -> LogSettings:
        """The log settings for a process that starts now."""
        return self.logging.settings

    def enrol(self, address: Address, role: str, handler: Callable[[Any], None]) -> None:
        """Route messages from `address` to `handler`; `role` is "gateway", "host", "scheduler",
        "ensemble", "worker" or "workspace"."""

        def handle(message: Any) -> None:
            self.logging.on_message(address, message)
            handler(message)

        self.control.enrol(address, role, handle)

    def broadcast(self, message: Any, *roles: str) -> None:
        """Send a message to every process with one of these roles; LOCAL_CLIENT: to every program
        that is one."""
        if LOCAL_CLIENT in roles:
            self.local_clients.tell(message)
        self.control.broadcast(message, *roles)

    def tell(self, message: Any, ensembles: bool = True) -> None:
        """Send news of models, or of the server's health, to every gateway and local client; those
        of models that serve to `ensembles`, too."""
        roles = _callers(message) if ensembles else ("gateway",)
        self.broadcast(message, *roles, LOCAL_CLIENT)

    async def publish(self, make: Callable[[int], Any]) -> None:
        """Tell every gateway and local client, and every ensemble of a model that serves, what
        `make(number)` gives; returns once it holds in each gateway and ensemble that lives, and in
        the local clients that are not stopped."""
        roles = _callers(make(0))
        told = (self.control.publish(make, *roles), self.local_clients.publish(make))
        await asyncio.gather(*told)

    def background(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine for as long as the server does not end."""
        return in_background(coroutine, self.tasks)

    async def end(self, child: Child | None, patience_s: float) -> None:
        """Wait for a process that was told to stop; kill it when `patience_s` seconds are over."""
        if child is None or not child.alive:
            return
        try:
            await asyncio.wait_for(child.gone(), patience_s)
        except TimeoutError:
            child.kill()
            await child.gone()
