"""The memory plan of an ensemble: what a request needs between its steps, as far as that is fixed,
is there before the first one comes.
"""

from __future__ import annotations

import logging

from shmserve.errors import ShmserveError
from shmserve.scheduler.ensemble.graph import Graph
from shmserve.scheduler.ensemble.memory import EnsembleMemory
from shmserve.scheduler.ensemble.steps.submission import placed_sizes
from shmserve.scheduler.ensemble.steps.targets import Targets

logger = logging.getLogger(__name__)


class MemoryPlanner:
    """Plans once: as soon as all steps' models are known, for requests of `batch_size`."""

    def __init__(
        self, graph: Graph, batch_size: int, targets: Targets, memory: EnsembleMemory
    ) -> None:
        self._graph = graph
        self._batch_size = batch_size
        self._targets = targets
        self._memory = memory
        self._planned_bytes = 0

    def plan(self) -> None:
        """A model has been published."""
        if self._planned_bytes:
            return
        try:
            targets = [(step, self._targets.find(step)) for step in self._graph.steps]
        except ShmserveError:
            return
        sizes = [
            size
            for step, target in targets
            for size in placed_sizes(step, target, self._graph, self._batch_size).values()
        ]
        self._planned_bytes = sum(sizes)
        if sizes:
            self._memory.reserve(sizes)
            logger.info(
                "%d tensors of fixed shapes between steps: %.1f MB a request, planned",
                len(sizes),
                self._planned_bytes / 1e6,
            )
