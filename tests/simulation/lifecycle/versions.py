"""The server's model versions, with records for the checks of the simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models.instance import Instance, InstanceState, bounds_of
from shmserve.supervisor.models.model_version import ModelVersion

if TYPE_CHECKING:
    from tests.simulation.lifecycle.processes import SimulatedChild

_RETIRED_STATES = (InstanceState.RETIRING, InstanceState.STOPPED)


def counts_of(config: ModelSpec) -> range:
    bounds = bounds_of(config)
    if bounds is not None:
        return range(bounds.minimum, bounds.maximum + 1)
    count = sum(group["count"] for group in config.source["instance_group"])
    return range(count, count + 1)


class ObservedVersion(ModelVersion):
    """A version with records.

    Attributes:
        was_ready: Whether it has been ready.
        is_draining: Whether it has received the message to drain.
        step_configs: The configurations of an ensemble's step models at its load.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.was_ready = self.is_draining = False
        self.step_configs: list[Any] = []
        self._find_published = parts[4]

    def __repr__(self) -> str:
        return f"{self.spec.name}:{self.spec.version}#{self.scheduler.number}"

    @property
    def ready(self) -> bool:
        ready = super().ready
        self.was_ready |= ready
        return ready

    async def start(self) -> None:
        self.step_configs = self.published_step_configs()
        await super().start()

    def published_step_configs(self) -> list[Any]:
        versions = [self._find_published(*step) for step in self.spec.steps]
        return [None if v is None else v.config.immutable_config for v in versions]

    @property
    def all_instances(self) -> list[Instance]:
        return self.instances._instances

    @property
    def active_count(self) -> int:
        """Return the number of instances that do not retire."""
        return sum(instance.state not in _RETIRED_STATES for instance in self.all_instances)

    def expects(self, index: int, child: SimulatedChild) -> bool:
        """Check whether the scheduler expects a process that has attached to it."""
        current: Any = self.scheduler.current
        expected = current.child.expected_pids.get((self.scheduler.number, index))
        return (
            expected == child.pid and child.scheduler_endpoint == self.scheduler.instances_endpoint
        )

    @property
    def is_stopping(self) -> bool:
        return self._lifetime.is_stopping
