"""What to load: one version of a model, as the repository and its configuration have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class VersionSpec:
    """What to load. `config` is normalised and validated as far as it goes before auto-completion.

    `complete(completed)` merges what the model says of itself, validates, and returns the final
    configuration; of an ensemble it takes {"steps": the configurations of its steps' models, None
    where one does not serve, "elsewhere": whether any version of each does}. `labels` are those of
    each output that has any. `files` changes with any file of the version that is not its
    configuration.
    """

    name: str
    version: str
    model_dir: Path
    repository: Path
    config: dict[str, Any]
    complete: Callable[[dict[str, Any]], dict[str, Any]]
    labels: dict[str, list[str]] = field(default_factory=dict)
    files: str = ""

    @property
    def steps(self) -> list[StepModel]:
        """The models that the steps of an ensemble run; none of any other model."""
        return steps_of(self.config)


class StepModel(NamedTuple):
    """A model that a step of an ensemble runs; version "" is the latest."""

    name: str
    version: str


def steps_of(config: dict[str, Any]) -> list[StepModel]:
    """The models that the steps of a configuration run, in order; none if it is no ensemble's."""
    scheduling = config.get("ensemble_scheduling") or {}
    steps: list[StepModel] = []
    for step in scheduling.get("step") or ():
        version = int(step.get("model_version") or -1)
        steps.append(StepModel(step["model_name"], str(version) if version > 0 else ""))
    return steps
