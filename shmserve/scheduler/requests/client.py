"""The clients that submit requests to a scheduler, or to an ensemble."""

from __future__ import annotations

from typing import Generic, TypeVar

from shmserve.ipc.transport.peercred_router import first_number

_MOST_CLIENTS = 1024  # more than that, and those without requests are forgotten

R = TypeVar("R")


class Client(Generic[R]):
    """A submitter: its address at our socket, its pid (0: unknown) and its requests by number."""

    __slots__ = ("peer", "pid", "requests")

    def __init__(self, peer: bytes) -> None:
        self.peer = peer
        self.pid = first_number(peer)
        self.requests: dict[int, R] = {}


class ClientTable(dict[bytes, Client[R]]):
    """All clients by address; who asks for one that is not known yet makes it known."""

    def __missing__(self, peer: bytes) -> Client[R]:
        if len(self) >= _MOST_CLIENTS:
            for known in [each for each in self.values() if not each.requests]:
                del self[known.peer]
        client: Client[R] = Client(peer)
        self[peer] = client
        return client

    def of_process(self, pid: int) -> list[Client[R]]:
        """Those of one process."""
        return [client for client in self.values() if client.pid == pid]
