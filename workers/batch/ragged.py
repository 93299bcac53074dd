"""Batches of requests with unequal shapes: ragged (flat) inputs, or inputs padded to one shape.

The model of a ragged batch receives generated tensors with the extent of each request in a flat
input (`batch_input`). Flat outputs are split (`batch_output`). The generated tensors for requests
with 2, 4 and 1 elements in the source input:

    BATCH_ELEMENT_COUNT                           [2, 4, 1]
    BATCH_ACCUMULATED_ELEMENT_COUNT               [2, 6, 7]
    BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO     [0, 2, 6, 7]
    BATCH_MAX_ELEMENT_COUNT_AS_SHAPE              zeros of the shape [4]
    BATCH_ITEM_SHAPE                              [rows of all, rank]: a shape for each row
    BATCH_ITEM_SHAPE_FLATTEN                      the same, flat

    BATCH_SCATTER_WITH_INPUT_SHAPE                a flat output, split into the inputs' shapes

The padded inputs of a batch are adjacent rows of one dense array. The gatherer therefore does not
copy them, and a model that receives separate requests can join them without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shmserve.errors import Internal
from shmserve.ipc.model_spec import ModelSpec, TensorSpec
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES, STORAGE_DTYPES, to_bf16
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count
from shmserve.ipc.tensors.padding import Pad, Padding, Shape
from shmserve.ipc.tensors.signature import Signature, shape_text
from shmserve.workers.batch.request import Array, Copied, Input, Request, Response


class _GeneratedTensor(NamedTuple):
    """A rule for a tensor that is generated for each batch."""

    name: str
    source: str
    values: Callable[[Sequence[Shape], bool], Array]
    kind: np.dtype[Any]


class _OutputSplit(NamedTuple):
    """The rule for splitting an output; -1 in `dims` (no batch dimension) is the source's size."""

    source: str
    dims: Shape


class Ragged:
    """The rules of one model's configuration for ragged batches."""

    def __init__(self, config: ModelSpec) -> None:
        self._batched = config.max_batch_size > 0
        self._generated = [
            _GeneratedTensor(
                name,
                each.source_input[0],
                _VALUES[each.kind],
                np.dtype(NUMPY_DTYPES[each.datatype]),
            )
            for each in config.batch_input
            for name in each.target_name
        ]
        dims = {output.name: output.model_dims for output in config.output}
        self._cuts = {
            name: _OutputSplit(each.source_input[0], dims[name])
            for each in config.batch_output
            for name in each.target_name
        }

    def inputs(self, requests: Sequence[Request]) -> dict[str, Array]:
        """Return the generated inputs of a batch, except those whose source is missing."""
        arrays: dict[str, Array] = {}
        for name, source, values, kind in self._generated:
            if source in requests[0].inputs:
                shapes = [request.inputs[source].shape for request in requests]
                arrays[name] = values(shapes, self._batched).astype(kind)
        return arrays

    def pieces(self, name: str, requests: Sequence[Request], whole: Shape) -> list[Shape] | None:
        """Return the shape of each request's part of an output, or None for one that has rows.

        Raises:
            Internal: The output, of shape `whole`, has another number of elements.
        """
        cut = self._cuts.get(name)
        if cut is None or cut.source not in requests[0].inputs:
            return None
        shapes = [self._piece(cut.dims, request.inputs[cut.source].shape) for request in requests]
        expected = sum(map(element_count, shapes))
        if element_count(whole) != expected:
            raise Internal(
                f"inference output '{name}' has {element_count(whole)} elements, expecting the "
                f"{expected} of the requests' inputs '{cut.source}'"
            )
        return shapes

    def _piece(self, dims: Shape, source: Shape) -> Shape:
        head, rest = (source[:1], source[1:]) if self._batched else ((), source)
        sizes = zip(dims, rest, strict=True)
        return (*head, *(size if dim == -1 else dim for dim, size in sizes))


