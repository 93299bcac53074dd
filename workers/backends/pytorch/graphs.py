"""The CUDA graphs of a model whose shapes are all fixed: recorded once for each batch bucket of its
memory plan, then replayed.

A graph reads and writes the same memory whenever it is replayed. So its inputs are copied into
buffers of the largest bucket, of which the others are the first rows, and its outputs are read
where it leaves them. What is left in the rows behind a batch's own is computed, and given to
nobody.
All graphs share one memory pool: they never run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from shmserve.ipc.tensors.signature import Signature
from shmserve.workers.memory.static_plan import MemoryPlan
from shmserve.workers.memory.tensors import TORCH

_WARM_UPS = 3  # as torch advises: libraries choose their algorithms in the first calls

Tensors = Mapping[str, torch.Tensor]


class Recorder(Protocol):
    """Records what a call does on a device."""

    def record(self, call: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """(what does it again, where its results are then)."""

    def reserved(self) -> int:
        """Bytes of the device that this process has taken."""


class CudaRecorder:
    """Records CUDA graphs, by torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record(self, call: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """As `Recorder` says."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                call()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            results = call()
        self._pool = graph.pool()
        return graph.replay, results

    def reserved(self) -> int:
        """As `Recorder` says."""
        return torch.cuda.memory_reserved(self._device)


class Graphs:
    """The recorded graphs of one model. `workspace` is what recording them took of the device."""

    def __init__(
        self,
        plan: MemoryPlan,
        signature: Signature,
        device: torch.device,
        call: Callable[[Tensors], Tensors],
        recorder: Recorder,
    ) -> None:
        self._plan = plan
        self._batched = signature.max_batch_size > 0
        self._inputs = {
            name: torch.zeros(
                self._shape(spec, plan.rows), dtype=TORCH[spec.datatype], device=device
            )
            for name, spec in signature.inputs.items()
        }
        self._graphs: dict[int, tuple[Callable[[], None], Tensors]] = {}
        before = recorder.reserved()
        # The largest first: the others fit into the memory that it leaves in the pool.
        for rows in reversed(plan.buckets):
            given = {name: self._rows(whole, rows) for name, whole in self._inputs.items()}
            self._graphs[rows] = recorder.record(partial(call, given))
        self.workspace = recorder.reserved() - before

    def run(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        """The model's outputs for a batch; they hold until the next run."""
        rows = len(next(iter(inputs.values()))) if self._batched else 1
        bucket = self._plan.bucket(rows)
        for name, tensor in inputs.items():
            self._rows(self._inputs[name], rows).copy_(tensor, non_blocking=True)
        replay, results = self._graphs[bucket]
        replay()
        return {name: self._rows(value, rows) for name, value in results.items()}

    def _rows(self, whole: torch.Tensor, rows: int) -> torch.Tensor:
        return whole[:rows] if self._batched else whole

    def _shape(self, spec: Any, rows: int) -> tuple[int, ...]:
        dims = spec.model_dims
        return (rows, *dims) if self._batched else tuple(dims)
