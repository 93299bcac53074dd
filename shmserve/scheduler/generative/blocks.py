"""The blocks of a KV pool: reference counts, the prefix cache, and contiguous extents (pure).

    free ── allocate ──> referenced ── release ──> cached, if its content has a key
      └───────────<── evicted, least recently used first ──┘

The only holder of a block without a key may write to it (Kwon et al., "PagedAttention", 2023). The
blocks of a sequence are adjacent if possible, because attention reads runs of blocks at once: a
sequence grows into the block after its last one, and a new sequence begins in the middle of the
widest gap, so that it and its neighbour can grow.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator

ROOT = b""  # the key before the first block


def block_key(before: bytes, tokens: array[int]) -> bytes:
    """Return the key of a full block from its `tokens` and the key of the block before it."""
    return hashlib.blake2b(before + tokens.tobytes(), digest_size=16).digest()


class BlockPool:
    """A pool of `count` blocks, numbered from 0.

    `references` counts the tables that hold each block.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.references = [0] * count
        self._lengths: dict[int, int] = {0: count} if count else {}  # free extents by their starts
        self._starts: dict[int, int] = {count - 1: 0} if count else {}  # free extents by their ends
        self._free = count
        self._keys: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced, oldest first

    @property
    def available(self) -> int:
        """Return the number of free blocks and of cached blocks without a reference."""
        return self._free + len(self._cached)

    @property
    def cached(self) -> int:
        """Return the number of unreferenced blocks with reusable content."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """Return the number of referenced blocks."""
        return self.count - self.available

    # --- allocation

    def allocate(self, wanted: int, after: int = -1) -> list[int]:
        """Return `wanted` blocks with one reference each, after block `after` if possible.

        As many must be `available`.
        """
        found: list[int] = []
        while len(found) < wanted and after >= 0:
            after += 1
            if after in self._cached:
                self._evict(after)
            if not self._take_start(after):
                break
            found.append(after)
        if len(found) < wanted:
            found += self._apart(wanted - len(found))
        for block in found:
            self.references[block] = 1
        return found

    def _apart(self, wanted: int) -> Iterator[int]:
        """Take free blocks from as few extents as possible."""
        while self._cached and max(self._lengths.values(), default=0) < wanted:
            if self._free >= 4 * wanted:
                break
            self._evict(next(iter(self._cached)))
        while wanted:
            start = max(self._lengths, key=self._lengths.__getitem__)
            length = self._lengths[start]
            taken = min(wanted, length)
            # Half of the gap is left to the sequence before it.
            first = start + (length - taken) // 2 if start else start
            self._cut(start, first, taken)
            yield from range(first, first + taken)
            wanted -= taken

    def _take_start(self, block: int) -> bool:
        """Take a block that begins a free extent; return False if it does not."""
        if block not in self._lengths:
            return False
        self._cut(block, block, 1)
        return True

    def _cut(self, start: int, first: int, taken: int) -> None:
        """Take `taken` blocks from `first` out of the extent at `start`."""
        end = start + self._lengths.pop(start)
        del self._starts[end - 1]
        self._add(start, first)
        self._add(first + taken, end)
        self._free -= taken

    def _add(self, start: int, end: int) -> None:
        if start < end:
            self._lengths[start] = end - start
            self._starts[end - 1] = start

    def _free_block(self, block: int) -> None:
        start, end = block, block + 1
        if block - 1 in self._starts:
            start = self._starts.pop(block - 1)
            del self._lengths[start]
        if end in self._lengths:
            end += self._lengths.pop(end)
            del self._starts[end - 1]
        self._add(start, end)
        self._free += 1

    # --- references

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks, which may be cached."""
        for block in blocks:
            self.references[block] += 1
            self._cached.pop(block, None)

    def release(self, blocks: list[int]) -> None:
        """Remove a reference from the successive blocks of a table.

        The last ones are evicted first.
        """
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block]:
                continue
            if block in self._keys:
                self._cached[block] = None
            else:
                self._free_block(block)

    def writable(self, block: int) -> bool:
        """Check whether the holder of a block may write to it."""
        return self.references[block] == 1 and block not in self._keys

    # --- the prefix cache

    def seal(self, block: int, key: bytes) -> None:
        """Register the key of a full block, unless another block has it."""
        if key not in self._by_key and block not in self._keys:
            self._by_key[key] = block
            self._keys[block] = key

    def find(self, key: bytes) -> int | None:
        """Return the block with this content, or None."""
        return self._by_key.get(key)

    def _evict(self, block: int) -> None:
        del self._cached[block]
        del self._by_key[self._keys.pop(block)]
        self._free_block(block)
