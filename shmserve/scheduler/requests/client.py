"""The clients that submit requests to a scheduler, or to an ensemble."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from shmserve.ipc.transport.router import first_number
from shmserve.scheduler.outboxes import ClientLinks

_MOST_CLIENTS = 1024  # more than that, and those without requests are forgotten

R = TypeVar("R")


class Client(Generic[R]):
    """A submitter: its address at our socket, its pid (0: unknown) and its requests by number;
    `post` queues a message for it."""

    __slots__ = ("peer", "pid", "post", "requests")

    def __init__(self, peer: bytes, post: Callable[[Any], object]) -> None:
        self.peer = peer
        self.pid = first_number(peer)
        self.post = post
        self.requests: dict[int, R] = {}


class ClientTable(dict[bytes, Client[R]]):
    """All clients by address; who asks for one that is not known yet makes it known, with its link
    of these."""

    def __init__(self, links: ClientLinks) -> None:
        super().__init__()
        self._links = links

    def __missing__(self, peer: bytes) -> Client[R]:
        if len(self) >= _MOST_CLIENTS:
            for known in [each for each in self.values() if not each.requests]:
                del self[known.peer]
        client: Client[R] = Client(peer, self._links.to(peer))
        self[peer] = client
        return client

    def of_process(self, pid: int) -> list[Client[R]]:
        """Those of one process."""
        return [client for client in self.values() if client.pid == pid]
