"""Gathering: the rows of a batch's requests to one contiguous batch of each input.

rows next to each other in one memory, or a batch of one    a view: nothing is copied
anything else                                               one copy into a buffer kept

Rows in clients' device memory become a batch there, unless the backend wants host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.tensors.datatypes import element_count
from shmserve.ipc.tensors.descriptors import Place
from shmserve.ipc.tensors.signature import Signature
from shmserve.workers.batch.request import Copied, Input, Request

_ROOM_AT_ONCE = 64 * 1024 * 1024  # bytes that a buffer may get for batches yet to come


@dataclass(eq=False)
class Gatherer:
    """The rows of a batch's requests, one input at a time, as one stretch of bytes.

    `allocate(byte_size)` makes a writable host buffer (pinned where that helps); one an input is
    kept and grown. If a row is in device memory, so is what is gathered: a tensor of uint8.
    """

    _signature: Signature
    _mappings: Mappings
    _allocate: Callable[[int], memoryview]
    _copied: Copied = field(default_factory=Copied)
    _buffers: dict[str, memoryview] = field(default_factory=dict)
    _on_device: Any = None  # DeviceBuffers, once there are any

    def __post_init__(self) -> None:
        self._most_rows = max(1, self._signature.max_batch_size)
        self._ragged = {spec.name for spec in self._signature.inputs.values() if spec.ragged}

    def reserve(self, name: str, byte_size: int) -> None:
        """Make the buffer of an input now, for batches of this size at most."""
        self._buffer(name, byte_size, byte_size)

    def gather(
        self, name: str, requests: Sequence[Request], own: bool = False
    ) -> tuple[Any, tuple[int, ...], bool]:
        """(bytes, shape, is a view) of input `name`, which all `requests` have; not for BYTES.

        The batch dimension of the shape is the sum of the requests'; an input with
        `allow_ragged_batch` always comes flat, one request after the other. The bytes hold until
        the next call for the same input. `own`: never a view.
        """
        inputs = [request.inputs[name] for request in requests]
        shape = self._batch_shape(name, inputs)
        if not own:
            raw = inputs[0].raw if len(inputs) == 1 else self._adjacent(inputs)
            if raw is not None:
                return raw, shape, inputs[0].place is not None or inputs[0].kept
        total = sum(len(item.raw) for item in inputs)
        rows = sum(request.batch_size for request in requests)
        self._copied.inputs += total
        most = room(total, rows, self._most_rows)
        if any(item.on_device for item in inputs):
            return self._gather_on_device(name, inputs, most), shape, False
        buffer = self._buffer(name, total, most)
        at = 0
        for item in inputs:
            end = at + len(item.raw)
            buffer[at:end] = item.raw
            at = end
        return buffer[:total], shape, False

    def gather_strings(self, name: str, requests: Sequence[Request]) -> np.ndarray[Any, Any]:
        """A BYTES input of a whole batch as one object array of `bytes`, as `gather` shapes it."""
        arrays = [request.inputs[name].numpy() for request in requests]
        if name in self._ragged:
            arrays = [array.reshape(-1) for array in arrays]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def _batch_shape(self, name: str, inputs: list[Input]) -> tuple[int, ...]:
        first = inputs[0].shape
        if name in self._ragged:
            return (sum(element_count(item.shape) for item in inputs),)
        if len(inputs) == 1:
            return first
        return (sum(item.shape[0] for item in inputs), *first[1:])

    def _gather_on_device(self, name: str, inputs: list[Input], most: int) -> Any:
        if self._on_device is None:
            from shmserve.workers.memory.device_memory import DeviceBuffers

            self._on_device = DeviceBuffers()
        return self._on_device.gather(name, [item.raw for item in inputs], most)

    def _adjacent(self, inputs: list[Input]) -> Any:
        first = inputs[0].place
        if first is None:
            whole = inputs[0].batch
            parts = [item.raw for item in inputs if whole is not None and item.batch is whole]
            return whole if parts and sum(map(len, parts)) == len(whole) else None
        end = first.offset
        for item in inputs:
            place = item.place
            if place is None or place.offset != end or place.memory.id != first.memory.id:
                return None
            end += place.byte_size
        return self._mappings.view(Place(first.memory, first.offset, end - first.offset))

    def _buffer(self, name: str, byte_size: int, most: int) -> memoryview:
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < byte_size:
            self._buffers.pop(name, None)  # before there is another one
            buffer = self._buffers[name] = self._allocate(most)
        return buffer


def room(byte_size: int, rows: int, most_rows: int) -> int:
    """The bytes that a buffer is given in which the first batch has `byte_size` and `rows`.

    Small ones have room for the largest batch of such rows at once, and never grow unless rows get
    larger. What is beyond `_ROOM_AT_ONCE` grows with what comes: by a quarter more, so that it does
    so seldom.

    >>> room(1000, 2, 8)
    4000
    >>> room(2 << 30, 2, 32) == 5 << 29
    True
    """
    rows = max(1, rows)
    largest = (byte_size + rows - 1) // rows * max(most_rows, rows)
    return min(largest, max(byte_size + byte_size // 4, _ROOM_AT_ONCE))
