"""Batches of requests with unequal shapes: ragged (flat) inputs, or inputs padded to one shape.

The model of a ragged batch receives generated tensors with the extent of each request in a flat
input (`batch_input`). Flat outputs are split (`batch_output`). The generated tensors for requests
with 2, 4 and 1 elements in the source input:

    BATCH_ELEMENT_COUNT                           [2, 4, 1]
    BATCH_ACCUMULATED_ELEMENT_COUNT               [2, 6, 7]
    BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO     [0, 2, 6, 7]
    BATCH_MAX_ELEMENT_COUNT_AS_SHAPE              zeros of the shape [4]
    BATCH_ITEM_SHAPE                              [number of rows, rank]: the shape of each row
    BATCH_ITEM_SHAPE_FLATTEN                      the same, flat

    BATCH_SCATTER_WITH_INPUT_SHAPE                a flat output, split into the inputs' shapes

The padded inputs of a batch are adjacent rows of one dense array. The gatherer therefore does not
copy them, and a model that receives separate requests can join them without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np

from shmserve.errors import Internal
from shmserve.ipc.model_spec import ModelSpec, TensorSpec
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES, STORAGE_DTYPES, to_bf16
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.padding import Pad, Padding, Shape
from shmserve.ipc.tensors.signature import Signature, shape_text
from shmserve.workers.batch.backend_request import Array, CopyCounter, Input, Request, Response


class _GeneratedTensor(NamedTuple):
    """A rule for a tensor that is generated for each batch."""

    name: str
    source: str  # name of an input
    compute: Callable[[Sequence[Shape], bool], Array]  # from the shapes of `source`
    dtype: np.dtype[Any]


class _OutputSplit(NamedTuple):
    """The rule for splitting a flat output into the shapes of the input `source`.

    `dims` is the shape of the output for a row; a size of -1 is the input's size.
    """

    source: str  # name of an input
    dims: Shape


class RaggedRules:
    """The rules of one model's configuration for ragged batches."""

    def __init__(self, config: ModelSpec) -> None:
        self._supports_batching = config.max_batch_size > 0
        self._generated_inputs = [
            _GeneratedTensor(
                name,
                rule.source_input[0],
                _GENERATORS[rule.kind],
                np.dtype(NUMPY_DTYPES[rule.datatype]),
            )
            for rule in config.batch_input
            for name in rule.target_name
        ]
        dims_by_output = {output.name: output.model_dims for output in config.output}
        self._output_splits = {
            name: _OutputSplit(rule.source_input[0], dims_by_output[name])
            for rule in config.batch_output
            for name in rule.target_name
        }

    def inputs(self, requests: Sequence[Request]) -> dict[str, Array]:
        """Return the generated inputs of a batch by name, except those whose source is missing."""
        arrays: dict[str, Array] = {}
        for name, source, compute, dtype in self._generated_inputs:
            if source in requests[0].inputs:
                shapes = [request.inputs[source].shape for request in requests]
                arrays[name] = compute(shapes, self._supports_batching).astype(dtype)
        return arrays

    def part_shapes(
        self, name: str, requests: Sequence[Request], shape: Shape
    ) -> list[Shape] | None:
        """Return the shape of each request's part of an output; None if it is split by rows.

        Raises:
            Internal: The output, of shape `shape`, has another number of elements.
        """
        rule = self._output_splits.get(name)
        if rule is None or rule.source not in requests[0].inputs:
            return None
        shapes = [self._part_shape(rule.dims, r.inputs[rule.source].shape) for r in requests]
        expected_count = sum(map(element_count, shapes))
        if element_count(shape) != expected_count:
            raise Internal(
                f"inference output '{name}' has {element_count(shape)} elements, expected "
                f"{expected_count} for the shapes of input '{rule.source}'"
            )
        return shapes

    def _part_shape(self, dims: Shape, source: Shape) -> Shape:
        batch_dim, item_dims = (source[:1], source[1:]) if self._supports_batching else ((), source)
        pairs = zip(dims, item_dims, strict=True)
        return (*batch_dim, *(size if dim == -1 else dim for dim, size in pairs))


