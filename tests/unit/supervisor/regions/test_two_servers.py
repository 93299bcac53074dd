"""Two servers, one of which takes over from the other: their regions, and the end of the first."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from shmserve.common.peers import Peer
from shmserve.ipc.messages.publications import RegionPublished
from shmserve.supervisor.handover import Handover
from shmserve.supervisor.host.handover_link import HandoverLink
from tests.rigs.region_rig import RegionRig, policy
from tests.support.leaks import open_descriptors
from tests.support.regions import SharedObject

OWN_PEER = Peer(os.getuid(), tuple(os.getgroups()))
SIZE = 4096


class RegionServer(RegionRig):
    """A server with one gateway, at one end of a link."""

    def __init__(self, link_end: socket.socket, max_regions: int = 100) -> None:
        super().__init__(policy(max_regions=max_regions, max_regions_per_uid=max_regions))
        self.link = HandoverLink(link_end, self.registry.apply)
        self.kept_regions.mirror_to(self.link)

    async def register(self, name: str, key: str) -> None:
        await self.registry.register(name, key, 0, SIZE, OWN_PEER)
        await self.kept_regions.flush()

    async def unregister(self, name: str) -> None:
        await self.registry.unregister(name, OWN_PEER)
        await self.kept_regions.flush()

    def names(self) -> list[str]:
        return [region.name for region in self.registry.active_regions()]


@contextlib.asynccontextmanager
async def linked_servers(
    max_regions: int = 100,
) -> AsyncIterator[tuple[RegionServer, RegionServer]]:
    """Return the two servers; the second one may have a lower limit of regions."""
    fds_before = open_descriptors()
    link_ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    first, second = (RegionServer(link_ends[0]), RegionServer(link_ends[1], max_regions))
    yield first, second
    for server in (first, second):
        server.registry.close()
    first.link.close()
    await second.link.end_future
    second.link.close()
    assert open_descriptors() <= fds_before


async def test_servers_share_their_regions() -> None:
    with SharedObject(SIZE) as first_object, SharedObject(SIZE) as second_object:
        objects = first_object, second_object
        async with linked_servers() as (first, second):
            await first.register("a", objects[0].key)
            await second.register("b", objects[1].key)
            assert first.names() == second.names() == ["a", "b"]
            own, copy = (server.registry.active_regions()[0] for server in (first, second))
            assert own.shared is not None and copy.shared is not None
            assert own.shared.inode == copy.shared.inode
            assert own.key == copy.key
            assert own.owner == copy.owner
            assert [type(message) for message in second.published] == [RegionPublished] * 2
            # An equal registration at either server is accepted.
            await second.register("a", objects[0].key)
            await second.unregister("a")
            assert first.names() == second.names() == ["b"]
            await first.register("a", objects[1].key)
            assert second.names() == ["b", "a"]


async def test_simultaneous_registrations_do_not_deadlock() -> None:
    """The servers do not wait for each other for ever; a name registered at both is one region."""
    with SharedObject(SIZE) as shared:
        async with linked_servers() as (first, second):
            registrations = [server.register("same", shared.key) for server in (first, second)]
            registrations += [first.register(f"{n}", shared.key) for n in range(20)]
            registrations += [second.register(f"{n}", shared.key) for n in range(20, 40)]
            await asyncio.wait_for(asyncio.gather(*registrations), 20)
            assert sorted(first.names()) == sorted(second.names())
            assert len(first.names()) == 41
            await first.unregister("")
            assert first.names() == second.names() == []


async def test_a_server_cannot_take_a_region_of_another_server() -> None:
    """The other server keeps it."""
    with SharedObject(SIZE) as shared_object:
        async with linked_servers(max_regions=1) as (first_server, second_server):
            for name in "ab":
                await first_server.register(name, shared_object.key)
            assert (first_server.names(), second_server.names()) == (["a", "b"], ["a"])


async def test_the_remaining_server_does_not_wait() -> None:
    with SharedObject(SIZE) as shared_object:
        async with linked_servers() as (first_server, second_server):
            second_server.link.close()
            await first_server.link.end_future
            await first_server.register("a", shared_object.key)
            assert (first_server.names(), second_server.names()) == (["a"], [])
            first_server.link.ask("anything")


@pytest.mark.parametrize("successor_exits", [False, True])
async def test_the_first_server_waits_for_the_others_run_directory(successor_exits: bool) -> None:
    """Otherwise it would remove the directory, and both servers would end."""
    link_ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    was_received, uses_directory = asyncio.Event(), asyncio.Event()

    async def accept(*_: object) -> None:
        was_received.set()
        await uses_directory.wait()

    successor = HandoverLink(link_ends[1], accept)
    handover = cast("Any", Handover.__new__(Handover))
    handover._successor = HandoverLink(link_ends[0], accept)
    waiting_task = asyncio.ensure_future(handover.let_successor_accept())
    await was_received.wait()
    assert not waiting_task.done()
    if successor_exits:
        successor.close()
    else:
        uses_directory.set()
    await asyncio.wait_for(waiting_task, 20)
    for link in (successor, handover._successor):
        link.close()
