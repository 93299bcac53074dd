"""The objects that all parts of the supervisor share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shmserve.common.tasks import in_background
from shmserve.config.server import ServerConfig
from shmserve.ipc.endpoints import Capabilities
from shmserve.logs import LogSettings
from shmserve.supervisor.events import EventPublisher
from shmserve.supervisor.local_clients.server import LocalClientServer
from shmserve.supervisor.processes.control_socket import ControlSocket, LogControl, TraceControl
from shmserve.supervisor.processes.zygote import Zygote
from shmserve.supervisor.resources.rate_limiter import CacheShares, Tickets
from shmserve.supervisor.resources.workspaces import Workspaces

LOCAL_CLIENT = "local client"


@dataclass(slots=True, eq=False)
class SupervisorContext:
    """The objects that all parts of the supervisor share.

    `front_zygote` forks gateways and schedulers. `worker_zygote`, which has imported torch, forks
    workers. A reload replaces `config`, so no other object may store it.
    """

    config: ServerConfig
    run_dir: Path
    control: ControlSocket
    front_zygote: Zygote
    worker_zygote: Zygote
    capabilities: Capabilities
    logging: LogControl
    tracing: TraceControl
    local_clients: LocalClientServer
    events: EventPublisher
    cache_shares: CacheShares
    tickets: Tickets
    workspaces: Workspaces
    scheduler_ids: itertools.count[int] = field(default_factory=partial(itertools.count, 1))
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def log(self) -> LogSettings:
        """Return the log settings for a new process."""
        return self.logging.settings

    def broadcast(self, message: Any, *roles: str) -> None:
        """Send a message to all processes with one of these roles; LOCAL_CLIENT is a role, too."""
        if LOCAL_CLIENT in roles:
            self.local_clients.broadcast(message)
        self.control.broadcast(message, *roles)

    def background(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in a task that is cancelled when the server ends."""
        return in_background(coroutine, self.tasks)
