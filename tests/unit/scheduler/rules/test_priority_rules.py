"""The rules of priorities and queue policies, tested by the sent messages."""

from typing import Any

import pytest

from shmserve.ipc.messages import inference as m
from tests.rigs.scheduler_rig import MS, Rig, ready_rig
from tests.support.texts import EXPIRED_TEXT

LEVELS = {"priority_levels": 3, "default_priority_level": 2}
DELAY_POLICY = {"timeout_action": "DELAY", "default_timeout_microseconds": 1000}


def refusal(number: int, text: str, retry_s: int = 0) -> m.Failed:
    return m.Failed(number, "UNAVAILABLE", text, retry_s, False)


def execution_order(rig: Rig, peer: bytes) -> list[list[int]]:
    """Complete the batches one by one; return the numbers of the requests in each."""
    batches: list[list[int]] = []
    while execute_messages := rig.take_batches():
        for _, batch in execute_messages:
            batches.append([int(request.data[0][1:]) for request in batch.requests])
            rig.finish(peer, batch)
    return batches


def busy_rig(dynamic_batching: dict[str, Any], **settings: Any) -> tuple[Rig, bytes, m.Execute]:
    rig, peer = ready_rig(dynamic_batching, **settings)
    rig.submit()
    return rig, peer, rig.execute()[1]


def test_higher_levels_run_first_and_no_level_is_the_default_level() -> None:
    """Level 1 is the highest. 0 and invalid levels mean the default level."""
    rig = Rig(LEVELS, max_batch_size=1)
    for priority in (3, 0, 1, 2**40, 2, 3, 1):
        rig.submit(priority=priority)
    assert execution_order(rig, rig.start()) == [[3], [7], [2], [4], [5], [1], [6]]


def test_a_batch_may_span_levels() -> None:
    rig = Rig(LEVELS, max_batch_size=4)
    for priority in (3, 2, 1, 3, 2):
        rig.submit(priority=priority)
    assert execution_order(rig, rig.start()) == [[3, 2, 5, 1], [4]]


def test_a_higher_arrival_changes_the_batch_that_is_being_formed() -> None:
    rig, peer = ready_rig({**LEVELS, "max_queue_delay_microseconds": 1000}, max_batch_size=4)
    rig.submit(3, priority=3)
    assert rig.take_batches() == []
    rig.submit(batch_size=4, priority=1)
    assert execution_order(rig, peer) == [[4]]
    rig.pass_time(MS)
    assert execution_order(rig, peer) == [[1, 2, 3]]


def test_a_low_level_may_starve() -> None:
    """Priority is strict: waiting requests are not promoted."""
    rig, peer, batch = busy_rig(LEVELS, max_batch_size=1)
    rig.submit(priority=3)
    for _ in range(50):
        rig.submit(priority=1)
        rig.pass_time(1_000 * MS)
        rig.finish(peer, batch)
        _, batch = rig.execute()
        assert batch.requests[0].data != [b"w2"]


def test_each_level_has_its_policy_and_its_own_bound() -> None:
    """Levels without a policy have the default one; running requests do not count."""
    policies = {"1": {"max_queue_size": 2}, "3": {"max_queue_size": 1}}
    dynamic_batching = {
        **LEVELS,
        "priority_queue_policy": policies,
        "default_queue_policy": {"max_queue_size": 3},
    }
    rig, peer, batch = busy_rig(dynamic_batching)
    for priority, max_queued in ((3, 1), (1, 2), (2, 3)):
        rig.submit(max_queued, priority=priority)
        assert rig.answers() == []
        (number,) = rig.submit(priority=priority, request_id="r")
        assert rig.answers() == [refusal(number, "[request id: r] Exceeds maximum queue size", 1)]
    rig.finish(peer, batch)
    rig.answers()
    rig.submit(priority=1)
    assert rig.answers() == []


def test_a_bound_of_zero_leaves_only_the_servers_bound() -> None:
    rig, _, _ = busy_rig({})
    rig.submit(10_000)
    assert rig.answers() == []


def test_delayed_requests_count_towards_the_bound_of_their_level() -> None:
    rig, _, _ = busy_rig({"default_queue_policy": {**DELAY_POLICY, "max_queue_size": 2}})
    rig.submit(1)
    rig.pass_time(MS + 1)
    rig.submit(1)
    (number,) = rig.submit()
    assert rig.answers() == [
        refusal(number, "[request id: <id_unknown>] Exceeds maximum queue size", 1)
    ]


def test_a_timeout_counts_from_the_enqueue_and_by_level() -> None:
    policies = {"1": {"default_timeout_microseconds": 1000}}
    dynamic_batching = {
        **LEVELS,
        "priority_queue_policy": policies,
        "default_queue_policy": {"default_timeout_microseconds": 3000},
    }
    rig, _, _ = busy_rig(dynamic_batching)
    high_priority, low_priority = rig.submit(priority=1) + rig.submit(priority=3)
    rig.pass_time(MS + 1)
    assert rig.answers() == [refusal(high_priority, EXPIRED_TEXT)]
    rig.pass_time(2 * MS)
    assert rig.answers() == [refusal(low_priority, EXPIRED_TEXT)]


