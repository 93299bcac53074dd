"""The shared memory extensions: register, status, unregister; for every listener.

Registering CUDA memory is in cuda_memory.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from typing import Any

from shmserve.common.access.shm_access import NOBODY, Peer
from shmserve.errors import InvalidArgument
from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.context import Gateway
from shmserve.gateway.region_table import GatewayRegion
from shmserve.ipc.messages import RegionAbandoned, RegisterRegion, UnregisterRegion

_LONGEST_NAME = 255


def check_name(name: str) -> None:
    """Raise InvalidArgument for what cannot be a region's name."""
    if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise InvalidArgument(
            f"a shared memory region's name must have 1 to {_LONGEST_NAME} printable characters"
        )


def register(
    gateway: Gateway,
    peer: Peer,
    name: str,
    key: str,
    offset: int,
    byte_size: int,
    *,
    leased: bool = False,
    pin: bool = False,
) -> Awaitable[dict[str, Any]]:
    """Have a POSIX object of `peer` registered; raises why it is refused.

    `leased`: its connection's end is the region's, see `lease`. `pin`: workers on CUDA devices lock
    its pages.
    """
    groups = list(peer.groups)
    return gateway.supervisor.ask(
        lambda number: RegisterRegion(
            number, name, key, offset, byte_size, peer.uid, groups, leased, pin
        )
    )


async def lease(
    gateway: Gateway, client: ClientIdentity, registered: Awaitable[dict[str, Any]]
) -> None:
    """Wait until a region is registered, which is unregistered when the client's connection ends.

    A client that leaves meanwhile has abandoned the region as soon as it is there.
    """

    def there(task: asyncio.Future[dict[str, Any]]) -> None:
        if not task.cancelled() and task.exception() is None:
            gone = RegionAbandoned(task.result()["memory_id"])
            client.when_gone(partial(gateway.supervisor.tell, gone))

    task = asyncio.ensure_future(registered)
    task.add_done_callback(there)
    await asyncio.shield(task)


def visible(
    gateway: Gateway, client: ClientIdentity, name: str, *, cuda: bool = False
) -> list[GatewayRegion]:
    """The regions of a kind that are the client's user's, or the one of this name; raises
    NotFound."""
    peer = client.administrator() if client.listener.shm else NOBODY
    return gateway.regions.visible(name, peer, cuda=cuda)


async def unregister(
    gateway: Gateway, client: ClientIdentity, name: str, *, cuda: bool = False
) -> None:
    """Have a region of the client's user unregistered, all of them for "", of one kind; an unknown
    name is fine."""
    peer = client.administrator()
    groups = list(peer.groups)
    await gateway.supervisor.ask(
        lambda number: UnregisterRegion(number, name, peer.uid, groups, cuda)
    )
