"""The request queue: admission, removal, and timeouts."""

from typing import Any

import pytest

from shmserve.errors import QueueFull, Unavailable
from shmserve.ipc.messages.inference import Submit
from shmserve.ipc.messages.supervision import SchedulingLimits
from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.tensors.signature import BatchProperties
from shmserve.scheduler.requests.queue import RequestQueue
from shmserve.scheduler.requests.scheduled import NEVER, Client, Event, ScheduledRequest
from shmserve.scheduler.settings import Settings

NOW = 1_000_000_000
CLIENT = Client[ScheduledRequest](b"77.ab", print)


def make_queue(fields: dict[str, Any] | None = None, max_queue_size: int = 0) -> RequestQueue:
    config = {
        "name": "m",
        "max_batch_size": 8,
        "dynamic_batching": {"default_queue_policy": fields or {}},
    }
    limits = SchedulingLimits(max_queue_size=max_queue_size)
    return RequestQueue(Settings.read(ModelSpec.of(config), "1", limits))


def submit(**fields: Any) -> Submit:
    """Return a request of one row that has just arrived."""
    defaults = {
        "id": 1, "schema": b"", "data": [b"work"], "arrived_ns": NOW - 1, "deadline_ns": 0,
        "timeout_us": 0, "priority": 0,
    }  # fmt: skip
    return Submit(**{**defaults, **fields})


def admit(queue: RequestQueue, now_ns: int = NOW, **fields: Any) -> ScheduledRequest:
    properties = BatchProperties(fields.pop("batch_size", 1), b"")
    return queue.enqueue(CLIENT, submit(**fields), properties, now_ns)


def test_the_policys_bound_overrides_the_servers() -> None:
    for queue in (make_queue({"max_queue_size": 2}, 5), make_queue({}, 2)):
        admit(queue)
        admit(queue)
        with pytest.raises(QueueFull) as caught:
            admit(queue, request_id="r7")
        assert caught.value.message == "[request id: r7] Exceeds maximum queue size"
        with pytest.raises(QueueFull) as caught:
            admit(queue)
        assert caught.value.message == "[request id: <id_unknown>] Exceeds maximum queue size"
        queue.take(1)
        admit(queue)


def test_a_request_with_an_expired_timeout_is_refused() -> None:
    with pytest.raises(Unavailable, match=r"^Request timeout expired \(0 microseconds"):
        admit(make_queue(), deadline_ns=NOW - 1)


def test_an_impossible_arrival_time_is_clamped() -> None:
    queue = make_queue()
    assert admit(queue, arrived_ns=NOW - 5).arrived_ns == NOW - 5
    for nonsense in (0, -4, NOW + 1, 2**63):
        assert admit(queue, arrived_ns=nonsense).arrived_ns == NOW


def test_with_preserved_order_no_request_is_delayed() -> None:
    """With preserve_ordering, a delayed request would hold up the responses of all others."""
    policy = {"allow_timeout_override": True, "timeout_action": "DELAY"}
    for is_ordered, limit_us in ((False, 40), (True, 0)):
        dynamic_batching = {"default_queue_policy": policy, "preserve_ordering": is_ordered}
        config = {"name": "m", "max_batch_size": 8, "dynamic_batching": dynamic_batching}
        queue = RequestQueue(Settings.read(ModelSpec.of(config), "1", SchedulingLimits()))
        request = admit(queue, timeout_us=40)
        assert request.queue_limit_ns == (NOW + limit_us * 1000 if limit_us else 0)


def test_a_batch_hurries_for_a_deadline_but_not_for_the_queue_policy() -> None:
    policy = {"default_timeout_microseconds": 100, "allow_timeout_override": True}
    deadline = NOW + 40_000
    assert admit(make_queue(), deadline_ns=deadline, timeout_us=40).flush_by_ns == deadline
    assert admit(make_queue(policy), deadline_ns=deadline, timeout_us=40).flush_by_ns == NEVER
    assert admit(make_queue(policy)).flush_by_ns == NEVER


def test_the_queue_limit_ends_with_the_queue_and_the_deadline_does_not() -> None:
    queue = make_queue({"default_timeout_microseconds": 100})
    request = admit(queue, deadline_ns=NOW + 500_000)
    queue.take(1)
    assert queue.take_expired(NOW + 200_000) == []
    assert queue.take_expired(NOW + 500_001) == [request]


def test_a_retried_request_runs_first_and_alone_and_keeps_only_its_deadline() -> None:
    queue = make_queue({"default_timeout_microseconds": 100})
    first_request = admit(queue, deadline_ns=NOW + 500_000)
    admit(queue)
    queue.take(1)
    queue.retry(first_request)
    assert len(queue) == 2 and first_request not in list(queue.in_order)
    assert first_request not in queue.take_expired(NOW + 200_000)
    assert queue.take_retry() is first_request and not queue.retries
    assert queue.take_expired(NOW + 500_001) == [first_request]


def test_timers_of_completed_requests_are_removed() -> None:
    queue = make_queue()
    for _ in range(5000):
        admit(queue, deadline_ns=NOW + 60_000_000_000)
        (request,) = queue.take(1)
        request.transition(Event.FINISH)
    assert len(queue.timers._heap) <= 1025
    assert queue.take_expired(NOW) == [] and queue.timers.due_ns == NEVER
