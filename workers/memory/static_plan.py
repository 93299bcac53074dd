"""The memory plan of a model whose shapes are all fixed. What its batches take is known when it
loads, and allocated then:

    weights      once
    inputs       one buffer an input, of the largest batch: every smaller bucket is a part of it
    outputs      the same
    workspace    what the model needs in between, where that was measured
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shmserve.ipc.model_spec import ModelSpec, TensorSpec
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.signature import Signature

_MB = 1_000_000


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes: of the weights, of a row of each input and output, of the workspace (None: it is not
    known). `buckets` are the rows of the batches that are prepared, ascending; a batch runs in the
    smallest that holds it."""

    weights: int
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    buckets: tuple[int, ...]
    workspace: int | None = None

    @classmethod
    def of(cls, config: ModelSpec, signature: Signature, weights: int) -> MemoryPlan | None:
        """The plan of a model whose parameters take `weights` bytes; None where the size of an
        input or output is only known when it is there."""
        specs = [*signature.inputs.values(), *signature.outputs.values()]
        if not specs or not all(map(_fixed, specs)):
            return None
        return cls(
            weights,
            {spec.name: _row(spec) for spec in signature.inputs.values()},
            {spec.name: _row(spec) for spec in signature.outputs.values()},
            buckets(config),
        )

    @property
    def rows(self) -> int:
        """Of the largest batch."""
        return self.buckets[-1]

    def bucket(self, rows: int) -> int:
        """The smallest bucket that holds so many rows; raises ValueError where none does."""
        for bucket in self.buckets:
            if rows <= bucket:
                return bucket
        raise ValueError(f"{rows} rows are more than the {self.rows} of the largest bucket")

    def byte_size(self, rows: int) -> tuple[int, int]:
        """(inputs, outputs) of a batch of so many rows."""
        return sum(self.inputs.values()) * rows, sum(self.outputs.values()) * rows

    @property
    def total(self) -> int:
        """Bytes in all, as far as they are known."""
        return self.weights + sum(self.byte_size(self.rows)) + (self.workspace or 0)

    def text(self) -> str:
        """The plan for the log, in MB."""
        each = ", ".join(
            f"{rows}: {inputs / _MB:.2f} + {outputs / _MB:.2f}"
            for rows in self.buckets
            for inputs, outputs in (self.byte_size(rows),)
        )
        workspace = "not known" if self.workspace is None else f"{self.workspace / _MB:.2f}"
        return (
            f"{self.total / _MB:.2f} MB: weights {self.weights / _MB:.2f}, inputs + outputs by "
            f"batch ({each}), workspace {workspace}"
        )


def buckets(config: ModelSpec) -> tuple[int, ...]:
    """The batch sizes to prepare, ascending, the largest last: those that `optimization.cuda`'s
    `graph_spec` names, or else the preferred ones and the powers of two."""
    most = max(1, config.max_batch_size)
    named = {spec.batch_size for spec in config.optimization.cuda_graph_spec}
    if not named:
        batching = config.dynamic_batching
        named = set(batching.preferred_batch_size if batching is not None else ())
        named |= {1 << power for power in range(most.bit_length())}
    return (*sorted(size for size in named if 0 < size < most), most)


def _fixed(spec: TensorSpec) -> bool:
    varies = spec.optional or spec.ragged or not ITEM_SIZE[spec.datatype]
    return spec.static and not varies


def _row(spec: TensorSpec) -> int:
    return element_count(spec.dims) * ITEM_SIZE[spec.datatype]
