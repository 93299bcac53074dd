"""The model manager: start-up, load, reload without downtime, unload; for each name in the order in
which they are asked for.

load:    what it needs (dependencies) -> itself (model_loader) -> the ensembles that need it
unload:  cancel what is loading -> withdraw from the gateways -> drain -> stop
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from shmserve.common.model_names import check_model_name
from shmserve.common.tasks import either
from shmserve.errors import ShmserveError, Unavailable
from shmserve.ipc.messages import events as m
from shmserve.ipc.messages.supervision import SchedulerLost
from shmserve.supervisor.context import LOCAL_CLIENT, SupervisorContext
from shmserve.supervisor.host.console import StartupReport
from shmserve.supervisor.models.dependencies import Dependencies
from shmserve.supervisor.models.load_planner import LoadPlanner
from shmserve.supervisor.models.model_loader import ModelLoader
from shmserve.supervisor.models.registry import (
    FOLDER,
    Change,
    LoadSource,
    ModelRegistry,
)
from shmserve.supervisor.models.repository import CONFIG_FILE
from shmserve.supervisor.models.rollout import Rollout
from shmserve.supervisor.models.statuses import UNLOADED, Outcome, statuses
from shmserve.supervisor.models.version.model_version import ModelVersion
from shmserve.supervisor.processes.scheduler_hosts import Group

logger = logging.getLogger(__name__)


class ModelManager:
    """Loads and unloads. `on_change` is called when a state has changed, and readiness may have."""

    def __init__(
        self,
        context: SupervisorContext,
        planner: LoadPlanner,
        registry: ModelRegistry,
        on_change: Callable[[], None],
    ) -> None:
        self._context = context
        self._planner = planner
        self._registry = registry
        self._rollout = Rollout(context, registry, planner, on_change)
        hosted = context.config.ensemble_scheduling == "hosted"
        self._dependencies = Dependencies(planner, registry, self.load, hosted)
        group = self._dependencies.group
        self._loader = ModelLoader(context, planner, registry, self._rollout, group, on_change)

    # --- requests

    async def start(self, progress: StartupReport) -> bool:
        """Load what the control mode says; whether all of it could be loaded."""
        config = self._context.config
        for root in config.model_repositories:
            if (root / CONFIG_FILE).is_file():
                logger.warning("'%s' is a model's folder: a repository is what holds it", root)
        found = await asyncio.to_thread(self._planner.scan)
        wanted = list(found)
        if config.model_control_mode == "explicit":
            wanted = list(found) if config.load_models == ("*",) else list(config.load_models)
        await self._dependencies.expect(wanted)
        with self._dependencies.loading(wanted):
            loads = [self._load_at_start(name, progress) for name in wanted]
            return all(await asyncio.gather(*loads))

    async def _load_at_start(self, name: str, progress: StartupReport) -> bool:
        progress.phase(name, "loading")
        try:
            await self.load(name)
        except ShmserveError as error:
            progress.phase(name, f"failed: {error.message}")
            model = self._registry.model(name)
            if not statuses(model):  # not even there: the server is not ready either
                model.outcomes[""] = Outcome(error.message)
            return False
        finally:
            self._dependencies.loaded(name)
        progress.phase(name, "ready")
        return True

    async def load_on_request(self, name: str, config: str, files: dict[str, bytes]) -> None:
        """POST /v2/repository/models/NAME/load."""
        self._require_explicit()
        check_model_name(name)
        self._dependencies.wanted_itself(name)
        try:
            await self.load(name, config, files)
        except ShmserveError as error:
            logger.error("model %s: %s", name, error.message.rstrip("; \n"))
            raise

    async def unload_on_request(self, name: str, dependents: bool) -> None:
        """POST /v2/repository/models/NAME/unload; an unknown model is fine. `dependents`: of an
        ensemble, the models that were loaded for it alone, too."""
        self._require_explicit()
        check_model_name(name)
        alone = self._dependencies.loaded_for(name) if dependents else []
        await self.unload(name)
        for step in alone:
            await self.unload_on_request(step, dependents)

    def _require_explicit(self) -> None:
        if self._context.config.model_control_mode != "explicit":
            raise Unavailable("explicit model load / unload is not allowed if polling is enabled")

    async def index(self, ready: bool) -> list[dict[str, Any]]:
        """The repository index: what the repositories hold and what is loaded."""
        # In a thread: a file system that does not respond must not hold up the process table.
        found = await asyncio.to_thread(self._planner.scan)
        return self._registry.index(found, ready)

    # --- load and unload

    async def load(
        self, name: str, config: str = "", files: dict[str, bytes] | None = None
    ) -> None:
        """Load or reload a model as its folder, or a request's `config` and `files`, has it.

        What it needs is loaded before it, and ensembles that lacked it, or know it in another
        shape, after it. Raises ShmserveError with Triton's texts; what served goes on serving then.
        """
        await self._load(name, LoadSource(config, files or {}))

    async def _load(self, name: str, source: LoadSource) -> None:
        try:
            with self._dependencies.loading([name]), self._registry.changing(name) as change:
                changed = await self._load_in_turn(change, source)
        except ShmserveError as error:
            self._context.events.publish(m.LoadRefused(name, error.message))
            raise
        self._regroup(self._dependencies.group(name))
        for ensemble in self._dependencies.to_load_after(name, changed):
            await self._load_again(ensemble)

    async def _load_in_turn(self, change: Change, source: LoadSource) -> bool:
        """Load a model once it has its turn; whether its configuration is another one then."""
        model, given_up = change.model, change.model.unloaded
        await change.turn()
        before, last = self._registry.configurations(model.name), model.source
        needs = self._dependencies.needs(model.name)
        model.source = source
        try:
            # Others may go on with what it needs when nobody waits for it here any more.
            await self._unless(given_up, self._dependencies.satisfy(model.name, source))
            await self._loader.load(model, source, given_up)
        except BaseException:
            if model.serving:
                model.source = last
                self._dependencies.set_needs(model.name, needs)
            raise
        finally:
            if not self._dependencies.needs(model.name):
                model.source = FOLDER  # nothing has it loaded again: its files are not kept
        return before != self._registry.configurations(model.name)

    async def _unless(self, event: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work, whose exception is raised; it goes on alone after an event."""
        tasks, task = self._context.tasks, asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        happened = asyncio.ensure_future(event.wait())
        try:
            await either(task, happened)
        finally:
            happened.cancel()
        if task.done():
            task.result()

    def _regroup(self, group: Group) -> None:
        """Models that belong to an ensemble's process, or not any more, move."""
        for name in group.names if len(group.names) > 1 else ():
            self._context.background(self._move(name))

    async def _move(self, name: str) -> None:
        with self._registry.changing(name) as change:
            await change.turn()
            model = change.model
            published = partial(self._rollout.published_again, model)
            for version in list(model.serving.values()):
                try:
                    await version.regroup(self._dependencies.group(name), published)
                except ShmserveError as error:
                    logger.error("model '%s' stays where it is: %s", name, error.message)

    async def _load_again(self, ensemble: str) -> None:
        """Load an ensemble of which a step's model was loaded; it serves no more if it does not fit
        that."""
        try:
            await self._load(ensemble, self._registry.model(ensemble).source)
        except ShmserveError as error:
            logger.error("ensemble '%s': %s", ensemble, error.message)
            await self._unload(ensemble)

    async def unload(self, name: str) -> None:
        """Cancel what loads, and have what serves finish what it has; an unknown model is fine.
        Ensembles that need it are unloaded before it, until it is loaded again."""
        group = self._dependencies.group(name)
        self._dependencies.not_wanted(name)
        if self._registry.get(name) is not None:
            await self._unload(name)
        self._regroup(group)

    async def _unload(self, name: str) -> None:
        with contextlib.ExitStack() as entered:
            changes = [
                entered.enter_context(self._registry.changing(each))
                for each in self._registry.with_users(name)
            ]
            # A model that hangs while it loads would keep its turn for ever, or take it next.
            for change in changes:
                change.model.give_up_loads()
            for change in changes:
                await self._unload_in_turn(change)

    async def _unload_in_turn(self, change: Change) -> None:
        model = change.model
        await asyncio.gather(*(v.kill() for v in model.coming.values() if not v.ready))
        await change.turn()
        old, model.serving = model.serving, {}
        model.outcomes = dict.fromkeys({*old, *model.outcomes} - {""}, UNLOADED)
        model.fingerprint = ""
        await self._rollout.dismiss(model, old)

    # --- end

    async def finish_sequences(self) -> None:
        """Begin no sequence any more; returns when those that are open have ended."""
        await asyncio.gather(*(version.finish_sequences() for version in self._registry.live))

    async def stop(self) -> None:
        """Drain and stop everything; what loads is given up."""
        ends: dict[ModelVersion, asyncio.Task[None]] = {}

        def end(version: ModelVersion) -> asyncio.Task[None]:
            if version not in ends:
                before = [end(each) for each in self._registry.ensembles_of(version.spec.name)]
                ends[version] = asyncio.ensure_future(_stop(version, before))
            return ends[version]

        await asyncio.gather(*map(end, self._registry.live))

    async def kill(self) -> None:
        """End everything now; what was in flight is refused."""
        live = self._registry.live
        await asyncio.gather(*(version.kill() for version in live))
        for version in live:
            self._context.broadcast(SchedulerLost(version.endpoint, ""), "gateway", LOCAL_CLIENT)


async def _stop(version: ModelVersion, before: list[asyncio.Task[None]]) -> None:
    """Drain and stop a version once those have ended that need it."""
    await asyncio.gather(*before)
    await (version.stop() if version.loaded else version.kill())
