"""The instances of a model version: what `instance_group` asks for, and the process of each."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from shmserve.supervisor.models.version.states import InstanceState, instance_after
from shmserve.supervisor.processes.restart_backoff import RestartBackoff
from shmserve.supervisor.processes.table import Child

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
    group: int = 0  # the number of its instance group
    state: InstanceState = InstanceState.STARTING
    child: Child | None = None
    inbox: asyncio.Queue[Any] = field(default_factory=inbox)
    ready_at: float = 0.0
    backoff: RestartBackoff = field(default_factory=RestartBackoff)
    failed_loads: int = 0
    checks_ready: bool = False

    @property
    def alive(self) -> bool:
        """Whether there is a process that has not been seen to end."""
        return self.child is not None and self.child.alive

    def event(self, name: str) -> None:
        """Move to the next state."""
        self.state = instance_after(self.state, name)

    def loaded(self, checks_ready: bool) -> None:
        """Its model is loaded; `checks_ready`: it says itself whether it is ready."""
        self.checks_ready = checks_ready
        self.event("loaded")
        self.ready_at = time.monotonic()
        self.failed_loads = 0


def expand_instances(config: dict[str, Any]) -> list[Instance]:
    """The instances that `instance_group` of a normalised configuration asks for, in order."""
    made: list[Instance] = []
    for place, group in enumerate(config["instance_group"]):
        gpu = group["kind"] == "KIND_GPU"
        for device_id in group["gpus"] if gpu else [0]:
            for number in range(group["count"]):
                made.append(
                    Instance(
                        index=len(made),
                        name=f"{group['name']}_{number}"
                        if not gpu
                        else f"{group['name']}_gpu{device_id}_{number}",
                        device=f"gpu:{device_id}" if gpu else "cpu",
                        kind=group["kind"].removeprefix("KIND_"),
                        device_id=device_id,
                        group=place,
                    )
                )
    return made
