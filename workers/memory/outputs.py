"""Output memory: arena blocks for outputs without a place of the client's, freed by their
readers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from shmserve.errors import Unavailable
from shmserve.ipc.endpoints import FIRST_LOCAL_CLIENT
from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.memory.lent import Readers, Token
from shmserve.ipc.tensors.descriptors import Place


class _Output(Token):
    """A block of the arena for the process that will read it."""

    __slots__ = ("_memory", "place", "reader")

    def __init__(self, memory: OutputMemory, place: Place, reader: int) -> None:
        self._users = 1
        self._memory = memory
        self.place = place
        self.reader = reader

    def _free(self) -> None:
        self._memory.free(self)


class OutputMemory:
    """Blocks of the worker's arena, each for the process that will read it and release it.

    A reader may take as long as it lives: its release travels through whichever scheduler there is
    by then. What no scheduler can have heard of (`undelivered`) comes back at once.

    A local client, which need not release anything, may hold as much as is free then and no more
    (dynamic thresholds: Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998): one
    that keeps all has half of the arena, n of them n/(n + 1), and the rest is left to others. Who
    holds nothing may have an output of any size.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._readers: Readers[int] = Readers()
        self._fresh: dict[int, _Output] = {}  # by offset: of responses that are still to be sent
        self._held: dict[int, int] = {}  # by reader: bytes
        self._reserved: dict[int, _Output] = {}  # by address: blocks that a model computes in
        self._exited: set[int] = set()  # readers, of which the scheduler may not know yet

    @property
    def id(self) -> int:
        """That of the memory of the arena."""
        return self._arena.memory.id

    def __len__(self) -> int:
        return len(self._readers) + len(self._fresh)

    def allocate(self, reader: int, byte_size: int) -> tuple[Place, memoryview]:
        """A block for a process and its bytes. Raises Unavailable when memory is full, or the share
        of a local client, InvalidArgument for what never fits."""
        held = self._held.get(reader, 0)
        if held and reader >= FIRST_LOCAL_CLIENT:
            self._check_share(held, byte_size)
        place = self._arena.allocate(byte_size)
        self._fresh[place.offset] = _Output(self, place, reader)
        self._held[reader] = held + byte_size
        return place, self._arena.view(place)

    def reserve(self, reader: int, byte_size: int) -> memoryview:
        """The bytes of a block in which an output is to be computed; `claim` finds it then, and
        what nobody claims is free again when the batch is handed over. Raises as `allocate`."""
        place, view = self.allocate(reader, byte_size)
        self._reserved[address_of(view)] = self._fresh[place.offset]
        return view

    def claim(self, reader: int, address: int, byte_size: int) -> Place | None:
        """The block that was reserved for such an output, if that was computed there."""
        output = self._reserved.get(address)
        if output is None or output.place.byte_size != byte_size or output.reader != reader:
            return None
        if self._fresh.get(output.place.offset) is not output:
            return None
        return self._reserved.pop(address).place

    def _check_share(self, held: int, byte_size: int) -> None:
        free = self._arena.memory.byte_size - self._arena.used
        if held + byte_size > free - byte_size:
            raise Unavailable(
                f"server memory for tensors: {byte_size} bytes were needed, {free} are free, and "
                f"this client has not released {held} yet; it may hold as much as is free then"
            )

    def release(self, reader: int, offsets: list[int]) -> None:
        """Take blocks back from their reader; what is not lent to it is ignored."""
        self._readers.release(reader, offsets)

    def exited(self, reader: int) -> None:
        """A process has ended. What it was lent is kept until `drop_reader`, with which the
        scheduler says that it does not look at that any more either (a cache keeps a copy), or
        `drop_exited`."""
        if reader in self._held:
            self._exited.add(reader)

    def drop_exited(self) -> None:
        """The scheduler itself has ended: take back what it would have spoken of."""
        for reader in list(self._exited):
            self.drop_reader(reader)

    def drop_reader(self, reader: int) -> None:
        """Take back every block of a process that has ended."""
        self._exited.discard(reader)
        self._readers.drop(reader)
        self.take_back([at for at, output in self._fresh.items() if output.reader == reader])

    def take_back(self, offsets: Iterable[int]) -> None:
        """Take back what was allocated there for responses that are still to be sent: they will not
        have it."""
        for offset in offsets:
            output = self._fresh.pop(offset, None)
            if output is not None:
                output.release()

    def free(self, output: _Output) -> None:
        """A block is used no more."""
        reader, place = output.reader, output.place
        held = self._held[reader] - place.byte_size
        if held:
            self._held[reader] = held
        else:
            del self._held[reader]
        self._arena.free(place.offset)

    @property
    def has_fresh(self) -> bool:
        """Whether anything was allocated for responses that are still to be sent."""
        return bool(self._fresh)

    def delivered(self) -> int:
        """The responses are sent: lend what was allocated for them to its readers; its bytes."""
        if not self._fresh:
            return 0
        for output in self._reserved.values():
            if self._fresh.get(output.place.offset) is output:
                self.take_back((output.place.offset,))
        self._reserved.clear()
        byte_size = 0
        for offset, output in self._fresh.items():
            byte_size += output.place.byte_size
            self._readers.lend(output.reader, offset, output)
        self._fresh.clear()
        return byte_size

    def undelivered(self) -> int:
        """The responses did not leave: free what was allocated for them; 0 bytes are lent."""
        self._reserved.clear()
        self.take_back(list(self._fresh))
        return 0


def address_of(view: memoryview) -> int:
    """Where bytes that may be written lie in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
