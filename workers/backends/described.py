"""Descriptions of tensors in a model's file, merged into what its author left open (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.datatypes import TO_CONFIG


@dataclass(frozen=True, slots=True)
class Described:
    """One tensor of a model: `dims`, batch dimension included; -1: the size may vary.

    `symbols`: the names of such dimensions, "" where one is fixed or has none; those of one name
    are of one size in a call.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    symbols: tuple[str, ...] = ()

    @property
    def leading(self) -> str:
        """The symbol of a first dimension that may vary, "" where it is fixed or has none."""
        return self.symbols[0] if self.symbols and self.dims[0] == -1 else ""


@dataclass(frozen=True, slots=True)
class Description:
    """A model's inputs in order, its outputs, the largest batch (0: it does not batch)."""

    inputs: tuple[Described, ...]
    outputs: tuple[Described, ...]
    largest_batch: int


def complete(
    config: dict[str, Any], description: Description, default_max_batch_size: int
) -> dict[str, Any]:
    """`config` with inputs, outputs, batch size and dynamic batching where it leaves them open."""
    completed = dict(config)
    if not config.get("input") and not config.get("output") and not config.get("max_batch_size"):
        completed["max_batch_size"] = min(description.largest_batch, default_max_batch_size)
        if completed["max_batch_size"] > 1 and not ModelSpec.of(config).has_scheduler:
            completed["dynamic_batching"] = {}
    batched = completed.get("max_batch_size", 0) > 0
    if not config.get("input"):
        completed["input"] = [_tensor_config(each, batched) for each in description.inputs]
    if not config.get("output"):
        completed["output"] = [_tensor_config(each, batched) for each in description.outputs]
    return completed


def _tensor_config(tensor: Described, batched: bool) -> dict[str, Any]:
    dims = list(tensor.dims[1:] if batched else tensor.dims)
    made: dict[str, Any] = {"name": tensor.name, "data_type": TO_CONFIG[tensor.datatype]}
    if dims:
        made["dims"] = dims
    else:
        # A configuration has no scalars: one element to the client, none to the model.
        made["dims"] = [1]
        made["reshape"] = {"shape": []}
    return made
