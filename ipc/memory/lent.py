"""Lent memory: blocks that one process owns and others read, and how each comes back (pure).

    allocate ──> a `Block`, which is its holder's to settle
                   ├──lend──> its reader has it ──Release, or the reader ends──> free
                   └──release──> free

Blocks, and whatever else keeps memory for others, are tokens: tests fail where one is collected
before it was settled (`watch`), which costs nothing where nobody watches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.messages.inference import Release
from shmserve.ipc.tensors.descriptors import Place
from shmserve.ipc.tensors.inference import places
from shmserve.ipc.transport.records import MalformedMessage

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Hashable)

TakeBack = Callable[[Place], None]


class Token:
    """A reference-counted holding of memory, to be settled before it is collected: each user, the
    first of which has made it, hands its use on or releases it."""

    __slots__ = ("_users",)

    def __init__(self) -> None:
        self._users = 1

    def acquire(self) -> None:
        """One more uses it."""
        self._users += 1

    def release(self) -> None:
        """One uses it no more; the last one frees it."""
        self._users -= 1
        if not self._users:
            self._free()

    def _free(self) -> None:
        """Free the memory that nobody uses any more."""

    @property
    def unsettled(self) -> bool:
        """Whether somebody uses it still."""
        return self._users > 0


class Holding(Token):
    """A holding that ends with a call of `on_free`."""

    __slots__ = ("_on_free",)

    def __init__(self, on_free: Callable[[], None]) -> None:
        super().__init__()
        self._on_free = on_free

    def _free(self) -> None:
        self._on_free()


class Block(Token):
    """A block of memory at `place`, which goes back to `take_back` when nobody uses it."""

    __slots__ = ("_take_back", "place")

    def __init__(self, take_back: TakeBack, place: Place) -> None:
        self._users = 1
        self._take_back = take_back
        self.place = place

    def _free(self) -> None:
        self._take_back(self.place)


class Readers(Generic[R]):
    """Tokens by who reads what they keep, and by the offset that the reader gives it back with. The
    same memory may be lent several times."""

    def __init__(self) -> None:
        self._lent: dict[R, dict[int, Token | _Again]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lent.values()))

    def __iter__(self) -> Iterator[R]:
        return iter(self._lent)

    def lend(self, reader: R, offset: int, token: Token) -> None:
        """`reader` has it now: this use of the token is its own."""
        lent = self._lent.get(reader)
        if lent is None:
            self._lent[reader] = {offset: token}
        else:
            lent[offset] = _Again(token, lent[offset]) if offset in lent else token

    def release(self, reader: R, offsets: Iterable[int]) -> bool:
        """A reader needs these no more; what it was not lent is ignored. Whether any was."""
        lent = self._lent.get(reader)
        if lent is None:
            return False
        found = False
        for offset in offsets:
            token = lent.pop(offset, None)
            if token is not None:
                found = True
                if type(token) is _Again:
                    token, lent[offset] = token
                token.release()  # type: ignore[union-attr]
        if not lent:
            self._lent.pop(reader, None)
        return found

    def drop(self, reader: R) -> None:
        """A reader has ended."""
        while lent := self._lent.get(reader):
            self.release(reader, list(lent))


class _Again(NamedTuple):
    """The last token that was lent with an offset, and those before it."""

    last: Token
    before: Token | _Again


class LentMemory:
    """The memory of a process that others read: an arena of `byte_size`, made when it is needed,
    and who reads which block of it, or of others' arenas that are passed on."""

    def __init__(self, byte_size: int) -> None:
        self.byte_size = byte_size
        self._arena: Arena | None = None
        self._readers: Readers[tuple[int, int]] = Readers()  # reader, id of the memory

    def __len__(self) -> int:
        return len(self._readers)

    @property
    def used(self) -> int:
        """Bytes of the arena that are allocated now."""
        return 0 if self._arena is None else self._arena.used

    def allocate(self, byte_size: int, take_back: TakeBack | None = None) -> Block:
        """A block; who is to have it back in `take_back` calls `free`. Raises Unavailable when the
        arena, or the machine's memory, is full."""
        if self._arena is None:
            self._arena = Arena(self.byte_size)
        return Block(take_back or self.free, self._arena.allocate(byte_size))

    def write(self, data: bytes | memoryview, take_back: TakeBack | None = None) -> Block:
        """A block with a copy of `data`, as `allocate` has it."""
        block = self.allocate(len(data), take_back)
        assert self._arena is not None
        self._arena.view(block.place)[:] = data
        return block

    def free(self, place: Place) -> None:
        """Take a block back; `Block.release` does."""
        assert self._arena is not None
        self._arena.free(place.offset)

    def lend(self, reader: int, place: Place, token: Token) -> None:
        """`reader` is told of a place, which this use of a token keeps until it releases it."""
        self._readers.lend((reader, place.memory.id), place.offset, token)

    def release(self, reader: int, memory: int, offsets: Iterable[int]) -> bool:
        """A reader needs these bytes of a memory no more; False: they were not lent here."""
        return self._readers.release((reader, memory), offsets)

    def drop_reader(self, reader: int) -> None:
        """A reader has ended: all that it was lent comes back."""
        for key in list(self._readers):
            if key[0] == reader:
                self._readers.drop(key)

    def close(self) -> None:
        """Unmap the arena; readers' mappings live on until they drop them."""
        if self._arena is not None:
            self._arena.close()


def releases(places: Iterable[Place], own: Container[int] = ()) -> list[Release]:
    """Return the messages that give back the outputs of a response, one for each memory.

    Args:
        places: Where the outputs lie. Those in a client's memory have no owner to be told.
        own: The ids of memories that are left out.
    """
    offsets: dict[tuple[int, int], list[int]] = {}
    for place in places:
        memory = place.memory
        if memory.sealed and memory.pid and memory.id not in own:
            offsets.setdefault((memory.pid, memory.id), []).append(place.offset)
    return [Release(pid, at, memory_id) for (pid, memory_id), at in offsets.items()]


def unread(data: Iterable[Any], own: Container[int] = ()) -> list[Release]:
    """Return the messages that give back a response's data, which nobody reads."""
    try:
        found = places(data)
    except MalformedMessage as error:
        logger.error("a worker's response is malformed: %s", error)
        return []
    return releases(found, own) if found else []
