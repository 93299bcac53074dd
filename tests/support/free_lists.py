"""The invariants of an allocator of blocks."""

from shmserve.ipc.memory.arena import FreeList


def check_integrity(free_list: FreeList) -> None:
    """Assert that holes and blocks cover the memory exactly."""
    blocks_and_holes = sorted([*free_list._holes, *free_list._block_sizes.items()])
    expected_offset = 0
    for offset, size in blocks_and_holes:
        assert offset == expected_offset and size > 0, blocks_and_holes
        expected_offset += size
    assert expected_offset == free_list.capacity, blocks_and_holes
    assert free_list.used_bytes == sum(free_list._block_sizes.values())
