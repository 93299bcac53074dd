"""Events that are derived: changes of models' states, counters once a second, and a snapshot for
each new subscriber."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shmserve.ipc.messages.events import (
    COUNTERS,
    MODELS,
    SEQUENCES,
    SNAPSHOT,
    ModelChanged,
    ProcessStarted,
)
from shmserve.supervisor.events.publisher import EventPublisher
from shmserve.supervisor.processes.table import Child
from shmserve.supervisor.regions.region import OpenRegion

_COUNTERS_EVERY_S = 1.0

# (state, reason) of (name, version)
States = Mapping[tuple[str, str], tuple[str, str]]


class EventFeed:
    """Derives events, while somebody subscribes to them.

    models(): the state of each version; processes(), regions(), health(): what there is;
    count(): have the counters of every model published.
    """

    def __init__(
        self,
        publisher: EventPublisher,
        models: Callable[[], States],
        processes: Callable[[], list[Child]],
        regions: Callable[[], list[OpenRegion]],
        health: Callable[[], Any],
        count: Callable[[], None],
    ) -> None:
        self._publisher = publisher
        self._models = models
        self._processes = processes
        self._regions = regions
        self._health = health
        self._count = count
        self._known: States = {}
        self._timer: asyncio.TimerHandle | None = None

    def subscribed(self, prefix: str, wanted: bool) -> None:
        """Somebody subscribes to topics that begin with this, or nobody does any more."""
        if wanted and prefix.startswith(SNAPSHOT):
            self._publisher.respond(prefix, self.snapshot())
        if wanted and prefix.startswith(SEQUENCES):
            self._publisher.number(prefix)
        if wanted and MODELS.startswith(prefix):
            self._known = self._models()
        if self._timer is None:
            self._tick()

    def models_changed(self) -> None:
        """A model may be in another state."""
        if self._publisher.wants(MODELS):
            before, self._known = self._known, self._models()
            for event in changes(before, self._known):
                self._publisher.publish(event)

    def snapshot(self) -> Iterator[Any]:
        """The server's state, as events."""
        yield self._health()
        yield from changes({}, self._models())
        for child in self._processes():
            yield ProcessStarted(child.pid, child.title)
        for region in self._regions():
            yield region.registered()

    def _tick(self) -> None:
        self._timer = None
        if self._publisher.wants(COUNTERS):
            self._count()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_COUNTERS_EVERY_S, self._tick)


def changes(before: States, after: States) -> Iterator[ModelChanged]:
    """The difference of two snapshots of the models' states, as events."""
    for name, version in before.keys() - after.keys():
        yield ModelChanged(name, version, "", "")
    for (name, version), state in after.items():
        if before.get((name, version)) != state:
            yield ModelChanged(name, version, *state)
