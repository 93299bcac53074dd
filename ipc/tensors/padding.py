"""Padding: which requests of unequal shapes may share a dense batch, and what shape it has (pure).

A model's parameter `padding` names inputs whose -1 dimensions are filled up, to the largest of the
batch or to the smallest bucket that fits all of it. Gateways write the true shapes into a request's
shape key, behind what must be equal; schedulers form batches by them, and workers fill them up.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from shmserve.ipc.tensors.datatypes import element_count
from shmserve.ipc.transport.records import record

# Of one input in a batch, unless its requests are as large apart: two that are long in different
# dimensions are small, and huge together.
_MOST_ELEMENTS = 1 << 28
Shape = tuple[int, ...]


@record
class Pad:
    """The padding of one input: `buckets` by their size, none: to the batch's largest. `lengths`
    and `mask` are the inputs that tell the model what is true, "" for none. No request joins a
    batch in which more than `max_waste` of the elements would be padding."""

    name: str
    dims: Shape
    value: float
    buckets: tuple[Shape, ...]
    lengths: str
    mask: str
    max_waste: float

    def padded(self, largest: Shape) -> Shape | None:
        """The shape that an input gets whose largest sizes are these; None: no bucket fits."""
        if not self.buckets:
            return largest
        return next((bucket for bucket in self.buckets if _fits(largest, bucket)), None)


class Padding:
    """The padding that a model's configuration asks for, which `validate` has found in order:
    `pads` by input, and `likes`, the outputs that are cut back, with their input."""

    def __init__(self, pads: Iterable[Pad], likes: Mapping[str, str]) -> None:
        self.pads = {pad.name: pad for pad in pads}
        self.likes = dict(likes)
        self._form = struct.Struct(f"<{sum(len(pad.dims) for pad in self.pads.values())}q")
        # (what must be equal, the shapes of padded inputs) of a request with a shape key
        self.read = lru_cache(1024)(self._split)

    @classmethod
    def of(cls, text: str, dims: Mapping[str, Shape]) -> Padding | None:
        """The padding that the text of a model's parameter `padding` asks for; None: nothing is
        padded. `dims` are those of its inputs, by name."""
        said = entries(text)
        if not said:
            return None
        pads = [_pad(name, dims[name], each) for name, each in said.items() if "like" not in each]
        likes = {name: each["like"] for name, each in said.items() if "like" in each}
        return cls(pads, likes)

    def key(self, rest: bytes, shapes: Mapping[str, Shape]) -> bytes:
        """The shape key of a request: `rest` must be equal, `shapes` are those of its padded inputs
        without the batch dimension."""
        sizes: list[int] = []
        for pad in self.pads.values():
            sizes += shapes.get(pad.name) or (0,) * len(pad.dims)
        return rest + self._form.pack(*sizes)

    def batch(self) -> PaddedBatch:
        """A batch that has no requests yet."""
        return PaddedBatch(self)

    def _split(self, key: bytes) -> tuple[bytes, tuple[Shape, ...]]:
        at = len(key) - self._form.size
        if at < 0:
            return key, tuple((0,) * len(pad.dims) for pad in self.pads.values())
        sizes = iter(self._form.unpack_from(key, at))
        shapes = tuple(tuple(next(sizes) for _ in pad.dims) for pad in self.pads.values())
        return key[:at], shapes


class PaddedBatch:
    """The requests that share a batch, as far as padding is concerned."""

    __slots__ = ("_apart", "_largest", "_padding", "_pads", "_rest", "_rows", "_true")

    def __init__(self, padding: Padding) -> None:
        self._padding = padding
        self._pads = tuple(padding.pads.values())
        self._rest: bytes | None = None
        self._largest: Sequence[Shape] = ()
        self._rows = 0
        self._true = [0] * len(self._pads)  # elements of each input that clients sent
        self._apart = [0] * len(self._pads)  # elements if each request were padded by itself

    def may_join(self, key: bytes, units: int) -> bool:
        """Whether a request of `units` rows joins; if it does, it is one of the batch.

        The first one does. Another one does where what must be equal is, there is a shape for all,
        and of no input's elements more than its `max_waste` are padding, unless joining adds none;
        nor are they more than a worker has memory for.
        """
        rest, shapes = self._padding.read(key)
        if self._rest is None:
            largest: Sequence[Shape] = shapes
        elif rest != self._rest:
            return False
        else:
            both = zip(self._largest, shapes, strict=True)
            largest = [tuple(map(max, one, other)) for one, other in both]
        rows = self._rows + units
        true, apart = self._true.copy(), self._apart.copy()
        for at, (pad, shape, most) in enumerate(zip(self._pads, shapes, largest, strict=True)):
            true[at] += units * element_count(shape)
            apart[at] += units * element_count(pad.padded(shape) or shape)
            padded = pad.padded(most)
            if self._rest is None:
                continue
            if padded is None:
                return False
            total = rows * element_count(padded)
            wasteful = total - true[at] > pad.max_waste * total
            if total > apart[at] and (wasteful or total > _MOST_ELEMENTS):
                return False
        self._rest, self._largest, self._rows = rest, largest, rows
        self._true, self._apart = true, apart
        return True

    def elements(self) -> dict[str, tuple[int, int]]:
        """(elements that the model gets, of these padding) by input."""
        found = {}
        for pad, most, true in zip(self._pads, self._largest, self._true, strict=True):
            total = self._rows * element_count(pad.padded(most) or most)
            found[pad.name] = total, total - true
        return found


def entries(text: str) -> dict[str, dict[str, Any]]:
    """The entries of the parameter `padding`; nothing where the text is none."""
    try:
        said = json.loads(text or "{}")
    except ValueError:
        return {}
    if not isinstance(said, dict) or not all(isinstance(each, dict) for each in said.values()):
        return {}
    return said


def _pad(name: str, dims: Shape, entry: dict[str, Any]) -> Pad:
    buckets = sorted(map(tuple, entry.get("buckets") or ()), key=element_count)
    return Pad(
        name,
        dims,
        entry.get("value", 0),
        tuple(buckets),
        entry.get("lengths", ""),
        entry.get("mask", ""),
        float(entry.get("max_waste", 1)),
    )


def _fits(shape: Shape, bucket: Shape) -> bool:
    return all(size <= room for size, room in zip(shape, bucket, strict=True))
