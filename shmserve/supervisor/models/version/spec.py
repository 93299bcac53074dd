"""A model version to load, as the repository and its configuration have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shmserve.ipc.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class VersionSpec:
    """A version to load. `config` is normalised and validated as far as it goes before
    auto-completion.

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
    config: ModelSpec
    complete: Callable[[dict[str, Any]], ModelSpec]
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


def steps_of(config: ModelSpec) -> list[StepModel]:
    """The models that the steps of a configuration run, in order; none if it is no ensemble's."""
    ensemble = config.ensemble_scheduling
    steps = ensemble.step if ensemble is not None else ()
    return [StepModel(step.model_name, step.version) for step in steps]


@dataclass(slots=True)
class Lifetime:
    """The shutdown state of a model version; its parts share it."""

    retiring: bool = False  # it finishes what it has
    stopping: bool = False  # its processes end
