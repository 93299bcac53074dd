"""Calls between models that wait for each other: which calls fail, and which may wait."""

from typing import Any

import pytest

from shmserve.ipc.messages import control_requests, inference
from shmserve.ipc.messages.inference import Caller, Failed
from shmserve.ipc.messages.supervision import InstanceExpected
from tests.rigs.scheduler_rig import Rig

START = 1
MS = 1_000_000


def rig(instances: int = 1, **more: Any) -> Rig:
    made = Rig(max_batch_size=1, **more)
    for index in range(instances):
        made.start(index, 100 + index)
    return made


def line(pid: int, batch: inference.Execute, model: str = "m") -> str:
    return Caller(pid, batch.requests[0].key, model).line


def failures(made: Rig) -> list[str]:
    return [answer.message for answer in made.answers() if isinstance(answer, Failed)]


def test_a_call_of_its_only_instance_fails_at_once() -> None:
    made = rig()
    _, batch = made.begin()
    made.submit(callers=f"{line(100, batch)}\n7/7/other model")
    assert failures(made) == [
        "deadlock: the call of model 'm' waits for its instances, which its callers hold (m -> "
        "other model -> m)"
    ]
    made.finish(b"0.100", batch)
    assert made.begin()


def test_a_call_waits_while_an_instance_may_become_free() -> None:
    made = rig(2)
    _, first = made.begin()
    _, second = made.begin()
    made.submit(callers=line(100, first))
    assert failures(made) == []
    made.finish(b"1.101", second)
    assert made.execute()[0] == b"1.101"


def test_two_callers_that_wait_for_each_other() -> None:
    """Each caller occupies one of two instances.

    The second call fails, so that the first can continue.
    """
    made = rig(2)
    (_, first), (_, second) = made.begin(), made.begin()
    made.submit(callers=line(100, first))
    made.submit(callers=line(101, second))
    assert len(failures(made)) == 1
    made.finish(b"1.101", second)
    assert made.execute()[1].requests[0].callers == line(100, first)


def test_callers_elsewhere_and_ended_ones_do_not_count() -> None:
    made = rig()
    _, batch = made.begin()
    made.submit(callers=f"100/999/m\n200/{batch.requests[0].key}/m")
    made.finish(b"0.100", batch)
    made.execute()
    assert failures(made) == []


def test_a_decoupled_instance_that_has_returned_is_free() -> None:
    made = rig(decoupled=True)
    _, batch = made.begin()
    made.returned(b"0.100", batch)
    made.submit(callers=line(100, batch))
    assert failures(made) == [] and made.execute()


def test_an_expected_instance_may_run_it() -> None:
    made = rig()
    _, batch = made.begin()
    made.supervisor(InstanceExpected(1, 101))
    made.submit(callers=line(100, batch))
    assert failures(made) == []


def test_a_call_in_the_sequence_of_its_caller_fails() -> None:
    """The sequence is bound to the caller's instance, although another instance is free."""
    made = rig(2, sequences={})
    _, batch = made.begin(correlation_id=5, flags=START)
    made.submit(correlation_id=5, callers=line(100, batch))
    assert len(failures(made)) == 1
    made.submit(correlation_id=6, flags=START, callers=line(100, batch))
    assert failures(made) == []


def test_a_response_in_order_cannot_come_before_its_callers() -> None:
    made = rig(2, dynamic={"preserve_ordering": True})
    _, batch = made.begin()
    made.submit(callers=line(100, batch))
    assert len(failures(made)) == 1


@pytest.mark.parametrize("callers", ["x", "1/2", "1//m", "\n\n", "-1/2/m", f"{'9' * 30}/1/m"])
def test_malformed_callers_are_none(callers: str) -> None:
    assert Caller.read(callers) == []
    made = rig()
    made.begin()
    made.submit(callers=callers)
    assert failures(made) == []


def test_callers_that_hold_the_resources_of_the_rate_limiter() -> None:
    made = rig(rate_limited=True)
    made.submit(callers="50/1/holder")
    (check,) = made.to_supervisor(control_requests.CheckHolders)
    assert check.pids == [50]
    made.supervisor(control_requests.ResourcesHeld(99), control_requests.ResourcesHeld(check.key))
    assert failures(made) == [
        "deadlock: the call of model 'm' waits for resources of the rate limiter, which its "
        "callers hold (holder -> m)"
    ]


def test_calls_that_wait_for_long_are_reported_at_intervals() -> None:
    made = rig(2)
    (_, first), (_, second) = made.begin(), made.begin()
    callers = line(200, first, "other")
    made.submit(callers=callers)
    made.submit(5)  # requests of clients are not reported
    made.pass_time(150 * MS)
    assert not made.to_supervisor(control_requests.CallsWaiting)
    made.pass_time(50 * MS)
    (report,) = made.to_supervisor(control_requests.CallsWaiting)
    occupied = [[100, first.requests[0].key], [101, second.requests[0].key]]
    ((((key, shown),), instances),) = report.waits
    assert (report.model, shown, instances) == ("m", callers, occupied)
    assert made.wake_ns == made.now + 200 * MS
    made.pass_time(200 * MS)
    assert made.to_supervisor(control_requests.CallsWaiting) == [report]
    chain = "other -> m -> other"
    made.supervisor(control_requests.CallDeadlocked(key, chain))
    assert failures(made) == [
        f"deadlock: the call of model 'm' waits for requests that wait for its callers ({chain})"
    ]
    made.supervisor(control_requests.CallDeadlocked(key, chain))
    made.pass_time(200 * MS)
    (report,) = made.to_supervisor(control_requests.CallsWaiting)
    assert report.waits == []
    assert made.wake_ns > made.now + 1_000 * MS


def test_a_call_in_a_sequence_is_reported_with_its_instance() -> None:
    made = rig(2, sequences={})
    _, batch = made.begin(correlation_id=5, flags=START)
    made.submit(correlation_id=5, callers="200/1/other")
    made.pass_time(200 * MS)
    (report,) = made.to_supervisor(control_requests.CallsWaiting)
    (((_, instances)),) = report.waits
    assert instances == [[100, batch.requests[0].key]]


def test_a_call_in_order_waits_for_each_instance() -> None:
    made = rig(2, dynamic={"preserve_ordering": True})
    for _ in range(2):
        made.begin()
    made.submit(callers="200/1/other")
    made.pass_time(200 * MS)
    (report,) = made.to_supervisor(control_requests.CallsWaiting)
    assert [[pid for pid, _ in instances] for _, instances in report.waits] == [[100], [101]]
