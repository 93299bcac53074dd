"""Memory that a program allocates on a CUDA device for use by the server's workers.

    allocation   |## a region's tensors, each aligned to 64 bytes ##|     exported by one handle

The program must synchronise the stream that writes inputs before it sends a request. Outputs are
complete when the response arrives. cuda-bindings is imported only by programs that allocate.

Torch, cupy, jax and numpy exchange tensors as DLPack capsules (version 0.x), whose layout is that
of DLPack's C header: https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmserve.client.memory.views import MemoryLease, RegisteredMemory
from shmserve.client.request.arrays import Array
from shmserve.errors import InvalidArgument, Released, Unavailable
from shmserve.ipc.memory.arena import FreeList
from shmserve.ipc.memory.cuda_ipc import CudaExporter, DeviceAllocation, Driver
from shmserve.ipc.messages import control_requests as m
from shmserve.ipc.tensors.arrays import STORAGE_DTYPES, array_interface
from shmserve.ipc.tensors.datatypes import element_count
from shmserve.ipc.tensors.descriptors import Range

CPU, CUDA = 1, 2  # DLPack's device types
# DLPack's types: datatype -> (type code, bits).
TYPES: dict[str, tuple[int, int]] = {
    **{f"INT{bits}": (0, bits) for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": (1, bits) for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": (2, bits) for bits in (16, 32, 64)},
    "BF16": (4, 16),
    "BOOL": (6, 8),
}
_CAPSULE_NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


# Keeps the memory of capsules in use: address of a `_ManagedTensor` -> the structure, its shape,
# and the owner of its data.
_exported: dict[int, tuple[Any, ...]] = {}

_c_api = ctypes.pythonapi
_create_capsule = _c_api.PyCapsule_New
_create_capsule.restype = ctypes.py_object
_create_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_capsule = _c_api.PyCapsule_IsValid
_is_capsule.restype, _is_capsule.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)
_capsule_pointer = _c_api.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)


def _release_exported(address: int) -> None:
    _exported.pop(address, None)


def _destroy_capsule(capsule: int) -> None:
    # A consumer renames the capsule and calls the deleter, so only unused capsules are freed here.
    if _is_capsule(capsule, _CAPSULE_NAME):
        _exported.pop(_capsule_pointer(capsule, _CAPSULE_NAME), None)


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_callbacks = _CALLBACK(_release_exported), _CALLBACK(_destroy_capsule)
_DELETER, _DESTRUCTOR = (ctypes.cast(function, ctypes.c_void_p) for function in _callbacks)
# This reference is never released: at interpreter exit, tensors may outlive this module.
_c_api.Py_IncRef(ctypes.py_object(_callbacks))


def capsule(
    pointer: int, shape: tuple[int, ...], datatype: str, device: tuple[int, int], owner: object
) -> Any:
    """Return a DLPack capsule over row-major memory at `pointer`.

    Args:
        pointer: The address of the memory.
        shape: The tensor's shape.
        datatype: The tensor's datatype.
        device: DLPack's device type (CPU or CUDA) and the device's number.
        owner: An object that is kept alive until the consumer has finished.
    """
    code, bits = TYPES[datatype]
    dims = (ctypes.c_int64 * len(shape))(*shape)
    managed_tensor = _ManagedTensor()
    tensor = managed_tensor.tensor
    tensor.data = pointer
    tensor.device_type, tensor.device_id = device
    tensor.ndim, tensor.code, tensor.bits, tensor.lanes = len(shape), code, bits, 1
    tensor.shape = dims
    managed_tensor.deleter = _DELETER
    address = ctypes.addressof(managed_tensor)
    _exported[address] = (managed_tensor, dims, owner)
    return _create_capsule(address, _CAPSULE_NAME, _DESTRUCTOR)


def device_number(device: object) -> int | None:
    """Return the number of the CUDA device "cuda:1", "cuda" or a `torch.device`; None for "cpu".

    Raises:
        InvalidArgument: `device` is no CUDA device and not "cpu".
    """
    name = str(device)
    if name == "cpu":
        return None
    device_type, _, device_index = name.partition(":")
    if device_type != "cuda" or not (device_index.isdecimal() or name == "cuda"):
        raise InvalidArgument(f"device '{name}' is unknown (allowed: 'cpu', 'cuda', 'cuda:NUMBER')")
    return int(device_index or 0)


class DeviceSegment(RegisteredMemory):
    """A device allocation that is shared with the server: the counterpart of `Segment`."""

    counts_against_limit = pin = False

    def __init__(self, cuda: CudaExporter, device: int, byte_size: int) -> None:
        """Allocate the memory; see `DeviceAllocation` for errors."""
        allocation = DeviceAllocation(cuda, device, byte_size)
        self._allocation: DeviceAllocation | None = allocation
        self._handle = allocation.handle
        self.size = allocation.size
        self.address = allocation.pointer
        self.free_list = FreeList(self.size)

    def make_share_request(self, request_number: int) -> tuple[Any, tuple[int, ...]]:
        """Return the message that shares the segment with a server, and the descriptors to pass."""
        handle = self._handle
        return m.ShareDeviceMemory(
            request_number, self.size, handle.raw, handle.device, handle.uuid
        ), ()

    def view(
        self, offset: int, shape: tuple[int, ...], datatype: str, lease: MemoryLease
    ) -> DeviceView:
        """Return a view of the tensor at `offset`; raise Released after `close`."""
        if self._allocation is None:
            raise Released("this client is closed")
        return DeviceView(self, self._allocation, offset, tuple(shape), datatype, lease)

    def close(self) -> None:
        """Free the memory once its last view is gone."""
        self._allocation = None


@dataclass(eq=False, repr=False)
class DeviceView:
    """A tensor in a region on a device; `torch()` or DLPack returns a tensor for computations.

    After the region's release, the view raises Released. Earlier tensors keep the memory alive.
    """

    segment: DeviceSegment
    _allocation: DeviceAllocation
    offset: int
    shape: tuple[int, ...]
    datatype: str
    lease: MemoryLease

    def __post_init__(self) -> None:
        self._pointer = self._allocation.pointer + self.offset
        self.nbytes = element_count(self.shape) * STORAGE_DTYPES[self.datatype].itemsize

    @property
    def device(self) -> str:
        """Return torch's name of the device."""
        return f"cuda:{self._allocation.device}"

    def _check(self) -> None:
        if self.lease.released:
            raise Released("this memory was released; copy data that you need after the release")

    def memory_range(self) -> Range:
        """Return the tensor's range as it is sent to the server; raise Released after a release."""
        self._check()
        return self.segment.memory_range(self.offset, self.nbytes)

    def torch(self) -> Any:
        """Return a torch tensor over the same memory.

        Raise Released after the region's release, or Unavailable without torch.
        """
        torch = sys.modules.get("torch")
        if torch is None:
            raise Unavailable("import torch before creating a tensor of device memory")
        return torch.from_dlpack(self)

    def numpy(self) -> Array:
        """Return a copy in host memory (BF16 as uint16) after pending device work.

        Raises Released after the region's release.
        """
        self._check()
        host_array = np.empty(self.shape, STORAGE_DTYPES[self.datatype])
        if host_array.nbytes:
            host_bytes = host_array.reshape(-1).view(np.uint8).data
            self._allocation.cuda.read(self._pointer, host_bytes, self._allocation.device)
        return host_array

    def fill(self, values: Any) -> None:
        """Copy an array to the device, converted to this view's shape and datatype.

        The copy is complete on return.

        Raises:
            Released: The region was released.
            InvalidArgument: The array cannot be converted.
        """
        self._check()
        try:
            array = np.asarray(values, STORAGE_DTYPES[self.datatype])
            array = np.ascontiguousarray(np.broadcast_to(array, self.shape))
        except (TypeError, ValueError) as error:
            text = f"the values cannot be converted to {self.datatype} {self.shape}: {error}"
            raise InvalidArgument(text) from error
        if array.nbytes:
            data = array.reshape(-1).view(np.uint8).data
            self._allocation.cuda.write(self._pointer, data, self._allocation.device)

    def __dlpack__(self, **options: Any) -> Any:
        self._check()
        device = self.__dlpack_device__()
        if options.get("copy") or options.get("dl_device", device) not in (device, None):
            raise BufferError("device memory can be exported only on its device, without a copy")
        return capsule(self._pointer, self.shape, self.datatype, device, self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self._allocation.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self._check()
        return array_interface(self._pointer, self.shape, STORAGE_DTYPES[self.datatype].str)

    def __repr__(self) -> str:
        return f"<{self.datatype} {self.shape} on {self.device}>"


def open_exporter() -> CudaExporter:
    """Return the CUDA driver. Raises Unavailable without cuda-bindings or a GPU."""
    try:
        return Driver()
    except Unavailable as error:
        raise Unavailable(f"cannot allocate device memory: {error.message}") from None
