"""The rate limiter, and the shares of the response cache."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.errors import InvalidArgument
from shmserve.ipc.messages.control_requests import (
    AskTicket,
    CheckHolders,
    ResourcesHeld,
    TicketGranted,
    TicketReturned,
)
from shmserve.ipc.messages.supervision import ResizeCache
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.resources.rate_limiter import (
    GLOBAL,
    PATIENCE,
    CacheShares,
    Needs,
    RateLimiter,
    Tickets,
)

R, S = ("R", 0), ("S", GLOBAL)


def make_limiter(*members: list[Needs], **explicit: int) -> RateLimiter:
    new_limiter = RateLimiter({(name, None): count for name, count in explicit.items()})
    for number, instances in enumerate(members):
        new_limiter.join(number, dict(enumerate(instances)))
    return new_limiter


def test_the_capacity_is_the_most_that_any_instance_needs() -> None:
    rate_limiter = make_limiter([Needs({R: 2}, 1), Needs({R: 3}, 1)], [Needs({R: 1, S: 4}, 1)])
    assert rate_limiter.capacity() == {R: 3, S: 4}
    rate_limiter.remove(0)
    assert rate_limiter.capacity() == {R: 1, S: 4}


def test_the_configured_amount_is_the_capacity() -> None:
    assert make_limiter([Needs({R: 2}, 1)], R=10).capacity() == {R: 10}
    explicit = RateLimiter({("R", 0): 7, ("R", None): 5})
    explicit.join(0, {0: Needs({R: 2, ("R", 1): 1}, 1)})
    assert explicit.capacity() == {R: 7, ("R", 1): 5}


def test_a_model_that_could_never_run_does_not_load() -> None:
    with pytest.raises(InvalidArgument) as caught:
        make_limiter([Needs({R: 4}, 1)], R=3)
    assert caught.value.message == (
        'Resource count for "R" is limited to 3 which will prevent scheduling of one or more model '
        "instances, the minimum required count is 4"
    )


@pytest.mark.parametrize("separately", [True, False])
def test_a_resource_is_global_or_a_devices(separately: bool) -> None:
    own_needs, other_needs = [Needs({R: 1}, 1)], [Needs({("R", GLOBAL): 1}, 1)]
    with pytest.raises(InvalidArgument, match="both global and device-specific"):
        make_limiter(*((own_needs, other_needs) if separately else (own_needs + other_needs,)))


def test_the_needs_of_each_instance_from_a_configuration() -> None:
    resources = [{"name": "R", "count": 2}, {"name": "S", "count": 1, "global": True}]
    limited_group = {"rate_limiter": {"resources": resources, "priority": 3}}
    config = ModelSpec.of({"instance_group": [limited_group, {}]})
    first_limits, second_limits = (group.rate_limiter for group in config.instance_group)
    assert first_limits.needs_resources and not second_limits.needs_resources
    assert Needs.of(first_limits, 0) == Needs({("R", 0): 2, ("S", GLOBAL): 1}, 3)
    assert Needs.of(first_limits, 1) == Needs({("R", 1): 2, ("S", GLOBAL): 1}, 3)
    assert Needs.of(second_limits, 0) == Needs({}, 1)


@pytest.mark.parametrize(("priority", "order"), [(1, "01010101"), (2, "00100100"), (3, "00001000")])
def test_the_model_with_the_fewest_weighted_executions_is_first(priority: int, order: str) -> None:
    """Priority N runs 1/N as often; the first executions are in Triton's order, too."""
    rate_limiter = make_limiter([Needs({R: 1}, 1)], [Needs({R: 1}, priority)])
    members = ""
    (granted_ticket,) = rate_limiter.ask(0, 0, 0)
    rate_limiter.ask(1, 0, 1)
    for ticket in range(2, 302):
        member = granted_ticket[0]
        members += str(member)
        # The next ticket is requested before the old one is returned, so that both models always
        # wait.
        rate_limiter.ask(member, 0, ticket)
        (granted_ticket,) = rate_limiter.release(*granted_ticket, True)
    assert members.startswith(order)
    assert abs(members.count("0") - priority * members.count("1")) <= 4


