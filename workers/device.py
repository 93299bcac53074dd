"""Compute devices: the CPU, or one of the accelerators that torch supports (cuda, npu, ...).

A zygote calls the functions that preload torch once, so that the workers that it forks do not spend
the time for imports and initialisation of torch.

The implementation uses `torch.accelerator`, so that all kinds share their code. A kind with its own
package registers itself with torch when the package is imported (`npu`: torch_npu).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.errors import InvalidArgument, Unavailable, missing_package

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as TorchDevice

_PACKAGES_BY_KIND = {"npu": "torch_npu"}
_ALIGNMENT = 64  # torch's alignment of tensors in bytes, for vector instructions


class Device:
    """A compute device; this class is the CPU, which uses tensors in host memory without a copy."""

    needs_copies = False  # whether tensors must be copied to and from the device

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def torch(self) -> TorchDevice:
        """Return torch's object for the device."""
        torch_device: TorchDevice = import_torch(f"device '{self.name}'").device(self.name)
        return torch_device

    def host_buffer(self, byte_size: int) -> memoryview:
        """Return writable host memory from which copies to the device are fast."""
        padded_buffer = np.empty(byte_size + _ALIGNMENT, np.uint8)
        start = -padded_buffer.ctypes.data % _ALIGNMENT
        return padded_buffer[start : start + byte_size].data

    def put(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to the device. The tensor must not change until `synchronize`."""
        return tensor

    def fetch(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of the device to host memory, readable after `synchronize`."""
        return tensor if tensor.device.type == "cpu" else tensor.cpu()

    def synchronize(self) -> None:
        """Wait until the device has completed the work of this process."""


class Accelerator(Device):
    """A compute device with memory of its own, to and from which tensors are copied."""

    needs_copies = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._torch = import_torch(f"device '{name}'")
        self._device: TorchDevice = self._torch.device(name)
        self._torch.accelerator.set_device_index(self._device.index)

    @property
    def torch(self) -> TorchDevice:
        return self._device

    def host_buffer(self, byte_size: int) -> memoryview:
        torch = self._torch
        return memoryview(torch.empty(byte_size, dtype=torch.uint8, pin_memory=True).numpy())

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def fetch(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        # torch keeps freed pinned blocks, so only the first copies allocate memory.
        host_tensor = self._torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy: Tensor = host_tensor.copy_(tensor, non_blocking=True)
        return copy

    def synchronize(self) -> None:
        # The device is passed, because the current device of a model's thread may be another one.
        self._torch.accelerator.synchronize(self._device)


def import_torch(needed_by: str) -> Any:
    """Return the package torch.

    Raises:
        Unavailable: torch is not installed. The message names `needed_by`, which needs torch, and
            the command that installs torch.
    """
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise Unavailable(missing_package(needed_by, error, "torch")) from None


def inference_mode() -> AbstractContextManager[Any]:
    """Return torch's inference mode, or an empty context in a process that has not loaded torch."""
    torch = sys.modules.get("torch")
    return contextlib.nullcontext() if torch is None else torch.inference_mode()


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
        allowed_text = "'cpu', or KIND:NUMBER such as 'cuda:0' or 'npu:1'"
        raise InvalidArgument(f"'{name}' is not a device (allowed: {allowed_text})")
    torch = import_torch(f"device '{name}'")
    _import_support(kind, name)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != kind:
        raise Unavailable(f"device '{name}' is not available: torch finds no {kind} on this host")
    device_count = torch.accelerator.device_count()
    if int(number) >= device_count:
        text = f"this host has {device_count} devices of kind '{kind}'"
        raise Unavailable(f"device '{name}' is not available: {text}")
    return Accelerator(name)


def accelerator_kind() -> str:
    """Return the kind of accelerator of this host, or "cuda" if the host has none."""
    torch = import_torch("an instance on an accelerator")
    for package in _PACKAGES_BY_KIND.values():
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    accelerator = torch.accelerator.current_accelerator()
    return "cuda" if accelerator is None else str(accelerator.type)


def _import_support(kind: str, name: str) -> None:
    package = _PACKAGES_BY_KIND.get(kind)
    if package is None:
        return
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise Unavailable(
            f"device '{name}' is not available: the package {package} cannot be imported ({error})"
        ) from error


# --- preloads

# Private modules of torch. A version of torch may lack one; the worker then imports it on demand.
_EXPORT_MODULES = (
    *("torch._export.serde.serialize", "torch.export.pt2_archive._package", "torch.export.passes"),
    *("torch._inductor.codecache", "torch._functorch.aot_autograd"),
)


def preload_exported() -> None:
    """Import the modules that exported programs need, which takes a second and 90 MB."""
    for name in _EXPORT_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def preload_text() -> None:
    """Import the backend of text models, if its packages are installed (0.2 s, 7 MB)."""
    with contextlib.suppress(ImportError):
        importlib.import_module("shmserve.workers.backends.llm")


def preload_operations() -> None:
    """Run operations of torch once on the CPU.

    Libraries set up code for this processor, tables and lazy imports at their first use. One thread
    runs the operations, because a pool of threads would not survive the fork.
    """
    import torch
    from torch.nn import functional

    image, kernels = torch.zeros(1, 3, 8, 8), torch.zeros(4, 3, 3, 3)
    rows, weights = torch.zeros(2, 64), torch.zeros(64, 64)
    thread_count = torch.get_num_threads()
    torch.set_num_threads(1)
    # A build of torch may lack an operation.
    with contextlib.suppress(RuntimeError), torch.inference_mode():
        functional.linear(rows, weights)
        torch.matmul(weights[None], weights[None])
        functional.conv2d(image, kernels)
        functional.avg_pool2d(image, 3)
        functional.gelu(rows)
        functional.layer_norm(rows, (64,))
        torch.softmax(rows, 1)
        (rows * 2 + 1).sum()
    torch.set_num_threads(thread_count)


@functools.cache
def preload_scripted() -> None:
    """Run a small TorchScript program until it is optimised.

    The compiler's initialisation at its first use takes as long as loading a model. A process whose
    zygote has called this function skips it.
    """
    import torch

    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
    with contextlib.suppress(RuntimeError):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit")  # deprecations
            program = torch.jit.script(module)
        with torch.inference_mode():
            for _ in range(3):  # three runs: profiled, optimised, and run as optimised
                program(torch.zeros(1, 4))
