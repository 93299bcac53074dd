"""The memory plan of an ensemble: what a request needs between its steps, as far as that is fixed,
is there before the first one comes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from shmserve.errors import ShmserveError
from shmserve.scheduler.ensemble.flow import Plan
from shmserve.scheduler.ensemble.graph import Graph
from shmserve.scheduler.ensemble.memory import EnsembleMemory
from shmserve.scheduler.ensemble.steps.submission import placed_sizes
from shmserve.scheduler.ensemble.steps.targets import Targets

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class MemoryPlanner:
    """Plans once: as soon as all steps' models are known, for requests of `batch_size`."""

    _graph: Graph
    _batch_size: int
    _targets: Targets
    _memory: EnsembleMemory
    _planned_bytes: int = 0

    def plan(self) -> None:
        """A model has been published."""
        if self._planned_bytes:
            return
        try:
            targets = [(step, self._targets.find(step)) for step in self._graph.steps]
            devices = Plan(self._graph, self._graph.outputs, self._targets).devices
        except ShmserveError:
            return
        blocks = [
            (size, devices.get(step.outputs[name]))
            for step, target in targets
            for name, size in placed_sizes(step, target, self._graph, self._batch_size).items()
        ]
        self._planned_bytes = sum(size for size, _ in blocks)
        if blocks:
            self._memory.reserve(blocks)
            on_devices = sum(size for size, device in blocks if device is not None)
            logger.info(
                "%d tensors of fixed shapes between steps: %.1f MB a request, planned%s",
                len(blocks),
                self._planned_bytes / 1e6,
                f", {on_devices / 1e6:.1f} of them on CUDA devices" if on_devices else "",
            )
