"""Compute devices: the CPU, or one of the accelerators that torch supports (cuda, npu, ...).

The implementation uses `torch.accelerator`, so that all kinds share their code. A kind with its own
package registers itself with torch when the package is imported (`npu`: torch_npu).
"""

from __future__ import annotations

import contextlib
import importlib

import torch

from shmserve.errors import InvalidArgument, Unavailable

_PACKAGES = {"npu": "torch_npu"}


class Device:
    """The CPU: tensors in host memory are where they are needed."""

    remote = False  # whether tensors must be copied to and from the device

    def __init__(self, name: str) -> None:
        self.name = name
        self.torch = torch.device(name)

    def host_buffer(self, byte_size: int) -> memoryview:
        """Writable host memory, of the kind from which copies to the device are fast."""
        return torch.empty(byte_size, dtype=torch.uint8).numpy().data

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to the device; it must not change until `synchronize`."""
        return tensor

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of the device to host memory, readable after `synchronize`."""
        return tensor if tensor.device.type == "cpu" else tensor.cpu()

    def synchronize(self) -> None:
        """Wait for all that was started on the device."""


class Accelerator(Device):
    """A device with memory of its own."""

    remote = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        torch.accelerator.set_device_index(self.torch.index)

    def host_buffer(self, byte_size: int) -> memoryview:
        return torch.empty(byte_size, dtype=torch.uint8, pin_memory=True).numpy().data

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.torch, non_blocking=True)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return tensor
        # torch keeps freed pinned blocks, so this costs an allocation once.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def synchronize(self) -> None:
        torch.accelerator.synchronize()


def open_device(name: str) -> Device:
    """Return the device with torch's name `name` ("cpu", "cuda:0", "npu:1").

    Raises:
        InvalidArgument: The name is invalid.
        Unavailable: This host has no such device, or its package is not installed.
    """
    kind, _, number = name.partition(":")
    if kind == "cpu":
        return Device("cpu")
    if not number.isdecimal():
        raise InvalidArgument(f"'{name}' is no device")
    _import_support(kind, name)
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != kind:
        raise Unavailable(f"device '{name}' is not available: torch finds no {kind} on this host")
    count = torch.accelerator.device_count()
    if int(number) >= count:
        raise Unavailable(f"device '{name}' is not available: this host has {count}")
    return Accelerator(name)


def accelerator_kind() -> str:
    """Return the kind of accelerator of this host, or "cuda", which cannot be opened if missing."""
    for package in _PACKAGES.values():
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    found = torch.accelerator.current_accelerator()
    return "cuda" if found is None else found.type


def _import_support(kind: str, name: str) -> None:
    package = _PACKAGES.get(kind)
    if package is None:
        return
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise Unavailable(
            f"device '{name}' is not available: the package {package} cannot be imported ({error})"
        ) from error
