"""An ensemble's memory on CUDA devices: blocks of allocations that this process exports, and that
the workers of its steps open.

Allocations are kept for the next requests, and end with the process.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable

from shmserve.errors import ShmserveError
from shmserve.ipc.memory.arena import FreeList
from shmserve.ipc.memory.cuda_ipc import DeviceAllocation, Exporting
from shmserve.ipc.memory.lent import Block
from shmserve.ipc.tensors.descriptors import Memory, Place

logger = logging.getLogger(__name__)

_LEAST = 64 * 1024 * 1024  # an allocation's size: a request's tensors many times, or one large one


class _Segment:
    """One allocation, and what of it is free."""

    def __init__(self, cuda: Exporting, device: int, byte_size: int) -> None:
        self._allocation = DeviceAllocation(cuda, device, byte_size)
        self.device = device
        self.free = FreeList(self._allocation.size)
        handle = self._allocation.handle
        self.memory = Memory.on_device(
            secrets.randbits(62), self._allocation.size, handle, os.getpid()
        )


class DeviceBlocks:
    """At most `byte_size` bytes on each device. `cuda()` raises Unavailable where there is none."""

    def __init__(self, byte_size: int, cuda: Callable[[], Exporting]) -> None:
        self._byte_size = byte_size
        self._make = cuda
        self._cuda: Exporting | None = None
        self._segments: dict[int, _Segment] = {}  # by the id of the memory
        self._full: set[int] = set()  # devices that have no more for us

    @property
    def used(self) -> int:
        """Bytes that are in use."""
        return sum(segment.free.used for segment in self._segments.values())

    def allocate(self, device: int, byte_size: int) -> Block | None:
        """A block on a device, or None where there is no room: what a device has refused it is not
        asked for again."""
        for segment in self._segments.values():
            if segment.device == device:
                offset = segment.free.allocate(byte_size)
                if offset is not None:
                    return Block(self.free, Place(segment.memory, offset, byte_size))
        made = self._grow(device, byte_size)
        if made is None:
            return None
        offset = made.free.allocate(byte_size)
        assert offset is not None
        return Block(self.free, Place(made.memory, offset, byte_size))

    def _grow(self, device: int, byte_size: int) -> _Segment | None:
        had = sum(s.free.capacity for s in self._segments.values() if s.device == device)
        size = min(max(byte_size, _LEAST), self._byte_size - had)
        if size < byte_size or device in self._full:
            return None
        try:
            if self._cuda is None:
                self._cuda = self._make()
            made = _Segment(self._cuda, device, size)
        except ShmserveError as error:
            self._full.add(device)
            logger.warning("tensors between steps go by the host's memory: %s", error.message)
            return None
        self._segments[made.memory.id] = made
        return made

    def free(self, place: Place) -> None:
        """Take a block back; `Block.release` does."""
        self._segments[place.memory.id].free.free(place.offset)
