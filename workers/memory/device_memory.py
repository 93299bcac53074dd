"""Device memory of others: each IPC handle opened once, viewed as tensors, closed when unused.

    region (memory id) ─┐
    region (memory id) ─┴─> Allocation (handle, device) <── views that a model still holds

One mapping a handle: several regions in one allocation share it, as CUDA wants it. The allocation
is closed when its last region is dropped and the last tensor over it is gone; then it waits for the
device's thread, which is the worker's loop. `settle` waits until what was written is there.
"""

from __future__ import annotations

import logging
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
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory
from shmserve.workers.memory.device_errors import DeviceLost, lost
from shmserve.workers.user_code import in_words

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class Allocation:
    """An open handle. `room` is how many bytes there are from `pointer` to the allocation's end."""

    __slots__ = ("__weakref__", "device", "pointer", "room")

    def __init__(self, pointer: int, room: int, device: int) -> None:
        self.pointer = pointer
        self.room = room
        self.device = device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.room,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "strides": None,
            "version": 3,
        }


def cuda_tensor(allocation: Allocation) -> torch.Tensor:
    """A tensor of all bytes of an allocation; the tensor, and every view of it, keeps the
    allocation."""
    import torch  # not before a handle is opened: most workers open none

    return torch.as_tensor(allocation, device=f"cuda:{allocation.device}")


class _Mapping:
    """The part of an allocation that one region may use; `view` is None once it is closed."""

    def __init__(self, view: torch.Tensor, pid: int, collect: Callable[[], None]) -> None:
        self.pid = pid  # 0 of a client's: its death ends it by way of its region
        self.view: Any = view
        self._collect = collect

    def close(self) -> None:
        self.view = None
        self._collect()


