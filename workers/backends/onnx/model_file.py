"""What an ONNX file says of its inputs and outputs, and whether a configuration agrees."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from shmserve.errors import InvalidArgument
from shmserve.ipc.model_spec import TensorSpec
from shmserve.ipc.tensors.datatypes import TO_CONFIG
from shmserve.ipc.tensors.signature import Signature, agree, shape_text
from shmserve.workers.backends.described import Described, Description

# onnxruntime's names of the datatypes.
_DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(bfloat16)": "BF16",
    "tensor(string)": "BYTES",
}
_UNBOUNDED = 2**31


def describe(session: Any) -> Description:
    """Read a session's file. Raises InvalidArgument for what the protocol has no datatype for."""
    inputs = tuple(_described("input", node) for node in session.get_inputs())
    outputs = tuple(_described("output", node) for node in session.get_outputs())
    return Description(inputs, outputs, _largest_batch([*inputs, *outputs]))


def _described(what: str, node: Any) -> Described:
    datatype = _DATATYPES.get(node.type)
    if datatype is None:
        raise InvalidArgument(f"{what} '{node.name}' of the ONNX file is a {node.type}")
    shape = list(node.shape)
    dims = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in shape)
    symbols = tuple(size if isinstance(size, str) else "" for size in shape)
    return Described(node.name, datatype, dims, symbols)


def _largest_batch(tensors: Sequence[Described]) -> int:
    """Files seldom say which dimension is the batch's: the first one, if it varies everywhere."""
    return _UNBOUNDED if all(tensor.dims[:1] == (-1,) for tensor in tensors) else 0


def check(
    signature: Signature, description: Description, made: Collection[str] = frozenset()
) -> None:
    """Raises InvalidArgument when a configuration promises what the file cannot do. `made`: inputs
    that are made of the batch, which clients do not send, and outputs that are cut."""
    name, most = signature.name, signature.max_batch_size
    for tensor in (*description.inputs, *filter(_ranked, description.outputs)) if most > 0 else ():
        if tensor.dims[:1] != (-1,):
            raise InvalidArgument(
                f"model '{name}' has max_batch_size {most}, but the first dimension of its tensor "
                f"'{tensor.name}', {shape_text(tensor.dims)}, is no batch dimension, which is one "
                "that varies in all"
            )
    sides: tuple[tuple[str, dict[str, TensorSpec], tuple[Described, ...]], ...] = (
        ("input", signature.inputs, description.inputs),
        ("output", signature.outputs, description.outputs),
    )
    for what, specs, tensors in sides:
        known = {tensor.name: tensor for tensor in tensors}
        for spec in specs.values():
            if spec.name not in known:
                raise InvalidArgument(
                    f"unexpected inference {what} '{spec.name}', allowed {what}s are: "
                    f"{', '.join(sorted(known))}"
                )
            if spec.name not in made:
                _check_tensor(what, spec, known[spec.name], signature)
    lost = sorted({tensor.name for tensor in description.inputs} - {*signature.inputs, *made})
    if lost:
        raise InvalidArgument(
            f"unable to load model '{name}', configuration expects {len(signature.inputs)} inputs, "
            f"model provides {len(description.inputs)}: '{lost[0]}' is missing"
        )


def _ranked(output: Described) -> bool:
    """Whether an output has dimensions: onnxruntime says of a scalar what it says of one that it
    does not know the rank of."""
    return bool(output.dims)


def _check_tensor(what: str, spec: TensorSpec, tensor: Described, signature: Signature) -> None:
    if spec.datatype != tensor.datatype:
        raise InvalidArgument(
            f"unable to load model '{signature.name}', configuration expects datatype "
            f"{TO_CONFIG[spec.datatype]} for {what} '{spec.name}', model provides "
            f"{TO_CONFIG[tensor.datatype]}"
        )
    dims = spec.model_dims
    want = tensor.dims[1:] if signature.max_batch_size > 0 else tensor.dims
    if (what == "input" or _ranked(tensor)) and not spec.ragged and not agree(dims, want):
        raise InvalidArgument(
            f"model '{signature.name}', tensor '{spec.name}': the model expects "
            f"{len(want)} dimensions (shape {shape_text(want)}) but the model configuration "
            f"specifies {len(dims)} dimensions (shape {shape_text(dims)})"
        )
