"""The rollout of versions: new ones take over from old ones without downtime, or are rolled back,
and those that leave are drained.

switch:   new versions are published -> every gateway knows them, and all are ready -> old ones
          retire; or, where a new one breaks for good before that, rolled back
retire:   withdrawn, if nobody serves the version now -> drained and stopped -> what reached it too
          late goes to who serves now
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.messages import supervision as m
from shmserve.supervisor.context import LOCAL_CLIENT, SupervisorContext
from shmserve.supervisor.models.load_planner import LoadPlanner
from shmserve.supervisor.models.registry import ModelEntry, ModelRegistry
from shmserve.supervisor.models.statuses import UNLOADED, Outcome
from shmserve.supervisor.models.version.model_version import ModelVersion

logger = logging.getLogger(__name__)


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

    async def switch(self, model: ModelEntry, new: dict[str, ModelVersion]) -> None:
        """Have `new` serve instead of what does now; that comes back when `new` breaks for good
        before every gateway knows that it is ready. Raises InvalidArgument then."""
        old = model.serving
        for number in old.keys() & new.keys():
            old[number].hand_counts_to(new[number])
        model.offered = True
        try:
            await self._offer(model)
        except Unavailable as error:
            model.coming, model.offered = {}, False
            for former in old.values():
                former.hand_counts_to(None)
            reason = f"{error.title}: {error.message}"
            failed = [number for number, version in new.items() if not version.ready]
            model.outcomes |= dict.fromkeys(new.keys() - old.keys(), Outcome(reason))
            await self.dismiss(model, new)
            raise load_failed(model, dict.fromkeys(failed[:1], reason)) from None
        model.serving, model.coming, model.offered = new, {}, False
        # What failed and is not wanted any more is nobody's concern.
        model.outcomes = {
            number: outcome
            for number, outcome in model.outcomes.items()
            if number not in new and not outcome.failed
        }
        model.outcomes |= dict.fromkeys(old.keys() - new.keys(), UNLOADED)
        await self.dismiss(model, old)

    async def published_again(self, model: ModelEntry) -> None:
        """Publish what serves, which has changed; returns once every gateway knows."""
        self.publish(model)
        await self._known(model)

    def publish(self, model: ModelEntry) -> None:
        """Have everybody know what serves, as far as that differs from what they know."""
        self._registry.publish(self._context, model)
        for ensemble in self._registry.ensembles_of(model.name):
            ensemble.changed()
        self._on_change()

    async def _known(self, model: ModelEntry) -> None:
        """Returns once every gateway and ensemble knows what was published last."""
        while not self._registry.publications.known(self._context, model.name):
            await self._context.control.acknowledgements.news()

    async def _offer(self, model: ModelEntry) -> None:
        """Publish what is offered; returns once all of it is ready, and every gateway knows. Raises
        Unavailable when it will not be."""
        self.publish(model)
        new = model.coming.values()
        while True:
            await self._known(model)
            for version in new:
                await version.until_ready()
            if all(v.ready for v in new) and self._registry.publications.known(
                self._context, model.name
            ):
                return

    async def dismiss(self, model: ModelEntry, leaving: Mapping[str, ModelVersion]) -> None:
        """Take versions out of service: those that no other serves are withdrawn, and what is in
        flight is finished."""
        model.retiring += leaving.values()
        self.publish(model)
        await self._known(model)
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
        model.retiring.remove(version)
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
        if model.shown.get(version.spec.version) is version:
            self.publish(model)


def _lost(model: ModelEntry, version: ModelVersion) -> m.SchedulerLost:
    now = model.serving.get(version.spec.version)
    same = now is not None and now.config.immutable_config == version.config.immutable_config
    return m.SchedulerLost(version.endpoint, now.endpoint if now and same else "")
