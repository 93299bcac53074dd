"""Calls between models that wait for each other: which calls fail, and which may wait."""

from typing import Any

import pytest

from shmserve.ipc.messages import control_requests, inference
from shmserve.ipc.messages.inference import Caller, Failed
from shmserve.ipc.messages.supervision import InstanceExpected
from tests.rigs.scheduler_rig import Rig

START = 1
MS = 1_000_000


def rig(instances: int = 1, **settings: Any) -> Rig:
    scheduler_rig = Rig(max_batch_size=1, **settings)
    for index in range(instances):
        scheduler_rig.start(index, 100 + index)
    return scheduler_rig


def caller_line(pid: int, batch: inference.Execute, model: str = "m") -> str:
    return Caller(pid, batch.requests[0].key, model).line


def failure_texts(scheduler_rig: Rig) -> list[str]:
    return [answer.message for answer in scheduler_rig.answers() if isinstance(answer, Failed)]


def test_a_call_of_its_only_instance_fails_at_once() -> None:
    caller_rig = rig()
    _, batch = caller_rig.submit_and_take_batch()
    caller_rig.submit(callers=f"{caller_line(100, batch)}\n7/7/other model")
    assert failure_texts(caller_rig) == [
        "deadlock: the call of model 'm' waits for its instances, which its callers hold (m -> "
        "other model -> m)"
    ]
    caller_rig.finish(b"0.100", batch)
    assert caller_rig.submit_and_take_batch()


def test_a_call_waits_while_an_instance_may_become_free() -> None:
    caller_rig = rig(2)
    _, first_batch = caller_rig.submit_and_take_batch()
    _, second_batch = caller_rig.submit_and_take_batch()
    caller_rig.submit(callers=caller_line(100, first_batch))
    assert failure_texts(caller_rig) == []
    caller_rig.finish(b"1.101", second_batch)
    assert caller_rig.execute()[0] == b"1.101"


def test_two_callers_that_wait_for_each_other() -> None:
    """Each occupies an instance; the second call fails, so that the first continues."""
    callers = rig(2)
    (_, first), (_, second) = (callers.submit_and_take_batch(), callers.submit_and_take_batch())
    callers.submit(callers=caller_line(100, first))
    callers.submit(callers=caller_line(101, second))
    assert len(failure_texts(callers)) == 1
    callers.finish(b"1.101", second)
    assert callers.execute()[1].requests[0].callers == caller_line(100, first)


def test_callers_of_other_models_and_ended_callers_do_not_count() -> None:
    caller_rig = rig()
    _, batch = caller_rig.submit_and_take_batch()
    caller_rig.submit(callers=f"100/999/m\n200/{batch.requests[0].key}/m")
    caller_rig.finish(b"0.100", batch)
    caller_rig.execute()
    assert failure_texts(caller_rig) == []


def test_a_decoupled_instance_that_has_returned_is_free() -> None:
    caller_rig = rig(decoupled=True)
    _, batch = caller_rig.submit_and_take_batch()
    caller_rig.report_returned(b"0.100", batch)
    caller_rig.submit(callers=caller_line(100, batch))
    assert failure_texts(caller_rig) == [] and caller_rig.execute()


def test_an_expected_instance_may_run_the_call() -> None:
    caller_rig = rig()
    _, batch = caller_rig.submit_and_take_batch()
    caller_rig.supervisor(InstanceExpected(1, 101))
    caller_rig.submit(callers=caller_line(100, batch))
    assert failure_texts(caller_rig) == []


def test_a_call_in_the_sequence_of_its_caller_fails() -> None:
    """The sequence is bound to the caller's instance, although another instance is free."""
    caller_rig = rig(2, sequences={})
    _, batch = caller_rig.submit_and_take_batch(correlation_id=5, flags=START)
    caller_rig.submit(correlation_id=5, callers=caller_line(100, batch))
    assert len(failure_texts(caller_rig)) == 1
    caller_rig.submit(correlation_id=6, flags=START, callers=caller_line(100, batch))
    assert failure_texts(caller_rig) == []


