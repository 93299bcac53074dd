"""The memory of the tensors between steps, and who has them.

A tensor whose size is known before it is made is written by its step's worker into the ensemble's
arena, where the next step's worker, or the client, reads it; between steps that are on one CUDA
device, into memory of the ensemble's there. What a model returns as it was given is not written
again: it keeps its block. Any other lies where its worker has
put it: that arena's descriptor is passed on to the next step's worker, and held open here, so that
it outlives the worker; of what the client is to read there is a copy in the ensemble's arena.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import starmap

from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.ipc.memory.cuda_ipc import Driver, Exporting
from shmserve.ipc.memory.lent import Block, LentMemory
from shmserve.ipc.memory.mappings import Mappings, opened
from shmserve.ipc.tensors.descriptors import Memory, Place, TensorRef
from shmserve.scheduler.ensemble.device_blocks import DeviceBlocks

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class EnsembleMemory:
    """The ensemble's arena, and what is `lent` to its clients; as much on each CUDA device; and
    workers' arenas, which `dropped(memory_id)` hears are held no more."""

    lent: LentMemory
    _dropped: Callable[[int], None]
    _cuda: Callable[[], Exporting] = Driver
    _held: dict[int, _Held] = field(default_factory=dict)
    _mappings: Mappings = field(default_factory=Mappings)

    def __post_init__(self) -> None:
        self._on_devices = DeviceBlocks(self.lent.byte_size, self._cuda)

    @property
    def used(self) -> int:
        """Bytes that are in use, of the arena and on devices."""
        return self._on_devices.used + self.lent.used

    @property
    def held(self) -> int:
        """The number of workers' arenas that are held open."""
        return len(self._held)

    def allocate(self, byte_size: int, device: int | None = None) -> Block:
        """A block on a CUDA device, or of the arena where there is none or no room on it. Raises
        Unavailable when that is full."""
        if device is not None:
            block = self._on_devices.allocate(device, byte_size)
            if block is not None:
                return block
        return self.lent.allocate(byte_size)

    def reserve(self, sizes: Iterable[tuple[int, int | None]]) -> None:
        """Have room for blocks of these sizes, on these devices, if the machine has it."""
        blocks: list[Block] = []
        try:
            blocks.extend(starmap(self.allocate, sizes))
        except ShmserveError as error:
            logger.warning("the memory between steps cannot be planned: %s", error)
        for block in blocks:
            block.release()

    def hold(self, place: Place) -> None:
        """Keep a worker's arena until `let_go`, whatever becomes of the worker. Raises Unavailable
        when it is gone."""
        memory = place.memory
        held = self._held.get(memory.id)
        if held is None:
            held = self._held[memory.id] = _Held(memory)
        held.users += 1

    def let_go(self, place: Place) -> None:
        """A place of a worker's arena is not used any more."""
        held = self._held[place.memory.id]
        held.users -= 1
        if held.gone and not held.users:
            self._close(place.memory.id)

    def passed_on(self, place: Place) -> Place:
        """The place as another worker can read it, also when the one that wrote it has ended."""
        held = self._held.get(place.memory.id)
        return place if held is None else replace(place, memory=held.memory)

    def copy(self, place: Place) -> Block:
        """A block of the arena with the bytes of a worker's arena that is held. Raises
        Unavailable when ours is full."""
        return self.lent.write(self._mappings.view(self.passed_on(place)))

    def process_exited(self, pid: int) -> None:
        """A process is gone: its arena is closed once nobody uses it."""
        for memory_id, held in list(self._held.items()):
            if held.pid == pid:
                held.gone = True
                if not held.users:
                    self._close(memory_id)
        self._mappings.drop_process(pid)

    def _close(self, memory_id: int) -> None:
        self._held.pop(memory_id).close()
        self._mappings.drop(memory_id)
        self._dropped(memory_id)

    def any_true(self, tensor: TensorRef) -> bool:
        """Whether an element of a BOOL tensor is true.

        Raises InvalidArgument for one in a client's own memory, which no scheduler reads.
        """
        data = tensor.data
        if isinstance(data, bytes):
            return any(data)
        memory = data.memory
        if memory.cuda is not None or memory.copied or not memory.sealed:
            raise InvalidArgument(
                f"'{tensor.name}' is a condition, which is to be sent in the request and not in a "
                "shared memory region"
            )
        return any(self._mappings.view(data))

    def close(self) -> None:
        """Let everything go."""
        for memory_id in list(self._held):
            self._close(memory_id)
        self._mappings.drop_all()


class _Held:
    """A worker's arena, held open by this process, too."""

    def __init__(self, memory: Memory) -> None:
        self.pid = memory.pid
        self.users = 0
        self.gone = False
        self._fd = opened(memory)
        self.memory = replace(memory, pid=os.getpid(), fd=self._fd)

    def close(self) -> None:
        os.close(self._fd)
