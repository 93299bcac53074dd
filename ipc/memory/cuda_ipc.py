"""CUDA IPC: device memory that programs allocate and export, and workers open by its handle.

    exporter   cuMemAlloc -> cuIpcGetMemHandle -> 64 bytes ──> register, or share
    worker     open(handle, device) -> pointer -> extent: [base, base + byte_size) of the allocation

Who owns what, when. The allocation is the exporter's: it must live, and not be freed, until its
region is unregistered and the last request that uses it has its response. What it wrote must have
reached the device before it asks (synchronise the stream that wrote it): a handle carries no
order between streams of two processes. What a worker wrote has reached the device when the answer
comes: it waits for the device first.

A handle means the whole allocation. A caching allocator hands out parts of one, and exports all of
it: export memory that was allocated for this. An exporter cannot open its own handles.

What a worker does here runs in its one thread that uses the device. All use a device's primary
context, which torch uses too. The driver's interface is used, so that it does not matter which CUDA
runtime torch was built with.
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

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.tensors.descriptors import CudaHandle

logger = logging.getLogger(__name__)

HANDLE_SIZE = 64
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every device of the process
# The driver may put smaller allocations side by side, and a handle opens what lies around, too.
_GRANULE = 2 * 1024 * 1024
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


class CudaError(Exception):
    """The driver refused; the text is for our log only."""


class Cuda(Protocol):
    """The CUDA operations that a worker needs. `device` is an ordinal; all raise CudaError."""

    def open(self, handle: bytes, device: int) -> int:
        """The address here of what a handle (64 bytes) means."""

    def close(self, pointer: int, device: int) -> None:
        """Undo one `open`, when nothing on the device uses the memory any more."""

    def extent(self, pointer: int, device: int) -> tuple[int, int]:
        """(base address, size in bytes) of the allocation that an address is in."""

    def uuid(self, device: int) -> bytes:
        """The 16 bytes that name a device in every process of this host."""

    def synchronize(self, device: int) -> None:
        """Wait until the device has done all that this process asked of it."""

    def pin(self, address: int, byte_size: int, device: int) -> None:
        """Lock pages of host memory, so that the device copies from and to them directly."""

    def unpin(self, address: int, device: int) -> None:
        """Undo `pin`, before the pages are unmapped."""


class Exporting(Protocol):
    """The CUDA operations that a program needs to have memory that workers open; from any thread.
    All raise CudaError."""

    def allocate(self, byte_size: int, device: int) -> int:
        """The address of new memory, full of zeros."""

    def free(self, pointer: int, device: int) -> None:
        """Give back what `allocate` gave."""

    def export(self, pointer: int, device: int) -> bytes:
        """The handle (64 bytes) by which others open what `allocate` gave."""

    def uuid(self, device: int) -> bytes:
        """The 16 bytes that name a device in every process of this host."""

    def read(self, pointer: int, target: memoryview, device: int) -> None:
        """Copy from the device, after all that it was asked to do; returns when that is done."""

    def write(self, pointer: int, source: memoryview, device: int) -> None:
        """Copy to the device, after all that it was asked to do; returns when that is done."""


class Driver:
    """`Cuda` and `Exporting` by the package cuda-bindings.

    Making one raises Unavailable where the package or a driver lacks.
    """

    def __init__(self) -> None:
        try:
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            logger.error("cuda-bindings cannot be imported: %s", error)
            raise Unavailable("CUDA shared memory needs shmserve's extra 'cuda'") from None
        try:
            self._call("cuInit", 0)
        except Exception as error:  # the package has its own for a library that is not there
            logger.error("there is no CUDA driver: %s", error)
            raise Unavailable("CUDA shared memory needs a GPU, and this host has none") from None
        self._contexts: dict[int, Any] = {}

    def open(self, handle: bytes, device: int) -> int:
        """As `Cuda` says."""
        raw = self._driver.CUipcMemHandle()
        assert len(handle) == HANDLE_SIZE
        # Not every version of the package has a field for them.
        ctypes.memmove(raw.getPtr(), handle, HANDLE_SIZE)
        with self._current(device):
            return int(self._call("cuIpcOpenMemHandle", raw, _LAZY_PEER_ACCESS))

    def close(self, pointer: int, device: int) -> None:
        """As `Cuda` says."""
        with self._current(device):
            self._call("cuCtxSynchronize")
            self._call("cuIpcCloseMemHandle", self._driver.CUdeviceptr(pointer))

    def extent(self, pointer: int, device: int) -> tuple[int, int]:
        """As `Cuda` says."""
        with self._current(device):
            base, size = self._call("cuMemGetAddressRange", self._driver.CUdeviceptr(pointer))
        return int(base), int(size)

    def uuid(self, device: int) -> bytes:
        """As `Cuda` says."""
        found: bytes = self._call("cuDeviceGetUuid", self._device(device)).bytes
        return bytes(found)

    def synchronize(self, device: int) -> None:
        """As `Cuda` says."""
        with self._current(device):
            self._call("cuCtxSynchronize")

    def pin(self, address: int, byte_size: int, device: int) -> None:
        """As `Cuda` says."""
        with self._current(device):
            self._call("cuMemHostRegister", address, byte_size, _PORTABLE)

    def unpin(self, address: int, device: int) -> None:
        """As `Cuda` says."""
        with self._current(device):
            self._call("cuCtxSynchronize")
            self._call("cuMemHostUnregister", address)

    # --- for programs that export

    def allocate(self, byte_size: int, device: int) -> int:
        """As `Exporting` says."""
        with self._current(device):
            pointer = self._call("cuMemAlloc", byte_size)
            self._call("cuMemsetD8", pointer, 0, byte_size)
            self._call("cuCtxSynchronize")
        return int(pointer)

    def free(self, pointer: int, device: int) -> None:
        """As `Exporting` says."""
        with self._current(device):
            self._call("cuMemFree", self._driver.CUdeviceptr(pointer))

    def export(self, pointer: int, device: int) -> bytes:
        """As `Exporting` says."""
        with self._current(device):
            raw = self._call("cuIpcGetMemHandle", self._driver.CUdeviceptr(pointer))
        return ctypes.string_at(raw.getPtr(), HANDLE_SIZE)

    def read(self, pointer: int, target: memoryview, device: int) -> None:
        """As `Exporting` says."""
        with self._current(device):
            self._call("cuCtxSynchronize")
            source = self._driver.CUdeviceptr(pointer)
            self._call("cuMemcpyDtoH", address_of(target), source, target.nbytes)

    def write(self, pointer: int, source: memoryview, device: int) -> None:
        """As `Exporting` says."""
        with self._current(device):
            self._call("cuCtxSynchronize")
            target = self._driver.CUdeviceptr(pointer)
            self._call("cuMemcpyHtoD", target, address_of(source), source.nbytes)
            self._call("cuCtxSynchronize")

    # --- calls

    @contextlib.contextmanager
    def _current(self, device: int) -> Iterator[None]:
        # Opening and closing mean the current context, and torch may have another device's.
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
        """Call a driver function; returns its results without the status. Raises CudaError."""
        status, *values = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise CudaError(f"{name}: {status!r}")
        return values[0] if len(values) == 1 else values


def address_of(view: memoryview) -> int:
    """Where the bytes of a view are in this process."""
    import numpy as np  # the supervisor has no other use for it

    return int(np.frombuffer(view, np.uint8).ctypes.data)


class DeviceAllocation:
    """Memory of this process, which others open by one handle: `size` bytes on a device, full of
    zeros, at least as many as were asked for; exported and freed as a whole, with the last that
    refers to it.

    Raises InvalidArgument for a device that is not there, Unavailable when it has no memory left.
    """

    def __init__(self, cuda: Exporting, device: int, byte_size: int) -> None:
        self.cuda = cuda
        self.device = device
        self.size = -(-byte_size // _GRANULE) * _GRANULE
        try:
            uuid = cuda.uuid(device)
        except CudaError as error:
            raise InvalidArgument(f"this program sees no device 'cuda:{device}'") from error
        try:
            self.pointer = cuda.allocate(self.size, device)
            finalizer = weakref.finalize(self, _free, cuda, self.pointer, device, os.getpid())
            finalizer.atexit = False  # it ends with the process anyway
            self.handle = CudaHandle(cuda.export(self.pointer, device), device, uuid)
        except CudaError as error:
            raise Unavailable(
                f"{byte_size} bytes of memory that can be shared cannot be had on 'cuda:{device}'"
            ) from error


def _free(cuda: Exporting, pointer: int, device: int, pid: int) -> None:
    if pid == os.getpid():  # a forked child has no part in it
        with contextlib.suppress(CudaError):  # a device that fails has nothing to give back
            cuda.free(pointer, device)
