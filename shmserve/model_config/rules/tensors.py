"""Rules for a model's tensors: inputs, outputs, generated batch tensors and warm-up samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from shmserve.model_config.source import Key, Problem, find_repeats, map_key
from shmserve.proto.model_config_pb2 import (
    BatchInput,
    BatchOutput,
    DataType,
    ModelConfig,
    ModelInput,
    ModelOutput,
)

_IMAGE_FORMATS = (ModelInput.FORMAT_NHWC, ModelInput.FORMAT_NCHW)
_BATCH_SIZE_KEY: Key = ("max_batch_size",)
_ALLOWED_DIMS = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def tensor_problems(config: ModelConfig, *, is_complete: bool) -> Iterator[Problem]:
    """Yield the problems of inputs and outputs; `is_complete` as for `validate`."""
    for index, io in enumerate(config.input):
        path: Key = ("input", index)
        yield from _io_problems(path, io, "model input ", config.max_batch_size, is_complete)
        if io.format in _IMAGE_FORMATS and io.dims and len(io.dims) != 3:
            dims = (*path, "dims")
            yield Problem((*path, "format"), "model input NHWC/NCHW require 3 dims", (dims,))
    for index, out in enumerate(config.output):
        path = ("output", index)
        yield from _io_problems(path, out, "model output ", config.max_batch_size, is_complete)
    yield from _repeat_problems("input", config.input)
    yield from _repeat_problems("output", config.output)


def batch_io_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield the problems of batch_input and batch_output."""
    input_names = {io.name for io in config.input}
    input_ranks = {io.name: _model_rank(io) for io in config.input}
    output_ranks = {out.name: _model_rank(out) for out in config.output}
    for index, batch_input in enumerate(config.batch_input):
        path: Key = ("batch_input", index)
        kind = BatchInput.Kind.Name(batch_input.kind)
        yield from _source_problems(path, batch_input, f"batch input kind '{kind}'", input_names)
        if batch_input.data_type not in (DataType.TYPE_INT32, DataType.TYPE_FP32):
            text = "batch input data type must be TYPE_INT32 or TYPE_FP32"
            yield Problem((*path, "data_type"), text)
        yield from _target_problems(path, batch_input.target_name, input_names)
    for index, batch_output in enumerate(config.batch_output):
        path = ("batch_output", index)
        kind = BatchOutput.Kind.Name(batch_output.kind)
        yield from _source_problems(path, batch_output, f"batch output kind '{kind}'", input_names)
        source = batch_output.source_input[0] if batch_output.source_input else ""
        names = enumerate(batch_output.target_name)
        targets: dict[Key, str] = {(*path, "target_name", i): name for i, name in names}
        for key, name in targets.items():
            if name not in output_ranks:
                yield Problem(key, f"unknown target output name '{name}'", (("output",),))
            elif source in input_ranks and output_ranks[name] != input_ranks[source]:
                text = f"target output '{name}' must have as many dims as source input '{source}'"
                yield Problem(key, text, (("output",), ("input",)))
        for key, name, first_key in find_repeats(targets.items()):
            yield Problem(
                key, f"target output name '{name}' can only be specified once", (first_key,)
            )


def _model_rank(io: ModelInput | ModelOutput) -> int:
    return len(io.reshape.shape if io.HasField("reshape") else io.dims)


def _target_problems(path: Key, names: Sequence[str], input_names: set[str]) -> Iterator[Problem]:
    if not names:
        yield Problem((*path, "target_name"), "batch input must specify 'target_name'")
    for index, name in enumerate(names):
        if name in input_names:
            text = (
                f"batch input '{name}' is created by the server and cannot be an input of clients"
            )
            yield Problem((*path, "target_name", index), text, (("input",),))


def _source_problems(
    path: Key, tensor: BatchInput | BatchOutput, subject: str, input_names: set[str]
) -> Iterator[Problem]:
    key, names = (*path, "source_input"), tensor.source_input
    if len(names) != 1:
        text = f"{subject} expects 1 source input, got {len(names)}"
        yield Problem(key, text, ((*path, "kind"),))
    for index, name in enumerate(names):
        if name not in input_names:
            yield Problem((*key, index), f"unknown source input name '{name}'", (("input",),))


def _repeat_problems(field: str, tensors: Sequence[ModelInput | ModelOutput]) -> Iterator[Problem]:
    names = (((field, i, "name"), io.name) for i, io in enumerate(tensors) if io.name)
    for key, name, first_key in find_repeats(names):
        yield Problem(key, f"model {field} '{name}' is specified more than once", (first_key,))


