"""Rules about a model's tensors: names, datatypes, dims, reshape, generated batch tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from shmserve.proto.model_config_pb2 import (
    BatchInput,
    BatchOutput,
    DataType,
    ModelConfig,
    ModelInput,
    ModelOutput,
)

_FORMATS = (ModelInput.FORMAT_NHWC, ModelInput.FORMAT_NCHW)


def tensor_problems(config: ModelConfig, *, complete: bool) -> Iterator[str]:
    """What is wrong with inputs and outputs; `complete` as in `validate`."""
    for io in config.input:
        yield from _tensor(io, "model input ", config.max_batch_size, complete)
        if io.format in _FORMATS and io.dims and len(io.dims) != 3:
            yield "model input NHWC/NCHW require 3 dims"
    for out in config.output:
        yield from _tensor(out, "model output ", config.max_batch_size, complete)
    yield from _repeated([io.name for io in config.input], "model input")
    yield from _repeated([out.name for out in config.output], "model output")


def batch_io_problems(config: ModelConfig) -> Iterator[str]:
    """What is wrong with batch_input and batch_output."""
    inputs = {io.name for io in config.input}
    outputs = {out.name for out in config.output}
    for made in config.batch_input:
        kind = BatchInput.Kind.Name(made.kind)
        yield from _sources(made.source_input, f"batch input kind '{kind}'", inputs)
        if made.data_type not in (DataType.TYPE_INT32, DataType.TYPE_FP32):
            yield "batch input data type must be TYPE_INT32 or TYPE_FP32"
    for split in config.batch_output:
        kind = BatchOutput.Kind.Name(split.kind)
        yield from _sources(split.source_input, f"batch output kind '{kind}'", inputs)
        for name, count in Counter(split.target_name).items():
            if name not in outputs:
                yield f"unknown target output name '{name}'"
            if count > 1:
                yield f"target output name '{name}' can only be specified once"


def _sources(names: Sequence[str], subject: str, inputs: set[str]) -> Iterator[str]:
    if len(names) != 1:
        yield f"{subject} expects 1 source input, got {len(names)}"
    for name in names:
        if name not in inputs:
            yield f"unknown source input name '{name}'"


def _repeated(names: list[str], kind: str) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1 and name:
            yield f"{kind} '{name}' is specified more than once"


def _tensor(
    io: ModelInput | ModelOutput, kind: str, max_batch_size: int, complete: bool
) -> Iterator[str]:
    if not io.name:
        yield f"{kind}must specify 'name'"
        return
    subject = f"{kind}'{io.name}' "
    if complete and io.data_type == DataType.TYPE_INVALID:
        yield f"{subject}must specify 'data_type'"
    if complete and not io.dims:
        yield f"{subject}must specify 'dims'"
    if not _are_dims(io.dims):
        yield (
            f"{subject}dimension must be integer >= 1, or -1 to indicate a variable-size dimension"
        )
    if io.HasField("reshape") and io.dims:
        yield from (
            f"{subject}{problem}" for problem in _reshape(io.dims, io.reshape.shape, max_batch_size)
        )
    if io.is_shape_tensor:
        yield "shape tensors are only supported for TensorRT platform"
    if io.is_non_linear_format_io:
        yield "Non-linear IO format is only supported for the TensorRT platform"


def _reshape(dims: Sequence[int], shape: Sequence[int], max_batch_size: int) -> Iterator[str]:
    if not shape and max_batch_size == 0:
        yield (
            "cannot have empty reshape for non-batching model as scalar tensors are not supported"
        )
    if not _are_dims(shape):
        yield (
            "reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension"
        )
    elif (-1 in dims) != (-1 in shape):
        yield "has different size for dims and reshape"
    else:
        # A -1 carries its size across, in order; the stretches between them must hold the same
        # number of elements on both sides.
        before, after = _products(dims), _products(shape)
        if len(before) != len(after):
            yield "has different number of variable-size dimensions for dims and reshape"
        elif before != after:
            yield "has different size for dims and reshape"


def _are_dims(dims: Sequence[int]) -> bool:
    return all(dim >= 1 or dim == -1 for dim in dims)


def _products(dims: Sequence[int]) -> list[int]:
    """Element counts of the stretches between variable dimensions: [2, 4, -1, 6] -> [8, 6]."""
    stretches: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            stretches.append([])
        else:
            stretches[-1].append(dim)
    return [math.prod(stretch) for stretch in stretches]
