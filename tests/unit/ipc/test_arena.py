"""The arena's allocator partitions its memory exactly; other processes read the written bytes."""

import dataclasses
import errno
import gc
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.memory.arena import Arena, FreeList
from shmserve.ipc.memory.mappings import Mappings
from shmserve.ipc.tensors.descriptors import Range, unpack_range
from shmserve.ipc.transport.frames import MalformedMessage
from tests.support.free_lists import check_integrity
from tests.support.leaks import open_descriptors


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=60))
def test_blocks_and_holes_always_tile_the_arena(steps: list[tuple[bool, int]]) -> None:
    free_list = FreeList(16384)
    offsets: list[int] = []
    for allocate, number in steps:
        if allocate:
            offset = free_list.allocate(number)
            if offset is not None:
                assert offset % 64 == 0
                offsets.append(offset)
        elif offsets:
            assert free_list.free(offsets.pop(number % len(offsets)))
        check_integrity(free_list)
    for offset in offsets:
        assert free_list.free(offset)
    assert free_list.used_bytes == 0
    assert free_list.allocate(16384) == 0, "all holes have joined again"


def test_a_second_or_forged_release_is_ignored() -> None:
    free_list = FreeList(1024)
    assert free_list.allocate(100) == 0
    assert not free_list.free(64) and free_list.free(0) and not free_list.free(0)
    check_integrity(free_list)


@pytest.mark.parametrize("byte_size", [-1, -64, -(1 << 40)])
def test_a_negative_size_is_refused(byte_size: int) -> None:
    free_list = FreeList(1024)
    with pytest.raises(InvalidArgument, match=f"byte_size.* {byte_size}$"):
        free_list.allocate(byte_size)
    check_integrity(free_list)


def test_another_mapping_reads_what_was_written() -> None:
    arena, reader = Arena(1 << 20), Mappings()
    memory_range = arena.allocate(5)
    arena.view(memory_range)[:] = b"hello"
    assert bytes(reader.view(memory_range)) == b"hello"
    reader.unmap(memory_range.memory.id)
    assert not reader._mappings_by_id
    arena.close()


def test_a_full_arena_is_an_error_and_recovers() -> None:
    arena = Arena(1 << 16)
    memory_range = arena.allocate(1 << 16)
    with pytest.raises(Unavailable, match="is full"):
        arena.allocate(1)
    with pytest.raises(InvalidArgument, match=r"65537 bytes .* --arena-byte-size allows 65536$"):
        arena.allocate((1 << 16) + 1)  # larger than the arena, so that it can never be allocated
    arena.free(memory_range.offset)
    assert arena.allocate(1 << 16).offset == 0
    arena.close()


def test_an_emptied_arena_returns_its_memory() -> None:
    arena = Arena(1 << 28)
    memory_range = arena.allocate(1 << 27)
    committed = os.fstat(arena.memory.fd).st_blocks * 512
    arena.free(memory_range.offset)
    assert committed >= 1 << 27
    assert os.fstat(arena.memory.fd).st_blocks * 512 <= 1 << 26
    arena.view(arena.allocate(1 << 27))[-1:] = b"x"
    arena.close()


def test_an_arena_cannot_be_shrunk() -> None:
    arena = Arena(1 << 16)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.memory.fd, 0)
    arena.close()


def test_a_memory_range_outside_its_memory_is_refused() -> None:
    arena, reader = Arena(1 << 16), Mappings()
    memory_range = arena.allocate(64)
    for offset, byte_size in ((1 << 16, 1), (-1, 1), (0, (1 << 16) + 1), (1, -1)):
        with pytest.raises(MalformedMessage, match="exceeds"):
            unpack_range((memory_range.memory.packed, offset, byte_size))
    with pytest.raises(Unavailable):
        reader.view(Range(dataclasses.replace(memory_range.memory, id=1, inode=1), 0, 1))
    with pytest.raises(Unavailable):
        reader.view(Range(dataclasses.replace(memory_range.memory, id=2, fd=9999), 0, 1))
    reader.unmap(memory_range.memory.id)
    arena.close()


def test_an_object_over_the_size_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ulimit -f` applies to memory, too. The error says so, and no descriptor remains open."""

    def raise_too_large(*_: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "ftruncate", raise_too_large)
    gc.collect()  # close the descriptors of earlier tests now, not in the middle of this test
    fds_before = open_descriptors()
    with pytest.raises(Unavailable, match=r"allocate 65536 bytes .*: File too large"):
        Arena(65536)
    assert open_descriptors() <= fds_before
