"""The models that an ensemble's steps run, in the place of instances of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shmserve.ipc.messages.publications import ModelPublished
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models.version.instance_processes import Instances
from shmserve.supervisor.models.version.spec import StepModel


class ServingModels(Protocol):
    """The models that serve."""

    def published_now(self, step: StepModel) -> ModelPublished | None:
        """The publication of a model version now, or None where it does not serve."""

    def failure_now(self, step: StepModel) -> str:
        """Why a model version serves no request, and will not; empty: it does, or will."""

    def ready_now(self, step: StepModel) -> bool:
        """Whether a model version takes requests now."""


@dataclass(slots=True, eq=False)
class EnsembleInstances(Instances):
    """The instances of an ensemble: none of its own, and ready while the models of its steps
    are."""

    models: ServingModels = field(kw_only=True)

    @property
    def problem(self) -> str:
        """The failure of the first of the models that has one."""
        return next(filter(None, map(self.models.failure_now, self._spec.steps)), "")

    @property
    def any_ready(self) -> bool:
        """Whether each of the models takes requests."""
        return all(map(self.models.ready_now, self._spec.steps))

    async def complete_config(self) -> None:
        """Have the graph checked with the models that serve now; raises InvalidArgument."""
        find, steps = self.models.published_now, self._spec.steps
        found = list(map(find, steps))
        configs = [None if model is None else model.config for model in found]
        elsewhere = [find(step._replace(version="")) is not None for step in steps]
        self.config = self._spec.complete({"steps": configs, "elsewhere": elsewhere})
        self.labels = {**_inherited(self.config, found), **self._spec.labels}

    def introduce(self, known: list[int]) -> None:
        """Tell the ensemble's process where its models are."""
        for step in self._spec.steps:
            model = self.models.published_now(step)
            if model is not None:
                self._scheduler.tell(model)


def _inherited(config: ModelSpec, models: Sequence[ModelPublished | None]) -> dict[str, list[str]]:
    """The labels of an ensemble's outputs: those that the model has which makes one."""
    scheduling = config.ensemble_scheduling
    assert scheduling is not None
    outputs = {each.name for each in config.output}
    found: dict[str, list[str]] = {}
    for step, model in zip(scheduling.step, models, strict=True):
        labels = {} if model is None else model.metadata.get("labels", {})
        for name, tensor in step.output_map.items():
            if tensor in outputs and name in labels:
                found[tensor] = labels[name]
    return found
