"""The load of one model that has its turn: plan every version -> start all (or none) -> switch to
them (rollout); or, where nothing but instances differs, update those that serve.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from shmserve.errors import Internal, InvalidArgument, ShmserveError, Unavailable
from shmserve.model_config import GraphProblem
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.models.load_planner import LoadPlanner
from shmserve.supervisor.models.registry import LoadSource, ModelEntry, ModelRegistry
from shmserve.supervisor.models.rollout import Rollout, load_failed
from shmserve.supervisor.models.statuses import DUPLICATE, Outcome, statuses
from shmserve.supervisor.models.version.model_version import InstanceUpdate, ModelVersion
from shmserve.supervisor.models.version.spec import VersionSpec
from shmserve.supervisor.processes.scheduler_hosts import Group

logger = logging.getLogger(__name__)

_UNLOADED_MEANWHILE = "the model is unloaded"


@dataclass(slots=True, eq=False)
class ModelLoader:
    """Loads models; `group(name)`: those that are scheduled beside one. `on_change` is called when
    a load begins, and when it fails."""

    _context: SupervisorContext
    _planner: LoadPlanner
    _registry: ModelRegistry
    _rollout: Rollout
    _group: Callable[[str], Group]
    _on_change: Callable[[], None]

    async def load(self, model: ModelEntry, source: LoadSource, given_up: asyncio.Event) -> None:
        """Load or reload a model of its `source`, unless that is `given_up` by the time that it is
        read. Raises ShmserveError; what served goes on serving then."""
        model.may_pass = False
        specs = await self._plan(model, source)
        if given_up.is_set():
            for spec in specs:
                self._planner.discard(spec)
            reason = f"{Unavailable.title}: {_UNLOADED_MEANWHILE}"
            raise load_failed(model, {spec.version: reason for spec in specs})
        updates = _instance_updates(model, specs)
        if updates is not None:
            await self._update_instances(model, updates)
        else:
            await self._deploy(model, specs)

    async def _plan(self, model: ModelEntry, source: LoadSource) -> list[VersionSpec]:
        name = model.name
        try:
            # Before it is read: a file that is changed meanwhile is seen by the next look.
            model.fingerprint = await asyncio.to_thread(self._planner.fingerprint, name)
            return await asyncio.to_thread(self._planner.plan, name, *source)
        except ShmserveError as error:
            ambiguous = self._planner.is_ambiguous(name)
            if ambiguous:
                logger.error(
                    "failed to poll model '%s': not unique across all model repositories", name
                )
            # Of a name that no repository has, nothing is kept: anybody may have mistyped it.
            if not model.serving and (statuses(model) or self._planner.has(name)):
                model.outcomes = {"": DUPLICATE if ambiguous else Outcome(error.message)}
                self._rollout.publish(model)
            raise

    async def _deploy(self, model: ModelEntry, specs: list[VersionSpec]) -> None:
        model.outcomes.pop("", None)
        changed = partial(self._rollout.changed, model)
        group = self._group(model.name)
        new = [ModelVersion(self._context, spec, changed, self._registry, group) for spec in specs]
        model.coming = {version.spec.version: version for version in new}
        self._registry.created(new)
        self._on_change()
        for spec in specs:
            logger.info("loading: %s:%s", model.name, spec.version)
        try:
            await self._start_all(model, new)
            await self._rollout.switch(model, model.coming)
        finally:
            model.coming = {}
        logger.info("successfully loaded '%s'", model.name)

    async def _start_all(self, model: ModelEntry, new: list[ModelVersion]) -> None:
        """Start every version, or, when one fails, none; raises InvalidArgument then."""
        results = await asyncio.gather(*(v.start() for v in new), return_exceptions=True)
        failures = _failures(model, dict(zip((v.spec.version for v in new), results, strict=True)))
        graph = next((r for r in results if isinstance(r, GraphProblem)), None)
        if failures:
            failed = [result for result in results if isinstance(result, BaseException)]
            model.may_pass = all(isinstance(error, Unavailable) for error in failed)
            await asyncio.gather(*(v.kill() for v in new))
            self._rollout.remove(new)
            model.coming = {}
            for number in {version.spec.version for version in new} - model.serving.keys():
                model.outcomes[number] = Outcome(failures.get(number, "another version failed"))
            self._rollout.publish(model)
            self._on_change()
            logger.error("failed to load '%s'", model.name)
            if graph is not None:
                raise InvalidArgument(f"load failed for model '{model.name}': {graph.message}\n")
            raise load_failed(model, failures)

    async def _update_instances(
        self, model: ModelEntry, updates: dict[str, InstanceUpdate]
    ) -> None:
        """Update every version, or, when one fails, none; raises InvalidArgument then. Returns once
        every gateway knows."""
        model.updates = list(updates.values())
        try:
            adding = (update.add() for update in model.updates)
            results = await asyncio.gather(*adding, return_exceptions=True)
            failures = _failures(model, dict(zip(updates, results, strict=True)))
            if failures:
                raise load_failed(model, failures)
        except BaseException:
            for update in model.updates:
                update.revert()
            raise
        finally:
            model.updates = []
        for version, update in updates.items():
            model.serving[version].commit(update)
            logger.info("updated the instances of '%s' version %s", model.name, version)
        await self._rollout.published_again(model)


def _instance_updates(
    model: ModelEntry, specs: Sequence[VersionSpec]
) -> dict[str, InstanceUpdate] | None:
    """The update of each version that serves, or None where another deployment is needed: other
    versions, one that is broken, or another difference than in instances; or none at all."""
    if {spec.version for spec in specs} != model.serving.keys():
        return None
    found: dict[str, InstanceUpdate] = {}
    for spec in specs:
        update = model.serving[spec.version].update_to(spec)
        if update is None:
            return None
        found[spec.version] = update
    return found


def _failures(model: ModelEntry, results: Mapping[str, object]) -> dict[str, str]:
    """The reasons of the versions whose result is an exception; they are logged."""
    failures: dict[str, str] = {}
    for version, result in results.items():
        if isinstance(result, BaseException):
            if not isinstance(result, ShmserveError):
                logger.error("loading failed", exc_info=result)
                result = Internal("internal error")
            reason = failures[version] = f"{result.title}: {result.message}"
            logger.error("failed to load '%s' version %s: %s", model.name, version, reason)
    return failures