@pytest.mark.parametrize(
    ("policy", "own_us", "limit_us"),
    [
        ({"default_timeout_microseconds": 100, "allow_timeout_override": True}, 40, 40),
        ({"default_timeout_microseconds": 100, "allow_timeout_override": True}, 100, 100),
        ({"default_timeout_microseconds": 100, "allow_timeout_override": True}, 400, 100),
        ({"default_timeout_microseconds": 100, "allow_timeout_override": True}, 0, 100),
        ({"default_timeout_microseconds": 100}, 40, 100),
        # Any timeout of a request is shorter than no timeout.
        ({"allow_timeout_override": True}, 40, 40),
        ({"allow_timeout_override": True}, 0, None),
        ({}, 40, None),
    ],
)
def test_a_requests_timeout_applies_if_allowed_and_shorter(
    policy: dict[str, Any], own_us: int, limit_us: int | None
) -> None:
    """`allow_timeout_override` allows it."""
    rig, _, _ = busy_rig({"default_queue_policy": policy})
    (number,) = rig.submit(timeout_us=own_us)
    if limit_us is None:
        rig.pass_time(3_600_000 * MS)
        assert rig.answers() == []
        return
    rig.pass_time(limit_us * 1000)
    assert rig.answers() == []
    rig.pass_time(1)
    assert rig.answers() == [refusal(number, EXPIRED_TEXT)]


def test_a_request_rejected_by_timeout_is_unavailable_and_counts_as_rejected() -> None:
    """REJECT is the default action."""
    rig, _, _ = busy_rig({"default_queue_policy": {"default_timeout_microseconds": 1000}})
    (number,) = rig.submit(request_id="r")
    rig.pass_time(MS + 1)
    assert rig.answers() == [refusal(number, EXPIRED_TEXT)]
    assert rig.report()["shmserve"]["failures"]["REJECTED"] == 1


def test_delayed_requests_are_behind_their_level_and_before_the_next() -> None:
    """Delayed requests no longer time out."""
    rig, peer, batch = busy_rig({**LEVELS, "default_queue_policy": DELAY_POLICY}, max_batch_size=1)
    rig.submit(2, priority=2)  # the requests 2 and 3 will be delayed
    rig.pass_time(MS + 1)
    rig.submit(priority=3)  # request 4
    rig.submit(priority=2)  # request 5
    rig.pass_time(MS // 2)
    rig.finish(peer, batch)
    rig.answers()
    assert execution_order(rig, peer) == [[5], [2], [3], [4]]


def test_delayed_requests_may_wait_for_ever() -> None:
    rig, peer, batch = busy_rig({"default_queue_policy": DELAY_POLICY}, max_batch_size=1)
    (delayed,) = rig.submit()
    for _ in range(20):
        rig.pass_time(MS + 1)
        rig.submit()
        rig.finish(peer, batch)
        _, batch = rig.execute()
        assert batch.requests[0].data != [b"w%d" % delayed]
    assert not any(isinstance(answer, m.Failed) for answer in rig.answers())


@pytest.mark.parametrize("limit_us", [0, 5000])
@pytest.mark.parametrize("is_deadline", [False, True])
def test_a_requests_own_timeout_also_delays_it(limit_us: int, is_deadline: bool) -> None:
    """With DELAY, such a timeout is no deadline; other deadlines still apply."""
    policy = {**DELAY_POLICY, "allow_timeout_override": True}
    rig, _, _ = busy_rig({"default_queue_policy": policy}, request_timeout_is_deadline=is_deadline)
    (number,) = rig.submit(timeout_us=400, timeout_ns=limit_us * 1000)
    rig.submit(timeout_us=400, arrived_ns=rig.now - MS)
    rig.pass_time(MS)
    assert rig.answers() == []
    rig.pass_time(3_600_000 * MS)
    assert rig.answers() == ([refusal(number, EXPIRED_TEXT)] if limit_us else [])


@pytest.mark.parametrize("is_deadline", [False, True])
def test_a_timeout_is_a_deadline_only_on_request(is_deadline: bool) -> None:
    """Without `allow_timeout_override` nothing reads a request's `timeout`, as in Triton."""
    rig, _, _ = busy_rig({}, request_timeout_is_deadline=is_deadline)
    (number,) = rig.submit(timeout_us=30)
    rig.pass_time(MS)
    answers = rig.answers()
    text = "Request timeout expired (30 microseconds, from the request's parameter 'timeout')"
    assert answers == ([refusal(number, text)] if is_deadline else [])


@pytest.mark.parametrize(
    ("fields", "policy", "text"),
    [
        ({"timeout_ns": 30_000, "deadline_origin": "--x"}, {}, " (30 microseconds, from --x)"),
        ({"timeout_ns": 30_000}, {}, " (30 microseconds, from the caller)"),
        # The error of Triton's queue policies has no details, and Triton's tests compare it.
        ({"timeout_us": 30}, {"allow_timeout_override": True}, ""),
        ({}, {"default_timeout_microseconds": 7}, ""),
    ],
)
def test_an_expired_request_names_its_deadline_and_the_origin(
    fields: dict[str, Any], policy: dict[str, Any], text: str
) -> None:
    rig, _, _ = busy_rig({"default_queue_policy": policy})
    (number,) = rig.submit(**fields)
    rig.pass_time(MS)
    assert rig.answers() == [refusal(number, f"Request timeout expired{text}")]


def test_cancelling_a_delayed_request_removes_it() -> None:
    rig, peer, batch = busy_rig({"default_queue_policy": DELAY_POLICY})
    delayed, remaining = rig.submit(2)
    rig.pass_time(MS + 1)
    rig.client(m.Cancel(delayed))
    rig.finish(peer, batch)
    assert execution_order(rig, peer) == [[remaining]]


@pytest.mark.parametrize("policy", [{}, DELAY_POLICY])
def test_a_timeout_expires_while_the_instance_is_busy(policy: dict[str, Any]) -> None:
    """The request is rejected at once, even while the instance is busy."""
    policy = {"default_timeout_microseconds": 1000, **policy}
    rig, _, _ = busy_rig({"default_queue_policy": policy})
    number = rig.submit()[0]
    assert rig.wake_ns == rig.now + MS + 1
    rig.pass_time(MS + 1)
    assert rig.answers() == ([] if "timeout_action" in policy else [refusal(number, EXPIRED_TEXT)])
