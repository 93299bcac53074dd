"""Protocol datatypes and torch's; bytes in host memory as torch tensors, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shmserve.ipc.tensors.arrays import NUMPY
from shmserve.ipc.tensors.datatypes import element_count

TORCH: dict[str, torch.dtype] = {
    **{name: getattr(torch, kind.name) for name, kind in NUMPY.items() if name != "BYTES"},
    "BF16": torch.bfloat16,
}
PROTOCOL: dict[torch.dtype, str] = {kind: name for name, kind in TORCH.items()}


def as_torch(datatype: str, shape: tuple[int, ...], raw: Any) -> torch.Tensor:
    """A tensor over the (writable) bytes in `raw`; a copy only when they are not aligned.

    `raw` is host memory, or on a device a tensor of uint8.
    """
    kind = TORCH[datatype]
    if not element_count(shape):
        return torch.empty(shape, dtype=kind)
    if isinstance(raw, torch.Tensor):
        if raw.data_ptr() % kind.itemsize or raw.storage_offset() % kind.itemsize:
            raw = raw.clone()
        on_device: torch.Tensor = raw.view(kind).view(shape)
        return on_device
    flat = torch.frombuffer(raw, dtype=torch.uint8, count=element_count(shape) * kind.itemsize)
    if flat.data_ptr() % kind.itemsize:
        flat = flat.clone()
    return flat.view(kind).view(shape)


def host_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A numpy view of a tensor (of a copy, if on a device); BF16 as uint16 bit patterns."""
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array
