"""CUDA IPC: programs allocate and export device memory, and workers open it by its handle.

    exporter   cuMemAlloc -> cuIpcGetMemHandle -> 64 bytes ──> register, or share
    worker     open(handle, device) -> pointer -> extent: [base, base + byte_size) of the allocation

The exporter owns the allocation. The exporter must not exit, nor free the memory, until the region
is unregistered and the last request that uses it has its response. A handle carries no order
between the streams of two processes: the exporter must synchronise the stream that wrote the inputs
before it sends a request. A worker waits for the device before it sends the response.

A handle denotes the whole allocation. A caching allocator returns parts of an allocation, so memory
that is to be exported must be allocated separately. An exporter cannot open its own handles.

A worker calls these functions in the one thread that uses the device. All calls use the device's
primary context, which torch uses, too. The driver's interface is used because it does not depend on
the CUDA runtime of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from shmserve.errors import InvalidArgument, Unavailable, how_to_install
from shmserve.ipc.tensors.descriptors import CudaHandle

logger = logging.getLogger(__name__)

HANDLE_SIZE = 64
_PORTABLE_FLAG = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every device of the process
# Bytes; the driver may place smaller allocations side by side, and a handle would open all of them.
_GRANULARITY = 2 * 1024 * 1024
_LAZY_PEER_ACCESS_FLAG = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that exists


class CudaError(Exception):
    """An error of the driver; its text is for the log only."""


class Cuda(Protocol):
    """The CUDA operations of a worker. `device` is an ordinal; all methods raise CudaError."""

    def open(self, handle: bytes, device: int) -> int:
        """Map the allocation of a handle (64 bytes); return its address in this process."""

    def close(self, pointer: int, device: int) -> None:
        """Unmap memory that `open` has mapped, after pending work on the device."""

    def extent(self, pointer: int, device: int) -> tuple[int, int]:
        """Return the base address and the size in bytes of the allocation at an address."""

    def uuid(self, device: int) -> bytes:
        """Return the 16 bytes that identify a device in every process of this host."""

    def synchronize(self, device: int) -> None:
        """Wait until the device has completed all work of this process."""

    def pin(self, address: int, byte_size: int, device: int) -> None:
        """Lock pages of host memory, so that the device copies from and to them directly."""

    def unpin(self, address: int, device: int) -> None:
        """Unlock pages that `pin` has locked, before they are unmapped."""


class CudaExporter(Protocol):
    """The CUDA operations of a program that exports memory; safe in any thread.

    All methods raise CudaError.
    """

    def allocate(self, byte_size: int, device: int) -> int:
        """Allocate zeroed memory; return its address."""

    def free(self, pointer: int, device: int) -> None:
        """Free memory that `allocate` has returned."""

    def export(self, pointer: int, device: int) -> bytes:
        """Return the handle (64 bytes) of memory that `allocate` has returned."""

    def uuid(self, device: int) -> bytes:
        """Return the 16 bytes that identify a device in every process of this host."""

    def read(self, pointer: int, target: memoryview, device: int) -> None:
        """Copy from the device after its pending work; block until the copy is complete."""

    def write(self, pointer: int, source: memoryview, device: int) -> None:
        """Copy to the device after its pending work; block until the copy is complete."""


class Driver(Cuda, CudaExporter):
    """The implementation of `Cuda` and `CudaExporter` with the package cuda-bindings.

    Raises:
        Unavailable: The package or the driver is missing.
    """

    def __init__(self) -> None:
        try:
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            logger.error("cuda-bindings cannot be imported: %s", error)
            instructions = how_to_install("cuda-bindings", "cuda")
            text = f"CUDA shared memory needs the package cuda-bindings: {instructions}"
            raise Unavailable(text) from None
        try:
            self._call("cuInit", 0)
        except Exception as error:  # the package raises its own error if a library is missing
            logger.error("there is no CUDA driver: %s", error)
            raise Unavailable("CUDA shared memory needs a GPU, and this host has none") from None
        self._contexts: dict[int, Any] = {}  # by device

    def open(self, handle: bytes, device: int) -> int:
        driver_handle = self._driver.CUipcMemHandle()
        assert len(handle) == HANDLE_SIZE
        # In some versions of the package, the handle has no attribute for its bytes.
        ctypes.memmove(driver_handle.getPtr(), handle, HANDLE_SIZE)
        with self._device_context(device):
            return int(self._call("cuIpcOpenMemHandle", driver_handle, _LAZY_PEER_ACCESS_FLAG))

    def close(self, pointer: int, device: int) -> None:
        with self._device_context(device):
            self._call("cuCtxSynchronize")
            self._call("cuIpcCloseMemHandle", self._driver.CUdeviceptr(pointer))

    def extent(self, pointer: int, device: int) -> tuple[int, int]:
        with self._device_context(device):
            base, size = self._call("cuMemGetAddressRange", self._driver.CUdeviceptr(pointer))
        return int(base), int(size)

    def uuid(self, device: int) -> bytes:
        uuid_bytes: bytes = self._call("cuDeviceGetUuid", self._device(device)).bytes
        return bytes(uuid_bytes)

    def synchronize(self, device: int) -> None:
        with self._device_context(device):
            self._call("cuCtxSynchronize")

    def pin(self, address: int, byte_size: int, device: int) -> None:
        with self._device_context(device):
            self._call("cuMemHostRegister", address, byte_size, _PORTABLE_FLAG)

    def unpin(self, address: int, device: int) -> None:
        with self._device_context(device):
            self._call("cuCtxSynchronize")
            self._call("cuMemHostUnregister", address)

    # --- exported memory

    def allocate(self, byte_size: int, device: int) -> int:
        with self._device_context(device):
            pointer = self._call("cuMemAlloc", byte_size)
            self._call("cuMemsetD8", pointer, 0, byte_size)
            self._call("cuCtxSynchronize")
        return int(pointer)

    def free(self, pointer: int, device: int) -> None:
        with self._device_context(device):
            self._call("cuMemFree", self._driver.CUdeviceptr(pointer))

    def export(self, pointer: int, device: int) -> bytes:
        with self._device_context(device):
            driver_handle = self._call("cuIpcGetMemHandle", self._driver.CUdeviceptr(pointer))
        return ctypes.string_at(driver_handle.getPtr(), HANDLE_SIZE)

    def read(self, pointer: int, target: memoryview, device: int) -> None:
        with self._device_context(device):
            self._call("cuCtxSynchronize")
            source = self._driver.CUdeviceptr(pointer)
            self._call("cuMemcpyDtoH", address_of(target), source, target.nbytes)

    def write(self, pointer: int, source: memoryview, device: int) -> None:
        with self._device_context(device):
            self._call("cuCtxSynchronize")
            target = self._driver.CUdeviceptr(pointer)
            self._call("cuMemcpyHtoD", target, address_of(source), source.nbytes)
            self._call("cuCtxSynchronize")

    # --- calls

    @contextlib.contextmanager
    def _device_context(self, device: int) -> Iterator[None]:
        # The driver uses the current context of the thread, and torch may have set that of another
        # device.
        if device not in self._contexts:
            self._contexts[device] = self._call("cuDevicePrimaryCtxRetain", self._device(device))
        self._call("cuCtxPushCurrent", self._contexts[device])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _device(self, ordinal: int) -> Any:
        return self._call("cuDeviceGet", ordinal)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function; return its results without the status.

        Raises:
            CudaError: The call has failed.
        """
        status, *values = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise CudaError(f"CUDA call {name} failed with {status!r}")
        return values[0] if len(values) == 1 else values


