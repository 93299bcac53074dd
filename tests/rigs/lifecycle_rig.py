"""The lifecycle of models without processes, files or time; tests execute its actions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from shmserve.errors import Internal
from shmserve.ipc.messages.publications import ModelPublished
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models.lifecycle import Lifecycle
from shmserve.supervisor.models.load_planner import VersionSpec
from shmserve.supervisor.models.manager import Audience, ModelPublisher, Publication
from shmserve.supervisor.models.orders import FOLDER, LoadPlan, LoadSource, Order
from shmserve.supervisor.models.registry import ModelRegistry, statuses
from shmserve.supervisor.models.scheduler_process import Group

EVENTS = ("read", "start", "known", "end", "move")


class FakeVersion:
    """A model version that is ready once it has started."""

    def __init__(self, spec: VersionSpec, rig: LifecycleRig, number: int) -> None:
        self.spec, self.config, self.endpoint = spec, spec.config, f"{number}"
        self.instances = SimpleNamespace(adopt_count=lambda _: None, hangs=False)
        self.ready = False
        self.problem = ""
        self._rig = rig

    @property
    def fatal_problem(self) -> str:
        """Return the reason why the version will not become ready."""
        return self.problem

    def uses(self, name: str) -> bool:
        return any(step.name == name for step in self.spec.steps)

    def publication(self, is_latest: bool) -> ModelPublished:
        name, version = self.spec.name, self.spec.version
        parts = (self.endpoint, self.ready, is_latest, 0.0, 0)
        return ModelPublished(name, version, self.config, {}, *parts)

    def update_to(self, spec: VersionSpec) -> None:
        pass

    def pass_counters_to(self, successor: FakeVersion | None) -> None:
        pass

    def report_change(self) -> None:
        self._rig.lifecycle.version_changed(cast("Any", self))


class LifecycleRig(Audience):
    """The actions of a lifecycle, and a gateway.

    Attributes:
        pending_actions: The actions that `execute_pending` executes, with their kinds.
        acknowledged_number: The last publication that the gateway has acknowledged.
        broken_models: The models that cannot be started.
        steps: The steps of ensembles, by name.
    """

    def __init__(self) -> None:
        self.registry = ModelRegistry()
        self.lifecycle = Lifecycle(self.registry, self, shares_hosts=True)
        self.publisher = ModelPublisher()
        self.pending_actions: list[tuple[str, Callable[[], None]]] = []
        self.answered_orders: list[Order] = []
        self.steps: dict[str, list[str]] = {}
        self.broken_models: set[str] = set()
        self.live_versions: list[Any] = []
        self.discarded_spec_count = 0
        self.publication_count = self.acknowledged_number = 0
        self._endpoints = itertools.count(1)

    def execute_pending(self, *kinds: str) -> None:
        """Execute pending actions of some kinds ("known": acknowledge all), and what follows."""
        while True:
            unread = "known" in kinds and self.acknowledged_number < self.publication_count
            if unread:
                self.acknowledged_number = self.publication_count
                self.lifecycle.publication_acknowledged()
            due = [a for a in self.pending_actions if {a[0], a[0].split()[0]} & {*kinds}]
            if not (due or unread):
                return
            for a in due:
                self.pending_actions.remove(a)
                a[1]()

    def execute_all(self) -> None:
        self.execute_pending(*EVENTS)

    # --- orders that are executed to the end

    def load(self, name: str, source: LoadSource = FOLDER, pins: bool = True) -> Order:
        order = self.lifecycle.load(name, source, pins)
        self.execute_all()
        return order

    def load_on_demand(self, name: str) -> Order | None:
        order = self.lifecycle.load_on_demand(name)
        self.execute_all()
        return order

    def unload(self, name: str, **options: Any) -> Order:
        order = self.lifecycle.unload(name, **options)
        self.execute_all()
        return order

    # --- the executor

    def announce(self, publication: Publication) -> int:
        self.publication_count += 1
        return self.publication_count

    def is_acknowledged(self, number: int) -> bool:
        return number <= self.acknowledged_number

    def publish_readiness(self, publication: Any) -> None:
        pass

    def read(self, order: Order) -> None:
        """Plan one version whose configuration depends on the source."""
        name, folder = order.model.name, Path("/")
        step = [{"model_name": step_model} for step_model in self.steps.get(name, [])]
        fields: dict[str, Any] = {
            "name": name,
            "parameters": {"sent": {"string_value": order.source.config}},
        }
        if step:
            fields["ensemble_scheduling"] = {"step": step}
        config = ModelSpec.of(fields)
        plan = LoadPlan("", [VersionSpec(name, "1", folder, config)], self.steps)
        self.pending_actions.append(
            (f"read {name}", lambda: self.lifecycle.load_planned(order, plan))
        )

    def create(self, spec: VersionSpec, group: Group) -> Any:
        version = FakeVersion(spec, self, next(self._endpoints))
        self.live_versions.append(version)
        return version

    def start(self, version: Any) -> None:
        def finish_start() -> None:
            error = Internal("broken") if version.spec.name in self.broken_models else None
            version.ready = error is None
            self.lifecycle.version_started(version, error)

        self.pending_actions.append((f"start {version.spec.name}", finish_start))

    def update(self, order: Order) -> None:
        pass

    def await_ends(self, order: Order) -> None:
        pass

    def move(self, order: Order, group: Group) -> None:
        self.pending_actions.append(("move", lambda: self.lifecycle.move_finished(order)))

    def kill(self, v: Any) -> None:
        self.pending_actions.append((f"end {v.spec.name}", lambda: self._end_version(v)))

    def retire(self, v: Any) -> None:
        self.pending_actions.append((f"end {v.spec.name}", lambda: self._end_version(v)))

    def _end_version(self, version: Any) -> None:
        version.ready = False
        self.live_versions.remove(version)
        self.lifecycle.version_ended(version)

    def forward(self, version: Any, successor: Any) -> None:
        pass

    def discard(self, specs: Iterable[VersionSpec]) -> None:
        self.discarded_spec_count += len(list(specs))

    def publish(self, model: Any) -> None:
        self.publisher.update(self, model.name, model.publications, model.unpublished_versions)

    def remove(self, model: Any) -> None:
        self.publisher.remove(model.name)

    def is_published(self, model: Any) -> bool:
        return self.publisher.are_acknowledged(self, model.name)

    def answer(self, order: Order) -> None:
        self.answered_orders.append(order)

    def report_change(self) -> None:
        """Check that the summaries of the models that have not changed are still valid."""
        assert self.registry.states() == {
            (model.name, number): status
            for model in self.registry.models.values()
            for number, status in statuses(model).items()
        }
