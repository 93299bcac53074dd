"""The tensors of an ensemble's requests and the memory that they lie in.

A tensor whose size is known before it is made is written by its step's worker into a block of the
ensemble's arena, where the next step's worker or the client reads it. Between steps that are on one
CUDA device the block is in memory of the ensemble on that device. A tensor that a model returns
unchanged keeps its block.

Any other tensor lies in its worker's arena. This process keeps the descriptor of that arena open
and passes it to the next step's worker, so that the arena outlives its worker. A tensor that the
client reads is copied from the worker's arena into the ensemble's arena.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap
from typing import Any

from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.ipc.memory.arena import FreeList
from shmserve.ipc.memory.cuda_ipc import CudaExporter, DeviceAllocation, Driver
from shmserve.ipc.memory.lent import Block, LentMemory, Token
from shmserve.ipc.memory.mappings import Mappings, open_memory
from shmserve.ipc.tensors.descriptors import Memory, Range
from shmserve.ipc.tensors.schemas import BoundedCache
from shmserve.ipc.tensors.signature import shapes_match

logger = logging.getLogger(__name__)

# Bytes of a CUDA allocation: large enough for the tensors of many requests, or for a large tensor.
_SEGMENT_SIZE = 64 * 1024 * 1024
_ALL_FALSE = re.compile(rb"\0*+")  # the bytes of a BOOL tensor; matching takes 1 ns per byte


@dataclass(frozen=True, slots=True, eq=False)
class TensorKind:
    """The datatype and shape of a tensor, compared by identity.

    `shared` returns the same object for equal kinds. Caches by kind therefore need no comparison
    of datatypes and shapes.

    Attributes:
        is_batched: Whether the first dimension is the batch dimension of the model that made it.
    """

    datatype: str
    shape: tuple[int, ...]
    is_batched: bool = False

    @classmethod
    def shared(cls, datatype: str, shape: tuple[int, ...], is_batched: bool) -> TensorKind:
        """Return the one object for this datatype and shape."""
        key = (datatype, shape, is_batched)
        return _SHARED_KINDS.find(key) or _SHARED_KINDS.store_if_absent(key, cls(*key))

    def shape_for(self, dims: Sequence[int], is_target_batched: bool) -> tuple[int, ...]:
        """Return the shape for another model: a batch dimension of 1 is added or removed if needed.

        Args:
            dims: The dimensions in that model's configuration.
            is_target_batched: Whether that model has a batch dimension.
        """
        shape, is_batched = self.shape, self.is_batched
        if is_target_batched and not is_batched and shapes_match(dims, shape):
            return (1, *shape)
        if is_target_batched or not is_batched or shape[:1] != (1,) or shapes_match(dims, shape):
            return shape
        return shape[1:] if shapes_match(dims, shape[1:]) else shape


_SHARED_KINDS: BoundedCache[Any, TensorKind] = BoundedCache(1024)


class Value(Token):
    """A reference-counted tensor of a request; `memory` is released with the last reference.

    Attributes:
        kind: The tensor's datatype and shape; None: the value is `SKIPPED` or `ABSENT`.
        data: The tensor's bytes or their memory range.
        is_true: Whether some element is true, if the tensor is a condition.
        sequence_override: The sequence parameters in the response that contained the tensor. They
            have precedence over those of the client's request.
        held_credits: The flow-control credits of the steps that made it, returned at its release.
    """

    __slots__ = ("data", "held_credits", "is_true", "kind", "memory", "sequence_override")

    def __init__(
        self,
        kind: TensorKind | None,
        data: bytes | Range,
        memory: Token | None = None,
        is_true: bool = True,  # of a condition: whether some element is true
        sequence_override: dict[str, Any] | None = None,
        held_credits: tuple[Token, ...] = (),
    ) -> None:
        self._reference_count = 1
        self.kind = kind
        self.data = data
        self.memory = memory
        self.is_true = is_true
        self.sequence_override = sequence_override
        self.held_credits = held_credits
        for credit in held_credits:
            credit.acquire()

    @property
    def is_in_own_memory(self) -> bool:
        """Return whether the tensor is inline or in a block of the ensemble's own arena."""
        return isinstance(self.data, bytes) or isinstance(self.memory, Block)

    def block_at(self, memory_range: Range) -> Block | None:
        """Return the ensemble's block of the tensor if the block is at `memory_range`, or None."""
        block = self.memory
        return block if isinstance(block, Block) and block.memory_range == memory_range else None

    def release(self) -> None:
        self._reference_count -= 1
        if not self._reference_count and (self.memory is not None or self.held_credits):
            self._free()

    def _free(self) -> None:
        if self.memory is not None:
            self.memory.release()
        for credit in self.held_credits:
            credit.release()


