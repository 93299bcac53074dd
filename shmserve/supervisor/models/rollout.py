"""The rollout of versions: new ones take over from old ones without downtime, or are rolled back,
and those that leave are drained.

switch:   new versions are in -> published until every gateway knows that all are ready -> old ones
          retire; or, where a new one breaks for good before that, rolled back
retire:   withdrawn, if nobody serves the version now -> drained and stopped -> what reached it too
          late goes to who serves now
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.messages import supervision as m
from shmserve.supervisor.context import LOCAL_CLIENT, SupervisorContext
from shmserve.supervisor.models.load_planner import LoadPlanner
from shmserve.supervisor.models.registry import UNLOADED, ModelEntry, ModelRegistry, Status
from shmserve.supervisor.models.version.model_version import ModelVersion
from shmserve.supervisor.models.version.spec import ModelState

logger = logging.getLogger(__name__)

_MOST_ANNOUNCEMENTS = 8


def load_failed(model: ModelEntry, reasons: Mapping[str, str]) -> InvalidArgument:
    """The refusal of a load whose versions failed for these reasons."""
    failures = "".join(
        f"version {version} is at UNAVAILABLE state: {reason};\n"
        for version, reason in reasons.items()
    )
    return InvalidArgument(f"load failed for model '{model.name}': {failures}")


@dataclass(slots=True, eq=False)
class Rollout:
    """Puts versions in service and out of it. `on_change` is called when a state changes."""

    _context: SupervisorContext
    _registry: ModelRegistry
    _planner: LoadPlanner
    _on_change: Callable[[], None]
    # The publications that were sent last, by model and number.
    _published: dict[tuple[str, str], m.ModelPublished] = field(init=False, default_factory=dict)

    async def switch(self, model: ModelEntry, new: dict[str, ModelVersion]) -> None:
        """Have `new` serve instead of what does now; that comes back when `new` breaks for good
        before every gateway knows that it is ready. Raises InvalidArgument then."""
        old, model.serving = model.serving, new
        before = model.status
        model.status = {
            number: status
            for number, status in before.items()
            # What failed and is not wanted any more is nobody's concern.
            if number in old or not status.failed
        }
        for number in old.keys() - new.keys():
            model.status[number] = Status(ModelState.UNLOADING)
        for number in old.keys() & new.keys():
            old[number].hand_counts_to(new[number])
        for number, version in new.items():
            try:
                await self._announce(model, version)
            except Unavailable as error:
                model.serving, model.status = old, before
                for former in old.values():
                    former.hand_counts_to(None)
                    self.changed(model, former)
                reason = f"{error.title}: {error.message}"
                for lost in new.keys() - old.keys():
                    model.status[lost] = Status(ModelState.UNAVAILABLE, reason)
                await self.dismiss(model, new)
                raise load_failed(model, {number: reason}) from None
        for number in new:
            model.status[number] = Status(ModelState.READY)
        self._steps_changed(model)
        await self.dismiss(model, old)

    async def published_again(self, model: ModelEntry) -> None:
        """Publish what serves again, which has changed; returns once every gateway knows."""
        for version in model.serving.values():
            await self._publish(model, version)
        self._on_change()

    async def _publish(self, model: ModelEntry, version: ModelVersion) -> None:
        """Returns once every gateway and ensemble knows."""
        publication = partial(self._registry.publication, model, version)
        self._published[model.name, version.spec.version] = publication(0)
        await self._context.publish(publication)

    async def _announce(self, model: ModelEntry, version: ModelVersion) -> None:
        """Returns once it is ready and every gateway knows. Raises Unavailable when it will not
        be, or is never so for long enough to be published."""
        for _ in range(_MOST_ANNOUNCEMENTS):
            await version.until_ready()
            changes = version.changes
            await self._publish(model, version)
            if version.ready and version.changes == changes:
                return
        raise Unavailable("its processes end as soon as they are ready")

    async def dismiss(self, model: ModelEntry, leaving: Mapping[str, ModelVersion]) -> None:
        """Take versions out of service: those that no other serves are withdrawn, and what is in
        flight is finished."""
        for number in leaving.keys() - model.serving.keys():
            self._published.pop((model.name, number), None)
            await self._context.publish(partial(m.ModelWithdrawn, model.name, number))
            self._context.broadcast(m.ModelWithdrawn(model.name, number, 0), "worker")
        self._steps_changed(model)
        self._on_change()
        for version in leaving.values():
            self._context.background(self._retire(model, version))

    async def _retire(self, model: ModelEntry, version: ModelVersion) -> None:
        number = version.spec.version
        if not model.serving:  # the ensembles that need it have been unloaded, and finish
            users = self._registry.ensembles_of(model.name)
            await asyncio.gather(*(ensemble.ended.wait() for ensemble in users))
        await version.stop()
        logger.info("successfully unloaded '%s' version %s", model.name, number)
        # What reached the old scheduler too late to be executed, or died with it, goes to who
        # serves now.
        self._context.broadcast(_lost(model, version), "gateway", "ensemble")
        self._context.broadcast(m.SchedulerLost(version.endpoint, ""), "worker", LOCAL_CLIENT)
        self.remove([version])
        status = model.status.get(number)
        last = all(
            (other.spec.name, other.spec.version) != (model.name, number)
            for other in self._registry.live
        )
        if status is not None and status.state is ModelState.UNLOADING and last:
            model.status[number] = Status(ModelState.UNAVAILABLE, UNLOADED)
        self._on_change()

    def remove(self, ended: Iterable[ModelVersion]) -> None:
        """Remove versions whose last processes have ended, and what was written for them alone."""
        ended = list(ended)
        self._registry.ended(ended)
        used = {version.spec.model_dir for version in self._registry.live}
        for spec in {version.spec.model_dir: version.spec for version in ended}.values():
            if spec.model_dir not in used:
                self._planner.discard(spec)

    def changed(self, model: ModelEntry, version: ModelVersion) -> None:
        """Publish a version whose readiness, endpoint or failure has changed."""
        if model.serving.get(version.spec.version) is version:
            news = self._registry.publication(model, version, 0)
            sent = self._published.get((news.name, news.version))
            if sent is None or news != replace(sent, ready=news.ready):
                # Ensembles are many, and want to know where a model is, and no more.
                moved = sent is None or sent.endpoint != news.endpoint
                self._context.tell(news, ensembles=moved)
            elif news.ready != sent.ready:
                # Alone, so that no gateway forgets the requests that it has prepared.
                ready = m.ReadinessChanged(news.name, news.version, news.ready)
                self._context.broadcast(ready, "gateway")
            self._published[news.name, news.version] = news
            self._steps_changed(model)
            self._on_change()

    def _steps_changed(self, model: ModelEntry) -> None:
        for ensemble in self._registry.ensembles_of(model.name):
            ensemble.changed()


def _lost(model: ModelEntry, version: ModelVersion) -> m.SchedulerLost:
    now = model.serving.get(version.spec.version)
    same = now is not None and now.config.immutable_config == version.config.immutable_config
    return m.SchedulerLost(version.endpoint, now.endpoint if now and same else "")
