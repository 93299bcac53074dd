"""The simulated executor of what the lifecycle decides: all of it happens later."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.ipc.messages.supervision import ModelPublished
from shmserve.supervisor.models.lifecycle import Lifecycle
from shmserve.supervisor.models.orders import ModelEntry, Order, OrderPhase
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.models.version.spec import VersionSpec
from shmserve.supervisor.processes.scheduler_hosts import Group
from tests.simulation.lifecycle.audience import SimulatedAudience, draw_lag
from tests.simulation.lifecycle.oracles import LifecycleOracles, RecordedLifecycle
from tests.simulation.lifecycle.repository import DrawnRepository
from tests.simulation.lifecycle.versions import SimulatedUpdate, SimulatedVersion
from tests.simulation.world import SECOND, World


class SimulatedExecutor:
    """As `LifecycleExecutor`, in virtual time. `alive` are the versions that may have a process."""

    def __init__(self, world: World, hosted: bool) -> None:
        self.world = world
        self.registry = ModelRegistry()
        self.repository = DrawnRepository(world)
        self.oracles = LifecycleOracles(self)
        self.lifecycle: Lifecycle = RecordedLifecycle(self.registry, self, hosted, self.oracles)
        self.audience = SimulatedAudience(world, self._news, self.oracles.broke)
        self.audience.on_withdrawal = self.oracles.withdrawn
        self.audience.snapshot = lambda: list(self.registry.publications.snapshot())
        self.audience.find = self._steps_of
        self.registry.audience = self.audience
        self.alive: list[SimulatedVersion] = []
        self.updating: set[Order] = set()
        self.actions = 0
        self.on_answer: dict[Order, list[Callable[[], None]]] = {}
        self._endpoints = itertools.count(1)
        self._waiting: list[tuple[ModelEntry, Callable[[], None]]] = []

    def lag(self) -> int:
        """None, or up to 300 ms."""
        return draw_lag(self.world)

    def new_endpoint(self, version: SimulatedVersion) -> str:
        """Of a scheduler that starts."""
        endpoint = f"e{next(self._endpoints)}"
        self.audience.by_endpoint[endpoint] = version
        return endpoint

    def _steps_of(self, version: SimulatedVersion) -> list[ModelPublished]:
        found = map(self.registry.published_now, version.spec.steps)
        return [news for news in found if news is not None]

    def _news(self) -> None:
        self.lifecycle.acknowledged()
        waiting, self._waiting = self._waiting, []
        for model, call in waiting:
            self._once_known(model, call)

    def _once_known(self, model: ModelEntry, call: Callable[[], None]) -> None:
        if self.registry.known(model):
            self.world.after(0, call)
        else:
            self._waiting.append((model, call))

    def _does(self, *words: Any) -> None:
        self.actions += 1
        self.world.note(*words)

    # --- as LifecycleExecutor

    def read(self, order: Order) -> None:
        """Its folder as it is at some moment from now on."""
        self._does("read", self.oracles.title(order))
        self.world.after(self.lag(), self._plan, order)

    def _plan(self, order: Order) -> None:
        plan = self.repository.plan(order.model.name, order.source, self._completion)
        self.world.after(self.lag(), self.lifecycle.was_read, order, plan)

    def _completion(self, config: Any) -> Callable[[dict[str, Any]], Any]:
        step = [each.model_name for each in getattr(config.ensemble_scheduling, "step", ())]

        def complete(completed: dict[str, Any]) -> Any:
            for name in step:
                model = self.registry.models.get(name)
                if model is None or not model.shown:
                    raise InvalidArgument(f"{name} is not available")
            return config

        return complete

    def discard(self, specs: Iterable[VersionSpec]) -> None:
        """As `LifecycleExecutor.discard`."""
        used = {version.spec.model_dir for version in self.registry.live}
        for folder, spec in {spec.model_dir: spec for spec in specs}.items():
            if folder not in used:
                self.oracles.discarded(folder)
                if self.repository.discard(spec) > 1:
                    self.oracles.broke(f"14: {folder} is removed twice")

    def create(self, spec: VersionSpec, group: Group) -> Any:
        """A version without any process."""
        version = SimulatedVersion(self, spec, group)
        self.alive.append(version)
        return version

    def start(self, version: Any) -> None:
        """It starts as was drawn."""
        self._does("start", version)
        version.start()

    def started(self, version: SimulatedVersion, error: ShmserveError | None) -> None:
        """It was started, or could not be."""
        self.world.note("started", version, error)
        self.lifecycle.started(cast("Any", version), error)

    def update(self, order: Order) -> None:
        """The instances are added, or not."""
        self._does("update", self.oracles.title(order))
        self.updating.add(order)
        self.world.after(0, self._update, order)

    def _update(self, order: Order) -> None:
        updates: Any = order.updates if order.phase is OrderPhase.STARTING else {}
        missing, errors = set(updates), {}

        def over(number: str, error: ShmserveError | None) -> None:
            missing.discard(number)
            if error is not None:
                errors[number] = error
            if not missing:
                self.updating.discard(order)
                self.lifecycle.updated(order, errors)

        if not updates:
            self.updating.discard(order)
            self.lifecycle.updated(order, {})
        update: SimulatedUpdate
        for number, update in updates.items():
            update.add(partial(over, number))

    def move(self, order: Order, group: Group) -> None:
        """One version after the other is scheduled elsewhere, where it is not there already."""
        self._does("move", order.model.name, sorted(group.names))
        versions: list[Any] = list(order.model.serving.values())
        self.world.after(self.lag(), self._move, order, group, versions)

    def _move(self, order: Order, group: Group, versions: list[SimulatedVersion]) -> None:
        if not versions:
            return self.lifecycle.moved(order)
        version, rest = versions[0], versions[1:]
        go_on = partial(self.world.after, self.lag(), self._move, order, group, rest)
        if version.ready and version.group.names != group.names:
            version.group = group
            version.move_to(self.new_endpoint(version))
            self.lifecycle.publish(order.model)
            return self._once_known(order.model, go_on)
        return go_on()

    def kill(self, version: Any) -> None:
        """It ends now."""
        self._does("kill", version)
        self.oracles.killed(version)
        version.killed()

    def retire(self, version: Any) -> None:
        """It finishes what it has."""
        self._does("retire", version)
        self.oracles.retired(version)
        version.retiring = version.drains = True
        late = self.world.between(1_000_000, 2 * SECOND)
        self.world.after(late, version.drained)

    def ended(self, version: SimulatedVersion) -> None:
        """Its last process has ended."""
        self.world.note("ended", version)
        self.oracles.ended(version)
        self.alive.remove(version)
        self.lifecycle.ended(cast("Any", version))

    def forward(self, version: Any, successor: Any) -> None:
        """What came late goes to who serves now."""
        self._does("forward", version, successor)

    def answer(self, order: Order) -> None:
        """Who gave it hears of it."""
        self._does("answer", self.oracles.title(order), order.error)
        self.oracles.answered(order)
        for call in self.on_answer.pop(order, ()):
            self.world.after(0, call)

    def changed(self) -> None:
        """Nobody looks."""
