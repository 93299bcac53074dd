"""Ragged batches: the tensors that tell a model where each request begins in a flat input, and the
cutting of flat outputs (a configuration's `batch_input` and `batch_output`).

For requests with 2, 4 and 1 elements in the source input:

    BATCH_ELEMENT_COUNT                           [2, 4, 1]
    BATCH_ACCUMULATED_ELEMENT_COUNT               [2, 6, 7]
    BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO     [0, 2, 6, 7]
    BATCH_MAX_ELEMENT_COUNT_AS_SHAPE              zeros of the shape [4]
    BATCH_ITEM_SHAPE                              [rows of all, rank]: a shape for each row
    BATCH_ITEM_SHAPE_FLATTEN                      the same, flat

    BATCH_SCATTER_WITH_INPUT_SHAPE                a flat output, cut into the inputs' shapes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shmserve.errors import Internal
from shmserve.ipc.model_spec import ModelSpec, TensorSpec
from shmserve.ipc.tensors.arrays import NUMPY
from shmserve.ipc.tensors.datatypes import element_count
from shmserve.workers.batch.request import Array, Request

Shape = tuple[int, ...]


class _Made(NamedTuple):
    """A tensor that is made for each batch."""

    name: str
    source: str
    values: Callable[[Sequence[Shape], bool], Array]
    kind: np.dtype[Any]


class _Cut(NamedTuple):
    """An output that is cut: `dims` without the batch dimension, -1 as in the source."""

    source: str
    dims: Shape


class Ragged:
    """The rules of one model's configuration for ragged batches."""

    def __init__(self, config: ModelSpec) -> None:
        self._batched = config.max_batch_size > 0
        self._made = [
            _Made(name, each.source_input[0], _VALUES[each.kind], np.dtype(NUMPY[each.datatype]))
            for each in config.batch_input
            for name in each.target_name
        ]
        dims = {output.name: output.model_dims for output in config.output}
        self._cuts = {
            name: _Cut(each.source_input[0], dims[name])
            for each in config.batch_output
            for name in each.target_name
        }

    def inputs(self, requests: Sequence[Request]) -> dict[str, Array]:
        """The made inputs of a batch; none whose sources its requests lack."""
        made: dict[str, Array] = {}
        for name, source, values, kind in self._made:
            if source in requests[0].inputs:
                shapes = [request.inputs[source].shape for request in requests]
                made[name] = values(shapes, self._batched).astype(kind)
        return made

    def pieces(self, name: str, requests: Sequence[Request], whole: Shape) -> list[Shape] | None:
        """The shape of each request's part of an output; None where that has rows as any other.

        Raises Internal when the output, which has the shape `whole`, has not their elements.
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
    """The tensors that a model gets by `batch_input`, as inputs: ragged, so that nobody looks for a
    row of them for each of the batch's."""
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
