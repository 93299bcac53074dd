"""Schemas: the constant part of messages, known by its bytes; and the bounded cache under them.

A request and a response travel as a `schema` and `data`. The schema has what requests of one kind
have in common: names, datatypes, shapes and parameters. It is packed once per kind, so that a
receiver finds what it derived from an earlier one by a dictionary lookup. The data are the
tensors' bytes, or where they lie.

    known = schemas.find(message.schema) or schemas.learn(message.schema)
    for tensor, data in zip(known.inputs, message.data): ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

_MOST_SCHEMAS = 256
# Bytes; a longer one is unpacked each time. Local clients choose what a scheduler keeps.
_LONGEST_SCHEMA = 4096


class BoundedCache(Generic[K, V]):
    """A cache of at most `most` values by key.

    A full cache is cleared, which costs least. With `on_evict` the oldest value is evicted instead,
    and passed to it. Threads may use a cache at the same time.
    """

    __slots__ = ("_known", "_most", "_noticed", "_on_evict", "find")

    def __init__(self, most: int, on_evict: Callable[[V], None] | None = None) -> None:
        self._known: dict[K, V] = {}
        self._noticed: set[K] = set()
        self._most = most
        self._on_evict = on_evict
        # The value of a key, or None: the dictionary's own method, without a call between.
        self.find: Callable[[K], V | None] = self._known.get

    def __len__(self) -> int:
        return len(self._known)

    def notice(self, key: K) -> bool:
        """Return whether the key came before, so that nothing is derived for a single use."""
        if key in self._known or key in self._noticed:
            return True
        if len(self._noticed) >= self._most:
            self._noticed.clear()
        self._noticed.add(key)
        return False

    def remember(self, key: K, value: V) -> None:
        """Store a value, or replace the one of this key."""
        self._reserve(key)
        self._known[key] = value

    def share(self, key: K, value: V) -> V:
        """Store a value unless another thread has stored one; return the stored one."""
        self._reserve(key)
        return self._known.setdefault(key, value)

    def forget(self, key: K) -> None:
        """Remove the value of a key, if there is one."""
        self._known.pop(key, None)

    def clear(self) -> None:
        """Evict all values."""
        if self._on_evict is None:
            self._known.clear()
            return
        for key in list(self._known):
            self._evict(key)

    def _reserve(self, key: K) -> None:
        if len(self._known) < self._most or key in self._known:
            return
        if self._on_evict is None:
            self._known.clear()
            return
        known = list(self._known)
        for oldest in known[: len(known) - self._most + 1]:
            self._evict(oldest)

    def _evict(self, key: K) -> None:
        value = self._known.pop(key, None)
        if value is not None and self._on_evict is not None:
            self._on_evict(value)


class Schemas(Generic[T]):
    """What a process has derived from the schemas that it received, by their bytes.

    Args:
        derive: Makes an entry from a packed schema; what it raises, `learn` raises.
        most: The number of entries that are kept; when it is reached, all are dropped.

    Attributes:
        known: The entries, for a single thread that looks into the dictionary itself.
    """

    __slots__ = ("_derive", "_most", "find", "known")

    def __init__(self, derive: Callable[[bytes], T], most: int = _MOST_SCHEMAS) -> None:
        self.known: dict[bytes, T] = {}
        self._derive = derive
        self._most = most
        # The entry of a schema, or None: the dictionary's own method, without a call between.
        self.find: Callable[[bytes], T | None] = self.known.get

    def __len__(self) -> int:
        return len(self.known)

    def learn(self, schema: bytes) -> T:
        """Derive the entry of a schema that is not known, and keep it."""
        entry = self._derive(schema)
        if len(schema) <= _LONGEST_SCHEMA:
            if len(self.known) >= self._most:
                self.known.clear()
            self.known[schema] = entry
        return entry

    def clear(self) -> None:
        """Drop all entries: other ones would be derived now."""
        self.known.clear()
