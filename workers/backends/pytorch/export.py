"""What an exported program says of its inputs and outputs, and whether a configuration agrees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import TensorArgument

from shmserve.errors import InvalidArgument
from shmserve.ipc.tensors.datatypes import TO_CONFIG
from shmserve.ipc.tensors.signature import Signature, agree, shape_text
from shmserve.workers.backends import has_scheduler
from shmserve.workers.memory.torch_types import PROTOCOL


@dataclass(frozen=True, slots=True)
class Described:
    """One tensor of a program: `dims`, batch dimension included; -1: the size may vary."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    leading: str  # the symbol of a first dimension that may vary, "" where it is fixed


@dataclass(frozen=True, slots=True)
class Description:
    """A program's inputs in order, its outputs, the largest batch (0: it does not batch)."""

    inputs: tuple[Described, ...]
    outputs: tuple[Described, ...]
    largest_batch: int


_UNBOUNDED = 2**31


def describe(exported: torch.export.ExportedProgram) -> Description:
    """Read a program's graph. Raises InvalidArgument for a datatype that the protocol lacks."""
    signature = exported.graph_signature
    values = {node.name: node.meta.get("val") for node in exported.graph.nodes}
    names = [name for name in signature.user_inputs if isinstance(name, str)]
    inputs = tuple(_described(name, values[name]) for name in names)
    results = [
        spec.arg.name if isinstance(spec.arg, TensorArgument) else None
        for spec in signature.output_specs
        if spec.kind.name == "USER_OUTPUT"
    ]
    labels = _labels(exported, len(results))
    outputs = tuple(
        _described(label, values[result])
        for label, result in zip(labels, results, strict=True)
        if result is not None
    )
    return Description(inputs, outputs, _largest_batch(exported, (*inputs, *outputs)))


def _described(name: str, value: Any) -> Described:
    datatype = PROTOCOL.get(value.dtype)
    if datatype is None:
        raise InvalidArgument(
            f"tensor '{name}' of the exported program is {value.dtype}, which no client can send"
        )
    dims = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    leading = "" if not dims or dims[0] != -1 else str(value.shape[0])
    return Described(name, datatype, dims, leading)


def _labels(exported: torch.export.ExportedProgram, count: int) -> Sequence[str]:
    out_spec = exported.call_spec.out_spec
    if out_spec is not None and out_spec.type is not None and len(out_spec.children()) == count:
        if issubclass(out_spec.type, Mapping):
            return [str(key) for key in out_spec.context]
        if hasattr(out_spec.type, "_fields") or hasattr(out_spec.context, "_fields"):
            named = out_spec.context if hasattr(out_spec.context, "_fields") else out_spec.type
            return list(named._fields)
    return [f"OUTPUT__{at}" for at in range(count)]


def _largest_batch(exported: torch.export.ExportedProgram, tensors: Sequence[Described]) -> int:
    leading = {tensor.leading for tensor in tensors}
    if len(leading) != 1 or "" in leading:
        return 0
    symbol = leading.pop()
    for known, bounds in exported.range_constraints.items():
        if str(known) == symbol:
            upper = bounds.upper
            return int(upper) if upper < _UNBOUNDED else _UNBOUNDED
    return 0  # an expression such as 2*s0 is no batch dimension


def complete(
    config: dict[str, Any], description: Description, default_max_batch_size: int
) -> dict[str, Any]:
    """`config` with inputs, outputs, batch size and dynamic batching where it leaves them open."""
    completed = dict(config)
    if not config.get("input") and not config.get("output") and not config.get("max_batch_size"):
        completed["max_batch_size"] = min(description.largest_batch, default_max_batch_size)
        if completed["max_batch_size"] > 1 and not has_scheduler(config):
            completed["dynamic_batching"] = {}
    batched = completed.get("max_batch_size", 0) > 0
    if not config.get("input"):
        completed["input"] = [_tensor_config(tensor, batched) for tensor in description.inputs]
    if not config.get("output"):
        completed["output"] = [_tensor_config(tensor, batched) for tensor in description.outputs]
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


def check(
    signature: Signature, description: Description, by_position: Sequence[tuple[int, str]]
) -> None:
    """Raises InvalidArgument when a configuration promises what the program cannot do."""
    flat = any(spec.ragged for spec in signature.inputs.values())
    most = 0 if flat else signature.max_batch_size
    if most > 0 and description.largest_batch == 0:
        raise InvalidArgument(
            f"model '{signature.name}' has max_batch_size {most}, but its program was exported "
            "with a fixed first dimension: export it with "
            "dynamic_shapes={...: {0: torch.export.Dim('batch')}}"
        )
    if most > description.largest_batch:
        raise InvalidArgument(
            f"model '{signature.name}' has max_batch_size {most}, but its program was exported for "
            f"{description.largest_batch} at most"
        )
    for position, name in by_position:
        spec, tensor = signature.inputs[name], description.inputs[position]
        if spec.datatype != tensor.datatype:
            raise InvalidArgument(
                f"input '{name}' of model '{signature.name}' has data_type "
                f"{TO_CONFIG[spec.datatype]}, but its program takes {TO_CONFIG[tensor.datatype]}"
            )
        if spec.ragged:
            continue  # as many dimensions as the program likes
        dims = spec.dims if spec.reshape is None else spec.reshape
        want = tensor.dims[1:] if signature.max_batch_size > 0 else tensor.dims
        if not agree(dims, want):
            raise InvalidArgument(
                f"input '{name}' of model '{signature.name}' has the shape {shape_text(dims)}, but "
                f"its program takes {shape_text(want)}"
            )
