"""The memory plan of a model whose shapes are all fixed, and the CUDA graphs recorded over it.

The memory of all batches is known at load, and is allocated then:

    weights      once
    inputs       one buffer per input, for the largest batch; smaller buckets use its first rows
    outputs      one buffer per output, for the largest batch
    workspace    the intermediate memory of the model, if it was measured

A graph is recorded for each batch bucket and then replayed. Each replay reads and writes the same
memory, so inputs are copied into the buffers and outputs are read from the graph's memory. The
unused rows of a bucket are computed and ignored. All graphs share one memory pool, because they
never run at the same time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from shmserve.ipc.model_spec import ModelSpec, TensorSpec
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.signature import Signature

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_MB = 1_000_000


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory that a model with fixed shapes needs.

    Attributes:
        weight_bytes: The bytes of the weights.
        input_row_bytes: The bytes of one row of each input, by name.
        output_row_bytes: The bytes of one row of each output, by name.
        buckets: The batch sizes that are prepared, ascending. A batch runs in the smallest bucket
            that holds it.
        workspace: The bytes of the workspace, or None if they were not measured.
    """

    weight_bytes: int
    input_row_bytes: Mapping[str, int]
    output_row_bytes: Mapping[str, int]
    buckets: tuple[int, ...]
    workspace: int | None = None

    @classmethod
    def of(cls, config: ModelSpec, signature: Signature, weight_bytes: int) -> MemoryPlan | None:
        """Return the plan of a model, or None if the size of an input or output varies."""
        specs = [*signature.inputs.values(), *signature.outputs.values()]
        if not specs or not all(map(_has_fixed_size, specs)):
            return None
        input_row_bytes = {spec.name: _row_bytes(spec) for spec in signature.inputs.values()}
        output_row_bytes = {spec.name: _row_bytes(spec) for spec in signature.outputs.values()}
        return cls(weight_bytes, input_row_bytes, output_row_bytes, buckets(config))

    @property
    def rows(self) -> int:
        """Return the number of rows of the largest batch."""
        return self.buckets[-1]

    def bucket_of(self, rows: int) -> int:
        """Return the smallest bucket of at least `rows` rows.

        Raises:
            ValueError: `rows` exceeds the largest bucket.
        """
        for bucket in self.buckets:
            if rows <= bucket:
                return bucket
        raise ValueError(f"a batch of {rows} rows exceeds the largest bucket, {self.rows} rows")

    def byte_size(self, rows: int) -> tuple[int, int]:
        """Return the bytes of the inputs and of the outputs of a batch of `rows` rows."""
        return sum(self.input_row_bytes.values()) * rows, sum(self.output_row_bytes.values()) * rows

    @property
    def total_bytes(self) -> int:
        """Return the total bytes; an unmeasured workspace counts as 0."""
        return self.weight_bytes + sum(self.byte_size(self.rows)) + (self.workspace or 0)

    def log(self, model: str) -> None:
        """Log the plan in MB; at debug level if it is too small to matter."""
        level = logging.INFO if self.total_bytes >= _MB else logging.DEBUG
        logger.log(level, "memory plan of model '%s': %s", model, self.text())

    def text(self) -> str:
        """Return the plan for the log, in MB."""
        batches = ", ".join(
            f"{rows}: {inputs / _MB:.2f} + {outputs / _MB:.2f}"
            for rows in self.buckets
            for inputs, outputs in (self.byte_size(rows),)
        )
        workspace = "not known" if self.workspace is None else f"{self.workspace / _MB:.2f}"
        return (
            f"{self.total_bytes / _MB:.2f} MB: weights {self.weight_bytes / _MB:.2f}, "
            f"inputs + outputs by batch ({batches}), workspace {workspace}"
        )


def buckets(config: ModelSpec) -> tuple[int, ...]:
    """Return the batch sizes to prepare, ascending, the largest last.

    The sizes are those in `graph_spec` of `optimization.cuda`, by default the preferred sizes and
    the powers of two, and always the maximum batch size.
    """
    max_rows = max(1, config.max_batch_size)
    batch_sizes = {spec.batch_size for spec in config.optimization.cuda_graph_spec}
    if not batch_sizes:
        batching = config.dynamic_batching
        batch_sizes = set(batching.preferred_batch_size if batching is not None else ())
        batch_sizes |= {1 << exponent for exponent in range(max_rows.bit_length())}
    return (*sorted(size for size in batch_sizes if 0 < size < max_rows), max_rows)


def _has_fixed_size(spec: TensorSpec) -> bool:
    return spec.is_static and not (spec.optional or spec.ragged or not ITEM_SIZE[spec.datatype])


def _row_bytes(spec: TensorSpec) -> int:
    return element_count(spec.dims) * ITEM_SIZE[spec.datatype]


# Torch recommends warm-ups, because libraries choose their algorithms in the first calls.
_WARM_UP_CALLS = 3

Tensors = Mapping[str, "torch.Tensor"]


class Recorder(Protocol):
    """The interface of a recorder of the work that a call submits to a device."""

    def record(self, call: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """Record a call.

        Returns:
            The function that repeats the call's work, and the tensors with its results.
        """

    def reserved_bytes(self) -> int:
        """Return the bytes of device memory that this process has reserved."""


class CudaRecorder(Recorder):
    """A recorder of CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def record(self, call: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        import torch

        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_CALLS):
                call()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            results = call()
        self._pool = graph.pool()
        return graph.replay, results

    def reserved_bytes(self) -> int:
        import torch

        return torch.cuda.memory_reserved(self._device)


class Graphs:
    """The recorded CUDA graphs of a model.

    `workspace` is the number of bytes that recording has reserved.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        signature: Signature,
        device: torch.device,
        call: Callable[[Tensors], Tensors],
        recorder: Recorder,
    ) -> None:
        import torch

        from shmserve.workers.memory.tensors import TORCH_DTYPES

        self._plan = plan
        self._supports_batching = signature.max_batch_size > 0
        rows_dim = (plan.rows,) if self._supports_batching else ()
        self._inputs = {
            name: torch.zeros(
                (*rows_dim, *spec.model_dims), dtype=TORCH_DTYPES[spec.datatype], device=device
            )
            for name, spec in signature.inputs.items()
        }
        # (replay function, outputs), by number of rows
        self._graphs: dict[int, tuple[Callable[[], None], Tensors]] = {}
        reserved_before = recorder.reserved_bytes()
        # The largest graph is first: smaller ones fit into the memory that it releases to the pool.
        for rows in reversed(plan.buckets):
            inputs = {name: self._first_rows(buffer, rows) for name, buffer in self._inputs.items()}
            self._graphs[rows] = recorder.record(partial(call, inputs))
        self.workspace = recorder.reserved_bytes() - reserved_before

    def run(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Return the outputs for a batch; they are valid until the next run."""
        rows = len(next(iter(inputs.values()))) if self._supports_batching else 1
        bucket = self._plan.bucket_of(rows)
        for name, tensor in inputs.items():
            self._first_rows(self._inputs[name], rows).copy_(tensor, non_blocking=True)
        replay, results = self._graphs[bucket]
        replay()
        return {name: self._first_rows(output, rows) for name, output in results.items()}

    def _first_rows(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        return tensor[:rows] if self._supports_batching else tensor
