"""Versions of models as the server has them, of which it is kept what the rules ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models.instances import Instance, InstanceState, bounds_of
from shmserve.supervisor.models.model_version import ModelVersion

if TYPE_CHECKING:
    from tests.simulation.lifecycle.processes import SimulatedChild

_LEAVING = (InstanceState.RETIRING, InstanceState.STOPPED)


def counts_of(config: ModelSpec) -> range:
    """The numbers of instances that a configuration allows."""
    bounds = bounds_of(config)
    if bounds is not None:
        return range(bounds.least, bounds.most + 1)
    count = sum(group["count"] for group in config.source["instance_group"])
    return range(count, count + 1)


class ObservedVersion(ModelVersion):
    """A version, whether it `was_ready`, whether it was told to drain, and of an ensemble the
    configurations of its steps' models as they were when it was loaded."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.was_ready = self.drains = False
        self.shapes: list[Any] = []
        self._find = parts[3]

    def __repr__(self) -> str:
        return f"{self.spec.name}:{self.spec.version}#{self.scheduler.number}"

    @property
    def ready(self) -> bool:
        """As `ModelVersion.ready`."""
        ready = super().ready
        self.was_ready |= ready
        return ready

    async def start(self) -> None:
        """As `ModelVersion.start`."""
        self.shapes = self.steps_known()
        await super().start()

    def steps_known(self) -> list[Any]:
        """The configurations of its steps' models, as they are published."""
        found = [self._find(*step) for step in self.spec.steps]
        return [None if version is None else version.config.immutable_config for version in found]

    @property
    def places(self) -> list[Instance]:
        """All of its instances."""
        return self.instances._all

    @property
    def wanted(self) -> int:
        """The number of instances that are not on their way out."""
        return sum(each.state not in _LEAVING for each in self.places)

    def knows(self, index: int, child: SimulatedChild) -> bool:
        """Whether its scheduler expects a process, which offers itself there."""
        serving: Any = self.scheduler.serving
        expected = serving.child.expected.get((self.scheduler.number, index))
        return expected == child.pid and child.offered_at == self.scheduler.instances_endpoint

    @property
    def stopping(self) -> bool:
        """Whether its processes are to end."""
        return self._lifetime.stopping
