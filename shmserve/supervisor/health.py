"""Health: whether the server is live and ready, and publication of what changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shmserve.ipc.messages.events import HealthChanged
from shmserve.supervisor.context import LOCAL_CLIENT, SupervisorContext
from shmserve.supervisor.local_clients.memory import LocalMemory
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.regions.region import OpenRegion
from shmserve.supervisor.regions.registry import RegionRegistry


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
        self, registry: ModelRegistry, regions: RegionRegistry, memory: LocalMemory, health: Health
    ) -> None:
        self._registry = registry
        self._regions = regions
        self._memory = memory
        self._health = health

    def for_gateway(self) -> Iterator[Any]:
        """Models, regions, and the health last."""
        yield from self._registry.publications.snapshot()
        yield from self._regions.published()
        yield from self._memory.published()
        yield self._health.current()

    def regions(self) -> list[OpenRegion]:
        """Every region that has a name, and the memory of local clients."""
        return [*self._regions.active(), *self._memory.all()]

    def for_local_client(self) -> Iterator[Any]:
        """Models, and the health last."""
        yield from self._registry.publications.snapshot()
        yield self._health.current()


def announce(context: SupervisorContext, health: Health) -> None:
    """Publish the health, if it has changed: to gateways, local clients and who reads events."""
    if health.update():
        context.broadcast(health.current(), "gateway", LOCAL_CLIENT)
        context.events.publish(health.current())