def combined_override(values: Iterable[Value]) -> dict[str, Any]:
    """Return the sequence parameters, by name, in the responses that contained these tensors.

    They override the sequence parameters of the client's request.
    """
    parameters: dict[str, Any] = {}
    for value in values:
        if value.sequence_override:
            parameters.update(value.sequence_override)
    return parameters


SKIPPED = Value(None, b"", is_true=False)  # an output of a step that did not run
ABSENT = Value(None, b"", is_true=False)  # an omitted input, or an output missing in a response


@dataclass(eq=False)
class EnsembleMemory:
    """The ensemble's arena, its memory on CUDA devices, and the workers' arenas that it holds.

    Attributes:
        lent_memory: The ensemble's arena, with a record of the clients that read each block.
    """

    lent_memory: LentMemory
    _on_dropped: Callable[[int], None]  # called with the id of an arena that is no longer held
    _create_driver: Callable[[], CudaExporter] = Driver
    _held_arenas: dict[int, _HeldArena] = field(default_factory=dict)
    _mappings: Mappings = field(default_factory=Mappings)

    def __post_init__(self) -> None:
        self._device_blocks = DeviceBlocks(self.lent_memory.byte_size, self._create_driver)

    def allocate(self, byte_size: int, device: int | None = None) -> Block:
        """Return a block on a CUDA device, or of the arena if the device has no free space.

        Raises:
            Unavailable: The arena is full.
        """
        if device is not None:
            block = self._device_blocks.allocate(device, byte_size)
            if block is not None:
                return block
        return self.lent_memory.allocate(byte_size)

    def reserve(self, sizes: Iterable[tuple[int, int | None]]) -> None:
        """Reserve memory for blocks of these sizes on these devices; log if there is too little."""
        blocks: list[Block] = []
        try:
            blocks.extend(starmap(self.allocate, sizes))
        except ShmserveError as error:
            logger.warning("memory for tensors between ensemble steps is not reserved: %s", error)
        for block in blocks:
            block.release()

    def hold(self, memory_range: Range) -> None:
        """Keep a worker's arena open until `end_hold`, even if the worker exits.

        Raises:
            Unavailable: The arena is gone.
        """
        memory = memory_range.memory
        arena = self._held_arenas.get(memory.id)
        if arena is None:
            arena = self._held_arenas[memory.id] = _HeldArena(memory)
        arena.reference_count += 1

    def end_hold(self, memory_range: Range) -> None:
        """Release a range that `hold` kept."""
        arena = self._held_arenas[memory_range.memory.id]
        arena.reference_count -= 1
        if arena.owner_exited and not arena.reference_count:
            self._close(memory_range.memory.id)

    def make_durable(self, memory_range: Range) -> Range:
        """Return a memory range in a form that is readable after its writer has exited."""
        arena = self._held_arenas.get(memory_range.memory.id)
        return memory_range if arena is None else replace(memory_range, memory=arena.memory)

    def copy(self, memory_range: Range) -> Block:
        """Return a block of the arena with the bytes of a worker's arena that is held.

        Raises:
            Unavailable: The ensemble's arena is full.
        """
        return self.lent_memory.write(self._mappings.view(self.make_durable(memory_range)))

    def process_exited(self, pid: int) -> None:
        """Close the arena of a process that has exited, as soon as nothing uses the arena."""
        for memory_id, arena in list(self._held_arenas.items()):
            if arena.pid == pid:
                arena.owner_exited = True
                if not arena.reference_count:
                    self._close(memory_id)
        self._mappings.unmap_process(pid)

    def _close(self, memory_id: int) -> None:
        self._held_arenas.pop(memory_id).close()
        self._mappings.unmap(memory_id)
        self._on_dropped(memory_id)

    def any_true(self, name: str, data: bytes | Range) -> bool:
        """Return whether an element of the BOOL tensor `name` is true.

        Raises:
            InvalidArgument: The tensor lies in a client's memory, which no scheduler reads.
        """
        content: Any = data
        if isinstance(data, Range):
            memory = data.memory
            if memory.cuda is not None or memory.copied or not memory.sealed:
                raise InvalidArgument(
                    f"input '{name}' is a step's condition: send its data in the request, not in a "
                    "shared memory region"
                )
            content = self._mappings.view(data)
        return _ALL_FALSE.fullmatch(content) is None

    def close(self) -> None:
        """Close all arenas that are held."""
        for memory_id in list(self._held_arenas):
            self._close(memory_id)
        self._mappings.unmap_all()


