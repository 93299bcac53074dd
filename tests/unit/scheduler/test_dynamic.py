"""The dynamic batcher's rules, as single cases and as properties of arbitrary queues."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.ipc.tensors.padding import Pad, PaddedBatch, Padding
from shmserve.scheduler.batchers import Batch, CloseReason, WaitUntil, decide
from shmserve.scheduler.requests.scheduled import NEVER
from shmserve.scheduler.settings import Batching

NOW = 1_000_000
DELAY_NS = 100_000


@dataclass(slots=True)
class Item:
    """A request with the attributes that the batcher reads."""

    rows: int = 1
    shape_key: bytes = b""
    enqueued_ns: int = NOW
    flush_by_ns: int = NEVER


def rules(max_batch_size: int = 8, preferred: tuple[int, ...] = (), delay_ns: int = 0) -> Batching:
    return Batching(max_batch_size, frozenset(preferred or (max_batch_size,)), delay_ns)


def items(*units: int) -> list[Item]:
    return [Item(size) for size in units]


@pytest.mark.parametrize(
    ("units", "batching", "expected"),
    [
        # The batch has exactly the largest preferred size that the queue reaches.
        ((1,) * 7, rules(8, (4, 6)), Batch(6, CloseReason.PREFERRED)),
        ((1,) * 5, rules(8, (4, 6)), Batch(4, CloseReason.PREFERRED)),
        ((1,), rules(8, (4, 6)), Batch(1, CloseReason.IDLE)),
        # The next request exceeds the largest preferred size: the queued requests run at once.
        ((3, 4), rules(8, (6,), DELAY_NS), Batch(1, CloseReason.PREFERRED)),
        # The first request alone exceeds the largest preferred size.
        ((7,), rules(8, (4,), DELAY_NS), Batch(1, CloseReason.PREFERRED)),
        ((7, 1), rules(8, (4,), DELAY_NS), Batch(1, CloseReason.PREFERRED)),
        # A preferred size that is also the maximum is a full batch.
        ((4, 4), rules(8, (4, 8), DELAY_NS), Batch(2, CloseReason.FULL)),
        # The batch cannot grow, so it runs at once despite the delay.
        ((5, 4), rules(8, (), DELAY_NS), Batch(1, CloseReason.FULL)),
    ],
)
def test_batch_sizes(units: tuple[int, ...], batching: Batching, expected: Batch) -> None:
    assert decide(NOW, items(*units), batching, 0) == expected


SHAPES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3)), min_size=1, max_size=12)


@given(SHAPES, st.floats(0, 1), st.integers(1, 8))
def test_padded_shapes_share_a_batch_up_to_their_bound(
    lengths_and_units: list[tuple[int, int]], most_waste: float, max_batch_size: int
) -> None:
    """A batch has the first requests that fit, until one would make it wasteful."""
    padding = Padding([Pad("X", (-1,), 0, (), "", "", most_waste)], {})
    queued_items = [
        Item(min(units, max_batch_size), shape_key=padding.key(b"", {"X": (length,)}))
        for length, units in lengths_and_units
    ]
    decision = decide(NOW, queued_items, replace(rules(max_batch_size), padding=padding), 0)
    assert isinstance(decision, Batch)
    batch_items = queued_items[: decision.count]
    batch = PaddedBatch(padding)
    assert all(batch.try_join(item.shape_key, item.rows) for item in batch_items)
    total = sum(item.rows for item in batch_items)
    if decision.count < len(queued_items):
        next_item = queued_items[decision.count]
        next_fits = total + next_item.rows <= max_batch_size
        assert (
            not next_fits
            or not batch.try_join(next_item.shape_key, next_item.rows)
            or total == max_batch_size
        )
        assert (decision.reason is CloseReason.SHAPE) == (next_fits and total < max_batch_size)
    ((elements, wasted_elements),) = batch.element_counts().values()
    assert wasted_elements <= most_waste * elements + 1e-9 or decision.count == 1


def test_a_deadline_ends_the_wait_while_there_is_time_to_run() -> None:
    queue = [Item(), Item(flush_by_ns=NOW + 60_000)]
    batching = rules(8, (), DELAY_NS)
    assert decide(NOW, queue, batching, 20_000) == WaitUntil(NOW + 40_000)
    assert decide(NOW + 40_000, queue, batching, 20_000) == Batch(2, CloseReason.DEADLINE)
    distant_items = [Item(flush_by_ns=NOW + 60 * DELAY_NS)]
    assert decide(NOW, distant_items, batching, 20_000) == WaitUntil(NOW + DELAY_NS)


@st.composite
def queue_states(draw: st.DrawFn) -> tuple[list[Item], Batching, int]:
    """Draw a queue of admitted requests, rules, and a reserve."""
    max_batch_size = draw(st.integers(1, 12))
    batching = Batching(
        max_batch_size,
        frozenset(draw(st.sets(st.integers(1, max_batch_size), min_size=1, max_size=3))),
        draw(st.sampled_from([0, 1, 50, 1000])),
    )
    item = st.builds(
        Item,
        rows=st.integers(1, max_batch_size),
        shape_key=st.sampled_from([b"a", b"b"]) if draw(st.booleans()) else st.just(b"a"),
        enqueued_ns=st.integers(NOW - 1500, NOW),
        flush_by_ns=st.one_of(st.just(NEVER), st.integers(NOW, NOW + 2000)),
    )
    return draw(st.lists(item, max_size=16)), batching, draw(st.sampled_from([0, 10, 500]))


def fits(queue: list[Item], count: int, batching: Batching) -> bool:
    """Return whether the first `count` requests may run together."""
    batch_items = queue[:count]
    return sum(item.rows for item in batch_items) <= batching.max_batch_size and all(
        item.shape_key == batch_items[0].shape_key for item in batch_items
    )


def max_batch(queue: list[Item], batching: Batching) -> int:
    """Return the maximum number of requests that may run together."""
    count = 0
    while count < len(queue) and fits(queue, count + 1, batching):
        count += 1
    return count


@given(queue_states())
def test_a_batch_is_legal_and_its_reason_true(drawn_case: tuple[list[Item], Batching, int]) -> None:
    queue, batching, reserve_ns = drawn_case
    decision = decide(NOW, queue, batching, reserve_ns)
    if not isinstance(decision, Batch):
        return
    count, total = decision.count, sum(item.rows for item in queue[: decision.count])
    limit = max_batch(queue, batching)
    next_item = queue[count] if count < len(queue) else None
    oldest = min(item.enqueued_ns for item in queue[:limit])
    waited_enough = batching.delay_ns > 0 and NOW - oldest >= batching.delay_ns
    assert 1 <= count <= limit
    assert fits(queue, count, batching)
    match decision.reason:
        case CloseReason.FULL:
            assert total == batching.max_batch_size or (
                next_item is not None and total + next_item.rows > batching.max_batch_size
            )
        case CloseReason.SHAPE:
            assert next_item is not None and next_item.shape_key != queue[0].shape_key
            assert count == limit
        case CloseReason.PREFERRED:
            assert not waited_enough
            assert total in batching.preferred_sizes or (
                next_item is None or total + next_item.rows > max(batching.preferred_sizes)
            )
        case CloseReason.DELAY:
            assert waited_enough and count == limit
        case CloseReason.IDLE:
            assert batching.delay_ns == 0 and count == len(queue)
        case CloseReason.DEADLINE:
            assert min(item.flush_by_ns for item in queue[:count]) - reserve_ns <= NOW
            assert batching.delay_ns > 0 and count == len(queue)
        case CloseReason.RETRY:
            pytest.fail("the batcher knows no retries")


@given(queue_states())
def test_waits_are_bounded_and_end_in_batches(drawn_case: tuple[list[Item], Batching, int]) -> None:
    queue, batching, reserve_ns = drawn_case
    decision = decide(NOW, queue, batching, reserve_ns)
    assert (decision is None) == (not queue)
    if isinstance(decision, WaitUntil):
        assert NOW < decision.end_ns <= min(item.enqueued_ns for item in queue) + batching.delay_ns
        # The batcher waits only if all queued requests fit into one batch that can still grow.
        assert fits(queue, len(queue), batching)
        assert sum(item.rows for item in queue) < max(batching.preferred_sizes)
        at_the_end = decide(decision.end_ns, queue, batching, reserve_ns)
        assert isinstance(at_the_end, Batch) and at_the_end.count == len(queue)


@given(queue_states())
def test_any_queue_drains_in_order_and_no_request_waits_past_its_delay(
    drawn_case: tuple[list[Item], Batching, int],
) -> None:
    queue, batching, reserve_ns = drawn_case
    now_ns, queued_items = NOW, list(queue)
    while queued_items:
        decision = decide(now_ns, queued_items, batching, reserve_ns)
        assert decision is not None
        if isinstance(decision, WaitUntil):
            now_ns = decision.end_ns
            continue
        for item in queued_items[: decision.count]:
            assert now_ns <= max(NOW, item.enqueued_ns + batching.delay_ns)
        del queued_items[: decision.count]