def test_a_large_request_does_not_block_smaller_ones() -> None:
    """Triton tries only the first waiting request."""
    rate_limiter = make_limiter([Needs({R: 4}, 1)], [Needs({R: 1}, 1)], [Needs({S: 1}, 1)], R=4)
    (small_ticket,) = rate_limiter.ask(1, 0, "small")
    assert rate_limiter.ask(0, 0, "large") == []
    assert rate_limiter.ask(2, 0, "other") == [(2, "other")]
    assert rate_limiter.release(*small_ticket, True) == [(0, "large")]


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    rate_limiter = make_limiter([Needs({R: 4}, 1)], [Needs({R: 1}, 1)] * 4, R=4)
    running_tickets = [rate_limiter.ask(1, index, (index, 0))[0] for index in range(4)]
    rate_limiter.ask(0, 0, "large")
    for number in range(1, 4 * PATIENCE):
        member, ticket = running_tickets.pop(0)
        rate_limiter.ask(1, number % 4, (number % 4, number))
        granted_tickets = rate_limiter.release(member, ticket, True)
        running_tickets += granted_tickets
        if (0, "large") in granted_tickets:
            return
    raise AssertionError("it still waits")


def test_new_models_are_not_charged_for_earlier_executions() -> None:
    rate_limiter = make_limiter([Needs({R: 1}, 1)])
    for ticket in range(1000):
        rate_limiter.ask(0, 0, ticket)
        rate_limiter.release(0, ticket, True)
    rate_limiter.join(1, {0: Needs({R: 1}, 1)})
    rate_limiter.ask(0, 0, "old")
    first_members = []
    for ticket in range(4):
        rate_limiter.ask(1, 0, ticket)
        granted_tickets = (
            rate_limiter.release(0, "old", True)
            if ticket % 2 == 0
            else rate_limiter.release(1, ticket - 1, True)
        )
        first_members += [member for member, _ in granted_tickets]
        if ticket % 2 == 0:
            rate_limiter.ask(0, 0, "old")
    assert 0 in first_members[1:]  # the newcomer does not run a thousand times first


def test_an_unused_ticket_counts_as_no_execution() -> None:
    rate_limiter = make_limiter([Needs({R: 1}, 1)], [Needs({R: 1}, 1)])
    for ticket in range(10):
        rate_limiter.ask(0, 0, ticket)
        rate_limiter.release(0, ticket, False)
    rate_limiter.ask(1, 0, "held")
    rate_limiter.ask(0, 0, "first")
    rate_limiter.ask(1, 0, "again")
    assert rate_limiter.release(1, "held", True) == [(0, "first")]


STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 5)), max_size=80)
NEEDS = st.dictionaries(st.sampled_from([R, S, ("T", 1)]), st.integers(1, 3))


@settings(max_examples=200)
@given(st.lists(st.lists(NEEDS, min_size=1, max_size=3), min_size=2, max_size=4), STEPS)
def test_resources_are_never_exceeded_and_never_idle_while_wanted(
    members: list[list[dict[tuple[str, int], int]]], steps: list[tuple[int, int, int]]
) -> None:
    limiter = make_limiter(
        *[[Needs(amounts, 1 + n) for n, amounts in enumerate(m)] for m in members]
    )
    needs: dict[Any, dict[tuple[str, int], int]] = {}
    held_tickets: dict[Any, None] = {}
    waiting_tickets: dict[Any, None] = {}
    overtaken: dict[Any, int] = {}
    for number, (action, member, index) in enumerate(steps):
        member %= len(members)
        if action < 2:
            index %= len(members[member])
            waiting_tickets[member, number] = None
            needs[member, number] = members[member][index]
            granted_tickets = limiter.ask(member, index, number)
        elif action == 2 and (held_tickets or waiting_tickets):
            key = random.Random(number).choice([*held_tickets, *waiting_tickets])
            held_tickets.pop(key, None)
            waiting_tickets.pop(key, None)
            granted_tickets = limiter.release(key[0], key[1], bool(index % 2))
        else:
            for key in [key for key in (*held_tickets, *waiting_tickets) if key[0] == member]:
                held_tickets.pop(key, None)
                waiting_tickets.pop(key, None)
            granted_tickets = limiter.disconnect(member)
        for key in granted_tickets:
            del waiting_tickets[key]
            held_tickets[key] = None
            for other_ticket in waiting_tickets:
                overtaken[other_ticket] = overtaken.get(other_ticket, 0) + 1
        used: dict[tuple[str, int], int] = {}
        for key in held_tickets:
            for resource, count in needs[key].items():
                used[resource] = used.get(resource, 0) + count
        capacity = limiter.capacity()
        assert +limiter._used_resources == used
        assert all(count <= capacity[resource] for resource, count in used.items())
        if max(overtaken.values(), default=0) < PATIENCE:
            for key in waiting_tickets:
                assert any(used.get(kind, 0) + n > capacity[kind] for kind, n in needs[key].items())


