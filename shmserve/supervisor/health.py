"""Health: whether the server is live and ready, and publication of what changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shmserve.ipc.messages.supervision import HealthChanged
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.events.feed import EventFeed
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.regions.registry import RegionRegistry


class Health:
    """Ready once it has started, until it ends, and while every model that should serve does
    (unless not `strict`)."""

    def __init__(self, registry: ModelRegistry, *, strict: bool) -> None:
        self._registry = registry
        self._strict = strict
        self._started = False
        self._exiting = False
        self._current = HealthChanged(live=True, ready=False, exiting=False)

    def current(self) -> HealthChanged:
        """As it was last published."""
        return self._current

    def started(self) -> None:
        """Note that everything is loaded that was to be at the start."""
        self._started = True

    def exiting(self) -> None:
        """Note that the server ends."""
        self._exiting = True

    def update(self) -> bool:
        """Look again; whether anything changed."""
        models = not self._strict or self._registry.all_ready()
        ready = self._started and not self._exiting and models
        before = self._current
        self._current = HealthChanged(live=True, ready=ready, exiting=self._exiting)
        return self._current != before


class Snapshot:
    """The state that a new gateway or local client is sent."""

    def __init__(self, registry: ModelRegistry, regions: RegionRegistry, health: Health) -> None:
        self._registry = registry
        self._regions = regions
        self._health = health

    def for_gateway(self) -> Iterator[Any]:
        """Models, regions, and the health last."""
        yield from self._registry.published()
        yield from self._regions.published()
        yield self._health.current()

    def for_local_client(self) -> Iterator[Any]:
        """Models, and the health last."""
        yield from self._registry.published()
        yield self._health.current()


class Announcer:
    """Publishes changes to gateways, local clients and subscribers of events."""

    def __init__(self, context: SupervisorContext, health: Health, feed: EventFeed) -> None:
        self._context = context
        self._health = health
        self._feed = feed

    def states_changed(self) -> None:
        """Publish the events of models whose states have changed."""
        self._feed.models_changed()

    def health_changed(self) -> None:
        """Publish the health, if it has changed."""
        if self._health.update():
            self._context.tell(self._health.current())
            self._context.events.publish(self._health.current())
