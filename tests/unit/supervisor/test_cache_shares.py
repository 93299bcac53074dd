"""The server's response cache, shared out."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from shmserve.ipc.messages.supervision import ResizeCache
from shmserve.supervisor.resources.cache_shares import CacheShares


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5))))
def test_all_parts_together_are_never_more_than_the_bound(steps: list[tuple[bool, int]]) -> None:
    shares = CacheShares(1000)
    told: dict[int, int] = {}

    def hears(member: int) -> Callable[[ResizeCache], None]:
        def hear(message: ResizeCache) -> None:
            told[member] = message.byte_size

        return hear

    for joins, member in steps:
        if joins:
            told[member] = shares.join(member, hears(member))
        else:
            shares.leave(member)
            told.pop(member, None)
        assert sum(told.values()) <= 1000
        assert len(set(told.values())) <= 1
