"""Detached views of shared memory: they become private and keep their contents."""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from shmserve.errors import InvalidArgument
from shmserve.ipc.memory.mappings import Mappings
from tests.rigs.worker_rig import Region

SIZE = 5 * 4096 + 100  # the last page is only partly used


@pytest.fixture
def region() -> Iterator[Region]:
    region = Region(SIZE)
    region.write(0, np.full(SIZE, 1, np.uint8))
    yield region
    region.close()


@pytest.mark.parametrize(
    ("offset", "size"), [(0, SIZE), (0, 1), (4095, 2), (8192, 4096), (SIZE - 7, 7)]
)
def test_detached_views_keep_their_contents(region: Region, offset: int, size: int) -> None:
    mappings = Mappings()
    memory_range = region.memory_range(offset, size)
    kept_array = np.frombuffer(mappings.view(memory_range), np.uint8)
    part = kept_array[-1:]
    mappings.detach([memory_range])
    region.write(0, np.full(SIZE, 2, np.uint8))
    assert set(kept_array) == set(part) == {1}
    kept_array[:] = 3  # a private copy: no other process sees the change
    assert set(region.read(0, SIZE)) == {2} and set(mappings.view(memory_range)) == {2}
    assert len(mappings._mappings_by_id) == 1
    mappings.unmap_all()


def test_several_views_of_one_memory(region: Region) -> None:
    mappings = Mappings()
    ranges = [
        region.memory_range(0, 10),
        region.memory_range(9000, 10),
        region.memory_range(20, 10),
    ]
    views = [mappings.view(memory_range) for memory_range in ranges]
    other_views = mappings.view(region.memory_range(3 * 4096, 10))
    mappings.detach(ranges)
    region.write(0, np.full(SIZE, 2, np.uint8))
    assert all(set(view) == {1} for view in views)
    assert set(other_views) == {2}  # on a page that is not detached
    mappings.unmap_all()


def test_memory_that_was_truncated_is_not_touched(region: Region) -> None:
    mappings = Mappings()
    memory_range = region.memory_range(4096, 4096)
    view = mappings.view(memory_range)
    os.ftruncate(region.fd, 4096)
    with pytest.raises(InvalidArgument, match="truncated"):
        mappings.detach([memory_range])
    del view
    mappings.unmap_all()
