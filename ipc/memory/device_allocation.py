"""Memory of this process on a CUDA device, which other processes open by one handle.

allocation   |###### blocks of whoever made it ######|     exported whole, freed as a whole
"""

from __future__ import annotations

import contextlib
import os
import weakref

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.memory.cuda_ipc import CudaError, Exporting
from shmserve.ipc.tensors.descriptors import CudaHandle

# The driver may put smaller allocations side by side, and a handle opens what lies around, too.
_GRANULE = 2 * 1024 * 1024


class DeviceAllocation:
    """`size` bytes on a device, full of zeros, at least as many as were asked for; freed with the
    last that refers to it.

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
