"""A workspace pool: one stretch of a device's memory, leased for the time of an execution (pure).

    ask ──> granted at once, if it fits and nobody waits ──> release ──> its bytes join the free
       └──> waits in the order of asking ──────────────────────┘         ones beside them; who waits
                                                                         is granted what fits

Who waits is granted in order and nobody overtakes, so that the largest lease comes after those
before it have ended, however many small ones are asked for meanwhile; and as every lease ends with
an execution, what is cut into pieces is whole again whenever the first in the queue needs all.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from shmserve.errors import InvalidArgument
from shmserve.ipc.memory.arena import FreeList


class GrantedLease(NamedTuple):
    """The lease that `owner` has asked for as `ticket`: its bytes begin at `offset`."""

    owner: int
    ticket: int
    offset: int


class _Waiting(NamedTuple):
    owner: int
    ticket: int
    byte_size: int


class WorkspacePool:
    """`capacity` bytes, a multiple of 64. Whatever changes it returns who is granted then; while it
    is closed, as it is at first, that is nobody."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._open = False
        self._free = FreeList(capacity)
        self._owners: dict[int, int] = {}  # offset -> owner
        self._waiting: deque[_Waiting] = deque()

    @property
    def used(self) -> int:
        """Bytes that are leased now."""
        return self._free.used

    @property
    def waiting(self) -> int:
        """The number of leases asked for and not granted."""
        return len(self._waiting)

    def open(self) -> list[GrantedLease]:
        """Its memory is there."""
        self._open = True
        return self._grant()

    def close(self) -> None:
        """Its memory is gone, and all leases with it; who waits goes on waiting."""
        self._open = False
        self._free = FreeList(self.capacity)
        self._owners.clear()

    def ask(self, owner: int, ticket: int, byte_size: int) -> list[GrantedLease]:
        """Lease `byte_size` bytes, now or later. Raises InvalidArgument when the pool can never
        have as many."""
        if byte_size > self.capacity:
            raise InvalidArgument(
                f"a workspace of {byte_size} bytes was asked for, and the device's pool has "
                f"{self.capacity}"
            )
        self._waiting.append(_Waiting(owner, ticket, byte_size))
        return self._grant()

    def release(self, owner: int, offset: int) -> list[GrantedLease]:
        """End a lease; one that `owner` does not have is ignored."""
        if self._owners.get(offset) != owner:
            return []
        del self._owners[offset]
        self._free.free(offset)
        return self._grant()

    def drop(self, owner: int) -> list[GrantedLease]:
        """End all that a process has, or waits for, that is gone."""
        for offset in [at for at, who in self._owners.items() if who == owner]:
            del self._owners[offset]
            self._free.free(offset)
        self._waiting = deque(each for each in self._waiting if each.owner != owner)
        return self._grant()

    def _grant(self) -> list[GrantedLease]:
        granted: list[GrantedLease] = []
        while self._waiting and self._open:
            first = self._waiting[0]
            offset = self._free.allocate(first.byte_size)
            if offset is None:
                break
            self._waiting.popleft()
            self._owners[offset] = first.owner
            granted.append(GrantedLease(first.owner, first.ticket, offset))
        return granted

    def check_integrity(self) -> None:
        """Assert that leases and holes tile the pool, and that each lease has an owner; for
        tests."""
        self._free.check_integrity()
        assert self._free.offsets() == self._owners.keys()
