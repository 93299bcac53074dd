"""The instances of a model version: what `instance_group` asks for, and the process of each with
its states, as a table {state: {event: state}}.

Another `instance_group` for a version that serves keeps the instances that it asks for, too: as
many of each kind, device and rate limit, by whatever name. One that stays down is none
of them. Index and name of an instance stay its own.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from shmserve.common.model_settings import MAX_INSTANCES, MIN_INSTANCES, instance_bound
from shmserve.ipc.model_spec import ModelSpec, RateLimit
from shmserve.supervisor.models.version.spec import VersionSpec
from shmserve.supervisor.processes.table import Child, RestartBackoff

_MOST_UNREAD = 16  # of a worker that says more than it is asked for


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


def inbox() -> asyncio.Queue[Any]:
    """A bounded queue of a worker's messages about itself."""
    return asyncio.Queue(_MOST_UNREAD)


@dataclass(slots=True, eq=False)
class Instance:
    """One worker process of a model, or the place where the next one will be."""

    index: int
    name: str
    device: str
    kind: str
    device_id: int
    rate_limit: RateLimit = field(default_factory=RateLimit)
    state: InstanceState = InstanceState.STARTING
    child: Child | None = None
    stacks_fd: int = -1  # of the child, as WorkerStarted says
    inbox: asyncio.Queue[Any] = field(default_factory=inbox)
    ready_at: float = 0.0
    backoff: RestartBackoff = field(default_factory=RestartBackoff)
    crashes: int = 0  # since one that lived had executed anything
    failed_loads: int = 0
    checks_ready: bool = False
    device_byte_size: int = 0

    @property
    def alive(self) -> bool:
        """Whether there is a process that has not been seen to end."""
        return self.child is not None and self.child.alive

    def transition(self, event: str) -> None:
        """Move to the state after an event; raises IllegalTransition where it has none."""
        try:
            self.state = INSTANCE[self.state][event]
        except KeyError:
            raise IllegalTransition(f"{event} in state {self.state}") from None

    def loaded(self, checks_ready: bool) -> None:
        """Become ready; `checks_ready`: its model says itself whether it is."""
        self.checks_ready = checks_ready
        self.transition("loaded")
        self.ready_at = time.monotonic()
        self.failed_loads = 0

    async def discard(self) -> Child | None:
        """End the process that has not loaded, where there is one, and return it."""
        child = self.child
        if child is not None and child.alive:
            child.cause = "it has not loaded"
            child.kill()
            await child.gone()
        self.child = None
        self.state = InstanceState.WAITING
        return child


class Bounds(NamedTuple):
    """The fewest and the most instances of a model whose number follows its load."""

    least: int
    most: int


def bounds_of(config: ModelSpec) -> Bounds | None:
    """The bounds that a configuration which was validated asks for; None: it has a fixed number."""
    most = instance_bound(config.parameters.get(MAX_INSTANCES, ""))
    least = instance_bound(config.parameters.get(MIN_INSTANCES, ""))
    return None if most is None else Bounds(least or 1, most)


def sized(config: ModelSpec, total: int) -> ModelSpec:
    """A configuration of one instance group with so many instances in all, evenly on its devices;
    as instances and updates need it, and nobody else: its `source` stays."""
    (group,) = config.instance_group
    devices = [(gpu,) for gpu in group.gpus] if group.kind == "KIND_GPU" else [group.gpus]
    shares = [(total + place) // len(devices) for place in reversed(range(len(devices)))]
    groups = (
        replace(group, gpus=gpus, count=count)
        for gpus, count in zip(devices, shares, strict=True)
        if count
    )
    return replace(config, instance_group=tuple(groups))


def expand_instances(config: ModelSpec, running: int = 0) -> list[Instance]:
    """The instances that `instance_group` of a configuration asks for, in order; with bounds, at
    least the fewest, and as many as are `running`, up to the most. None of an ensemble's."""
    made, bounds = _expanded(config), bounds_of(config)
    if bounds is None:
        return made
    wanted = max(len(made), bounds.least, min(running, bounds.most))
    return made if len(made) == wanted else _expanded(sized(config, wanted))


def _expanded(config: ModelSpec) -> list[Instance]:
    made: list[Instance] = []
    for group in config.instance_group:
        gpu = group.kind == "KIND_GPU"
        for device_id in group.gpus if gpu else (0,):
            prefix = f"{group.name}_gpu{device_id}" if gpu else group.name
            for number in range(group.count):
                made.append(
                    Instance(
                        index=len(made),
                        name=f"{prefix}_{number}",
                        device=f"gpu:{device_id}" if gpu else "cpu",
                        kind=group.kind.removeprefix("KIND_"),
                        device_id=device_id,
                        rate_limit=group.rate_limiter,
                    )
                )
    return made


class InstanceUpdate(NamedTuple):
    """The change from the instances that a version has to those of `config`, the final
    configuration of `spec`, which is another one than it has where it `differs`."""

    spec: VersionSpec
    config: ModelSpec
    differs: bool
    added: list[Instance]
    leaving: list[Instance]


def change_between(
    present: Sequence[Instance], config: ModelSpec, running: int = 0
) -> tuple[list[Instance], list[Instance]]:
    """The instances to add to those that are `present`, so that there are those which a
    configuration asks for (see `expand_instances`), and those to take away; none of them is
    changed."""
    left = [i for i in present if i.state not in (InstanceState.RETIRING, InstanceState.STOPPED)]
    usable = [i for i in left if i.state is not InstanceState.FAILED]
    wanted = expand_instances(config, running)
    for same_name in (True, False):
        for instance in wanted[:]:
            match = next(
                (
                    other
                    for other in usable
                    if _what(other) == _what(instance)
                    and (other.name == instance.name or not same_name)
                ),
                None,
            )
            if match is not None:
                usable.remove(match)
                left.remove(match)
                wanted.remove(instance)
    taken = {instance.index for instance in present}
    indexes = (index for index in itertools.count() if index not in taken)
    for instance in wanted:
        instance.index = next(indexes)
    return wanted, left


def _what(instance: Instance) -> tuple[str, int, RateLimit]:
    return instance.kind, instance.device_id, instance.rate_limit
