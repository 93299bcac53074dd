"""The lifecycle of models without processes, files or time: what is decided waits until the test
has it happen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from shmserve.errors import Internal
from shmserve.ipc.messages.publications import ModelPublished
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models.instances import VersionSpec
from shmserve.supervisor.models.lifecycle import Lifecycle
from shmserve.supervisor.models.manager import News, Publications
from shmserve.supervisor.models.orders import LoadPlan, Order
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.processes.scheduler_hosts import Group


class Generation:
    """A version that is ready once it was started, unless it is made another."""

    def __init__(self, spec: VersionSpec, rig: LifecycleRig, number: int) -> None:
        self.spec, self.config, self.endpoint = spec, spec.config, f"{number}"
        self.instances = SimpleNamespace(begin_like=lambda _: None)
        self.ready = False
        self.problem = ""
        self._rig = rig

    @property
    def hopeless(self) -> str:
        """Why it will not be ready."""
        return self.problem

    def uses(self, name: str) -> bool:
        """Whether a step of it is this model."""
        return any(step.name == name for step in self.spec.steps)

    def publication(self, latest: bool) -> ModelPublished:
        """Return the message that publishes it."""
        name, version = self.spec.name, self.spec.version
        parts = (self.endpoint, self.ready, latest, 0.0, 0)
        return ModelPublished(name, version, self.config, {}, *parts)

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
        self.publications = Publications()
        self.pending: list[tuple[str, Callable[[], None]]] = []
        self.answers: list[Order] = []
        self.steps: dict[str, list[str]] = {}
        self.broken: set[str] = set()  # cannot be started
        self.alive: list[Any] = []
        self.discarded = 0
        self.number = self.known = 0
        self._endpoints = itertools.count(1)

    def happen(self, *kinds: str) -> None:
        """Have what waits of these kinds happen, and what that leads to; the gateway knows of what
        was announced."""
        while True:
            news = "known" in kinds and self.known < self.number
            if news:
                self.known = self.number
                self.lifecycle.acknowledged()
            due = [each for each in self.pending if {each[0], each[0].split()[0]} & {*kinds}]
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
        """One version, of an ensemble if it has `steps`; a source's configuration is another."""
        name, folder = order.model.name, Path("/")
        step = [{"model_name": each} for each in self.steps.get(name, [])]
        written: dict[str, Any] = {
            "name": name,
            "parameters": {"sent": {"string_value": order.source.config}},
        }
        if step:
            written["ensemble_scheduling"] = {"step": step}
        config = ModelSpec.of(written)
        spec = VersionSpec(name, "1", folder, folder, config)
        plan = LoadPlan("", [spec], self.steps)
        self.pending.append(("read", lambda: self.lifecycle.was_read(order, plan)))

    def create(self, spec: VersionSpec, group: Group) -> Any:
        """A generation of its own."""
        made = Generation(spec, self, next(self._endpoints))
        self.alive.append(made)
        return made

    def start(self, version: Any) -> None:
        """It is ready then."""

        def started() -> None:
            error = Internal("broken") if version.spec.name in self.broken else None
            version.ready = error is None
            self.lifecycle.started(version, error)

        self.pending.append((f"start {version.spec.name}", started))

    def complete(self, spec: VersionSpec, completed: dict[str, Any]) -> ModelSpec:
        """The model adds nothing."""
        return spec.config

    def update(self, order: Order) -> None:
        """No generation is updated."""

    def move(self, order: Order, group: Group) -> None:
        """It has moved at once."""
        self.pending.append(("move", lambda: self.lifecycle.moved(order)))

    def kill(self, version: Any) -> None:
        """It ends."""
        self.pending.append((f"end {version.spec.name}", lambda: self._ended(version)))

    def retire(self, version: Any) -> None:
        """It ends once it has finished."""
        self.pending.append((f"end {version.spec.name}", lambda: self._ended(version)))

    def _ended(self, version: Any) -> None:
        version.ready = False
        self.alive.remove(version)
        self.lifecycle.ended(version)

    def forward(self, version: Any, successor: Any) -> None:
        """It had nothing."""

    def discard(self, specs: Iterable[VersionSpec]) -> None:
        """Counted."""
        self.discarded += len(list(specs))

    def publish(self, model: Any) -> None:
        """As the server does."""
        self.publications.update(self, model.name, *self.registry.news(model))

    def is_known(self, model: Any) -> bool:
        """Whether the gateway knows what serves of it."""
        return self.publications.known(self, model.name)

    def answer(self, order: Order) -> None:
        """Kept."""
        self.answers.append(order)

    def changed(self) -> None:
        """Nobody looks."""