def generated_inputs(config: ModelSpec) -> list[TensorSpec]:
    """Return the inputs that `batch_input` generates.

    The inputs are `ragged`, because they do not have one row for each row of the batch.
    """
    ranks = {spec.name: len(spec.model_dims) for spec in config.input}
    return [
        TensorSpec(
            name,
            rule.datatype,
            (ranks[rule.source_input[0]] if rule.kind == "BATCH_ITEM_SHAPE" else -1,),
            ragged=True,
        )
        for rule in config.batch_input
        for name in rule.target_name
    ]


def _element_counts(shapes: Sequence[Shape]) -> list[int]:
    return list(map(element_count, shapes))


def _item_shapes(shapes: Sequence[Shape], is_batched: bool) -> Array:
    if not is_batched:
        return np.array(shapes)
    return np.repeat(np.array([dims[1:] for dims in shapes]), [dims[0] for dims in shapes], axis=0)


_GENERATORS: dict[str, Callable[[Sequence[Shape], bool], Array]] = {
    "BATCH_ELEMENT_COUNT": lambda shapes, _: np.array(_element_counts(shapes)),
    "BATCH_ACCUMULATED_ELEMENT_COUNT": lambda shapes, _: np.cumsum(_element_counts(shapes)),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda shapes, _: np.cumsum(
        [0, *_element_counts(shapes)]
    ),
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda shapes, _: np.zeros(max(_element_counts(shapes))),
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": lambda *arguments: _item_shapes(*arguments).reshape(-1),
}


class Padder:
    """The padder of batches: pads the inputs of a model, and cuts its outputs."""

    def __init__(self, padding: Padding, signature: Signature, copy_counter: CopyCounter) -> None:
        self._padding = padding
        self._cut_rules = {
            name: _CutRule.of(signature.outputs[name], signature.inputs[source])
            for name, source in padding.cut_outputs.items()
        }
        self._copy_counter = copy_counter

    def pad(self, requests: Sequence[Request]) -> PaddedInputs:
        """Pad the inputs of a batch, add lengths and masks; return the true and padded shapes."""
        result = PaddedInputs()
        for name, pad in self._padding.pads.items():
            if name not in requests[0].inputs:
                continue  # the input is optional, and no request of the batch has it
            inputs = [request.inputs[name] for request in requests]
            shapes = [item.shape[1:] for item in inputs]
            largest_shape = tuple(map(max, zip(*shapes, strict=True)))
            target_shape = pad.padded_shape(largest_shape) or largest_shape
            result.true_shapes[name], result.padded_shapes[name] = shapes, target_shape
            self._copy_counter.inputs += sum(len(item.raw) for item in inputs)
            padded_bytes = _padded_batch(pad, inputs, target_shape)
            _replace_inputs(requests, inputs, name, inputs[0].datatype, padded_bytes, target_shape)
            if pad.lengths_input:
                rows = [item.shape[0] for item in inputs]
                lengths_bytes = _byte_view(np.repeat(np.array(shapes, np.int64), rows, axis=0))
                shape = (len(target_shape),)
                _replace_inputs(requests, inputs, pad.lengths_input, "INT64", lengths_bytes, shape)
            if pad.mask_input:
                mask = _byte_view(_value_mask(inputs, target_shape))
                _replace_inputs(requests, inputs, pad.mask_input, "BOOL", mask, target_shape)
        return result

    def cut(self, responses: Sequence[Response], padded_inputs: PaddedInputs) -> None:
        """Cut the outputs of a padded batch to the true lengths of each request.

        A request fails if its output has neither the padded nor the true lengths.
        """
        for request_index, response in enumerate(responses):
            for output_index, output in enumerate(response.outputs):
                rule = self._cut_rules.get(output.name)
                if rule is None or rule.source not in padded_inputs.true_shapes:
                    continue
                source = rule.source
                shape = padded_inputs.true_shapes[source][request_index]
                slices = rule.true_slices(output.shape, shape, padded_inputs.padded_shapes[source])
                if slices is None:
                    response.error = Internal(
                        f"inference output '{output.name}' has the shape "
                        f"{shape_text(output.shape)}, which cannot be cut like input '{source}', "
                        f"whose padded shape is {shape_text(padded_inputs.padded_shapes[source])}"
                    )
                else:
                    response.outputs[output_index] = output._replace(data=output.data[slices])


