"""The registry of regions: names, generations, and when a mapping ends."""

import asyncio
import gc
import os
import resource
from collections.abc import Iterator
from dataclasses import replace

import posix_ipc
import pytest

from shmserve.common.peers import Peer
from shmserve.errors import AlreadyExists, InvalidArgument
from shmserve.ipc.messages.publications import MemoryDropped, RegionPublished, RegionWithdrawn
from shmserve.ipc.tensors.descriptors import unpack_range
from tests.rigs.region_rig import RegionOffice, unchecked_handles

KEY = f"/test-{os.getpid()}-regions"
ME = Peer(os.getuid(), tuple(os.getgroups()))


def make_object(size: int = 8192) -> None:
    posix_ipc.SharedMemory(KEY, posix_ipc.O_CREX, size=size).close_fd()


@pytest.fixture
def key() -> Iterator[str]:
    make_object()
    gc.collect()  # what other tests dropped is closed now, not in the middle of this one
    before = len(os.listdir("/proc/self/fd"))
    yield KEY
    posix_ipc.unlink_shared_memory(KEY)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_register_and_unregister(key: str) -> None:
    office = RegionOffice()
    await office.registry.register("r", key, 100, 1000, ME)
    (published,) = office.told
    assert isinstance(published, RegionPublished)
    extent = unpack_range(published.memory_range)
    memory = extent.memory
    assert (extent.offset, extent.byte_size, memory.byte_size) == (100, 1000, 1100)
    await office.registry.unregister("r", ME)
    withdrawn, draining = office.told[1:]
    assert withdrawn == RegionWithdrawn("r", memory.id, 1)
    assert draining == replace(published, draining=True)
    assert office.registry.active() == []
    assert office.workers == [], "a gateway may still have requests that use it"
    office.registry.draining.released(7, memory.id)
    assert office.workers == [MemoryDropped(memory.id)]


async def test_the_same_again_is_fine_and_anything_else_is_not(key: str) -> None:
    office = RegionOffice()
    await office.registry.register("r", key, 0, 4096, ME)
    await office.registry.register("r", key, 0, 4096, ME)
    assert len(office.told) == 1
    for offset, size in ((0, 4095), (1, 4096)):
        with pytest.raises(AlreadyExists, match="shared memory region 'r' already in manager"):
            await office.registry.register("r", key, offset, size, ME)
    office.registry.close()


async def test_a_client_that_died_and_came_back_takes_its_name_over(key: str) -> None:
    office = RegionOffice()
    await office.registry.register("r", key, 0, 4096, ME)
    posix_ipc.unlink_shared_memory(key)
    make_object()
    await office.registry.register("r", key, 0, 8192, ME)
    before, withdrawn, draining, now = office.told
    assert withdrawn == RegionWithdrawn("r", unpack_range(before.memory_range).memory.id, 1)
    assert draining == replace(before, draining=True)
    assert (
        unpack_range(before.memory_range).memory.inode
        != unpack_range(now.memory_range).memory.inode
    )
    office.registry.draining.gateway_exited(7)
    assert len(office.workers) == 1
    office.registry.close()


async def test_a_key_made_again_while_its_object_lives_under_another_name(key: str) -> None:
    office = RegionOffice()
    await office.registry.register("r", key, 0, 4096, ME)
    os.link(f"/dev/shm{key}", f"/dev/shm{key}-kept")
    try:
        posix_ipc.unlink_shared_memory(key)
        make_object()
        with pytest.raises(AlreadyExists):
            await office.registry.register("r", key, 0, 4096, ME)
    finally:
        os.unlink(f"/dev/shm{key}-kept")
        office.registry.close()


@pytest.mark.parametrize(("offset", "size"), [(0, 0), (0, 8193), (8192, 1), (2**62, 2**62)])
def test_ranges_outside_the_object(key: str, offset: int, size: int) -> None:
    with pytest.raises(InvalidArgument, match="failed to register shared memory region 'r'"):
        asyncio.run(RegionOffice().registry.register("r", key, offset, size, ME))


def test_an_unknown_name_is_fine(key: str) -> None:
    asyncio.run(RegionOffice().registry.unregister("nobody", ME))


async def test_regions_are_pinned_as_far_as_a_process_may_lock_memory(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8192, 8192))
    office = RegionOffice(handles=unchecked_handles(1))
    pin = office.registry.register
    await pin("r", key, 4096, 1024, ME, pin=True)
    assert unpack_range(office.told[-1].memory_range).memory.pinned
    with pytest.raises(AlreadyExists):
        await pin("r", key, 4096, 1024, ME)
    text = r"4096 bytes cannot be pinned: 5120 of the 8192 bytes .*RLIMIT_MEMLOCK"
    with pytest.raises(InvalidArgument, match=text):
        await pin("s", key, 0, 4096, ME, pin=True)
    await office.registry.register("s", key, 0, 4096, ME)
    assert not unpack_range(office.told[-1].memory_range).memory.pinned
    await office.registry.unregister("r", ME)
    await office.registry.unregister("s", ME)
    office.registry.draining.gateway_exited(7)
    await pin("s", key, 0, 8192, ME, pin=True)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    await pin("t", key, 0, 8192, ME, pin=True)
    office.registry.close()


async def test_nothing_is_pinned_without_a_device_or_if_it_is_not_mapped(key: str) -> None:
    office = RegionOffice()
    with pytest.raises(InvalidArgument, match="the server has none"):
        await office.registry.register("r", key, 0, 4096, ME, pin=True)
    await office.registry.register("r", key, 0, 4096, ME)
    office.registry.close()
    os.chmod(f"/dev/shm{key}", 0o666)  # whoever may write to it may truncate it
    office = RegionOffice(handles=unchecked_handles(1))
    with pytest.raises(InvalidArgument, match="not mapped, nor pinned"):
        await office.registry.register("r", key, 0, 4096, ME, pin=True)
    office.registry.close()
