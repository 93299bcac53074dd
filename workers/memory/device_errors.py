"""What errors say of a device and its memory, as far as this process has torch: it is not imported
for that."""

from __future__ import annotations

import sys
from typing import Any


class DeviceLost(Exception):
    """A device cannot be used by this process any more: it must end, and another one start."""


def _torch() -> Any:
    return sys.modules.get("torch")


def lost(error: BaseException) -> bool:
    """Whether `error` says that this process can use its device no more."""
    return isinstance(error, DeviceLost | getattr(_torch(), "AcceleratorError", DeviceLost))


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory is full, the host's or a device's."""
    return isinstance(error, MemoryError | getattr(_torch(), "OutOfMemoryError", MemoryError))


def free_cached() -> None:
    """Give back the device memory that torch keeps for tensors to come."""
    torch = _torch()
    if torch is not None and torch.accelerator.is_available():
        torch.accelerator.empty_cache()
