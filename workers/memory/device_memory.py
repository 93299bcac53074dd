"""Device memory of other processes: each IPC handle is opened once and closed when unused.

    region (memory id) ─┐
    region (memory id) ─┴─> Allocation (handle, device) <── views that a model still holds

CUDA allows one mapping of a handle in a process, so regions of one allocation share the mapping.
The allocation is closed after its last region was dropped and its last tensor was collected, by the
thread of the worker's loop.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from shmserve.errors import InvalidArgument, ShmserveError, Unavailable
from shmserve.ipc.memory.cuda_ipc import Cuda, CudaError, Driver, address_of
from shmserve.ipc.messages.supervision import CheckMemory, MemoryChecked
from shmserve.ipc.tensors.arrays import array_interface
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory
from shmserve.workers.user_code import describe_error

if TYPE_CHECKING:
    import torch

_CANNOT_OPEN = "a client's memory on device %d cannot be opened: %s"


class DeviceLost(Exception):
    """An error after which this process cannot use its device; it must be restarted."""


def _torch() -> Any:
    return sys.modules.get("torch")


def is_tensor(value: Any) -> bool:
    """Check whether a value is a torch tensor, without importing torch."""
    return isinstance(value, getattr(_torch(), "Tensor", ()))


def is_module(value: Any) -> bool:
    """Check whether a value is a torch module, without importing torch."""
    torch = _torch()
    return torch is not None and isinstance(value, torch.nn.Module)


def is_device_lost(error: BaseException) -> bool:
    """Check whether an error means that this process cannot use its device any more."""
    return isinstance(error, DeviceLost | getattr(_torch(), "AcceleratorError", DeviceLost))


def is_out_of_memory(error: BaseException) -> bool:
    """Check whether an error means that host or device memory is full."""
    return isinstance(error, MemoryError | getattr(_torch(), "OutOfMemoryError", MemoryError))


def free_cached_memory() -> None:
    """Release the device memory that torch caches."""
    torch = _torch()
    if torch is not None and torch.accelerator.is_available():
        torch.accelerator.empty_cache()


logger = logging.getLogger(__name__)


class Allocation:
    """An allocation opened by its handle; `capacity` is the bytes from `pointer` to its end."""

    __slots__ = ("__weakref__", "capacity", "device", "pointer")

    def __init__(self, pointer: int, capacity: int, device: int) -> None:
        self.pointer = pointer
        self.capacity = capacity
        self.device = device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return array_interface(self.pointer, (self.capacity,), "|u1")


def cuda_tensor(allocation: Allocation) -> torch.Tensor:
    """Return a tensor of all bytes of an allocation; the tensor keeps the allocation open."""
    import torch  # imported here, because most workers open no handle

    return torch.as_tensor(allocation, device=f"cuda:{allocation.device}")


class _Mapping:
    """The part of an allocation that one region may use; `view` is None after `close`."""

    def __init__(self, view: torch.Tensor, pid: int, close_unused: Callable[[], None]) -> None:
        # The pid of the owner; 0 for a client's memory, which is closed with its region.
        self.pid = pid
        self.view: Any = view
        self._close_unused = close_unused

    def close(self) -> None:
        self.view = None
        self._close_unused()


@dataclass(eq=False)
class DeviceMemory:
    """The device memory of other processes that this process has open.

    Attributes:
        written_devices: The devices with writes that `finish_writes` has not waited for.
    """

    _create_driver: Callable[[], Cuda] = Driver
    _as_tensor: Callable[[Allocation], torch.Tensor] = cuda_tensor  # returns the bytes as a tensor
    _cuda: Cuda | None = None
    _allocations: weakref.WeakValueDictionary[tuple[bytes, int], Allocation] = field(
        default_factory=weakref.WeakValueDictionary
    )
    # The pointers and devices of the allocations to close.
    _unused_allocations: deque[tuple[int, int]] = field(default_factory=deque)
    written_devices: set[int] = field(default_factory=set)
    # Devices that this process has used successfully.
    _working_devices: set[int] = field(default_factory=set)
    _loop_thread: int = field(default_factory=threading.get_ident)
    _open_lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, memory: Memory) -> _Mapping:
        """Map the memory of a region or of a workspace; safe in any thread.

        Raises:
            InvalidArgument: The handle cannot be opened, its allocation is smaller than the region,
                or it belongs to another device.
            Unavailable: There is no CUDA, torch was built without it, or the device has no memory
                for this process.
            DeviceLost: This process cannot use the device any more.
        """
        with self._open_lock:
            return self._open_locked(memory)

    def _open_locked(self, memory: Memory) -> _Mapping:
        handle = memory.cuda
        assert handle is not None
        self.close_unused()  # closes unused handles, because a process may open a handle only once
        if self._cuda is None:
            self._cuda = self._create_driver()
        allocation = self._allocation(self._cuda, handle)
        if memory.byte_size > allocation.capacity:
            text = f"its allocation of {allocation.capacity} bytes"
            del allocation
            self.close_unused()
            region = f"a shared memory region of {memory.byte_size} bytes"
            raise InvalidArgument(f"{region} is larger than {text}")
        try:
            view = self._as_tensor(allocation)
        except Exception as error:  # starting torch's CUDA fails in many ways
            if is_device_lost(error):
                raise
            logger.error("torch cannot use device %d: %s", allocation.device, describe_error(error))
            raise _unusable_error(allocation.device) from None
        return _Mapping(view[: memory.byte_size], memory.pid, self.close_unused)

    def _allocation(self, cuda: Cuda, handle: CudaHandle) -> Allocation:
        key = (handle.raw, handle.device)
        existing_allocation = self._allocations.get(key)
        try:
            if handle.uuid and handle.uuid != cuda.uuid(handle.device):
                raise InvalidArgument(
                    f"device {handle.device} of the server is not the one with the 'device_uuid' "
                    "that the shared memory region was registered with"
                )
            if existing_allocation is not None:
                return existing_allocation
            pointer = cuda.open(handle.raw, handle.device)
            self._working_devices.add(handle.device)
        except CudaError as error:
            logger.warning(_CANNOT_OPEN, handle.device, error)
            self._check_device(cuda, handle.device)
            raise InvalidArgument(
                "the CUDA handle of a shared memory region cannot be opened: its owner has exited, "
                f"or it is not of device {handle.device} of the server"
            ) from None
        try:
            base, byte_size = cuda.extent(pointer, handle.device)
        except CudaError as error:
            cuda.close(pointer, handle.device)
            logger.warning(_CANNOT_OPEN, handle.device, error)
            text = "the CUDA handle of a shared memory region does not refer to an allocation"
            raise InvalidArgument(text) from None
        allocation = Allocation(pointer, base + byte_size - pointer, handle.device)
        # A thread of the model may drop the last reference: the loop closes the handle later.
        weakref.finalize(
            allocation, self._unused_allocations.append, (pointer, handle.device)
        ).atexit = False
        self._allocations[key] = allocation
        return allocation

    def _check_device(self, cuda: Cuda, device: int) -> None:
        """Determine whether the device or the handle caused a failure to open a handle.

        Raises:
            DeviceLost: The device caused it, and has worked before.
            Unavailable: The device caused it, and has never worked for this process.
        """
        try:
            cuda.synchronize(device)
        except CudaError as error:
            if device in self._working_devices:
                raise DeviceLost(f"device {device}: {error}") from None
            logger.error("device %d cannot be used: %s", device, error)
            raise _unusable_error(device) from None
        self._working_devices.add(device)

    def close_unused(self) -> None:
        """Close unused allocations; does nothing outside of the loop's thread."""
        if threading.get_ident() != self._loop_thread:
            return
        while self._unused_allocations:
            pointer, device = self._unused_allocations.popleft()
            assert self._cuda is not None
            try:
                self._cuda.close(pointer, device)
            except CudaError as error:
                text = "a client's memory on device %d cannot be closed until this worker exits: %s"
                logger.warning(text, device, error)

    def pin(self, view: memoryview, device: int) -> Callable[[], None]:
        """Pin a mapping of a client's region for a device, and return the function that unpins it.

        A region that cannot be pinned is used unpinned, which is slower.
        """
        if not view.nbytes:
            return _no_unpin
        address = address_of(view)
        try:
            if self._cuda is None:
                self._cuda = self._create_driver()
            self._cuda.pin(address, view.nbytes, device)
        except (CudaError, Unavailable) as error:
            text = "a region of %d bytes could not be pinned, so its copies are slower: %s"
            logger.warning(text, view.nbytes, error)
            return _no_unpin
        return partial(self._unpin, self._cuda, address, device)

    @staticmethod
    def _unpin(cuda: Cuda, address: int, device: int) -> None:
        try:
            cuda.unpin(address, device)
        except CudaError as error:
            text = "a region (at %#x) cannot be unpinned until this worker exits: %s"
            logger.warning(text, address, error)

    def write(self, destination: torch.Tensor, source: torch.Tensor, device: int) -> int:
        """Copy a tensor from any device to a client's memory, and return the bytes copied.

        The number is 0 if the tensor is at the destination. `finish_writes` waits for the copy.
        """
        self.written_devices.add(device)
        source = source.detach().resolve_conj().resolve_neg()
        if source.data_ptr() == destination.data_ptr() and source.is_contiguous():
            return 0
        if destination.data_ptr() % source.dtype.itemsize:
            destination.copy_(source.contiguous().view(-1).view(destination.dtype))
        else:
            if _overlap(destination, source):
                source = source.clone()
            destination.view(source.dtype).view(source.shape).copy_(source)
        return int(destination.numel())

    def finish_writes(self) -> None:
        """Wait until all writes have reached the devices.

        Raises:
            DeviceLost: This process cannot use a device any more.
        """
        while self.written_devices:
            self.synchronize(self.written_devices.pop())

    def synchronize(self, device: int) -> None:
        """Wait until a device has completed the work of this process; safe in any thread.

        Raises:
            DeviceLost: This process cannot use the device any more.
        """
        assert self._cuda is not None
        try:
            self._cuda.synchronize(device)
        except CudaError as error:
            raise DeviceLost(f"device {device}: {error}") from error

    def check(self, request: CheckMemory) -> MemoryChecked:
        """Open and close the memory that a message names; return the result as a message."""
        handle = CudaHandle(request.handle, request.device_id, request.device_uuid)
        try:
            self.open(Memory.on_device(0, request.byte_size, handle)).close()
        except ShmserveError as error:
            return MemoryChecked(request.id, error.code, error.message)
        return MemoryChecked(request.id, "", "")


def _unusable_error(device: int) -> Unavailable:
    return Unavailable(f"this model's process cannot use shared memory on device {device} now")


def _no_unpin() -> None:
    """Do nothing: the memory was not pinned."""


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.device != second.device:
        return False
    last_element = sum((n - 1) * s for n, s in zip(second.shape, second.stride(), strict=True) if n)
    end = second.data_ptr() + (last_element + 1) * second.dtype.itemsize
    return second.data_ptr() < first.data_ptr() + first.numel() and first.data_ptr() < end
