"""The model manager: start-up, load, reload without downtime, unload, end; the doors of the
lifecycle, in which orders are given and waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from shmserve.common.model_names import check_model_name
from shmserve.errors import ShmserveError, Unavailable
from shmserve.ipc.messages.publications import SchedulerLost
from shmserve.supervisor.context import LOCAL_CLIENT, SupervisorContext
from shmserve.supervisor.models.executor import LifecycleExecutor
from shmserve.supervisor.models.load_planner import LoadPlanner
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.on_demand import OnDemand
from shmserve.supervisor.models.orders import FOLDER, LoadSource
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.models.repository import CONFIG_FILE

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
        self._on_change = on_change
        self._executor = LifecycleExecutor(context, planner, registry, self._changed)
        self._lifecycle = self._executor.lifecycle
        self.on_demand = OnDemand(context, registry, self._executor)

    def _changed(self) -> None:
        self.on_demand.changed()
        self._on_change()

    # --- requests

    async def start(self) -> bool:
        """Load what the control mode says, or have it on demand; whether all could be loaded."""
        config = self._context.config
        for root in config.model_repositories:
            if (root / CONFIG_FILE).is_file():
                logger.warning("'%s' is a model's folder: a repository is what holds it", root)
        found = await asyncio.to_thread(self._planner.scan)
        wanted = list(found)
        if not found and config.model_control_mode != "explicit":
            logger.warning(
                "no model in %s: one is a folder there, with a configuration (config.pbtxt) or a "
                "version's folder (1)",
                ", ".join(f"'{root}'" for root in config.model_repositories),
            )
        if config.model_control_mode == "explicit":
            wanted = list(found) if config.load_models == ("*",) else list(config.load_models)
        if config.load_on_demand:
            wanted = wanted if config.model_control_mode == "explicit" else []
            self._lifecycle.offer(found.keys() - set(wanted))
        self._lifecycle.expect(await asyncio.to_thread(self._steps, wanted))
        # All at once: whoever needs one of them waits for it.
        orders = [self._lifecycle.load(name) for name in wanted]
        await asyncio.gather(*map(self._executor.over, orders), return_exceptions=True)
        return all(order.error is None for order in orders)

    def _steps(self, names: list[str]) -> dict[str, list[str]]:
        return {
            name: list(dict.fromkeys(step.name for step in self._planner.steps(name)))
            for name in names
        }

    async def load_on_request(self, name: str, config: str, files: dict[str, bytes]) -> None:
        """POST /v2/repository/models/NAME/load."""
        self._require_explicit()
        check_model_name(name)
        try:
            await self.load(name, LoadSource(config, files or {}))
        except ShmserveError as error:
            logger.error("model %s: %s", name, error.message.rstrip("; \n"))
            raise

    async def unload_on_request(self, name: str, dependents: bool) -> None:
        """POST /v2/repository/models/NAME/unload; an unknown model is fine. `dependents`: of an
        ensemble, the models that were loaded for it alone, too."""
        self._require_explicit()
        check_model_name(name)
        alone = self._lifecycle.loaded_for(name) if dependents else []
        await self.unload(name)
        for step in alone:
            await self.unload_on_request(step, dependents)

    def _require_explicit(self) -> None:
        mode = self._context.config.model_control_mode
        if mode != "explicit":
            raise Unavailable(
                "explicit model load / unload is not allowed if polling is enabled "
                f"(--model-control-mode is {mode}, and has to be explicit)"
            )

    async def index(self, ready: bool) -> list[dict[str, Any]]:
        """The repository index: what the repositories hold and what is loaded."""
        # In a thread: a file system that does not respond must not hold up the process table.
        found = await asyncio.to_thread(self._planner.scan)
        return self._registry.index(found, ready)

    # --- load and unload

    def offer(self, name: str) -> None:
        """Have a model be one on demand."""
        self._lifecycle.offer([name])

    async def load(self, name: str, source: LoadSource = FOLDER, pins: bool = True) -> None:
        """Load or reload a model, which is not on demand any more then, if that `pins` it.

        What it needs is loaded before it, and ensembles that lacked it, or know it in another
        shape, after it. Raises ShmserveError with Triton's texts; what served goes on serving then.
        """
        await self._executor.over(self._lifecycle.load(name, source, pins))

    async def unload(self, name: str) -> None:
        """Give up what loads, and have what serves finish what it has; an unknown model is fine.
        Ensembles that need it are unloaded before it, until it is loaded again. Returns once
        everybody knows that it does not serve."""
        await self._executor.over(self._lifecycle.unload(name))

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
