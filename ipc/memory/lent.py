"""Reference-counted memory blocks that one process owns and other processes read (pure).

    allocate ──> `Block`
                   ├──lend──> read by another process ──Release, or the reader exits──> free
                   └──release──> free

Blocks and other references to memory are tokens. Tests fail if a token is collected before its last
release.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from shmserve.ipc.memory.arena import Arena
from shmserve.ipc.messages.inference import Release
from shmserve.ipc.tensors.descriptors import Range
from shmserve.ipc.tensors.schemas import unpack_ranges
from shmserve.ipc.transport.frames import MalformedMessage

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Hashable)

FreeRange = Callable[[Range], None]


class Token:
    """The reference counter of a block of memory, which the last `release` frees.

    The creator has the first reference. Each holder of a reference releases it or passes it on.
    """

    __slots__ = ("_reference_count",)

    def __init__(self) -> None:
        self._reference_count = 1

    def acquire(self) -> None:
        """Add a reference."""
        self._reference_count += 1

    def release(self) -> None:
        """Release a reference; the last release frees the memory."""
        self._reference_count -= 1
        if not self._reference_count:
            self._free()

    def _free(self) -> None:
        """Free the memory, which has no reference any more."""


class CallbackToken(Token):
    """A token that calls `on_free` at its last release."""

    __slots__ = ("_on_free",)

    def __init__(self, on_free: Callable[[], None]) -> None:
        super().__init__()
        self._on_free = on_free

    def _free(self) -> None:
        self._on_free()


class Block(Token):
    """A block of memory at `memory_range`; its last release passes the range to `free_range`."""

    __slots__ = ("_free_range", "memory_range")

    def __init__(self, free_range: FreeRange, memory_range: Range) -> None:
        self._reference_count = 1
        self._free_range = free_range
        self.memory_range = memory_range

    def _free(self) -> None:
        self._free_range(self.memory_range)


class LentTokens(Generic[R]):
    """The tokens of the blocks that are lent to readers, by reader and by offset of the block.

    A block may be lent to a reader several times.
    """

    def __init__(self) -> None:
        # By reader, then by offset of the block.
        self._tokens: dict[R, dict[int, Token | _TokenStack]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._tokens.values()))

    def __iter__(self) -> Iterator[R]:
        return iter(self._tokens)

    def lend(self, reader: R, offset: int, token: Token) -> None:
        """Lend a block to a reader; the caller's reference to the token passes to the reader."""
        tokens = self._tokens.get(reader)
        if tokens is None:
            self._tokens[reader] = {offset: token}
        else:
            tokens[offset] = _TokenStack(token, tokens[offset]) if offset in tokens else token

    def release(self, reader: R, offsets: Iterable[int]) -> bool:
        """Release blocks of a reader; offsets that were not lent to the reader are ignored.

        Returns:
            Whether at least one block was lent to the reader.
        """
        tokens = self._tokens.get(reader)
        if tokens is None:
            return False
        was_lent = False
        for offset in offsets:
            token = tokens.pop(offset, None)
            if token is not None:
                was_lent = True
                if type(token) is _TokenStack:
                    token, tokens[offset] = token
                token.release()  # type: ignore[union-attr]
        if not tokens:
            self._tokens.pop(reader, None)
        return was_lent

    def release_all(self, reader: R) -> None:
        """Release all blocks of a reader that has exited."""
        while tokens := self._tokens.get(reader):
            self.release(reader, list(tokens))


class _TokenStack(NamedTuple):
    """The tokens of a block that was lent several times: the latest, and the earlier ones."""

    latest_token: Token
    earlier_tokens: Token | _TokenStack


class LentMemory:
    """The memory that a process lends to readers.

    The first allocation creates an arena of `byte_size` bytes. The process can also lend blocks of
    other processes' arenas that were lent to it.
    """

    def __init__(self, byte_size: int) -> None:
        self.byte_size = byte_size
        self._arena: Arena | None = None
        self._lent_tokens: LentTokens[tuple[int, int]] = LentTokens()  # by (reader, memory id)

    @property
    def used_bytes(self) -> int:
        """Return the number of allocated bytes of the arena."""
        return 0 if self._arena is None else self._arena.used_bytes

    def allocate(self, byte_size: int, free_range: FreeRange | None = None) -> Block:
        """Allocate a block.

        Args:
            byte_size: The size of the block.
            free_range: Called at the last release instead of `free`; it must call `free` itself.

        Raises:
            Unavailable: The arena or the host's memory is full.
        """
        if self._arena is None:
            self._arena = Arena(self.byte_size)
        return Block(free_range or self.free, self._arena.allocate(byte_size))

    def write(self, data: bytes | memoryview, free_range: FreeRange | None = None) -> Block:
        """Allocate a block by `allocate`, and copy `data` to it."""
        block = self.allocate(len(data), free_range)
        assert self._arena is not None
        self._arena.view(block.memory_range)[:] = data
        return block

    def free(self, memory_range: Range) -> None:
        """Free a block; `Block.release` calls this method."""
        assert self._arena is not None
        self._arena.free(memory_range.offset)

    def lend(self, reader: int, memory_range: Range, token: Token) -> None:
        """Lend a range to a reader; the caller's reference to the token passes to the reader."""
        self._lent_tokens.lend((reader, memory_range.memory.id), memory_range.offset, token)

    def release(self, reader: int, memory_id: int, offsets: Iterable[int]) -> bool:
        """Release blocks of a memory; return whether at least one was lent to the reader."""
        return self._lent_tokens.release((reader, memory_id), offsets)

    def release_all(self, reader: int) -> None:
        """Release all blocks of a reader that has exited."""
        for key in list(self._lent_tokens):
            if key[0] == reader:
                self._lent_tokens.release_all(key)

    def close(self) -> None:
        """Unmap the arena; the mappings of readers stay valid."""
        if self._arena is not None:
            self._arena.close()


def release_messages(ranges: Iterable[Range], own_memory_ids: Container[int] = ()) -> list[Release]:
    """Return the messages that release the outputs of a response, one for each memory.

    Args:
        ranges: The ranges of the outputs. Ranges in a client's memory need no message.
        own_memory_ids: The ids of the caller's own memories, for which there is no message.
    """
    offsets: dict[tuple[int, int], list[int]] = {}  # by (pid, memory id)
    for memory_range in ranges:
        memory = memory_range.memory
        if memory.sealed and memory.pid and memory.id not in own_memory_ids:
            offsets.setdefault((memory.pid, memory.id), []).append(memory_range.offset)
    return [Release(pid, offset_list, memory) for (pid, memory), offset_list in offsets.items()]


def unread_releases(data: Iterable[Any], own_memory_ids: Container[int] = ()) -> list[Release]:
    """Return the messages that release the outputs of a response that will not be read.

    Args:
        data: The data of the response.
        own_memory_ids: The ids of the caller's own memories, for which there is no message.
    """
    try:
        ranges = unpack_ranges(data)
    except MalformedMessage as error:
        logger.error("the memory of a malformed response's outputs is not released: %s", error)
        return []
    return release_messages(ranges, own_memory_ids) if ranges else []
