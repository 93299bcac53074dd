"""Bytes in host or device memory as torch tensors, and tensors as bytes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shmserve.errors import Unavailable
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES
from shmserve.ipc.tensors.datatypes import element_count
from shmserve.workers.memory.device_memory import is_device_lost

logger = logging.getLogger(__name__)

# Protocol datatype -> torch dtype, and the reverse.
TORCH_DTYPES: dict[str, torch.dtype] = {
    **{name: getattr(torch, kind.name) for name, kind in NUMPY_DTYPES.items() if name != "BYTES"},
    "BF16": torch.bfloat16,
}
PROTOCOL_DATATYPES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def as_torch(datatype: str, shape: tuple[int, ...], data: Any) -> torch.Tensor:
    """Return a tensor over writable bytes, or over a copy if they are not aligned.

    Args:
        datatype: The datatype of the protocol.
        shape: The shape of the tensor.
        data: Host memory, or a tensor of uint8 on a device.
    """
    dtype = TORCH_DTYPES[datatype]
    if not element_count(shape):
        return torch.empty(shape, dtype=dtype)
    if isinstance(data, torch.Tensor):
        if data.data_ptr() % dtype.itemsize or data.storage_offset() % dtype.itemsize:
            data = data.clone()
        device_tensor: torch.Tensor = data.view(dtype).view(shape)
        return device_tensor
    flat = torch.frombuffer(data, dtype=torch.uint8, count=element_count(shape) * dtype.itemsize)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(shape)


def host_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a numpy view of a tensor, or of its host copy; BF16 becomes uint16 bit patterns."""
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array


# Host bytes, or a one-dimensional tensor of uint8 on a device.
Bytes = Any


class DeviceBuffers:
    """Device buffers for the rows of a batch: one per input, kept, and enlarged on demand."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}  # by input

    def gather(self, name: str, rows: Sequence[Bytes], capacity: int) -> torch.Tensor:
        """Copy rows into one buffer, on the device of the first row that is in device memory.

        The copies are ordered by the current stream.

        Args:
            name: The input.
            rows: The bytes of the rows, in host or device memory.
            capacity: The capacity in bytes of a new buffer, if the kept one is too small.
        """
        device = next(row.device for row in rows if isinstance(row, torch.Tensor))
        byte_size = sum(map(len, rows))
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < byte_size or buffer.device != device:
            buffer = None
            self._buffers.pop(name, None)  # freed before the new buffer is allocated
            buffer = torch.empty(max(capacity, byte_size), dtype=torch.uint8, device=device)
            self._buffers[name] = buffer
        position = 0
        for row in rows:
            end = position + len(row)
            buffer[position:end].copy_(as_bytes(row), non_blocking=True)
            position = end
        return buffer[:byte_size]


def as_bytes(data: Bytes) -> torch.Tensor:
    """Return a tensor of uint8 over bytes in host or device memory."""
    if isinstance(data, torch.Tensor):
        return data
    if not len(data):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(data, dtype=torch.uint8)


def to_host(data: Bytes) -> memoryview:
    """Copy the bytes of a device to host memory, after the device's pending work.

    Raises:
        Unavailable: The memory cannot be read. The error of torch is raised instead if the device
            is lost.
    """
    try:
        return memoryview(data.to("cpu", copy=True).numpy())
    except RuntimeError as error:
        if is_device_lost(error):
            raise
        logger.error("device memory cannot be read: %s", error)
        raise Unavailable("the memory of a tensor cannot be read") from error
