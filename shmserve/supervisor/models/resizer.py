"""Has the number of a model's instances follow its load, between the bounds of its configuration:
looks at what schedulers count, asks `Sizing` what is to change, and changes it in place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from shmserve.common.host import processors
from shmserve.errors import ShmserveError
from shmserve.ipc import model_settings
from shmserve.ipc.messages.publications import InstancesChanged
from shmserve.ipc.messages.supervision import CountChange
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.models.instances import Bounds, bounds_of
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.orders import ModelEntry
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.models.room import Room
from shmserve.supervisor.models.sizing import LOOK_EVERY_S, Change, LoadSample, Sizing

logger = logging.getLogger(__name__)

_AGAIN_S = 10.0  # after an instance that could not be started, or that there was no room for


@dataclass(slots=True, eq=False)
class _Watch:
    """One version that serves; `asked` is what its scheduler will say, and there is no change
    before `not_before_s`."""

    sizing: Sizing
    room: Room
    asked: asyncio.Future[dict[str, Any]] | None = None
    not_before_s: float = 0.0
    changing: bool = False


@dataclass(slots=True, eq=False)
class Resizer:
    """Watches the versions of a registry that serve and have bounds."""

    _context: SupervisorContext
    _registry: ModelRegistry
    _watches: WeakKeyDictionary[ModelVersion, _Watch] = field(
        init=False, default_factory=WeakKeyDictionary
    )

    async def run(self) -> None:
        """Look until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Ask the scheduler of each version, unless it has not answered yet. While an order of its
        model is followed, and changes the instances or ends them, it stays as it is."""
        for model in self._registry.models.values():
            for version in model.serving.values():
                bounds = bounds_of(version.config)
                if bounds is not None and version.ready and not model.orders:
                    self._ask(model, version, bounds)

    def _ask(self, model: ModelEntry, version: ModelVersion, bounds: Bounds) -> None:
        watch = self._watches.get(version)
        if watch is None:
            watch = self._watches[version] = _watch(version.config, bounds)
        if watch.asked is None or watch.asked.done():
            watch.asked = version.scheduler.snapshot()
            watch.asked.add_done_callback(partial(self._said, model, version, watch))

    def _said(
        self,
        model: ModelEntry,
        version: ModelVersion,
        watch: _Watch,
        said: asyncio.Future[dict[str, Any]],
    ) -> None:
        if said.cancelled():
            return
        load = LoadSample.of(said.result(), time.monotonic(), version.config.decoupled)
        change = watch.sizing.look(load, version.instances.count)
        if not version.instances.all_serve:
            return
        watch.room.look(version.instances.pids(), load.took_s, load.at_s)
        if change is not None and not (watch.changing or model.orders):
            self._follow(version, watch, change)

    def _follow(self, version: ModelVersion, watch: _Watch, change: Change) -> None:
        before, now_s = version.instances.count, time.monotonic()
        if now_s < watch.not_before_s:
            return
        lacks = watch.room.lacks(change.total) if change.total > before else ""
        if lacks:
            watch.not_before_s = now_s + _AGAIN_S
            text = "model '%s' stays at %d instances, though %s: %s"
            logger.warning(text, version.spec.name, before, change.because, lacks)
            return
        watch.changing = True
        self._context.background(self._change(version, watch, change))

    async def _change(self, version: ModelVersion, watch: _Watch, change: Change) -> None:
        before, name = version.instances.count, version.spec.name
        try:
            await version.instances.resize(change.total)
        except ShmserveError as error:
            watch.not_before_s = time.monotonic() + _AGAIN_S
            text = "model '%s' stays at %d instances: %s"
            logger.error(text, name, version.instances.count, error.message)
            return
        finally:
            watch.changing = False
        after = version.instances.count
        watch.sizing.changed(time.monotonic(), before, after)
        text = "model '%s' has %d instances, was %d: %s"
        logger.info(text, name, after, before, change.because)
        event = InstancesChanged(name, version.spec.version, before, after, change.because)
        self._context.events.publish(event)
        version.scheduler.tell(CountChange(after > before))


def _watch(config: ModelSpec, bounds: Bounds) -> _Watch:
    target_ms = model_settings.target_ms(config.parameters.get(model_settings.TARGET, "")) or 0.0
    batching = config.dynamic_batching
    delay_us = 0 if batching is None else batching.max_queue_delay_microseconds
    sizing = Sizing(*bounds, target_s=target_ms / 1e3, delay_s=delay_us / 1e6)
    count, quota = processors()
    return _Watch(sizing, Room(count if quota is None else min(count, quota)))
