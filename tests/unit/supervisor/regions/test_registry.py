"""The registry of regions: names, generations, and when a mapping ends."""

import asyncio
import errno
import gc
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import posix_ipc
import pytest

from shmserve.common.peers import Peer
from shmserve.errors import AlreadyExists, InvalidArgument, Unavailable
from shmserve.ipc.messages.publications import (
    MemoryDropped,
    RegionPublished,
    RegionRetired,
    RegionWithdrawn,
)
from shmserve.ipc.tensors.descriptors import unpack_range
from tests.rigs.region_rig import RegionRig, unchecked_handles
from tests.support.leaks import open_descriptors

KEY = f"/test-{os.getpid()}-regions"
ME = Peer(os.getuid(), tuple(os.getgroups()))


def make_object(size: int = 8192) -> None:
    posix_ipc.SharedMemory(KEY, posix_ipc.O_CREX, size=size).close_fd()


@pytest.fixture
def key() -> Iterator[str]:
    make_object()
    gc.collect()  # objects of earlier tests are finalized now and not during this test
    fds_before = open_descriptors()
    yield KEY
    posix_ipc.unlink_shared_memory(KEY)
    assert open_descriptors() <= fds_before


async def test_register_and_unregister(key: str) -> None:
    rig = RegionRig()
    await rig.registry.register("r", key, 100, 1000, ME)
    (published,) = rig.published
    assert isinstance(published, RegionPublished)
    extent = unpack_range(published.memory_range)
    memory = extent.memory
    assert (extent.offset, extent.byte_size, memory.byte_size) == (100, 1000, 1100)
    await rig.registry.unregister("r", ME)
    retired_message, withdrawn_message, draining_region = rig.published[1:]
    assert retired_message == RegionRetired(memory.id, 1)
    assert withdrawn_message == RegionWithdrawn("r", memory.id, 1)
    assert draining_region == replace(published, draining=True)
    assert rig.registry.active_regions() == []
    assert rig.workers == [], "a gateway may still have requests that use it"
    rig.registry.draining.record_release(7, memory.id)
    assert rig.workers == [MemoryDropped(memory.id)]


class BusyOffice(RegionRig):
    """An rig whose gateway uses each region that is unregistered."""

    async def publish(self, make: Callable[[int], Any], *roles: str) -> None:
        await super().publish(make, *roles)
        if isinstance(self.published[-1], RegionRetired):
            self.registry.draining.record_use(7, self.published[-1].memory_id, True)


@pytest.mark.parametrize("end_cause", ["unused", "the gateway exits", "the object shrinks"])
async def test_a_region_in_use_is_withdrawn_when_its_use_ends(key: str, end_cause: str) -> None:
    rig = BusyOffice()
    draining_regions = rig.registry.draining
    await rig.registry.register("r", key, 0, 8192, ME)
    memory_id = unpack_range(rig.published[0].memory_range).memory.id
    await rig.registry.unregister("r", ME)
    assert rig.published[1:] == [RegionRetired(memory_id, 1)]
    published = replace(rig.published[0], ack_number=0)
    expected_messages = [published, RegionRetired(memory_id, 0)]
    assert list(rig.registry.publications()) == expected_messages
    draining_regions.record_use(8, memory_id, True)  # a request that arrived during the drain
    draining_regions.record_use(7, memory_id, False)
    await asyncio.sleep(0)
    assert len(rig.published) == 2
    if end_cause == "unused":
        draining_regions.record_use(8, memory_id, False)
    elif end_cause == "the gateway exits":
        draining_regions.gateway_exited(8)
    else:
        os.truncate(f"/dev/shm{key}", 0)
        await rig.registry.unregister_shrunk()
    await asyncio.sleep(0)
    assert rig.published[2] == RegionWithdrawn("r", memory_id, 1)
    draining_regions.record_release(7, memory_id)
    assert rig.workers == [MemoryDropped(memory_id)]
    assert list(rig.registry.publications()) == []
    await asyncio.sleep(0)


