"""Health: liveness and readiness of the server, their publication, and the watchdog.

The watchdog belongs to the service manager. The server sends a keep-alive message only if every
gateway and every scheduler host has acknowledged a ping since the previous one.

The server itself restarts a process that exited or was stopped. The watchdog covers processes that
hang, and the supervisor: the service manager then restarts the whole server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shmserve.ipc.messages.publications import HealthChanged
from shmserve.ipc.messages.supervision import LoadsFailed, Ping
from shmserve.supervisor.context import LOCAL_CLIENT, SupervisorContext
from shmserve.supervisor.host.service_manager import ServiceManager
from shmserve.supervisor.local_clients.server import LocalMemory
from shmserve.supervisor.models.manager import ModelPublisher
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.processes.children import ProcessTable
from shmserve.supervisor.processes.control_socket import ControlSocket
from shmserve.supervisor.regions.region import OpenRegion
from shmserve.supervisor.regions.registry import RegionRegistry

logger = logging.getLogger(__name__)


class Health:
    """The health of the server.

    The server is ready between its start and its drain. With `requires_models`, all models that
    should serve must also be ready. The server is live unless its start failed. `failures` are the
    models that could not be loaded.
    """

    def __init__(self, registry: ModelRegistry, *, requires_models: bool) -> None:
        self._registry = registry
        self._requires_models = requires_models
        self.has_started = False  # whether the models of the start are loaded
        self.has_failed = False  # whether the start has failed
        self.is_exiting = False  # whether the server ends without a successor
        self._last_health = HealthChanged(live=True, ready=False, exiting=False, started=False)
        self.failures = LoadsFailed([], 0)

    def current(self) -> HealthChanged:
        """Return the last published health."""
        return self._last_health

    def update(self) -> bool:
        """Compute the health, and return whether it has changed."""
        models_ready = not self._requires_models or self._registry.all_ready()
        is_ready = self.has_started and not (self.is_exiting or self.has_failed) and models_ready
        old_health = self._last_health
        live = not self.has_failed
        self._last_health = HealthChanged(live, is_ready, self.is_exiting, self.has_started)
        return self._last_health != old_health

    def update_failures(self) -> bool:
        """Update the models that failed to load, and return whether they have changed."""
        old_failures, self.failures = self.failures, self._registry.failures()
        return self.failures != old_failures


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state that a new gateway or a new local client receives."""

    _publisher: ModelPublisher
    _regions: RegionRegistry
    _memory: LocalMemory
    _health: Health

    def for_gateway(self) -> Iterator[Any]:
        """Yield the messages for a new gateway: models, regions, and finally the health."""
        yield from self._publisher.snapshot()
        yield from self._regions.publications()
        yield from self._memory.publications()
        yield self._health.failures
        yield self._health.current()

    def regions(self) -> list[OpenRegion]:
        """Return every active region, and the memory of local clients."""
        return [*self._regions.active_regions(), *self._memory.all()]

    def for_local_client(self) -> Iterator[Any]:
        """Yield the messages for a new local client: models, and finally the health."""
        yield from self._publisher.snapshot()
        yield self._health.current()


def announce(context: SupervisorContext, health: Health) -> None:
    """Publish the health to gateways, local clients and subscribers of events if it has changed."""
    if health.update():
        context.broadcast(health.current(), "gateway", LOCAL_CLIENT)
        context.events.publish(health.current())
    if health.update_failures():
        context.broadcast(health.failures, "gateway")


@dataclass(frozen=True, slots=True)
class Watchdog:
    """The sender of keep-alive messages to the service manager, two in each required interval."""

    _control: ControlSocket
    _processes: ProcessTable
    _service_manager: ServiceManager

    async def run(self) -> None:
        """Send keep-alive messages until the task is cancelled."""
        limit_s, acknowledgements = self._service_manager.watchdog_s, self._control.acknowledgements
        while limit_s:
            number = self._control.announce(Ping, "gateway", "host")
            try:
                async with asyncio.timeout(limit_s / 4):
                    await acknowledgements.until_acknowledged(number)
            except TimeoutError:
                logger.error(
                    "the service manager is not notified, and ends this server %g s after the "
                    "last notification, because these processes do not respond: %s",
                    limit_s,
                    ", ".join(self._missing_peers(number)),
                )
                await acknowledgements.until_acknowledged(number)
                logger.warning("all processes respond again")
            self._service_manager.notify_alive()
            await asyncio.sleep(limit_s / 2)

    def _missing_peers(self, number: int) -> list[str]:
        missing_pids = self._control.acknowledgements.missing(number)
        children = [child for child in self._processes.all() if child.pid in missing_pids]
        return sorted(f"{child.title} (pid {child.pid})" for child in children)
