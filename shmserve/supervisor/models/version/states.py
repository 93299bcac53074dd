"""The states of a model version, and the state machine of an instance as a table, {state: {event:
state}}. An event that a state does not know raises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from shmserve.errors import Unavailable


class ModelState(StrEnum):
    """What the repository index shows for a version."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


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
    """How far a model version is on its way out; its parts share it."""

    retiring: bool = False  # it finishes what it has
    stopping: bool = False  # its processes end

    def refuse_if_stopping(self) -> None:
        """Raise Unavailable: whoever stops it may not have seen what was only just started."""
        if self.stopping:
            raise Unavailable("the model is unloaded")
