"""Moving memory to huge pages: exactly the intended ranges are moved."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shmserve.workers.backends.llm.model.checkpoint import moved_to_huge_pages, subtract_ranges

MIB = 1 << 20
_ranges = st.lists(st.integers(0, 60), max_size=12, unique=True).map(
    lambda bounds: list(zip(*[iter(sorted(bounds))] * 2, strict=False))
)


@given(_ranges, _ranges)
def test_the_difference_of_address_ranges(
    first: list[tuple[int, int]], removed: list[tuple[int, int]]
) -> None:
    def addresses(bounds_list: list[tuple[int, int]]) -> set[int]:
        return {address for begin, end in bounds_list for address in range(begin, end)}

    remaining = list(subtract_ranges(first, removed))
    assert addresses(remaining) == addresses(first) - addresses(removed)
    assert all(begin < end for begin, end in remaining)


def _huge_bytes() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return int(re.findall(r"AnonHugePages: +(\d+) kB", rollup)[0]) * 1024


def test_memory_allocated_during_a_move_is_moved() -> None:
    size = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
    if not size.exists() or int(size.read_text(encoding="ascii")) > 2 * MIB:
        pytest.skip("no huge pages of 2 MiB here")
    earlier_tensor = torch.ones(16 * MIB)
    bytes_before = _huge_bytes()
    with moved_to_huge_pages():
        kept_tensor = torch.arange(16 * MIB)
    moved_bytes = _huge_bytes() - bytes_before
    assert kept_tensor.nbytes - 8 * MIB <= moved_bytes <= kept_tensor.nbytes + 8 * MIB
    assert torch.equal(kept_tensor[::4096], torch.arange(0, 16 * MIB, 4096))
    assert earlier_tensor.sum() == 16 * MIB