class _HeldArena:
    """A worker's arena that this process holds open."""

    def __init__(self, memory: Memory) -> None:
        self.pid = memory.pid
        self.reference_count = 0
        self.owner_exited = False  # whether the worker that owns the arena has exited
        self._fd = open_memory(memory)
        self.memory = replace(memory, pid=os.getpid(), fd=self._fd)

    def close(self) -> None:
        os.close(self._fd)


class DeviceBlocks:
    """The ensemble's blocks on CUDA devices, which the workers of its steps open.

    Allocations are kept for further requests until the process exits.
    """

    def __init__(self, max_byte_size: int, create_driver: Callable[[], CudaExporter]) -> None:
        """Create an allocator without allocations.

        Args:
            max_byte_size: The maximum number of bytes to allocate on each device.
            create_driver: Returns the driver. Raises Unavailable if there is none.
        """
        self._byte_size = max_byte_size
        self._create_driver = create_driver
        self._cuda: CudaExporter | None = None
        self._segments: dict[int, _Segment] = {}  # allocations by the id of their memory
        self._full_devices: set[int] = set()  # devices on which an allocation has failed

    def allocate(self, device: int, byte_size: int) -> Block | None:
        """Return a block on a device, or None if there is no free space.

        After a device has failed to allocate, no further allocation is tried on it.
        """
        for segment in self._segments.values():
            if segment.device == device:
                offset = segment.free_list.allocate(byte_size)
                if offset is not None:
                    return Block(self.free, Range(segment.memory, offset, byte_size))
        return self.allocate(device, byte_size) if self._grow(device, byte_size) else None

    def _grow(self, device: int, byte_size: int) -> bool:
        """Allocate a segment for a block of `byte_size`; return False if that is not possible."""
        capacity = sum(s.free_list.capacity for s in self._segments.values() if s.device == device)
        size = min(max(byte_size, _SEGMENT_SIZE), self._byte_size - capacity)
        if size < max(byte_size, 1) or device in self._full_devices:
            return False
        try:
            if self._cuda is None:
                self._cuda = self._create_driver()
            segment = _Segment(self._cuda, device, size)
        except ShmserveError as error:
            self._full_devices.add(device)
            logger.warning(
                "tensors between ensemble steps use host memory, not device %d: %s",
                device,
                error.message,
            )
            return False
        self._segments[segment.memory.id] = segment
        return True

    def free(self, memory_range: Range) -> None:
        """Free a block; called by `Block.release`."""
        self._segments[memory_range.memory.id].free_list.free(memory_range.offset)


class _Segment:
    """An allocation on a device and its free space."""

    def __init__(self, cuda: CudaExporter, device: int, byte_size: int) -> None:
        self._allocation = DeviceAllocation(cuda, device, byte_size)
        self.device = device
        size, handle = self._allocation.size, self._allocation.handle
        self.free_list = FreeList(size)
        self.memory = Memory.on_device(secrets.randbits(62), size, handle, os.getpid())
