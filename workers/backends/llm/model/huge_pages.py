"""Memory on huge pages: a processor reads on where a small page ends only once it has its address.

Weights are read at twice the speed. Linux gives huge pages to those who ask (madvise(2)), and torch
does not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_ASK, _MOVE = 14, 25  # MADV_HUGEPAGE, MADV_COLLAPSE
_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MAPPED = Path("/proc/self/maps")
_c = ctypes.CDLL(None)

Range = tuple[int, int]  # of addresses: the first, and that behind the last


@contextmanager
def moved_to_huge_pages() -> Iterator[None]:
    """Move what is allocated meanwhile, and kept, to huge pages, as far as there are any."""
    before = _private_memory()
    yield
    for begin, end in without(_private_memory(), before):
        _move(begin, end)


def without(ranges: Iterable[Range], others: Iterable[Range]) -> Iterator[Range]:
    """What of `ranges` is in none of the others, which are sorted."""
    apart = list(others)
    for begin, end in ranges:
        for first, last in apart:
            if begin < last and first < end:
                if begin < first:
                    yield begin, first
                begin = last
        if begin < end:
            yield begin, end


def _private_memory() -> list[Range]:
    """Where this process has memory of its own that is no file's."""
    found: list[Range] = []
    if _SIZE.exists():
        for line in _MAPPED.read_text(encoding="utf-8", errors="replace").splitlines():
            addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
            if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
                begin, end = addresses.split("-")
                found.append((int(begin, 16), int(end, 16)))
    return found


def _move(begin: int, end: int) -> None:
    """Move what is in a range to huge pages, and have there what comes later. What a system does
    not know it refuses, and the pages stay as they are."""
    size = int(_SIZE.read_text(encoding="ascii"))
    begin, end = -(-begin // size) * size, end // size * size
    if begin < end:
        for advice in (_ASK, _MOVE):
            _c.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)
