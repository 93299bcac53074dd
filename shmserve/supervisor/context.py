"""The objects that all parts of the supervisor share, and their common ways to send messages."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from shmserve.common.tasks import in_background
from shmserve.config.server import ServerConfig
from shmserve.errors import Internal, ShmserveError
from shmserve.ipc.endpoints import Capabilities
from shmserve.ipc.messages.control_requests import Answered, Refused
from shmserve.ipc.messages.publications import (
    ModelPublication,
    ModelPublished,
    ModelWithdrawn,
    ReadinessChanged,
)
from shmserve.logs import LogSettings
from shmserve.supervisor.events import EventPublisher
from shmserve.supervisor.local_clients.server import LocalClientServer
from shmserve.supervisor.processes.children import Child
from shmserve.supervisor.processes.control_socket import (
    Address,
    ControlSocket,
    LogControl,
    TraceControl,
)
from shmserve.supervisor.processes.zygote import Zygote
from shmserve.supervisor.resources.rate_limiter import CacheShares, Tickets
from shmserve.supervisor.resources.workspaces import Workspaces

logger = logging.getLogger(__name__)

LOCAL_CLIENT = "local client"
# Handles a request of the process `pid`, and returns the payload of the response.
RequestHandler = Callable[[int, Any], Awaitable[dict[str, Any] | None]]


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

    def register_peer(self, address: Address, role: str, handler: Callable[[Any], None]) -> None:
        """Route messages from `address` to `handler`; send it settings after its first message."""

        def handle(message: Any) -> None:
            self.logging.on_message(address, message)
            if role == "gateway":
                self.tracing.on_message(address, message)
            handler(message)

        self.control.register_peer(address, role, handle)

    def serve_requests(self, types: Iterable[type[Any]], handle: RequestHandler) -> None:
        """Handle requests of these types; respond `Answered`, or `Refused` if `handle` fails."""

        def start(pid: int, request: Any) -> None:
            self.background(self._respond(handle, pid, request))

        self.control.serve(types, start)

    async def _respond(self, handle: RequestHandler, pid: int, request: Any) -> None:
        response: Answered | Refused
        try:
            response = Answered(request.id, await handle(pid, request) or {})
        except ShmserveError as error:
            response = Refused.of(request.id, error)
        except Exception:
            logger.exception("the request %s of process %d failed", type(request).__name__, pid)
            response = Refused.of(request.id, Internal())
        self.control.send(pid, response)

    def broadcast(self, message: Any, *roles: str) -> None:
        """Send a message to all processes with one of these roles; LOCAL_CLIENT is a role, too."""
        if LOCAL_CLIENT in roles:
            self.local_clients.broadcast(message)
        self.control.broadcast(message, *roles)

    def announce(self, message: ModelPublication | ModelWithdrawn) -> int:
        """Announce a change of a model to every gateway and local client.

        Ensembles receive published models, too, but no withdrawals, since they finish their
        requests first. Workers that call models receive withdrawals without acknowledgement.

        Returns:
            The number that the receivers acknowledge, see `is_acknowledged`.
        """

        def numbered(number: int) -> ModelPublication | ModelWithdrawn:
            return replace(message, ack_number=number)

        is_published = isinstance(message, ModelPublished)
        roles = ("gateway", "ensemble") if is_published else ("gateway",)
        number = self.control.announce(numbered, *roles, extra_peers=self.local_clients.numbers())
        self.local_clients.announce(numbered(number))
        if isinstance(message, ModelWithdrawn):
            self.control.broadcast(message, "caller")
        return number

    def is_acknowledged(self, number: int) -> bool:
        """Return whether all receivers have acknowledged the change with this number."""
        return self.control.acknowledgements.is_acknowledged(number)

    def publish_readiness(self, message: ReadinessChanged) -> None:
        """Send the readiness of a model to every gateway."""
        self.control.broadcast(message, "gateway")

    def background(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in a task that is cancelled when the server ends."""
        return in_background(coroutine, self.tasks)

    async def end(self, child: Child | None, patience_s: float) -> bool:
        """Wait for a process that was sent `Stop`; kill it after `patience_s` seconds.

        Returns:
            Whether the process exited by itself.
        """
        if child is None or not child.alive:
            return True
        child.is_stopping = True
        try:
            async with asyncio.timeout(patience_s):
                await child.until_exit()
        except TimeoutError:
            child.kill()
            await child.until_exit()
            return False
        return True
