"""A stand-in for CUDA over host memory: what is exported here is opened, bounded, used and closed
by the worker's own code, on a machine without a device.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter
from typing import Any

import numpy as np
import torch

from shmserve.ipc.memory.cuda_ipc import CudaError
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory
from shmserve.workers.device import Device
from shmserve.workers.memory.device_memory import Allocation, DeviceMemory

_numbers = itertools.count(1)


class Exported:
    """An allocation of another process: its bytes, and the handle to them."""

    def __init__(self, byte_size: int, device: int, inside: int) -> None:
        self.device = device
        self.inner_offset = inside  # the offset of the handle's memory in the allocation
        self.raw_handle = next(_numbers).to_bytes(64, "big")
        self.buffer = (ctypes.c_ubyte * (inside + byte_size))()

    @property
    def content(self) -> np.ndarray[Any, Any]:
        """Return the memory from the handle's address on, as the exporter sees it."""
        return np.frombuffer(memoryview(self.buffer), np.uint8)[self.inner_offset :]

    def memory(self, byte_size: int | None = None, uuid: bytes = b"") -> Memory:
        size = len(self.content) if byte_size is None else byte_size
        return Memory.on_device(
            next(_numbers), size, CudaHandle(self.raw_handle, self.device, uuid)
        )

    def write(self, offset: int, array: np.ndarray[Any, Any]) -> None:
        """Put an array in, as a client does."""
        self.content[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)

    def read(self, offset: int, model_array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return (
            self.content[offset : offset + model_array.nbytes]
            .copy()
            .view(model_array.dtype)
            .reshape(model_array.shape)
        )


class FakeCuda:
    """A stand-in for `cuda_ipc.Cuda` with two devices; `calls` lists the calls."""

    def __init__(self) -> None:
        self._exported: dict[bytes, Exported] = {}
        self._open: Counter[int] = Counter()
        self.calls: list[tuple[str, int]] = []
        self.is_broken = False
        self.pinned: dict[int, int] = {}  # address -> byte size

    def export(self, byte_size: int, device: int = 0, inside: int = 0) -> Exported:
        export = Exported(byte_size, device, inside)
        self._exported[export.raw_handle] = export
        return export

    def revoke(self, exported: Exported) -> None:
        """Simulate the exit of the exporter: the handle can no longer be opened."""
        self._exported.pop(exported.raw_handle, None)

    @property
    def opened(self) -> int:
        return self._open.total()

    def open(self, handle: bytes, device: int) -> int:
        """Open a handle as `Cuda` does, and refuse a handle that is already open."""
        allocation = self._exported.get(handle)
        if allocation is None or allocation.device != device:
            raise CudaError("cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE")
        pointer = ctypes.addressof(allocation.buffer) + allocation.inner_offset
        assert not self._open[pointer], "the handle is open already"
        self._open[pointer] += 1
        self.calls.append(("open", device))
        return pointer

    def close(self, pointer: int, device: int) -> None:
        assert self._open[pointer] == 1
        self._open[pointer] -= 1
        self.calls.append(("close", device))

    def extent(self, pointer: int, device: int) -> tuple[int, int]:
        for allocation in self._exported.values():
            base = ctypes.addressof(allocation.buffer)
            if base <= pointer < base + len(allocation.buffer):
                return base, len(allocation.buffer)
        raise CudaError("cuMemGetAddressRange: CUDA_ERROR_NOT_FOUND")

    def uuid(self, device: int) -> bytes:
        if device not in (0, 1):
            raise CudaError("cuDeviceGet: CUDA_ERROR_INVALID_DEVICE")
        return bytes([device]) * 16

    def synchronize(self, device: int) -> None:
        self.calls.append(("synchronize", device))
        if self.is_broken:
            raise CudaError("cuCtxSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS")

    def pin(self, address: int, byte_size: int, device: int) -> None:
        """Pin memory, and refuse empty memory, which breaks the driver's next call."""
        assert byte_size and address not in self.pinned
        if self.is_broken:
            raise CudaError("cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY")
        self.pinned[address] = byte_size
        self.calls.append(("pin", device))

    def unpin(self, address: int, device: int) -> None:
        """Unpin memory as `Cuda` does; its pages are still mapped."""
        ctypes.string_at(address, self.pinned.pop(address))
        self.calls.append(("unpin", device))

    def exporting(self) -> FakeExporting:
        """Return the CUDA of another process, which allocates memory."""
        return FakeExporting(self)

    def device_memory(self) -> DeviceMemory:
        return DeviceMemory(lambda: self, _as_tensor)


class FakeExporting:
    """A stand-in for `cuda_ipc.CudaExporter` whose memory `cuda` can open."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.allocated: dict[int, Exported] = {}
        self.byte_limit = 1 << 30

    def allocate(self, byte_size: int, device: int) -> int:
        if byte_size > self.byte_limit:
            raise CudaError("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY")
        export = self._cuda.export(byte_size, device)
        pointer = ctypes.addressof(export.buffer)
        self.allocated[pointer] = export
        return pointer

    def free(self, pointer: int, device: int) -> None:
        self._cuda.revoke(self.allocated.pop(pointer))

    def export(self, pointer: int, device: int) -> bytes:
        return self.allocated[pointer].raw_handle

    def uuid(self, device: int) -> bytes:
        return self._cuda.uuid(device)

    def read(self, pointer: int, target: memoryview, device: int) -> None:
        target[:] = ctypes.string_at(pointer, target.nbytes)

    def write(self, pointer: int, source: memoryview, device: int) -> None:
        ctypes.memmove(pointer, bytes(source), source.nbytes)


def _as_tensor(allocation: Allocation) -> torch.Tensor:
    kind: Any = type("_View", (ctypes.c_ubyte * allocation.capacity,), {})
    view = kind.from_address(allocation.pointer)
    view.owner = allocation  # the tensor keeps the allocation alive, as torch does for a CUDA array
    return torch.frombuffer(view, dtype=torch.uint8)


class FakeDevice(Device):
    """A device with separate memory; it counts the bytes copied through the host."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.put_bytes = 0
        self.fetched_bytes = 0

    needs_copies = True

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        self.put_bytes += tensor.nbytes
        return tensor.clone()

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        self.fetched_bytes += tensor.nbytes
        return tensor.clone()
