"""The rules of the dynamic batcher, tested by the messages to workers and clients."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.ipc.messages import inference as m
from shmserve.scheduler.batchers import CloseReason
from tests.rigs.scheduler_rig import MS, Rig, ready_rig
from tests.support.texts import EXPIRED_TEXT

DELAYED_BATCHING = {"max_queue_delay_microseconds": 1000}


def batch_sizes(rig: Rig, peer: bytes, batches: int = 99) -> list[int]:
    """Complete up to `batches` batches; return the number of requests in each."""
    sent_sizes: list[int] = []
    while len(sent_sizes) < batches and (execute_messages := rig.take_batches()):
        for _, batch in execute_messages:
            sent_sizes.append(len(batch.requests))
            rig.finish(peer, batch)
    return sent_sizes


def count_closed(rig: Rig) -> dict[str, int]:
    counts: dict[str, int] = rig.report()["shmserve"]["batches_closed"]
    return {reason: count for reason, count in counts.items() if count}


def queue_requests(rig: Rig, *units: int, **fields: Any) -> bytes:
    for size in units:
        rig.submit(batch_size=size, **fields)
    return rig.start()


@pytest.mark.parametrize(
    ("max_batch_size", "units", "expected"),
    [
        (8, (4, 4, 1), [2, 1]), (8, (5, 4), [1, 1]), (8, (0, 0, 7), [2, 1]), (8, (8, 8), [1, 1]),
        (1, (1, 1), [1, 1]), (0, (0, 0), [1, 1]),
    ],
)  # fmt: skip
def test_batch_sizes_are_summed_and_no_request_is_split(
    max_batch_size: int, units: tuple[int, ...], expected: list[int]
) -> None:
    """A request counts as its batch size, at least 1; a maximum of 0 is one of 1."""
    rig = Rig({}, max_batch_size=max_batch_size)
    assert batch_sizes(rig, queue_requests(rig, *units)) == expected


def test_batching_stops_at_the_first_incompatible_request() -> None:
    """Later requests are not pulled ahead; shapes are compared with the first request's."""
    rig = Rig(DELAYED_BATCHING)
    for key in (b"a", b"a", b"b", b"a"):
        rig.submit(shape_key=key)
    peer = rig.start()
    assert batch_sizes(rig, peer) == [2, 1]
    rig.pass_time(MS)
    assert batch_sizes(rig, peer) == [1]
    assert count_closed(rig) == {CloseReason.SHAPE: 2, CloseReason.DELAY: 1}


def test_after_the_delay_all_requests_run_even_past_a_preferred_size() -> None:
    rig = Rig({**DELAYED_BATCHING, "preferred_batch_size": [4]})
    rig.submit(5)
    rig.pass_time(MS)
    assert batch_sizes(rig, rig.start()) == [5]
    assert count_closed(rig) == {CloseReason.DELAY: 1}


def test_the_delay_counts_from_the_oldest_that_waits() -> None:
    """The oldest request need not be the first of the batch."""
    rig = Rig({**DELAYED_BATCHING, "priority_levels": 2, "default_priority_level": 2})
    rig.submit()
    rig.pass_time(400_000)
    rig.submit(priority=1)
    peer = rig.start()
    assert rig.wake_ns == rig.now + 600_000
    rig.pass_time(600_000)
    assert batch_sizes(rig, peer) == [2]


def test_a_wait_ends_with_the_closest_timeout_of_a_request() -> None:
    """The wait ends after the rest of the delay, or at a request's timeout."""
    policy = {"default_timeout_microseconds": 300}
    rig, _ = ready_rig({**DELAYED_BATCHING, "default_queue_policy": policy})
    (number,) = rig.submit()
    assert rig.wake_ns == rig.now + 300_001
    rig.pass_time(300_001)
    assert rig.answers() == [m.Failed(number, "UNAVAILABLE", EXPIRED_TEXT, 0, False)]


@pytest.mark.parametrize("preferred", [[4], [], [2, 4]])
def test_the_largest_preferred_size_runs_at_once(preferred: list[int]) -> None:
    """The default preferred size is the maximum size."""
    rig = Rig({**DELAYED_BATCHING, "preferred_batch_size": preferred}, max_batch_size=4)
    assert batch_sizes(rig, queue_requests(rig, 1, 1, 2)) == [3]


def test_a_batch_is_formed_only_when_an_instance_can_take_it() -> None:
    """Requests that arrive while the instance is busy join the next batch."""
    rig, peer = ready_rig(DELAYED_BATCHING)
    rig.submit()
    rig.pass_time(MS)
    _, batch = rig.execute()
    rig.submit(2)
    rig.pass_time(5 * MS)
    rig.submit(1)
    assert rig.take_batches() == []
    rig.finish(peer, batch)
    assert batch_sizes(rig, peer) == [3]


@pytest.mark.parametrize(
    ("block", "sent_sizes"),
    [
        ({}, [8]),
        ({"default_queue_policy": {"default_timeout_microseconds": 1000}}, []),
        ({"default_queue_policy": {"max_queue_size": 100}}, []),
        ({"priority_levels": 2, "default_priority_level": 1}, []),
    ],
)
def test_with_a_policy_no_batch_is_sent_before_an_instance_is_free(
    block: dict[str, Any], sent_sizes: list[int]
) -> None:
    """Without a policy, a batch that cannot grow may be sent ahead."""
    rig, _ = ready_rig(block)
    rig.core.executions.service_time.pipeline_depth = 2
    rig.submit()
    rig.execute()
    rig.submit(9)
    assert [len(batch.requests) for _, batch in rig.take_batches()] == sent_sizes


@given(st.permutations(range(4)), st.sets(st.integers(0, 3)))
def test_responses_keep_the_order_of_requests(order: list[int], fails: set[int]) -> None:
    """The order is kept whichever instance finishes first, and whichever request fails."""
    rig = Rig({"preserve_ordering": True}, max_batch_size=1)
    for index in range(4):
        rig.start(index, 100 + index)
    numbers = rig.submit(4)
    batches = rig.take_batches()
    records: list[int] = []
    for batch_index in order:
        peer, batch = batches[batch_index]
        key = batch.requests[0].key
        code = "INTERNAL" if batch_index in fails else ""
        rig.finish(peer, batch, m.Reply(key, code, "bad" if code else ""))
        records += [answer.id for answer in rig.answers()]
        assert records == numbers[: len(records)]
    assert records == numbers


def test_the_default_scheduler_has_no_priorities_and_no_batches() -> None:
    """Requests run first in, first out, one per execution, without a queue policy."""
    rig, peer = ready_rig(max_batch_size=8)
    rig.submit(2, priority=0)
    rig.submit(2, priority=1)
    order = []
    while execute_messages := rig.take_batches():
        ((_, batch),) = execute_messages
        order += [request.data[0] for request in batch.requests]
        assert len(batch.requests) == 1
        rig.finish(peer, batch)
    assert order == [b"w1", b"w2", b"w3", b"w4"]


def test_requests_are_numbered_by_arrival() -> None:
    """Requests run in order of arrival, whatever their sizes."""
    rig = Rig({})
    peer = queue_requests(rig, 3, 8, 1, 1, 7)
    contents = []
    while execute_messages := rig.take_batches():
        for _, batch in execute_messages:
            contents += [request.data[0] for request in batch.requests]
            rig.finish(peer, batch)
    assert contents == [b"w%d" % number for number in itertools.islice(itertools.count(1), 5)]
