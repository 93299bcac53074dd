"""Moving memory to huge pages: exactly the intended ranges are moved."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shmserve.workers.backends.llm.model.transformer import moved_to_huge_pages, subtract_ranges

MIB = 1 << 20
_ranges = st.lists(st.integers(0, 60), max_size=12, unique=True).map(
    lambda ends: list(zip(*[iter(sorted(ends))] * 2, strict=False))
)


@given(_ranges, _ranges)
def test_the_difference_of_address_ranges(
    ranges: list[tuple[int, int]], removed: list[tuple[int, int]]
) -> None:
    def addresses(of: list[tuple[int, int]]) -> set[int]:
        return {address for begin, end in of for address in range(begin, end)}

    remaining = list(subtract_ranges(ranges, removed))
    assert addresses(remaining) == addresses(ranges) - addresses(removed)
    assert all(begin < end for begin, end in remaining)


def _huge_bytes() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return int(re.findall(r"AnonHugePages: +(\d+) kB", rollup)[0]) * 1024


def test_memory_allocated_during_a_move_is_moved() -> None:
    size = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
    if not size.exists() or int(size.read_text(encoding="ascii")) > 2 * MIB:
        pytest.skip("no huge pages of 2 MiB here")
    earlier = torch.ones(16 * MIB)
    before = _huge_bytes()
    with moved_to_huge_pages():
        kept = torch.arange(16 * MIB)
    moved = _huge_bytes() - before
    assert kept.nbytes - 8 * MIB <= moved <= kept.nbytes + 8 * MIB
    assert torch.equal(kept[::4096], torch.arange(0, 16 * MIB, 4096))
    assert earlier.sum() == 16 * MIB
