"""The blocks of a pool: their owners, the order of eviction, and adjacent allocation."""

import itertools
from array import array

import pytest

from shmserve.scheduler.generative.sequences import ROOT_KEY, BlockPool, block_key

KEYS = [block_key(ROOT_KEY, array("i", [token])) for token in range(8)]


def register_blocks(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    for block, key in zip(blocks, KEYS, strict=False):
        pool.register(block, key)
    return blocks


def test_only_the_single_holder_of_a_block_without_a_key_may_write_to_it() -> None:
    pool = BlockPool(4)
    free, shared = pool.allocate(2)
    pool.share([shared])
    (keyed,) = register_blocks(pool, 1)
    assert [pool.is_writable(block) for block in (free, shared, keyed)] == [True, False, False]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_released_blocks_merge_to_one_extent(order: tuple[int, ...]) -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for block_index in order:
        pool.release([blocks[block_index]])
    assert pool.allocate(4) == [0, 1, 2, 3]


def test_a_table_grows_in_place() -> None:
    pool = BlockPool(16)
    assert (pool.allocate(2), pool.allocate(2)) == ([0, 1], [8, 9])
    assert pool.allocate(3, previous=1) == [2, 3, 4]
    assert pool.allocate(4, previous=4) == [5, 6, 7, 12]


def test_a_cached_block_in_the_way_is_evicted() -> None:
    pool = BlockPool(4)
    first_block, second_block = register_blocks(pool, 2)
    pool.release([second_block])
    assert pool.allocate(1, previous=first_block) == [second_block]
    assert (pool.find(KEYS[0]), pool.find(KEYS[1])) == (first_block, None)


def test_the_least_recently_used_block_is_evicted_first() -> None:
    pool = BlockPool(4)
    blocks = register_blocks(pool, 4)
    pool.release(blocks[:2])
    pool.release(blocks[2:])
    pool.share([blocks[1]])
    pool.release([blocks[1]])
    for remaining in ({1, 2, 3}, {1, 2}, {1}, set()):
        pool.allocate(1)
        assert {index for index in range(4) if pool.find(KEYS[index]) is not None} == remaining


def test_with_wide_gaps_nothing_is_evicted_for_contiguity() -> None:
    pool = BlockPool(16)
    registered_blocks = register_blocks(pool, 1)
    pool.release(registered_blocks)
    block_lists = [pool.allocate(1, previous=previous) for previous in (1, 3, 5, 7, 9, 11, 13)]
    assert all(block_lists)
    pool.allocate(2)
    assert pool.find(KEYS[0]) == registered_blocks[0]


def test_the_first_of_two_equal_blocks_is_found() -> None:
    pool = BlockPool(4)
    (first_block,), (second_block,) = register_blocks(pool, 1), register_blocks(pool, 1)
    assert pool.find(KEYS[0]) == first_block
    pool.release([second_block])
    assert (pool.available_count, pool.cached_count, pool.used_count) == (3, 0, 1)
    pool.release([first_block])
    assert (pool.available_count, pool.cached_count, pool.used_count) == (4, 1, 0)
