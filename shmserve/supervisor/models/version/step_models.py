"""What an ensemble runs on: models that others serve, in the place of instances of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from shmserve.ipc.messages.supervision import ModelPublished
from shmserve.supervisor.models.version.scheduler_process import VersionScheduler
from shmserve.supervisor.models.version.spec import StepModel, VersionSpec
from shmserve.supervisor.models.version.states import InstanceState
from shmserve.supervisor.processes.table import Child


class ServingModels(Protocol):
    """The models that serve."""

    def published_now(self, step: StepModel) -> ModelPublished | None:
        """What is told of a model version now, or None where it does not serve."""

    def ready_now(self, step: StepModel) -> bool:
        """Whether a model version takes requests now."""


class StepModels:
    """The models of an ensemble's steps. It has no process: what concerns those has no effect."""

    failure = ""
    checks_ready = False

    def __init__(
        self, spec: VersionSpec, scheduler: VersionScheduler, models: ServingModels
    ) -> None:
        self._spec = spec
        self._scheduler = scheduler
        self._models = models
        self.config = spec.config
        self.labels = spec.labels

    @property
    def any_ready(self) -> bool:
        """Whether each of them takes requests."""
        return all(map(self._models.ready_now, self._spec.steps))

    def states(self) -> list[InstanceState]:
        """None has a state."""
        return []

    def children(self) -> list[Child]:
        """None has a process."""
        return []

    def pids(self) -> list[int]:
        """None runs."""
        return []

    def pids_on(self, device_id: int) -> list[int]:
        """None is on an accelerator."""
        return []

    def checking_ready(self) -> list[int]:
        """None says itself whether it is ready."""
        return []

    async def complete_config(self) -> None:
        """Have the graph checked with the models that serve now; raises InvalidArgument."""
        find, steps = self._models.published_now, self._spec.steps
        found = list(map(find, steps))
        configs = [None if model is None else model.config for model in found]
        elsewhere = [find(step._replace(version="")) is not None for step in steps]
        self.config = self._spec.complete({"steps": configs, "elsewhere": elsewhere})
        self.labels = {**_inherited(self.config, found), **self._spec.labels}

    async def load(self) -> None:
        """They are loaded."""

    def introduce(self, known: list[int]) -> None:
        """Tell the ensemble's process where its models are."""
        for step in self._spec.steps:
            model = self._models.published_now(step)
            if model is not None:
                self._scheduler.tell(model)

    def attach(self) -> None:
        """None offers itself."""

    def kill_overrunning(self, index: int, reason: str, pid: int) -> None:
        """None runs."""

    def retired(self, index: int, pid: int) -> None:
        """None was to."""

    def process_exited(self, child: Child) -> None:
        """None of them is ours."""

    async def stop(self) -> None:
        """They serve on."""


def _inherited(
    config: dict[str, Any], models: Sequence[ModelPublished | None]
) -> dict[str, list[str]]:
    """The labels of an ensemble's outputs: those that the model has which makes one."""
    outputs = {each["name"] for each in config["output"]}
    found: dict[str, list[str]] = {}
    for step, model in zip(config["ensemble_scheduling"]["step"], models, strict=True):
        labels = {} if model is None else model.metadata.get("labels", {})
        for name, tensor in step["output_map"].items():
            if tensor in outputs and name in labels:
                found[tensor] = labels[name]
    return found
