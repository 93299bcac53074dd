"""A cache bounded by bytes, which evicts what was used least recently (pure)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class LruCache(Generic[T]):
    """Values by key, of which all sizes together are at most `bound` bytes."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.used = 0
        self.evicted = 0
        self._entries: OrderedDict[bytes, tuple[int, T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: bytes) -> T | None:
        """The value of a key, which is then the one used last; or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[1]

    def insert(self, key: bytes, value: T, byte_size: int) -> bool:
        """Keep a value, and evict others as long as there is no room; False: it is larger than
        the whole cache, and nothing has changed."""
        if byte_size > self.bound:
            return False
        before = self._entries.pop(key, None)
        if before is not None:
            self.used -= before[0]
        self._evict(self.bound - byte_size)
        self._entries[key] = byte_size, value
        self.used += byte_size
        return True

    def clear(self) -> None:
        """Keep nothing of it."""
        self._entries.clear()
        self.used = 0

    def resize(self, bound: int) -> None:
        """Have another bound from now on."""
        self.bound = bound
        self._evict(bound)

    def _evict(self, most: int) -> None:
        while self.used > most:
            byte_size, _ = self._entries.popitem(last=False)[1]
            self.used -= byte_size
            self.evicted += 1
