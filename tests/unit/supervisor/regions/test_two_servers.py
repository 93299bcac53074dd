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
from tests.rigs.region_rig import RegionOffice, policy
from tests.support.regions import SharedObject

ME = Peer(os.getuid(), tuple(os.getgroups()))
SIZE = 4096


class Side(RegionOffice):
    """A server with one gateway, at one end of a link."""

    def __init__(self, end: socket.socket, most: int = 100) -> None:
        super().__init__(policy(max_regions=most, max_regions_per_uid=most))
        self.link = HandoverLink(end, self.registry.apply)
        self.kept.mirror_to(self.link)

    async def register(self, name: str, key: str) -> None:
        await self.registry.register(name, key, 0, SIZE, ME)
        await self.kept.flush()

    async def unregister(self, name: str) -> None:
        await self.registry.unregister(name, ME)
        await self.kept.flush()

    def names(self) -> list[str]:
        return [region.name for region in self.registry.active()]


@contextlib.asynccontextmanager
async def sides(most: int = 100) -> AsyncIterator[tuple[Side, Side]]:
    """Return the two servers; the second one may have a lower limit of regions."""
    before = len(os.listdir("/proc/self/fd"))
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one, two = Side(ends[0]), Side(ends[1], most)
    yield one, two
    for side in (one, two):
        side.registry.close()
    one.link.close()
    await two.link.ended
    two.link.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_each_has_what_the_other_has() -> None:
    async def steps() -> None:
        async with sides() as (one, two):
            await one.register("a", objects[0].key)
            await two.register("b", objects[1].key)
            assert one.names() == two.names() == ["a", "b"]
            first, second = (side.registry.active()[0] for side in (one, two))
            assert first.shared is not None and second.shared is not None
            assert first.shared.inode == second.shared.inode
            assert (first.key, first.owner) == (second.key, second.owner)
            assert [type(message) for message in two.published] == [RegionPublished] * 2
            # An equal registration at either server is accepted.
            await two.register("a", objects[0].key)
            await two.unregister("a")
            assert one.names() == two.names() == ["b"]
            await one.register("a", objects[1].key)
            assert two.names() == ["b", "a"]

    with SharedObject(SIZE) as a, SharedObject(SIZE) as b:
        objects = a, b
        asyncio.run(steps())


def test_at_the_same_time() -> None:
    """The servers do not wait for each other for ever; a name registered at both is one region."""

    async def steps() -> None:
        async with sides() as (one, two):
            registrations = [side.register("same", shared.key) for side in (one, two)]
            registrations += [one.register(f"{number}", shared.key) for number in range(20)]
            registrations += [two.register(f"{number}", shared.key) for number in range(20, 40)]
            await asyncio.wait_for(asyncio.gather(*registrations), 20)
            assert sorted(one.names()) == sorted(two.names())
            assert len(one.names()) == 41
            await one.unregister("")
            assert one.names() == two.names() == []

    with SharedObject(SIZE) as shared:
        asyncio.run(steps())


def test_a_server_cannot_take_a_region_of_another_server() -> None:
    """The other server keeps it."""

    async def steps() -> None:
        async with sides(most=1) as (one, two):
            for name in "ab":
                await one.register(name, shared.key)
            assert (one.names(), two.names()) == (["a", "b"], ["a"])

    with SharedObject(SIZE) as shared:
        asyncio.run(steps())


def test_the_other_one_ends() -> None:
    """The remaining server does not wait for it."""

    async def steps() -> None:
        async with sides() as (one, two):
            two.link.close()
            await one.link.ended
            await one.register("a", shared.key)
            assert (one.names(), two.names()) == (["a"], [])
            one.link.ask("anything")

    with SharedObject(SIZE) as shared:
        asyncio.run(steps())


@pytest.mark.parametrize("successor_exits", [False, True])
def test_the_first_one_waits_until_the_other_uses_the_run_directory(successor_exits: bool) -> None:
    """Otherwise it would remove the directory, and both servers would end."""

    async def steps() -> None:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        received, uses_directory = asyncio.Event(), asyncio.Event()

        async def accept(*_: object) -> None:
            received.set()
            await uses_directory.wait()

        successor = HandoverLink(ends[1], accept)
        handover = cast("Any", Handover.__new__(Handover))
        handover._successor = HandoverLink(ends[0], accept)
        waiting = asyncio.ensure_future(handover.let_successor_accept())
        await received.wait()
        assert not waiting.done()
        if successor_exits:
            successor.close()
        else:
            uses_directory.set()
        await asyncio.wait_for(waiting, 20)
        for link in (successor, handover._successor):
            link.close()

    asyncio.run(steps())
