"""Health: whether the server is live and ready, publication of what changes, and signs of life.

The watchdog is a service manager's: the server says that it is alive only when every gateway and
every process that hosts schedulers has acknowledged a ping since the last time.

A process that is gone or stopped is replaced by the server itself. This is for one that hangs, and
for the supervisor: the manager ends the server then, and starts it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shmserve.ipc.messages.publications import HealthChanged
from shmserve.ipc.messages.supervision import Ping
from shmserve.supervisor.context import LOCAL_CLIENT, SupervisorContext
from shmserve.supervisor.host.service_manager import ServiceManager
from shmserve.supervisor.local_clients.memory import LocalMemory
from shmserve.supervisor.models.manager import Publications
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.processes.control_socket import ControlSocket
from shmserve.supervisor.processes.table import ProcessTable
from shmserve.supervisor.regions.region import OpenRegion
from shmserve.supervisor.regions.registry import RegionRegistry

logger = logging.getLogger(__name__)


class Health:
    """Ready once it has started, until it ends, and while every model that should serve does
    (unless not `strict`); live unless it could not begin."""

    def __init__(self, registry: ModelRegistry, *, strict: bool) -> None:
        self._registry = registry
        self._strict = strict
        self.started = False  # everything is loaded that was to be at the start
        self.failed = False  # it could not begin, and will not
        self.exiting = False
        self._current = HealthChanged(live=True, ready=False, exiting=False)

    def current(self) -> HealthChanged:
        """As it was last published."""
        return self._current

    def update(self) -> bool:
        """Look again; whether anything changed."""
        models = not self._strict or self._registry.all_ready()
        ready = self.started and not (self.exiting or self.failed) and models
        before = self._current
        self._current = HealthChanged(live=not self.failed, ready=ready, exiting=self.exiting)
        return self._current != before


class Snapshot:
    """The state that a new gateway or local client is sent."""

    def __init__(
        self,
        publications: Publications,
        regions: RegionRegistry,
        memory: LocalMemory,
        health: Health,
    ) -> None:
        self._publications = publications
        self._regions = regions
        self._memory = memory
        self._health = health

    def for_gateway(self) -> Iterator[Any]:
        """Models, regions, and the health last."""
        yield from self._publications.snapshot()
        yield from self._regions.published()
        yield from self._memory.published()
        yield self._health.current()

    def regions(self) -> list[OpenRegion]:
        """Every region that has a name, and the memory of local clients."""
        return [*self._regions.active(), *self._memory.all()]

    def for_local_client(self) -> Iterator[Any]:
        """Models, and the health last."""
        yield from self._publications.snapshot()
        yield self._health.current()


def announce(context: SupervisorContext, health: Health) -> None:
    """Publish the health, if it has changed: to gateways, local clients and who reads events."""
    if health.update():
        context.broadcast(health.current(), "gateway", LOCAL_CLIENT)
        context.events.publish(health.current())


@dataclass(frozen=True, slots=True)
class Watchdog:
    """Gives a sign of life twice in the time that the manager waits for one, if it does."""

    _control: ControlSocket
    _processes: ProcessTable
    _manager: ServiceManager

    async def run(self) -> None:
        """Until it is cancelled."""
        limit_s = self._manager.watchdog_s
        while limit_s:
            number = self._control.announce(Ping, "gateway", "host")
            try:
                async with asyncio.timeout(limit_s / 4):
                    await self._control.known(number)
            except TimeoutError:
                logger.error(
                    "no sign of life for the service manager, which ends this server %g s after "
                    "the last one: no answer from %s",
                    limit_s,
                    ", ".join(self._missing(number)),
                )
                await self._control.known(number)
                logger.warning("all processes answer again")
            self._manager.alive()
            await asyncio.sleep(limit_s / 2)

    def _missing(self, number: int) -> list[str]:
        missing = self._control.acknowledgements.missing(number)
        children = [child for child in self._processes.all() if child.pid in missing]
        return sorted(f"{child.title} (pid {child.pid})" for child in children)