class _CutRule(NamedTuple):
    """The rule for cutting an output with the variable dimensions of the input `source`, in order.

    Attributes:
        axes: Pairs of the output's and the input's dimension, without the batch dimension.
    """

    source: str  # name of an input
    rank: int  # number of dimensions
    axes: list[tuple[int, int]]

    @classmethod
    def of(cls, output: TensorSpec, source: TensorSpec) -> Self:
        """Return the rule that pairs the variable dimensions of two tensors, in order."""
        variable_axes = [
            [axis for axis, dim in enumerate(spec.dims) if dim == -1] for spec in (output, source)
        ]
        return cls(source.name, len(output.dims), list(zip(*variable_axes, strict=True)))

    def true_slices(
        self, output_shape: Shape, true_shape: Shape, padded_shape: Shape
    ) -> tuple[slice, ...] | None:
        """Return the slices of an output's true part; None if a size is neither padded nor true."""
        if len(output_shape) != 1 + self.rank:
            return None
        slices = [slice(None)] * len(output_shape)
        for axis, source_axis in self.axes:
            if output_shape[1 + axis] == padded_shape[source_axis]:
                slices[1 + axis] = slice(true_shape[source_axis])
            elif output_shape[1 + axis] != true_shape[source_axis]:
                return None
        return tuple(slices)


@dataclass(slots=True, eq=False)
class PaddedInputs:
    """The shapes of a batch's padded inputs, by name, without the batch dimension.

    Attributes:
        true_shapes: The shapes of each request before padding, by input.
        padded_shapes: The shapes of the batch after padding, by input.
    """

    true_shapes: dict[str, list[Shape]] = field(default_factory=dict)
    padded_shapes: dict[str, Shape] = field(default_factory=dict)


def _replace_inputs(
    requests: Sequence[Request],
    inputs: Sequence[Input],
    name: str,
    datatype: str,
    batch_bytes: Any,
    shape: Shape,
) -> None:
    """Replace an input of each request by its rows of `batch_bytes`, the bytes of a batch."""
    offset = 0
    row_bytes = element_count(shape) * ITEM_SIZE[datatype]
    for request, source in zip(requests, inputs, strict=True):
        rows = source.shape[0]
        end = offset + rows * row_bytes
        request.inputs[name] = Input(
            name,
            datatype,
            (rows, *shape),
            batch_bytes[offset:end],
            model=source.model,
            on_device=not isinstance(batch_bytes, memoryview),
            is_private=True,  # the padded array belongs to this batch alone
            batch=batch_bytes,
        )
        offset = end


def _padded_batch(pad: Pad, inputs: Sequence[Input], target_shape: Shape) -> Any:
    """Return the bytes of a padded batch, in device memory if one of the inputs is there."""
    shape = (sum(item.shape[0] for item in inputs), *target_shape)
    if any(item.on_device for item in inputs):
        return _padded_batch_on_device(pad, inputs, shape)
    datatype = inputs[0].datatype
    batch: Array = np.empty(shape, STORAGE_DTYPES[datatype])
    if any(item.shape[1:] != target_shape for item in inputs):
        batch[...] = to_bf16(np.array(pad.value)) if datatype == "BF16" else pad.value
    for item, slices in zip(inputs, _input_slices(inputs), strict=True):
        batch[slices] = item.numpy()
    return _byte_view(batch)


def _padded_batch_on_device(pad: Pad, inputs: Sequence[Input], shape: Shape) -> Any:
    import torch

    device = next(item.raw.device for item in inputs if item.on_device)
    tensors = [item.torch() for item in inputs]
    batch = torch.full(shape, pad.value, dtype=tensors[0].dtype, device=device)
    for tensor, slices in zip(tensors, _input_slices(inputs), strict=True):
        batch[slices] = tensor.to(device)
    return batch.reshape(-1).view(torch.uint8)


def _value_mask(inputs: Sequence[Input], target_shape: Shape) -> Array:
    """Return a mask of the padded batch that is False at the padding."""
    mask = np.zeros((sum(item.shape[0] for item in inputs), *target_shape), np.bool_)
    for slices in _input_slices(inputs):
        mask[slices] = True
    return mask


def _input_slices(inputs: Sequence[Input]) -> Iterator[tuple[slice, ...]]:
    """Yield the slices of the padded batch that each input occupies."""
    start = 0
    for item in inputs:
        end = start + item.shape[0]
        yield (slice(start, end), *map(slice, item.shape[1:]))
        start = end


def _byte_view(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