@dataclass(eq=False)
class DeviceMemory:
    """The memory that this process has open on devices. `cuda` and `as_tensor` are replaced in
    tests."""

    _make: Callable[[], Cuda] = Driver
    _as_tensor: Callable[[Allocation], torch.Tensor] = cuda_tensor
    _cuda: Cuda | None = None
    _open: weakref.WeakValueDictionary[tuple[bytes, int], Allocation] = field(
        default_factory=weakref.WeakValueDictionary
    )
    _unused: deque[tuple[int, int]] = field(default_factory=deque)  # (pointer, device), to close
    _written: set[int] = field(default_factory=set)
    _used: set[int] = field(default_factory=set)  # devices that worked
    _thread: int = field(default_factory=threading.get_ident)
    _opening: threading.Lock = field(default_factory=threading.Lock)

    def open(self, memory: Memory) -> _Mapping:
        """Map the memory of a region, or of a workspace, for `Mappings`; from any thread.

        Raises InvalidArgument when the handle opens nothing, or less than the region says, or on
        another device than it says; Unavailable where there is no CUDA, or torch was built without,
        or the device has no room for this process; DeviceLost when it can be used no more.
        """
        with self._opening:
            return self._opened(memory)

    def _opened(self, memory: Memory) -> _Mapping:
        handle = memory.cuda
        assert handle is not None
        self.collect()  # a handle is open once at a time
        if self._cuda is None:
            self._cuda = self._make()
        allocation = self._allocation(self._cuda, handle)
        if memory.byte_size > allocation.room:
            del allocation
            self.collect()
            raise InvalidArgument("a shared memory region is larger than the allocation behind it")
        try:
            view = self._as_tensor(allocation)
        except Exception as error:  # starting torch's CUDA fails in many ways
            if lost(error):
                raise
            logger.error("torch cannot use device %d: %s", allocation.device, in_words(error))
            raise _unusable(allocation.device) from None
        return _Mapping(view[: memory.byte_size], memory.pid, self.collect)

    def _allocation(self, cuda: Cuda, handle: CudaHandle) -> Allocation:
        key = (handle.raw, handle.device)
        known = self._open.get(key)
        try:
            if handle.uuid and handle.uuid != cuda.uuid(handle.device):
                raise InvalidArgument(
                    f"device {handle.device} of the server is not the one with the 'device_uuid' "
                    "that the shared memory region was registered with"
                )
            if known is not None:
                return known
            pointer = cuda.open(handle.raw, handle.device)
            self._used.add(handle.device)
        except CudaError as error:
            logger.warning("a client's memory on device %d: %s", handle.device, error)
            self._blame(cuda, handle.device)
            raise InvalidArgument(
                "the CUDA handle of a shared memory region cannot be opened: its owner is gone, or "
                f"it is not of device {handle.device} of the server"
            ) from None
        try:
            base, byte_size = cuda.extent(pointer, handle.device)
        except CudaError as error:
            cuda.close(pointer, handle.device)
            logger.warning("a client's memory on device %d: %s", handle.device, error)
            raise InvalidArgument(
                "the CUDA handle of a shared memory region means no allocation"
            ) from None
        made = Allocation(pointer, base + byte_size - pointer, handle.device)
        # Wherever the last reference goes, also in a thread of the model's: noted, not closed.
        weakref.finalize(made, self._unused.append, (pointer, handle.device)).atexit = False
        self._open[key] = made
        return made

    def _blame(self, cuda: Cuda, device: int) -> None:
        """Return where it was a handle's fault that it did not open; raise where the device's."""
        try:
            cuda.synchronize(device)
        except CudaError as error:
            if device in self._used:
                raise DeviceLost(f"device {device}: {error}") from None
            logger.error("device %d cannot be used: %s", device, error)
            raise _unusable(device) from None
        self._used.add(device)

    def collect(self) -> None:
        """Close what nobody refers to any more; nothing outside the device's thread."""
        if threading.get_ident() != self._thread:
            return
        while self._unused:
            pointer, device = self._unused.popleft()
            assert self._cuda is not None
            try:
                self._cuda.close(pointer, device)
            except CudaError as error:
                logger.warning("closing a client's memory on device %d: %s", device, error)

    def pin(self, view: memoryview, device: int) -> Callable[[], None]:
        """Lock a mapping of a client's region for a device, for `Mappings`; gives what undoes it.

        What cannot be pinned is used as it is: it is only slower. Each call of the driver says
        itself whether it went well, so that no later one fails for it.
        """
        if not view.nbytes:
            return _nothing
        address = address_of(view)
        try:
            if self._cuda is None:
                self._cuda = self._make()
            self._cuda.pin(address, view.nbytes, device)
        except (CudaError, Unavailable) as error:
            logger.warning("a region of %d bytes cannot be pinned: %s", view.nbytes, error)
            return _nothing
        return partial(self._unpin, self._cuda, address, device)

    @staticmethod
    def _unpin(cuda: Cuda, address: int, device: int) -> None:
        try:
            cuda.unpin(address, device)
        except CudaError as error:
            logger.warning("unpinning a region: %s", error)

    def write(self, destination: torch.Tensor, source: torch.Tensor, device: int) -> int:
        """Copy a tensor, from wherever it is, to bytes of a client's memory; how many were copied.

        None where it is there already. The bytes are there after `settle`.
        """
        self._written.add(device)
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

    def settle(self) -> None:
        """Wait until all that was written has reached the devices.

        Raises DeviceLost when that fails: the process can use the device no more.
        """
        while self._written:
            self.synchronize(self._written.pop())

    def synchronize(self, device: int) -> None:
        """Wait until a device has done all that this process asked of it; from any thread.

        Raises DeviceLost when that fails.
        """
        assert self._cuda is not None
        try:
            self._cuda.synchronize(device)
        except CudaError as error:
            raise DeviceLost(f"device {device}: {error}") from error

    def check(self, question: CheckMemory) -> MemoryChecked:
        """Open a memory and let it go again: how that went."""
        handle = CudaHandle(question.handle, question.device_id, question.device_uuid)
        try:
            self.open(Memory.on_device(0, question.byte_size, handle)).close()
        except ShmserveError as error:
            return MemoryChecked(question.id, error.code, error.message)
        return MemoryChecked(question.id, "", "")

    @property
    def handles(self) -> int:
        """The number of handles that are open, or wait to be closed."""
        return len(self._open) + len(self._unused)


def _unusable(device: int) -> Unavailable:
    return Unavailable(f"this model's process cannot use shared memory on device {device} now")


def _nothing() -> None:
    """Unpin memory that was not pinned."""


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.device != other.device:
        return False
    reach = sum((n - 1) * s for n, s in zip(other.shape, other.stride(), strict=True) if n)
    end = other.data_ptr() + (reach + 1) * other.dtype.itemsize
    return other.data_ptr() < one.data_ptr() + one.numel() and one.data_ptr() < end
