"""The instances of a model version: what `instance_group` asks for, and the process of each.

Another `instance_group` for a version that serves keeps the instances that it asks for, too: as
many of each kind, device and rate limit, by whatever name. One that stays down is none
of them. Index and name of an instance stay its own.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shmserve.ipc.model_spec import ModelSpec, RateLimit
from shmserve.supervisor.models.version.spec import InstanceState, instance_after
from shmserve.supervisor.processes.table import Child, RestartBackoff

_MOST_UNREAD = 16  # of a worker that says more than it is asked for


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
    failed_loads: int = 0
    checks_ready: bool = False

    @property
    def alive(self) -> bool:
        """Whether there is a process that has not been seen to end."""
        return self.child is not None and self.child.alive

    def transition(self, event: str) -> None:
        """Move to the state after an event; raises IllegalTransition."""
        self.state = instance_after(self.state, event)

    def loaded(self, checks_ready: bool) -> None:
        """Become ready; `checks_ready`: its model says itself whether it is."""
        self.checks_ready = checks_ready
        self.transition("loaded")
        self.ready_at = time.monotonic()
        self.failed_loads = 0


def expand_instances(config: ModelSpec) -> list[Instance]:
    """The instances that `instance_group` of a configuration asks for, in order; none of an
    ensemble's."""
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


class InstanceChange(NamedTuple):
    """The difference between the instances of two configurations."""

    added: list[Instance]
    leaving: list[Instance]


def change_between(present: Sequence[Instance], config: ModelSpec) -> InstanceChange:
    """The change from the instances that are `present` to those that a configuration asks for; none
    of them is changed."""
    left = [i for i in present if i.state not in (InstanceState.RETIRING, InstanceState.STOPPED)]
    usable = [i for i in left if i.state is not InstanceState.FAILED]
    wanted = expand_instances(config)
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
    return InstanceChange(wanted, left)


def _what(instance: Instance) -> tuple[str, int, RateLimit]:
    return instance.kind, instance.device_id, instance.rate_limit
