"""Registered shared memory regions: where tensors are, and how long a region is in use.

The supervisor registers; here is a copy of its table. A gateway never maps a region: it checks that
a range lies within one and tells the worker where that is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from shmserve.errors import InvalidArgument, NotFound
from shmserve.gateway.codec import RegionRange
from shmserve.gateway.values import LARGEST_UNSIGNED
from shmserve.ipc.messages import RegionPublished
from shmserve.ipc.ranges import fits
from shmserve.ipc.tensors import CudaHandle, Memory, Place

logger = logging.getLogger(__name__)


class Region:
    """One generation of a name. `requests` counts those in flight that use it."""

    __slots__ = (
        "byte_size",
        "key",
        "memory",
        "name",
        "offset",
        "requests",
        "warned",
        "withdrawn",
        "written",
    )

    def __init__(self, message: RegionPublished) -> None:
        self.name = message.name
        self.key = message.key
        self.offset = message.offset
        self.byte_size = message.byte_size
        if message.handle:
            handle = CudaHandle(message.handle, message.device_id, message.device_uuid)
            self.memory = Memory.on_device(message.memory_id, message.object_size, handle)
        else:
            self.memory = Memory(
                id=message.memory_id,
                pid=message.pid,
                fd=message.fd,
                inode=message.inode,
                byte_size=message.object_size,
                sealed=False,
            )
        self.requests = 0
        self.withdrawn = False
        self.written: list[tuple[int, int]] = []  # output ranges in flight
        self.warned = False

    def place(self, wanted: RegionRange) -> Place:
        """The place of a range of this region; raises InvalidArgument when it lies outside."""
        offset, size = wanted.offset, wanted.byte_size
        if size > LARGEST_UNSIGNED - offset:
            raise InvalidArgument(
                f"Integer overflow detected: byte_size ({size}) + offset ({offset}) exceeds "
                f"maximum value ({LARGEST_UNSIGNED}) for region '{self.name}'"
            )
        if offset >= self.byte_size:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{self.name}'")
        if not fits(offset, size, self.byte_size):
            raise InvalidArgument(
                f"Invalid offset + byte size for shared memory region: '{self.name}'"
            )
        return Place(self.memory, self.offset + offset, size)

    def status(self) -> dict[str, Any]:
        """As the status endpoint of its kind shows it."""
        if self.memory.cuda is not None:
            device_id = self.memory.cuda.device
            return {"name": self.name, "device_id": device_id, "byte_size": self.byte_size}
        return {
            "name": self.name,
            "key": self.key,
            "offset": self.offset,
            "byte_size": self.byte_size,
        }


class Uses:
    """The regions that one request uses and the ranges that it writes; given back at once."""

    __slots__ = ("_regions", "_table", "_writes")

    def __init__(self, table: RegionTable) -> None:
        self._table = table
        self._regions: list[Region] = []
        self._writes: list[tuple[Region, tuple[int, int]]] = []

    def take(self, wanted: RegionRange, *, write: bool = False) -> Place:
        """Use a range; raises NotFound or InvalidArgument."""
        region = self._table.find(wanted.region)
        place = region.place(wanted)
        if region not in self._regions:
            self._regions.append(region)
            region.requests += 1
        if write:
            span = (place.offset, place.offset + place.byte_size)
            _warn_of_overlap(region, span)
            region.written.append(span)
            self._writes.append((region, span))
        return place

    def release(self) -> None:
        """The request is over."""
        for region, span in self._writes:
            region.written.remove(span)
        self._writes.clear()
        for region in self._regions:
            region.requests -= 1
            if region.withdrawn and not region.requests:
                self._table.released(region)
        self._regions.clear()


def _warn_of_overlap(region: Region, span: tuple[int, int]) -> None:
    # Two requests that write to the same bytes: both succeed, and one finds the other's result.
    if not region.warned and any(s < span[1] and span[0] < e for s, e in region.written):
        region.warned = True
        logger.warning(
            "requests in flight write to overlapping parts of shared memory region '%s'",
            region.name,
        )


class RegionTable:
    """The regions by name.

    `on_released(memory_id)` hears when the last request leaves a withdrawn generation.
    """

    def __init__(self, on_released: Callable[[int], None]) -> None:
        self._on_released = on_released
        self._by_name: dict[str, Region] = {}
        self._by_id: dict[int, Region] = {}

    def publish(self, message: RegionPublished) -> None:
        """A region may be used under its name."""
        if message.memory_id not in self._by_id:
            region = self._by_id[message.memory_id] = Region(message)
            self._by_name[message.name] = region

    def withdraw(self, memory_id: int) -> None:
        """The name is free; requests in flight keep the generation."""
        region = self._by_id.get(memory_id)
        if region is None:
            self._on_released(memory_id)
            return
        region.withdrawn = True
        if self._by_name.get(region.name) is region:
            del self._by_name[region.name]
        if not region.requests:
            self.released(region)

    def released(self, region: Region) -> None:
        """Nothing uses a withdrawn generation any more."""
        self._by_id.pop(region.memory.id, None)
        self._on_released(region.memory.id)

    def find(self, name: str) -> Region:
        """The region of a name, for a request. Raises NotFound."""
        region = self._by_name.get(name)
        if region is None:
            raise NotFound(
                f"Unable to find shared memory region: '{name}' "
                f"({len(self._by_name)} are registered; "
                "register it before the request, and again after a restart of the server)"
            )
        return region

    def status(self, name: str, *, cuda: bool) -> list[dict[str, Any]]:
        """What the status call of a kind of memory answers; all regions of it for an empty name.

        Raises NotFound with Triton's texts for an unknown name and for one of the other kind.
        """
        if not name:
            return [r.status() for r in self.all() if (r.memory.cuda is not None) == cuda]
        kind, other = ("CUDA", "system") if cuda else ("system", "CUDA")
        region = self._by_name.get(name)
        if region is None:
            raise NotFound(f"Unable to find {kind.lower()} shared memory region: '{name}'")
        if (region.memory.cuda is not None) != cuda:
            raise NotFound(
                f"The region named '{name}' is registered as {other} shared memory, "
                f"not {kind} shared memory"
            )
        return [region.status()]

    def all(self) -> Iterable[Region]:
        """Every region that has a name, by name."""
        return [self._by_name[name] for name in sorted(self._by_name)]
