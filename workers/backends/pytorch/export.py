"""The description of an exported program's inputs and outputs, checked against a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export.graph_signature import TensorArgument

from shmserve.errors import InvalidArgument
from shmserve.ipc.tensors.datatypes import TO_CONFIG
from shmserve.ipc.tensors.signature import Signature, agree, shape_text
from shmserve.workers.backends.described import Described, Description
from shmserve.workers.memory.tensors import PROTOCOL

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
    symbols = tuple("" if isinstance(size, int) else str(size) for size in value.shape)
    return Described(name, datatype, dims, symbols)


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
        dims = spec.model_dims
        want = tensor.dims[1:] if signature.max_batch_size > 0 else tensor.dims
        if not agree(dims, want):
            raise InvalidArgument(
                f"input '{name}' of model '{signature.name}' has the shape {shape_text(dims)}, but "
                f"its program takes {shape_text(want)}"
            )
