"""The lifecycle of models without processes, files or time: what is decided waits until the test
has it happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from shmserve.errors import ShmserveError
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models.lifecycle import Lifecycle
from shmserve.supervisor.models.orders import LoadPlan, Order
from shmserve.supervisor.models.publications import News
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.models.version.spec import VersionSpec
from shmserve.supervisor.processes.scheduler_hosts import Group


class Generation:
    """A version that is ready once it was started, unless it is made another."""

    def __init__(self, spec: VersionSpec, rig: LifecycleRig, number: int) -> None:
        self.spec, self.config, self.endpoint = spec, spec.config, f"{number}"
        self.instances = SimpleNamespace(labels={}, checks_ready=False)
        self.ready = False
        self.problem = ""
        self.load_seconds = 0.0
        self._rig = rig

    @property
    def hopeless(self) -> str:
        """Why it will not be ready."""
        return self.problem

    def uses(self, name: str) -> bool:
        """Whether a step of it is this model."""
        return any(step.name == name for step in self.spec.steps)

    def update_to(self, spec: VersionSpec) -> None:
        """It always needs another generation."""

    def hand_counts_to(self, successor: Generation | None) -> None:
        """It has counted nothing."""

    def changed(self) -> None:
        """As `ModelVersion.changed`."""
        self._rig.lifecycle.changed(cast("Any", self))


class LifecycleRig:
    """An executor, and a gateway that knows the news up to `known`. What is to come waits in
    `pending`, by what it does, until `happen`."""

    def __init__(self) -> None:
        self.registry = ModelRegistry()
        self.lifecycle = Lifecycle(self.registry, self, hosted=True)
        self.registry.audience = self
        self.pending: list[tuple[str, Callable[[], None]]] = []
        self.answers: list[Order] = []
        self.alive: list[Any] = []
        self.discarded = 0
        self.number = self.known = 0

    def happen(self, *kinds: str) -> None:
        """Have what waits of these kinds happen, and what that leads to; the gateway knows of what
        was announced."""
        while True:
            news = "known" in kinds and self.known < self.number
            if news:
                self.known = self.number
                self.lifecycle.acknowledged()
            due = [each for each in self.pending if each[0] in kinds]
            if not (due or news):
                return
            for each in due:
                self.pending.remove(each)
                each[1]()

    # --- the executor

    def announce(self, news: News) -> int:
        """The gateway is sent it."""
        self.number += 1
        return self.number

    def know(self, number: int) -> bool:
        """Whether the gateway knows it."""
        return number <= self.known

    def tell_readiness(self, news: Any) -> None:
        """Nobody looks."""

    def read(self, order: Order) -> None:
        """One version of the model's name."""
        folder, config = Path("/"), ModelSpec.of({"name": order.model.name})
        spec = VersionSpec(order.model.name, "1", folder, folder, config, lambda _: config)
        plan = LoadPlan("", [spec], {})
        self.pending.append(("read", lambda: self.lifecycle.was_read(order, plan)))

    def create(self, spec: VersionSpec, group: Group) -> Any:
        """A generation of its own."""
        made = Generation(spec, self, len(self.alive))
        self.alive.append(made)
        return made

    def start(self, version: Any, error: ShmserveError | None = None) -> None:
        """It is ready then."""

        def started() -> None:
            version.ready = error is None
            self.lifecycle.started(version, error)

        self.pending.append(("start", started))

    def update(self, order: Order) -> None:
        """No generation is updated."""

    def move(self, order: Order, group: Group) -> None:
        """It has moved at once."""
        self.pending.append(("move", lambda: self.lifecycle.moved(order)))

    def kill(self, version: Any) -> None:
        """It ends."""
        self.pending.append(("end", lambda: self._ended(version)))

    def retire(self, version: Any) -> None:
        """It ends once it has finished."""
        self.pending.append(("end", lambda: self._ended(version)))

    def _ended(self, version: Any) -> None:
        version.ready = False
        self.alive.remove(version)
        self.lifecycle.ended(version)

    def forward(self, version: Any, successor: Any) -> None:
        """It had nothing."""

    def discard(self, specs: Iterable[VersionSpec]) -> None:
        """Counted."""
        self.discarded += len(list(specs))

    def answer(self, order: Order) -> None:
        """Kept."""
        self.answers.append(order)

    def changed(self) -> None:
        """Nobody looks."""
