"""The executor of what the lifecycle of models decides: threads that read, processes that start and
end, messages. It decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec

from shmserve.errors import ShmserveError
from shmserve.ipc.messages import publications
from shmserve.ipc.messages.publications import SchedulerLost
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.context import LOCAL_CLIENT, SupervisorContext
from shmserve.supervisor.models.instances import VersionSpec
from shmserve.supervisor.models.lifecycle import Lifecycle
from shmserve.supervisor.models.load_planner import LoadPlanner
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.orders import LoadPlan, ModelEntry, Order, OrderKind, OrderPhase
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.processes.scheduler_hosts import Group

logger = logging.getLogger(__name__)


P = ParamSpec("P")


def _in_background(
    method: Callable[Concatenate[LifecycleExecutor, P], Coroutine[Any, Any, None]],
) -> Callable[Concatenate[LifecycleExecutor, P], None]:
    """Make a method return at once; it goes on as a task."""

    @wraps(method)
    def begin(self: LifecycleExecutor, /, *args: P.args, **kwargs: P.kwargs) -> None:
        self.context.background(method(self, *args, **kwargs))

    return begin


async def _no_bound() -> None:
    """There is room for all models."""


class LifecycleExecutor:
    """Carries out what its `lifecycle` decides about a registry's models. `on_change` is called
    when a status may have changed."""

    def __init__(
        self,
        context: SupervisorContext,
        planner: LoadPlanner,
        registry: ModelRegistry,
        on_change: Callable[[], None],
    ) -> None:
        self.context = context
        self._planner = planner
        self._registry = registry
        self.changed = on_change
        self._over: dict[Order, asyncio.Event] = {}
        self.make_room: Callable[[], Awaitable[None]] = _no_bound  # before a version is started
        self._starts: dict[ModelVersion, asyncio.Task[None]] = {}
        hosted = context.config.ensemble_scheduling == "hosted"
        registry.audience = context
        self.lifecycle = Lifecycle(registry, self, hosted)
        self._hear_acknowledgements()

    async def over(self, order: Order) -> None:
        """Wait until an order is over; raises ShmserveError where it failed."""
        if not order.answered:
            await self._over.setdefault(order, asyncio.Event()).wait()
        if order.error is not None:
            raise order.error

    def answer(self, order: Order) -> None:
        """As `LifecycleActions`; a load that failed is an event, too."""
        if order.kind is OrderKind.LOAD and order.error is not None:
            refused = publications.LoadRefused(order.model.name, order.error.message)
            self.context.events.publish(refused)
        event = self._over.pop(order, None)
        if event is not None:
            event.set()

    # --- what is told

    @_in_background
    async def _hear_acknowledgements(self) -> None:
        while True:
            await self.context.control.acknowledgements.news()
            self.lifecycle.acknowledged()

    def forward(self, version: ModelVersion, successor: ModelVersion | None) -> None:
        """As `LifecycleActions`."""
        same = successor is not None and (
            successor.config.immutable_config == version.config.immutable_config
        )
        endpoint = successor.endpoint if successor is not None and same else ""
        broadcast = self.context.broadcast
        broadcast(SchedulerLost(version.endpoint, endpoint), "gateway", "ensemble")
        broadcast(SchedulerLost(version.endpoint, ""), "caller", LOCAL_CLIENT)

    # --- files

    @_in_background
    async def read(self, order: Order) -> None:
        """As `LifecycleActions`, in a thread."""
        plan = await asyncio.to_thread(self._plan, order)
        if plan.ambiguous:
            text = "failed to poll model '%s': not unique across all model repositories"
            logger.error(text, order.model.name)
        self.lifecycle.was_read(order, plan)

    def _plan(self, order: Order) -> LoadPlan:
        name, planner = order.model.name, self._planner
        # Before it is read: a file that is changed meanwhile is seen by the next look.
        fingerprint = ""
        try:
            fingerprint = planner.fingerprint(name)
            specs = planner.plan(name, *order.source)
        except ShmserveError as error:
            known, ambiguous = planner.has(name), planner.is_ambiguous(name)
            return LoadPlan(fingerprint, [], {}, error, known, ambiguous)
        steps: dict[str, list[str]] = {}
        waiting = [step.name for spec in specs for step in spec.steps]
        while waiting:
            step = waiting.pop()
            if step not in steps:
                steps[step] = [each.name for each in planner.steps(step)]
                waiting += steps[step]
        return LoadPlan(fingerprint, specs, steps)

    def discard(self, specs: Iterable[VersionSpec]) -> None:
        """As `LifecycleActions`."""
        used = {version.spec.model_dir for version in self._registry.live}
        for spec in {spec.model_dir: spec for spec in specs}.values():
            if spec.model_dir not in used:
                self._planner.discard(spec)

    def complete(self, spec: VersionSpec, completed: dict[str, Any]) -> ModelSpec:
        """As `LifecycleActions`."""
        return self._planner.complete(spec, completed)

    # --- processes

    def create(self, spec: VersionSpec, group: Group) -> ModelVersion:
        """As `LifecycleActions`."""
        events = self.lifecycle.changed, self.lifecycle.config_completed
        return ModelVersion(self.context, spec, group, self._registry.serving, *events)

    def start(self, version: ModelVersion) -> None:
        """As `LifecycleActions`."""
        self._starts[version] = self.context.background(self._start(version))

    async def _start(self, version: ModelVersion) -> None:
        error: Exception | None = None
        try:
            await self.make_room()
            await version.start()
        except Exception as raised:
            error = raised
            if not isinstance(raised, ShmserveError):
                logger.exception("loading failed")
        del self._starts[version]
        self.lifecycle.started(version, error)

    @_in_background
    async def update(self, order: Order) -> None:
        """As `LifecycleActions`."""
        updates = order.updates if order.phase is OrderPhase.STARTING else {}
        coming = order.model.coming
        adding = (coming[number].instances.add(update) for number, update in updates.items())
        results = await asyncio.gather(*adding, return_exceptions=True)
        errors = {
            number: result
            for number, result in zip(updates, results, strict=True)
            if isinstance(result, BaseException)
        }
        self.lifecycle.updated(order, errors)

    @_in_background
    async def move(self, order: Order, group: Group) -> None:
        """As `LifecycleActions`."""
        model = order.model
        for version in list(model.serving.values()):
            try:
                await version.regroup(group, partial(self._published, model))
            except ShmserveError as error:
                logger.error("model '%s' stays where it is: %s", model.name, error.message)
        self.lifecycle.moved(order)

    async def _published(self, model: ModelEntry) -> None:
        """Publish what has moved; returns once all know."""
        self.lifecycle.publish(model)
        while not self._registry.known(model):
            await self.context.control.acknowledgements.news()

    @_in_background
    async def kill(self, version: ModelVersion) -> None:
        """As `LifecycleActions`."""
        start = self._starts.get(version)
        await version.kill()
        if start is not None:
            await asyncio.wait({start})
        self.lifecycle.ended(version)

    @_in_background
    async def retire(self, version: ModelVersion) -> None:
        """As `LifecycleActions`."""
        await version.stop()
        self.lifecycle.ended(version)