def test_a_response_in_order_waits_for_its_callers_response() -> None:
    caller_rig = rig(2, dynamic={"preserve_ordering": True})
    _, batch = caller_rig.submit_and_take_batch()
    caller_rig.submit(callers=caller_line(100, batch))
    assert len(failure_texts(caller_rig)) == 1


@pytest.mark.parametrize("callers", ["x", "1/2", "1//m", "\n\n", "-1/2/m", f"{'9' * 30}/1/m"])
def test_malformed_callers_are_ignored(callers: str) -> None:
    assert Caller.parse(callers) == []
    caller_rig = rig()
    caller_rig.submit_and_take_batch()
    caller_rig.submit(callers=callers)
    assert failure_texts(caller_rig) == []


def test_a_call_fails_if_its_callers_hold_the_resources() -> None:
    caller_rig = rig(rate_limited=True)
    caller_rig.submit(callers="50/1/holder")
    (check,) = caller_rig.take_supervisor_messages(control_requests.CheckHolders)
    assert check.pids == [50]
    caller_rig.supervisor(
        control_requests.ResourcesHeld(99), control_requests.ResourcesHeld(check.key)
    )
    assert failure_texts(caller_rig) == [
        "deadlock: the call of model 'm' waits for resources of the rate limiter, which its "
        "callers hold (holder -> m)"
    ]


def test_calls_that_wait_for_long_are_reported_at_intervals() -> None:
    caller_rig = rig(2)
    (_, first), (_, second) = (
        caller_rig.submit_and_take_batch(),
        caller_rig.submit_and_take_batch(),
    )
    callers = caller_line(200, first, "other")
    caller_rig.submit(callers=callers)
    caller_rig.submit(5)  # requests of clients are not reported
    caller_rig.pass_time(150 * MS)
    assert not caller_rig.take_supervisor_messages(control_requests.CallsWaiting)
    caller_rig.pass_time(50 * MS)
    (report,) = caller_rig.take_supervisor_messages(control_requests.CallsWaiting)
    occupied_instances = [[100, first.requests[0].key], [101, second.requests[0].key]]
    ((((key, shown_callers),), instances),) = report.waits
    assert (report.model, shown_callers, instances) == ("m", callers, occupied_instances)
    assert caller_rig.wake_ns == caller_rig.now + 200 * MS
    caller_rig.pass_time(200 * MS)
    assert caller_rig.take_supervisor_messages(control_requests.CallsWaiting) == [report]
    chain = "other -> m -> other"
    caller_rig.supervisor(control_requests.CallDeadlocked(key, chain))
    assert failure_texts(caller_rig) == [
        f"deadlock: the call of model 'm' waits for requests that wait for its callers ({chain})"
    ]
    caller_rig.supervisor(control_requests.CallDeadlocked(key, chain))
    caller_rig.pass_time(200 * MS)
    (report,) = caller_rig.take_supervisor_messages(control_requests.CallsWaiting)
    assert report.waits == []
    assert caller_rig.wake_ns > caller_rig.now + 1_000 * MS


def test_a_call_in_a_sequence_is_reported_with_its_instance() -> None:
    caller_rig = rig(2, sequences={})
    _, batch = caller_rig.submit_and_take_batch(correlation_id=5, flags=START)
    caller_rig.submit(correlation_id=5, callers="200/1/other")
    caller_rig.pass_time(200 * MS)
    (report,) = caller_rig.take_supervisor_messages(control_requests.CallsWaiting)
    (((_, instances)),) = report.waits
    assert instances == [[100, batch.requests[0].key]]


def test_a_call_in_order_waits_for_each_instance() -> None:
    caller_rig = rig(2, dynamic={"preserve_ordering": True})
    for _ in range(2):
        caller_rig.submit_and_take_batch()
    caller_rig.submit(callers="200/1/other")
    caller_rig.pass_time(200 * MS)
    (report,) = caller_rig.take_supervisor_messages(control_requests.CallsWaiting)
    assert [[pid for pid, _ in instances] for _, instances in report.waits] == [[100], [101]]
