"""A model version: what to load, as the repository and its configuration have it; and the state
machine of an instance as a table, {state: {event: state}}. An event that a state does not
know raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from shmserve.errors import Unavailable
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


class InstanceState(StrEnum):
    """Where an instance's process is."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    RETIRING = "retiring"  # finishes what it has, and ends
    WAITING = "waiting"  # died, starts again after a pause
    FAILED = "failed"  # died too often, stays down
    STOPPED = "stopped"


INSTANCE: Mapping[InstanceState, Mapping[str, InstanceState]] = {
    InstanceState.STARTING: {
        "started": InstanceState.LOADING,
        "exited": InstanceState.WAITING,
        "stop": InstanceState.STOPPED,
    },
    InstanceState.LOADING: {
        "loaded": InstanceState.READY,
        "exited": InstanceState.WAITING,
        "stop": InstanceState.STOPPED,
    },
    InstanceState.READY: {
        "exited": InstanceState.WAITING,
        "retire": InstanceState.RETIRING,
        "stop": InstanceState.STOPPED,
    },
    InstanceState.RETIRING: {"exited": InstanceState.STOPPED, "stop": InstanceState.STOPPED},
    InstanceState.WAITING: {
        "restart": InstanceState.STARTING,
        "give_up": InstanceState.FAILED,
        "stop": InstanceState.STOPPED,
    },
    InstanceState.FAILED: {"stop": InstanceState.STOPPED},
    InstanceState.STOPPED: {"exited": InstanceState.STOPPED, "stop": InstanceState.STOPPED},
}


class IllegalTransition(Exception):
    """An event came in a state that does not know it: a defect of ours."""


def instance_after(state: InstanceState, event: str) -> InstanceState:
    """The instance state after `event`; raises IllegalTransition."""
    try:
        return INSTANCE[state][event]
    except KeyError:
        raise IllegalTransition(f"{event} in state {state}") from None


@dataclass(slots=True)
class Lifetime:
    """The shutdown state of a model version; its parts share it."""

    retiring: bool = False  # it finishes what it has
    stopping: bool = False  # its processes end

    def refuse_if_stopping(self) -> None:
        """Raise Unavailable: whoever stops it may not have seen what was only just started."""
        if self.stopping:
            raise Unavailable("the model is unloaded")
