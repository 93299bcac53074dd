"""The workspace pool: leases that never overlap, waiting in order, nothing lost to fragments."""

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import InvalidArgument
from shmserve.supervisor.resources.workspaces import GrantedLease, WorkspacePool

CAPACITY = 64 * 64

Step = tuple[str, int, int]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 5), st.integers(1, CAPACITY)),
        st.tuples(st.just("release"), st.integers(0, 10), st.just(0)),
        st.tuples(st.just("drop"), st.integers(1, 5), st.just(0)),
    ),
    max_size=60,
)


def opened() -> WorkspacePool:
    """A pool whose memory is there."""
    pool = WorkspacePool(CAPACITY)
    assert pool.open() == []
    return pool


@given(STEPS)
def test_leases_are_apart_in_order_and_all_come_back(steps: list[Step]) -> None:
    pool = opened()
    waiting: deque[tuple[int, int, int]] = deque()
    leases: dict[int, tuple[int, int]] = {}  # offset -> owner, size

    def take(granted: list[GrantedLease]) -> None:
        for owner, ticket, offset in granted:
            first = waiting.popleft()
            assert (owner, ticket) == first[:2]  # nobody overtakes
            for at, (_, size) in leases.items():
                assert offset + first[2] <= at or at + size <= offset
            assert offset + first[2] <= CAPACITY
            leases[offset] = owner, first[2]

    for number, (what, who, size) in enumerate(steps):
        if what == "ask":
            waiting.append((who, number, size))
            take(pool.ask(who, number, size))
        elif what == "release" and leases:
            offset = sorted(leases)[who % len(leases)]
            owner, _ = leases.pop(offset)
            take(pool.release(owner, offset))
        elif what == "drop":
            leases = {at: each for at, each in leases.items() if each[0] != who}
            waiting = deque(each for each in waiting if each[0] != who)
            take(pool.drop(who))
        pool.check_integrity()
        assert pool.waiting == len(waiting)
        assert leases or not waiting  # with nothing leased, nobody waits
    while leases:
        offset, (owner, _) = leases.popitem()
        take(pool.release(owner, offset))
    assert not waiting and pool.used == 0
    assert pool.ask(9, 0, CAPACITY) == [GrantedLease(9, 0, 0)]  # whole again


def test_a_day_of_mixed_sizes_leaves_no_fragments() -> None:
    """A hundred thousand leases, from bytes to the whole pool: each is had in the end, and the
    pool is one piece then."""
    chance = random.Random(17)
    pool = opened()
    sizes: dict[int, int] = {}
    leased: list[tuple[int, int]] = []
    done = 0
    for ticket in range(100_000):
        sizes[ticket] = min(CAPACITY, int(2 ** chance.uniform(0, 12.1)))
        granted = pool.ask(ticket, ticket, sizes[ticket])
        while granted or pool.waiting > 8:
            leased += [(owner, offset) for owner, _, offset in granted]
            done += len(granted)
            granted = []
            if pool.waiting > 8:
                granted = pool.release(*leased.pop(chance.randrange(len(leased))))
    while leased:
        granted = pool.release(*leased.pop())
        done += len(granted)
        leased += [(owner, offset) for owner, _, offset in granted]
    pool.check_integrity()
    assert done == 100_000 and pool.used == 0
    assert pool.ask(1, 1, CAPACITY)


def test_more_than_the_pool_is_an_error_with_both_figures() -> None:
    with pytest.raises(InvalidArgument, match=r"8192 bytes was asked for, .* pool has 4096"):
        opened().ask(1, 1, 8192)


def test_only_the_owner_ends_a_lease() -> None:
    pool = opened()
    assert pool.ask(1, 7, CAPACITY) == [GrantedLease(1, 7, 0)]
    assert pool.ask(2, 8, 64) == []
    assert pool.release(2, 0) == []
    assert pool.release(1, 64) == []
    assert pool.drop(1) == [GrantedLease(2, 8, 0)]


def test_who_asks_waits_while_the_memory_is_not_there() -> None:
    """Leases end with it; who waits is granted, in order, when there is some again."""
    pool = WorkspacePool(CAPACITY)
    assert pool.ask(1, 7, CAPACITY) == []
    assert pool.open() == [GrantedLease(1, 7, 0)]
    assert pool.ask(2, 8, 64) == pool.ask(3, 9, 64) == []
    pool.close()
    assert (pool.used, pool.waiting) == (0, 2)
    assert pool.release(1, 0) == pool.drop(2) == []
    pool.check_integrity()
    assert pool.open() == [GrantedLease(3, 9, 0)]