def address_of(view: memoryview) -> int:
    """Return the address of a view's bytes in this process."""
    import numpy as np  # imported late, because the supervisor does not use it otherwise

    return int(np.frombuffer(view, np.uint8).ctypes.data)


class DeviceAllocation:
    """Zeroed device memory of this process that other processes open by one handle.

    The allocation is exported as a whole, and freed when the object is collected.

    Attributes:
        size: The size in bytes, at least the requested one.

    Raises:
        InvalidArgument: There is no such device.
        Unavailable: The device is out of memory.
    """

    def __init__(self, cuda: CudaExporter, device: int, byte_size: int) -> None:
        self.cuda = cuda
        self.device = device
        self.size = -(-byte_size // _GRANULARITY) * _GRANULARITY
        try:
            uuid = cuda.uuid(device)
        except CudaError as error:
            text = f"this program has no device 'cuda:{device}' (see CUDA_VISIBLE_DEVICES)"
            raise InvalidArgument(text) from error
        try:
            self.pointer = cuda.allocate(self.size, device)
            finalizer = weakref.finalize(self, _free, cuda, self.pointer, device, os.getpid())
            finalizer.atexit = False  # the memory is freed with the process anyway
            self.handle = CudaHandle(cuda.export(self.pointer, device), device, uuid)
        except CudaError as error:
            text = f"{byte_size} bytes of shareable memory cannot be allocated on 'cuda:{device}'"
            raise Unavailable(text) from error


def _free(cuda: CudaExporter, pointer: int, device: int, pid: int) -> None:
    if pid == os.getpid():  # a forked child does not own the memory
        with contextlib.suppress(CudaError):  # a device that has failed frees nothing
            cuda.free(pointer, device)