def test_instances_are_added_and_removed_while_their_model_serves() -> None:
    rate_limiter = make_limiter([Needs({R: 1}, 1), Needs({R: 3}, 1)])
    assert rate_limiter.ask(0, 1, "a") == [(0, "a")]
    rate_limiter.join(0, {2: Needs({R: 2}, 1)})
    assert rate_limiter.capacity() == {R: 3}
    assert rate_limiter.ask(0, 2, "b") == rate_limiter.ask(0, 1, "c") == []
    assert (
        rate_limiter.remove_instance(0, 1) == []
    )  # it no longer waits; the ticket it holds is returned later
    assert rate_limiter.capacity() == {R: 2} and rate_limiter.ask(0, 1, "d") == []
    assert rate_limiter.release(0, "a", was_used=True) == [(0, "b")]
    assert +rate_limiter._used_resources == {R: 2}
    assert rate_limiter.remove_instance(0, 7) == rate_limiter.remove_instance(1, 0) == []


def test_tickets_of_an_exited_scheduler_are_released() -> None:
    notifications: list[tuple[Any, Any]] = []
    tickets = Tickets(True, {}, lambda pid, message: notifications.append((pid, message)))
    for member, pid in ((1, 100), (2, 200)):
        tickets.join(member, {0: Needs({R: 1}, 1)})
        tickets.bind(pid, member)
    tickets.handle(100, AskTicket(7, 0))
    tickets.handle(200, AskTicket(8, 0))
    assert notifications == [(100, TicketGranted(7))]
    tickets.process_exited(100)
    assert notifications == [(100, TicketGranted(7)), (200, TicketGranted(8))]
    tickets.bind(101, 1)  # its successor
    tickets.handle(101, AskTicket(1, 0))
    tickets.handle(100, TicketReturned(8, True))  # a message of an exited process
    tickets.remove(2)
    assert notifications[2:] == [(101, TicketGranted(1))]


def test_a_call_whose_callers_hold_its_resources_is_reported() -> None:
    sent: list[Any] = []
    tickets = Tickets(True, {("R", None): 2}, lambda pid, message: sent.append((pid, message)))
    for member, needs in ((1, [1]), (2, [1]), (3, [2]), (4, [2, 1])):
        tickets.join(member, {i: Needs({R: amount}, 1) for i, amount in enumerate(needs)})
        tickets.bind(100 * member, member)
    tickets.handle(100, AskTicket(1, 0, 11))
    sent.clear()
    for scheduler in (200, 300, 400):
        tickets.handle(scheduler, CheckHolders(scheduler, [10, 11]))
        # The scheduler does not hold these tickets.
        tickets.handle(scheduler, CheckHolders(7, [10]))
    assert sent == [(300, ResourcesHeld(300))]
    tickets.handle(200, AskTicket(2, 0, 12))
    sent.clear()
    tickets.handle(400, CheckHolders(5, [11, 12]))
    tickets.handle(100, TicketReturned(1, True))
    tickets.handle(400, CheckHolders(6, [11, 12]))
    assert sent == [(400, ResourcesHeld(5))]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5))))
def test_shares_never_exceed_the_bound(steps: list[tuple[bool, int]]) -> None:
    shares = CacheShares(1000)
    notified_sizes: dict[int, int] = {}

    def record_size(member: int) -> Callable[[ResizeCache], None]:
        def on_granted(message: ResizeCache) -> None:
            notified_sizes[member] = message.byte_size

        return on_granted

    for joins, member in steps:
        if joins:
            notified_sizes[member] = shares.join(member, record_size(member))
        else:
            shares.remove(member)
            notified_sizes.pop(member, None)
        assert sum(notified_sizes.values()) <= 1000
        assert len(set(notified_sizes.values())) <= 1