def _io_problems(
    path: Key, io: ModelInput | ModelOutput, noun: str, max_batch_size: int, is_complete: bool
) -> Iterator[Problem]:
    if not io.name:
        yield Problem((*path, "name"), f"{noun}must specify 'name'")
        return
    subject = f"{noun}'{io.name}' "
    dims_key = (*path, "dims")
    if is_complete and io.data_type == DataType.TYPE_INVALID:
        yield Problem((*path, "data_type"), f"{subject}must specify 'data_type'")
    if is_complete and not io.dims:
        yield Problem(dims_key, f"{subject}must specify 'dims'")
    for index in _invalid_dims(io.dims):
        yield Problem((*dims_key, index), f"{subject}dimension {_ALLOWED_DIMS}")
    if io.HasField("reshape") and io.dims:
        for problem in _reshape_problems(path, io.dims, io.reshape.shape, max_batch_size):
            yield problem._replace(text=f"{subject}{problem.text}")
    if io.is_shape_tensor:
        text = "shape tensors are only supported for TensorRT platform"
        yield Problem((*path, "is_shape_tensor"), text)
    if io.is_non_linear_format_io:
        text = "Non-linear IO format is only supported for the TensorRT platform"
        yield Problem((*path, "is_non_linear_format_io"), text)


def _reshape_problems(
    path: Key, dims: Sequence[int], shape: Sequence[int], max_batch_size: int
) -> Iterator[Problem]:
    key, related_keys = (*path, "reshape", "shape"), ((*path, "dims"),)
    if not shape and max_batch_size == 0:
        text = (
            "cannot have empty reshape for non-batching model as scalar tensors are not supported"
        )
        yield Problem(key, text, (_BATCH_SIZE_KEY,))
    for index in _invalid_dims(shape):
        yield Problem((*key, index), f"reshape dimensions {_ALLOWED_DIMS}")
    if _invalid_dims(shape) or _invalid_dims(dims):
        return
    if (-1 in dims) != (-1 in shape):
        yield Problem(key, "has different size for dims and reshape", related_keys)
        return
    # Each -1 keeps its size, in order. The dimensions between two -1 must therefore hold the same
    # number of elements before and after the reshape.
    dims_products, shape_products = _products(dims), _products(shape)
    if len(dims_products) != len(shape_products):
        text = "has different number of variable-size dimensions for dims and reshape"
        yield Problem(key, text, related_keys)
    elif dims_products != shape_products:
        yield Problem(key, "has different size for dims and reshape", related_keys)


def _invalid_dims(dims: Sequence[int]) -> list[int]:
    """Return the indices of invalid dimensions: neither a positive size nor -1."""
    return [index for index, dim in enumerate(dims) if dim < 1 and dim != -1]


def _products(dims: Sequence[int]) -> list[int]:
    """Return the element counts between variable dimensions: [2, 4, -1, 6] -> [8, 6]."""
    fixed_runs: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            fixed_runs.append([])
        else:
            fixed_runs[-1].append(dim)
    return [math.prod(fixed_dims) for fixed_dims in fixed_runs]


def warmup_problems(config: ModelConfig, *, is_complete: bool) -> Iterator[Problem]:
    """Yield the problems of model_warmup; `is_complete` as for `validate`.

    The files of samples are read only when an instance loads the model. As in Triton, a sample of
    batch size 0 is skipped, so its inputs may be incomplete.
    """
    max_size = max(config.max_batch_size, 1)
    for index, sample in enumerate(config.model_warmup):
        if not sample.batch_size:
            continue
        if is_complete and sample.batch_size > max_size:
            text = f"warmup sample '{sample.name}': batch size {sample.batch_size}, max allowed is"
            yield Problem(("model_warmup", index, "batch_size"), f"{text} {max_size}")
        for name, tensor in sorted(sample.inputs.items()):
            path: Key = ("model_warmup", index, "inputs", map_key(name))
            if tensor.data_type == DataType.TYPE_INVALID:
                text = f"warmup setting of input '{name}' must specify 'data_type'"
                yield Problem(path, text)
            if any(dim < 0 for dim in tensor.dims):
                text = (
                    "warmup setting expects all variable-size dimensions are specified for input "
                    f"'{name}'"
                )
                yield Problem(path, text)
            if tensor.WhichOneof("input_data_type") is None:
                text = f"warmup setting expects input '{name}' to have input_data_type set"
                yield Problem(path, text)
