"""A cache of message schemas, and a bounded cache for other values.

A request or response is sent as a `schema` and `data`. The schema contains the constant part of
such messages: names, datatypes, shapes and parameters. The sender packs each schema once, so the
receiver can look up the unpacked schema by its bytes. The data are the tensors' bytes or memory
ranges.

    entry = schemas[message.schema]
    for tensor, data in zip(entry.inputs, message.data): ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

_MAX_SCHEMAS = 256
# Bytes; a longer schema is unpacked each time, because local clients could fill the cache with it.
_MAX_CACHED_SCHEMA_SIZE = 4096


class BoundedCache(Generic[K, V]):
    """A cache of at most `capacity` values by key.

    A full cache is cleared, which is the cheapest policy. With `on_evict`, the oldest value is
    evicted instead and passed to `on_evict`. Thread-safe.
    """

    __slots__ = ("_capacity", "_on_evict", "_seen_keys", "_values", "find")

    def __init__(self, capacity: int, on_evict: Callable[[V], None] | None = None) -> None:
        self._values: dict[K, V] = {}
        self._seen_keys: set[K] = set()
        self._capacity = capacity
        self._on_evict = on_evict
        # Returns the value of a key, or None. The dictionary's own method avoids a Python call.
        self.find: Callable[[K], V | None] = self._values.get

    def __len__(self) -> int:
        return len(self._values)

    def is_repeated(self, key: K) -> bool:
        """Record a key, and return whether it was seen before.

        A caller can thereby avoid deriving a value for a single use.
        """
        if key in self._values or key in self._seen_keys:
            return True
        if len(self._seen_keys) >= self._capacity:
            self._seen_keys.clear()
        self._seen_keys.add(key)
        return False

    def store(self, key: K, value: V) -> None:
        """Store or replace the value of a key."""
        self._reserve(key)
        self._values[key] = value

    def store_if_absent(self, key: K, value: V) -> V:
        """Store a value unless another thread has stored one; return the stored one."""
        self._reserve(key)
        return self._values.setdefault(key, value)

    def remove(self, key: K) -> None:
        """Remove the value of a key, if there is one."""
        self._values.pop(key, None)

    def clear(self) -> None:
        """Evict all values."""
        if self._on_evict is None:
            self._values.clear()
            return
        for key in list(self._values):
            self._evict(key)

    def _reserve(self, key: K) -> None:
        if len(self._values) < self._capacity or key in self._values:
            return
        if self._on_evict is None:
            self._values.clear()
            return
        keys = list(self._values)
        for oldest in keys[: len(keys) - self._capacity + 1]:
            self._evict(oldest)

    def _evict(self, key: K) -> None:
        value = self._values.pop(key, None)
        if value is not None and self._on_evict is not None:
            self._on_evict(value)


class Schemas(dict[bytes, T]):
    """A cache of the values that a process derives from received schemas, by packed schema.

    `schemas[schema]` derives a missing value, and propagates the exceptions of `derive`.

    Args:
        derive: Returns the value of a packed schema.
        capacity: The capacity. A full cache is cleared.
    """

    __slots__ = ("_capacity", "_derive")

    def __init__(self, derive: Callable[[bytes], T], capacity: int = _MAX_SCHEMAS) -> None:
        self._derive = derive
        self._capacity = capacity

    def __missing__(self, schema: bytes) -> T:
        """Derive and store the value of a schema."""
        value = self._derive(schema)
        if len(schema) <= _MAX_CACHED_SCHEMA_SIZE:
            if len(self) >= self._capacity:
                self.clear()
            self[schema] = value
        return value