async def test_a_region_that_cannot_be_kept_is_closed(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    rig = RegionRig()
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", fail)
        with pytest.raises(Unavailable, match="'r' cannot be registered: Too many open files"):
            await rig.registry.register("r", key, 0, 4096, ME)
    assert not rig.registry.active_regions() and not rig.published


async def test_the_name_of_a_region_in_use_is_free(key: str) -> None:
    rig = BusyOffice()
    await rig.registry.register("r", key, 0, 4096, ME)
    memory_id = unpack_range(rig.published[0].memory_range).memory.id
    await rig.registry.unregister("r", ME)
    await rig.registry.register("r", key, 0, 8192, ME)
    rig.registry.draining.record_use(7, memory_id, False)
    await asyncio.sleep(0)
    assert [region.byte_size for region in rig.registry.active_regions()] == [8192]
    rig.registry.close()


async def test_an_equal_registration_is_accepted_and_another_refused(key: str) -> None:
    rig = RegionRig()
    await rig.registry.register("r", key, 0, 4096, ME)
    await rig.registry.register("r", key, 0, 4096, ME)
    assert len(rig.published) == 1
    for offset, size in ((0, 4095), (1, 4096)):
        with pytest.raises(AlreadyExists, match="shared memory region 'r' already in manager"):
            await rig.registry.register("r", key, offset, size, ME)
    rig.registry.close()


async def test_a_restarted_client_takes_over_its_name(key: str) -> None:
    rig = RegionRig()
    await rig.registry.register("r", key, 0, 4096, ME)
    posix_ipc.unlink_shared_memory(key)
    make_object()
    await rig.registry.register("r", key, 0, 8192, ME)
    old, withdrawn, draining_region, new = rig.published
    assert withdrawn == RegionWithdrawn("r", unpack_range(old.memory_range).memory.id, 1)
    assert draining_region == replace(old, draining=True)
    assert (
        unpack_range(old.memory_range).memory.inode != unpack_range(new.memory_range).memory.inode
    )
    rig.registry.draining.gateway_exited(7)
    assert len(rig.workers) == 1
    rig.registry.close()


async def test_a_key_recreated_while_its_old_object_is_registered(key: str) -> None:
    rig = RegionRig()
    await rig.registry.register("r", key, 0, 4096, ME)
    os.link(f"/dev/shm{key}", f"/dev/shm{key}-kept")
    try:
        posix_ipc.unlink_shared_memory(key)
        make_object()
        with pytest.raises(AlreadyExists):
            await rig.registry.register("r", key, 0, 4096, ME)
    finally:
        os.unlink(f"/dev/shm{key}-kept")
        rig.registry.close()


@pytest.mark.parametrize(("offset", "size"), [(0, 0), (0, 8193), (8192, 1), (2**62, 2**62)])
def test_ranges_outside_the_object_are_refused(key: str, offset: int, size: int) -> None:
    with pytest.raises(InvalidArgument, match="failed to register shared memory region 'r'"):
        asyncio.run(RegionRig().registry.register("r", key, offset, size, ME))


def test_unregistering_an_unknown_name_succeeds(key: str) -> None:
    asyncio.run(RegionRig().registry.unregister("nobody", ME))


async def test_regions_are_pinned_up_to_the_limit_of_locked_memory(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (8192, 8192))
    rig = RegionRig(handles=unchecked_handles(1))
    pin = rig.registry.register
    await pin("r", key, 4096, 1024, ME, pin=True)
    assert unpack_range(rig.published[-1].memory_range).memory.pinned
    with pytest.raises(AlreadyExists):
        await pin("r", key, 4096, 1024, ME)
    text = r"4096 bytes cannot be pinned: 5120 of the 8192 bytes .*RLIMIT_MEMLOCK"
    with pytest.raises(InvalidArgument, match=text):
        await pin("s", key, 0, 4096, ME, pin=True)
    await rig.registry.register("s", key, 0, 4096, ME)
    assert not unpack_range(rig.published[-1].memory_range).memory.pinned
    await rig.registry.unregister("r", ME)
    await rig.registry.unregister("s", ME)
    rig.registry.draining.gateway_exited(7)
    await pin("s", key, 0, 8192, ME, pin=True)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    await pin("t", key, 0, 8192, ME, pin=True)
    rig.registry.close()


async def test_nothing_is_pinned_without_a_device_or_if_it_is_not_mapped(key: str) -> None:
    rig = RegionRig()
    with pytest.raises(InvalidArgument, match="the server has none"):
        await rig.registry.register("r", key, 0, 4096, ME, pin=True)
    await rig.registry.register("r", key, 0, 4096, ME)
    rig.registry.close()
    os.chmod(f"/dev/shm{key}", 0o666)  # a user who may write to the object may truncate it
    rig = RegionRig(handles=unchecked_handles(1))
    with pytest.raises(InvalidArgument, match="neither mapped nor pinned"):
        await rig.registry.register("r", key, 0, 4096, ME, pin=True)
    rig.registry.close()