def made_inputs(config: ModelSpec) -> list[TensorSpec]:
    """Return the inputs that `batch_input` generates.

    They are `ragged`, because they do not have one row for each row of the batch.
    """
    ranks = {each.name: len(each.model_dims) for each in config.input}
    return [
        TensorSpec(
            name,
            each.datatype,
            (ranks[each.source_input[0]] if each.kind == "BATCH_ITEM_SHAPE" else -1,),
            ragged=True,
        )
        for each in config.batch_input
        for name in each.target_name
    ]


def _counts(shapes: Sequence[Shape]) -> list[int]:
    return list(map(element_count, shapes))


def _item_shapes(shapes: Sequence[Shape], batched: bool) -> Array:
    if not batched:
        return np.array(shapes)
    return np.repeat(
        np.array([shape[1:] for shape in shapes]), [shape[0] for shape in shapes], axis=0
    )


_VALUES: dict[str, Callable[[Sequence[Shape], bool], Array]] = {
    "BATCH_ELEMENT_COUNT": lambda shapes, _: np.array(_counts(shapes)),
    "BATCH_ACCUMULATED_ELEMENT_COUNT": lambda shapes, _: np.cumsum(_counts(shapes)),
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda shapes, _: np.cumsum([0, *_counts(shapes)]),
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": lambda shapes, _: np.zeros(max(_counts(shapes))),
    "BATCH_ITEM_SHAPE": _item_shapes,
    "BATCH_ITEM_SHAPE_FLATTEN": lambda shapes, batched: _item_shapes(shapes, batched).reshape(-1),
}


class Padder:
    """The padder of one model's batches."""

    def __init__(self, padding: Padding, signature: Signature, copied: Copied) -> None:
        self._padding = padding
        self._likes = {
            name: _Like(
                source,
                len(signature.outputs[name].dims),
                list(zip(*_free(signature.outputs[name], signature.inputs[source]), strict=True)),
            )
            for name, source in padding.likes.items()
        }
        self._copied = copied

    def pad(self, requests: Sequence[Request]) -> PaddedInputs:
        """Pad the inputs of a batch, add lengths and masks, and return the true shapes."""
        padded = PaddedInputs()
        for name, pad in self._padding.pads.items():
            if name not in requests[0].inputs:
                continue  # the input is optional, and no request of the batch has it
            inputs = [request.inputs[name] for request in requests]
            shapes = [item.shape[1:] for item in inputs]
            most = tuple(map(max, zip(*shapes, strict=True)))
            target = pad.padded(most) or most
            padded.true[name], padded.shape[name] = shapes, target
            self._copied.inputs += sum(len(item.raw) for item in inputs)
            _share(requests, inputs, name, inputs[0].datatype, _filled(pad, inputs, target), target)
            if pad.lengths:
                rows = [item.shape[0] for item in inputs]
                lengths = _bytes(np.repeat(np.array(shapes, np.int64), rows, axis=0))
                _share(requests, inputs, pad.lengths, "INT64", lengths, (len(target),))
            if pad.mask:
                mask = _bytes(_mask(inputs, target))
                _share(requests, inputs, pad.mask, "BOOL", mask, target)
        return padded

    def cut(self, responses: Sequence[Response], padded: PaddedInputs) -> None:
        """Cut the outputs of a padded batch to the true lengths of each request.

        A request fails if its output has neither the padded nor the true lengths.
        """
        for at, response in enumerate(responses):
            for index, output in enumerate(response.outputs):
                like = self._likes.get(output.name)
                if like is None or like.source not in padded.true:
                    continue
                source = like.source
                where = like.part(output.shape, padded.true[source][at], padded.shape[source])
                if where is None:
                    response.error = Internal(
                        f"inference output '{output.name}' has the shape "
                        f"{shape_text(output.shape)}, which cannot be cut like input '{source}', "
                        f"whose padded shape is {shape_text(padded.shape[source])}"
                    )
                else:
                    response.outputs[index] = output._replace(data=output.data[where])


