"""Bytes on a device, or in host memory, as tensors of torch: gathered, viewed, fetched."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from shmserve.errors import Unavailable
from shmserve.workers.memory.device_errors import lost

logger = logging.getLogger(__name__)

# Host bytes, or a one-dimensional tensor of uint8 on a device.
Bytes = Any


class DeviceBuffers:
    """Where rows from several places come together on a device; one an input, kept and grown."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def gather(self, name: str, rows: Sequence[Bytes], room: int) -> torch.Tensor:
        """The rows one after the other, on the device of the first that is on one.

        Copied from device to device in the order of the current stream; rows in host memory are
        copied to it. `room` is how many bytes the buffer gets when it is made.
        """
        device = next(row.device for row in rows if isinstance(row, torch.Tensor))
        total = sum(map(len, rows))
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < total or buffer.device != device:
            buffer = None
            self._buffers.pop(name, None)  # before there is another one
            buffer = torch.empty(max(room, total), dtype=torch.uint8, device=device)
            self._buffers[name] = buffer
        at = 0
        for row in rows:
            end = at + len(row)
            buffer[at:end].copy_(as_bytes(row), non_blocking=True)
            at = end
        return buffer[:total]


def as_bytes(raw: Bytes) -> torch.Tensor:
    """A tensor of uint8 over bytes, wherever they are."""
    if isinstance(raw, torch.Tensor):
        return raw
    if not len(raw):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(raw, dtype=torch.uint8)


def to_host(raw: Bytes) -> memoryview:
    """A copy of a device's bytes in host memory, once all that was asked of the device is done.

    Raises Unavailable when that fails, and what torch raises when the device can be used no more.
    """
    try:
        return memoryview(raw.to("cpu", copy=True).numpy())
    except RuntimeError as error:
        if lost(error):
            raise
        logger.error("reading a client's memory: %s", error)
        raise Unavailable("the memory of a tensor cannot be read") from error
