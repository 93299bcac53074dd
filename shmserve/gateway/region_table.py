"""Registered shared memory regions: a replica of the supervisor's table, with reference counts.

A gateway never maps a region. For a range in a request, the gateway only checks that the range lies
within the region, and sends the range to the worker. An unregistered region is retired: requests
may still use the region. Once no request uses it, the region is withdrawn: the table removes its
name.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from shmserve.common.peers import EVERYONE, Ownership, Peer
from shmserve.errors import AlreadyExists, InvalidArgument, NotFound
from shmserve.gateway.inference.infer_request import RegionRange
from shmserve.ipc.messages.control_requests import RegionInUse, RegionReleased
from shmserve.ipc.messages.publications import RegionPublished
from shmserve.ipc.tensors.descriptors import MAX_UINT64, Range, is_within, unpack_range

logger = logging.getLogger(__name__)


class GatewayRegion:
    """One generation of a region; its name may later be registered again with other memory.

    Attributes:
        request_count: The number of requests in flight that use the region.
        written_ranges: The ranges that requests in flight write to; all regions of one memory
            object share them.
    """

    def __init__(self, message: RegionPublished) -> None:
        self.name = message.name
        self.key = message.key
        registered_range = unpack_range(message.memory_range)
        self.offset = registered_range.offset
        self.byte_size = registered_range.byte_size
        self.memory = registered_range.memory
        self.owner = Ownership(message.uid, message.group, registered_range.memory.copied)
        self.request_count = 0
        # Whether the region was unregistered; requests may use it until it is withdrawn.
        self.is_retired = False
        self.is_withdrawn = False
        self.written_ranges = WrittenRanges()

    def admits(self, peer: Peer) -> bool:
        """Check whether a user may use the region."""
        return peer.uid == EVERYONE or self.owner.admits(peer)

    def memory_range(self, region_range: RegionRange) -> Range:
        """Return the range of the shared memory object for a range of this region.

        Raises:
            InvalidArgument: The range does not lie within the region.
        """
        offset, size = region_range.offset, region_range.byte_size
        if offset >= self.byte_size:
            raise InvalidArgument(
                f"Invalid offset for shared memory region: '{self.name}' (offset {offset}; the "
                f"region has {self.byte_size} bytes)"
            )
        if size > MAX_UINT64 - offset:
            raise InvalidArgument(
                f"Integer overflow detected: byte_size ({size}) + offset ({offset}) exceeds "
                f"maximum value ({MAX_UINT64}) for region '{self.name}'"
            )
        if not is_within(offset, size, self.byte_size):
            raise InvalidArgument(
                f"Invalid offset + byte size for shared memory region: '{self.name}' (byte_size "
                f"{size} at offset {offset}; the region has {self.byte_size} bytes)"
            )
        return Range(self.memory, self.offset + offset, size)

    def status(self) -> dict[str, Any]:
        """Return the region in the format of the status endpoint of its kind."""
        size, cuda = self.byte_size, self.memory.cuda
        if cuda is not None:
            return {"name": self.name, "device_id": cuda.device, "byte_size": size}
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": size}


class WrittenRanges:
    """An interval set of the ranges of a shared memory object that requests in flight write to.

    The ranges are sorted and do not overlap, so that a new range is compared with its two
    neighbours only. `region_count` counts the registered regions. `has_warned` is set once an
    overlap was logged.
    """

    __slots__ = ("has_warned", "ranges", "region_count")

    def __init__(self) -> None:
        self.region_count = 0  # registered regions of this object
        self.ranges: list[tuple[int, int]] = []  # (start, end), sorted
        self.has_warned = False  # whether an overlap was logged

    def add(self, new_range: tuple[int, int]) -> bool:
        """Add a range; return False, and add nothing, if it overlaps another range."""
        ranges = self.ranges
        index = bisect_left(ranges, new_range)
        for other_start, _ in ranges[index : index + 1]:
            if other_start < new_range[1]:
                return False
        if index and ranges[index - 1][1] > new_range[0]:
            return False
        ranges.insert(index, new_range)
        return True

    def remove(self, written_range: tuple[int, int]) -> None:
        """Remove the range of an output, since its request has ended."""
        del self.ranges[bisect_left(self.ranges, written_range)]


# An output of a request: its region, and its start and end in the region's memory object.
WrittenRange = tuple[GatewayRegion, tuple[int, int]]


class RegionReferences:
    """The references of one request to regions, and the ranges that it writes to."""

    __slots__ = ("_output_ranges", "_reserved_ranges", "_table", "regions")

    def __init__(self, table: RegionTable) -> None:
        self._table = table
        self.regions: list[GatewayRegion] = []
        self._output_ranges: list[WrittenRange] = []  # the ranges of all outputs
        self._reserved_ranges: list[WrittenRange] = []  # the ranges that overlap no other range

    def reference_range(self, region_range: RegionRange, *, is_output: bool = False) -> Range:
        """Count a reference to a region, and return the range; an output's range is reserved.

        Raises:
            NotFound: The region is not registered.
            InvalidArgument: The range does not lie within the region.
            AlreadyExists: The range of an output is in use, and `overlap_policy` is "error".
        """
        region = self._table.find(region_range.region)
        memory_range = region.memory_range(region_range)
        if region not in self.regions:
            self.regions.append(region)
            region.request_count += 1
            if region.is_retired:
                self._table.report_first_use(region)
        bounds = (memory_range.offset, memory_range.offset + memory_range.byte_size)
        if is_output and memory_range.byte_size and self._table.overlap_policy != "ignore":
            self._output_ranges.append((region, bounds))
            self._reserve((region, bounds))
        return memory_range

    def _reserve(self, output_range: WrittenRange) -> None:
        region, bounds = output_range
        if region.written_ranges.add(bounds):
            self._reserved_ranges.append(output_range)
            return
        # Both requests would succeed, but a client would read the result of another request.
        if self._table.overlap_policy == "error":
            raise AlreadyExists(
                f"an output in shared memory region '{region.name}' overlaps an output of a "
                "request in flight"
            )
        if not region.written_ranges.has_warned:
            region.written_ranges.has_warned = True
            logger.warning(
                "requests in flight write to overlapping parts of shared memory region '%s'",
                region.name,
            )

    def as_template(self) -> ReferenceTemplate:
        """Return the template of these references for later requests with the same header."""
        regions, output_ranges = tuple(self.regions), tuple(self._output_ranges)
        return ReferenceTemplate(self._table, self._table.version, regions, output_ranges)

    @classmethod
    def from_template(cls, template: ReferenceTemplate) -> RegionReferences | None:
        """Return the references of `template` for a new request; None if the table has changed.

        Raises:
            AlreadyExists: The range of an output is in use, and `overlap_policy` is "error".
        """
        table, table_version, regions, output_ranges = template
        if table_version != table.version:
            return None
        references = cls(table)
        references.regions += regions
        for region in regions:
            region.request_count += 1
            if region.is_retired:
                table.report_first_use(region)
        try:
            if table.overlap_policy != "ignore":
                for output_range in output_ranges:
                    references._reserve(output_range)
        except BaseException:
            references.release()
            raise
        return references

    def release(self) -> None:
        """Release the references at the end of the request."""
        for region, bounds in self._reserved_ranges:
            region.written_ranges.remove(bounds)
        self._reserved_ranges = []
        regions, self.regions = self.regions, []
        for region in regions:
            region.request_count -= 1
            if not region.request_count and (region.is_retired or region.is_withdrawn):
                self._table.report_unused(region)


class ReferenceTemplate(NamedTuple):
    """The references of a checked request, for later requests with the same header.

    Attributes:
        table: The table of regions.
        table_version: The version of the table. The template is invalid in other versions, where
            names may refer to other regions.
        regions: The regions.
        output_ranges: The ranges of the outputs.
    """

    table: RegionTable
    table_version: int
    regions: tuple[GatewayRegion, ...]
    output_ranges: tuple[WrittenRange, ...]


@dataclass(eq=False)
class RegionTable:
    """The regions by name, and by id until no request uses them.

    Attributes:
        _report: Sends a message to the supervisor.
        overlap_policy: The policy for overlapping outputs of two requests: "error", "warn" or
            "ignore".
        version: A number that changes when a name is added or removed.
    """

    _report: Callable[[RegionInUse | RegionReleased], None]
    overlap_policy: str = "warn"

    def __post_init__(self) -> None:
        self.version = 0
        # The written ranges of each shared memory object, by its identity (`Memory.object`).
        self._written_ranges: dict[int | bytes, WrittenRanges] = {}
        self._regions_by_name: dict[str, GatewayRegion] = {}
        # Regions without a name: withdrawn regions that requests still use, and the memory of local
        # clients.
        self._draining_regions: dict[int, GatewayRegion] = {}
        self._regions_by_id: dict[int, GatewayRegion] = {}

    def publish(self, message: RegionPublished) -> None:
        """Register a region under its name; a `draining` region is only listed."""
        region = GatewayRegion(message)
        memory_id = region.memory.id
        if message.draining:
            self._draining_regions[memory_id] = region
        elif memory_id not in self._regions_by_id:
            self._regions_by_id[memory_id] = region
            # Regions of the same object share the ranges written to it.
            ranges = self._written_ranges.setdefault(region.memory.object, region.written_ranges)
            region.written_ranges = ranges
            ranges.region_count += 1
            self._regions_by_name[message.name] = region
            self.version += 1

    def retire(self, memory_id: int) -> None:
        """Mark an unregistered region as retired, and report it if requests use it."""
        region = self._regions_by_id.get(memory_id)
        if region is not None:
            region.is_retired = True
            if region.request_count:
                self._report(RegionInUse(memory_id, True))

    def report_first_use(self, region: GatewayRegion) -> None:
        """Report to the supervisor that a retired region is in use again, by its first request."""
        if region.request_count == 1:
            self._report(RegionInUse(region.memory.id, True))

    def withdraw(self, memory_id: int) -> None:
        """Remove a region's name; requests in flight may still use the region."""
        region = self._regions_by_id.get(memory_id)
        if region is None:
            self._report(RegionReleased(memory_id))
            return
        region.is_withdrawn = True
        self.version += 1
        if self._regions_by_name.get(region.name) is region:
            del self._regions_by_name[region.name]
        if not region.request_count:
            self.report_unused(region)

    def remove_drained(self, memory_id: int) -> None:
        """Remove a withdrawn region that no request of any gateway refers to."""
        self._draining_regions.pop(memory_id, None)

    def report_unused(self, region: GatewayRegion) -> None:
        """Report that no request uses a region; remove it if it was withdrawn."""
        if not region.is_withdrawn:
            self._report(RegionInUse(region.memory.id, False))
            return
        if self._regions_by_id.pop(region.memory.id, None) is not None:
            region.written_ranges.region_count -= 1
            if not region.written_ranges.region_count:
                del self._written_ranges[region.memory.object]
        self._report(RegionReleased(region.memory.id))

    def find(self, name: str) -> GatewayRegion:
        """Return the region with a name.

        Raises:
            NotFound: No region has this name.
        """
        region = self._regions_by_name.get(name)
        if region is None:
            raise NotFound(
                f"Unable to find shared memory region: '{name}' "
                f"({len(self._regions_by_name)} are registered; "
                "register it before the request, and again after a restart of the server)"
            )
        return region

    def visible_regions(self, name: str, peer: Peer, *, is_cuda: bool) -> list[GatewayRegion]:
        """Return the regions of a kind that `peer` may see: all, or the one with a `name`.

        Raises:
            NotFound: No region of this kind has the name; the message is Triton's.
        """
        regions_by_name = {region.name: region for region in self._draining_regions.values()}
        regions_by_name |= self._regions_by_name
        if not name:
            regions = (region for _, region in sorted(regions_by_name.items()))
            return [r for r in regions if r.admits(peer) and (r.memory.cuda is not None) == is_cuda]
        kind, other_kind = ("CUDA", "system") if is_cuda else ("system", "CUDA")
        region = regions_by_name.get(name)
        if region is None or not region.admits(peer):
            raise NotFound(f"Unable to find {kind.lower()} shared memory region: '{name}'")
        if (region.memory.cuda is not None) != is_cuda:
            raise NotFound(
                f"The region named '{name}' is registered as {other_kind} shared memory, "
                f"not {kind} shared memory"
            )
        return [region]

    def named_regions(self) -> Iterable[GatewayRegion]:
        """Return the regions that have a name, sorted by name."""
        return [region for _, region in sorted(self._regions_by_name.items())]

    def unnamed_regions(self) -> Iterable[GatewayRegion]:
        """Return the regions that no request can name: withdrawn ones and local clients' memory."""
        return self._draining_regions.values()


def authorise(regions: Iterable[GatewayRegion], peer: Peer) -> None:
    """Check that a user may use regions.

    Raises:
        NotFound: A region belongs to another user.
    """
    for region in regions:
        # This is `GatewayRegion.admits` inlined, which saves one of two calls per region.
        if peer.uid != EVERYONE and not region.owner.admits(peer):
            raise NotFound(
                f"Unable to find shared memory region: '{region.name}' (it was registered by "
                "another user)"
            )