class _Like(NamedTuple):
    """The rule for cutting an output, whose variable dimensions are those of an input, in order.

    Attributes:
        axes: Pairs of the output's and the input's dimension, without the batch dimension.
    """

    source: str
    rank: int
    axes: list[tuple[int, int]]

    def part(self, shape: Shape, true: Shape, padded: Shape) -> tuple[slice, ...] | None:
        """Return the true part of an output, or None if its sizes are neither padded nor true."""
        if len(shape) != 1 + self.rank:
            return None
        where = [slice(None)] * len(shape)
        for at, source in self.axes:
            if shape[1 + at] == padded[source]:
                where[1 + at] = slice(true[source])
            elif shape[1 + at] != true[source]:
                return None
        return tuple(where)


@dataclass(slots=True, eq=False)
class PaddedInputs:
    """The shapes of a batch's padded inputs, by name, without the batch dimension.

    Attributes:
        true: The shape of each request before padding.
        shape: The shape after padding.
    """

    true: dict[str, list[Shape]] = field(default_factory=dict)
    shape: dict[str, Shape] = field(default_factory=dict)


def _share(
    requests: Sequence[Request],
    inputs: Sequence[Input],
    name: str,
    datatype: str,
    whole: Any,
    shape: Shape,
) -> None:
    """Replace an input of each request by its rows of `whole`, the bytes of a batch."""
    at = 0
    row = element_count(shape) * ITEM_SIZE[datatype]
    for request, source in zip(requests, inputs, strict=True):
        rows = source.shape[0]
        end = at + rows * row
        request.inputs[name] = Input(
            name,
            datatype,
            (rows, *shape),
            whole[at:end],
            model=source.model,
            on_device=not isinstance(whole, memoryview),
            writable=True,  # the padded array belongs to this batch alone
            batch=whole,
        )
        at = end


def _filled(pad: Pad, inputs: Sequence[Input], target: Shape) -> Any:
    """Return the bytes of a padded batch, on the device of an input if an input is on a device."""
    shape = (sum(item.shape[0] for item in inputs), *target)
    if any(item.on_device for item in inputs):
        return _filled_on_device(pad, inputs, shape)
    datatype = inputs[0].datatype
    whole: Array = np.empty(shape, STORAGE_DTYPES[datatype])
    if any(item.shape[1:] != target for item in inputs):
        whole[...] = to_bf16(np.array(pad.value)) if datatype == "BF16" else pad.value
    for item, where in zip(inputs, _slices(inputs), strict=True):
        whole[where] = item.numpy()
    return _bytes(whole)


def _filled_on_device(pad: Pad, inputs: Sequence[Input], shape: Shape) -> Any:
    import torch

    device = next(item.raw.device for item in inputs if item.on_device)
    tensors = [item.torch() for item in inputs]
    whole = torch.full(shape, pad.value, dtype=tensors[0].dtype, device=device)
    for tensor, where in zip(tensors, _slices(inputs), strict=True):
        whole[where] = tensor.to(device)
    return whole.reshape(-1).view(torch.uint8)


def _mask(inputs: Sequence[Input], target: Shape) -> Array:
    mask = np.zeros((sum(item.shape[0] for item in inputs), *target), np.bool_)
    for where in _slices(inputs):
        mask[where] = True
    return mask


def _slices(inputs: Sequence[Input]) -> Iterator[tuple[slice, ...]]:
    """Yield the slices of the padded batch that each input occupies."""
    at = 0
    for item in inputs:
        end = at + item.shape[0]
        yield (slice(at, end), *map(slice, item.shape[1:]))
        at = end


def _bytes(whole: Array) -> memoryview:
    return whole.reshape(-1).view(np.uint8).data


def _free(*specs: TensorSpec) -> list[list[int]]:
    """Return the indices of the variable dimensions of each tensor."""
    return [[axis for axis, dim in enumerate(spec.dims) if dim == -1] for spec in specs]
