"""Padding of requests with unequal shapes, which may then share a dense batch (no I/O).

A model's parameter `padding` names the inputs whose -1 dimensions are padded. The padded size is
the largest size in the batch, or the smallest configured bucket that fits the whole batch. The
shape key of a request ends with the unpadded shapes of these inputs. Schedulers form batches by the
shapes, and workers pad the inputs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from shmserve.ipc.tensors.datatypes import element_count
from shmserve.ipc.transport.frames import Record

# The limit of a padded input in a batch. Two small requests that are long in different dimensions
# could otherwise form a huge batch.
_MAX_PADDED_ELEMENTS = 1 << 28
Shape = tuple[int, ...]


class Pad(Record):
    """The padding of one input.

    Attributes:
        name: The name of the input.
        dims: The configured dimensions.
        value: The value of padding elements.
        buckets: The padded shapes, ascending by size; empty to pad to the largest of the batch.
        lengths_input: The name of the input that receives the true lengths; "" for none.
        mask_input: The name of the input that receives the padding mask; "" for none.
        max_waste: The largest fraction of padding elements with which a request joins a batch.
    """

    name: str
    dims: Shape
    value: float  # of padding elements
    buckets: tuple[Shape, ...]  # padded shapes, ascending
    lengths_input: str  # input for the true lengths
    mask_input: str  # input for the padding mask
    max_waste: float  # maximum fraction of padding

    def padded_shape(self, largest_shape: Shape) -> Shape | None:
        """Return the padded shape for the largest sizes of a batch, or None if no bucket fits."""
        if not self.buckets:
            return largest_shape
        return next((b for b in self.buckets if _fits(largest_shape, b)), None)


class Padding:
    """The padding of a model, from a configuration that has been validated.

    Attributes:
        pads: The padding of each padded input, by name.
        cut_outputs: The outputs that are cut to the true shape of an input, with the input's name.
        split_key: Splits a shape key into its constant part and the shapes of the padded inputs.
    """

    def __init__(self, pads: Iterable[Pad], cut_outputs: Mapping[str, str]) -> None:
        self.pads = {pad.name: pad for pad in pads}
        self.cut_outputs = dict(cut_outputs)
        self._shape_format = struct.Struct(f"<{sum(len(pad.dims) for pad in self.pads.values())}q")
        self.split_key = lru_cache(1024)(self._split)

    @classmethod
    def of(cls, text: str, dims: Mapping[str, Shape]) -> Padding | None:
        """Return the padding of a model, or None if no input is padded.

        Args:
            text: The parameter `padding` of the model.
            dims: The dimensions of the model's inputs, by name.
        """
        specs = parse_entries(text)
        if not specs:
            return None
        padded_specs = {name: spec for name, spec in specs.items() if "like" not in spec}
        pads = [_pad_from_entry(name, dims[name], spec) for name, spec in padded_specs.items()]
        cut_outputs = {name: spec["like"] for name, spec in specs.items() if "like" in spec}
        return cls(pads, cut_outputs)

    def key(self, constant_part: bytes, shapes: Mapping[str, Shape]) -> bytes:
        """Return the shape key of a request.

        Args:
            constant_part: The constant part, which is equal for all requests of a batch.
            shapes: The shapes of the padded inputs, without the batch dimension.
        """
        sizes: list[int] = []
        for pad in self.pads.values():
            sizes += shapes.get(pad.name) or (0,) * len(pad.dims)
        return constant_part + self._shape_format.pack(*sizes)

    def _split(self, key: bytes) -> tuple[bytes, tuple[Shape, ...]]:
        split_at = len(key) - self._shape_format.size
        if split_at < 0:
            return key, tuple((0,) * len(pad.dims) for pad in self.pads.values())
        sizes = iter(self._shape_format.unpack_from(key, split_at))
        shapes = tuple(tuple(next(sizes) for _ in pad.dims) for pad in self.pads.values())
        return key[:split_at], shapes


@dataclass(slots=True, eq=False)
class PaddedBatch:
    """The shapes and the padding of the requests in a batch.

    Attributes:
        _true_elements: The number of elements of each input that the clients sent.
        _elements_if_alone: The number of elements of each input if each request were padded alone.
    """

    _padding: Padding
    _constant_part: bytes | None = None  # of the shape keys
    _largest_shapes: Sequence[Shape] = ()  # by input
    _rows: int = 0  # number of rows
    _pads: tuple[Pad, ...] = field(init=False)
    _true_elements: list[int] = field(init=False)  # by input
    _elements_if_alone: list[int] = field(init=False)  # by input

    def __post_init__(self) -> None:
        self._pads = tuple(self._padding.pads.values())
        self._true_elements = [0] * len(self._pads)
        self._elements_if_alone = [0] * len(self._pads)

    def try_join(self, key: bytes, rows: int) -> bool:
        """Add a request to the batch if it may join.

        The first request always joins. A later request joins if the constant part of its key is
        equal and some bucket fits every request. If joining adds padding to an input, the fraction
        of padding must not exceed `max_waste`, and the input must not become too large.

        Args:
            key: The shape key of the request.
            rows: The rows of the request.

        Returns:
            Whether the request has joined.
        """
        constant_part, shapes = self._padding.split_key(key)
        if self._constant_part is None:
            limits: Sequence[Shape] = shapes
        elif constant_part != self._constant_part:
            return False
        else:
            pairs = zip(self._largest_shapes, shapes, strict=True)
            limits = [tuple(map(max, shape_a, shape_b)) for shape_a, shape_b in pairs]
        total_rows = self._rows + rows
        true_elements = self._true_elements.copy()
        elements_if_alone = self._elements_if_alone.copy()
        for index, (pad, shape, limit) in enumerate(zip(self._pads, shapes, limits, strict=True)):
            true_elements[index] += rows * element_count(shape)
            elements_if_alone[index] += rows * element_count(pad.padded_shape(shape) or shape)
            padded_shape = pad.padded_shape(limit)
            if self._constant_part is None:
                continue
            if padded_shape is None:
                return False
            padded_elements = total_rows * element_count(padded_shape)
            is_wasteful = padded_elements - true_elements[index] > pad.max_waste * padded_elements
            if padded_elements > elements_if_alone[index] and (
                is_wasteful or padded_elements > _MAX_PADDED_ELEMENTS
            ):
                return False
        self._constant_part, self._largest_shapes, self._rows = constant_part, limits, total_rows
        self._true_elements, self._elements_if_alone = true_elements, elements_if_alone
        return True

    def element_counts(self) -> dict[str, tuple[int, int]]:
        """Return the number of elements and of padding elements in the batch, by input."""
        counts = {}
        for pad, largest_shape, true_count in zip(
            self._pads, self._largest_shapes, self._true_elements, strict=True
        ):
            padded_shape = pad.padded_shape(largest_shape) or largest_shape
            padded_count = self._rows * element_count(padded_shape)
            counts[pad.name] = padded_count, padded_count - true_count
        return counts


def parse_entries(text: str) -> dict[str, dict[str, Any]]:
    """Return the entries of the parameter `padding`; empty if the text is not valid."""
    try:
        specs = json.loads(text or "{}")
    except ValueError:
        return {}
    if not isinstance(specs, dict) or not all(isinstance(spec, dict) for spec in specs.values()):
        return {}
    return specs


def _pad_from_entry(name: str, dims: Shape, entry: dict[str, Any]) -> Pad:
    buckets = sorted(map(tuple, entry.get("buckets") or ()), key=element_count)
    value, max_waste = entry.get("value", 0), float(entry.get("max_waste", 1))
    names = (entry.get("lengths", ""), entry.get("mask", ""))
    return Pad(name, dims, value, tuple(buckets), *names, max_waste)


def _fits(shape: Shape, bucket: Shape) -> bool:
    return all(size <= limit for size, limit in zip(shape, bucket, strict=True))
