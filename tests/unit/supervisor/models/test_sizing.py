"""When a model gets another instance, and when it loses one."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shmserve.supervisor.models.sizing import LOOK_EVERY_S, Change, LoadSample, Sizing


def load(at_s: float, **more: Any) -> LoadSample:
    """Of two instances that took 50 ms for each of 100 requests, and have nothing to do."""
    given: dict[str, Any] = {
        "executed": 100,
        "succeeded": 100,
        "waited_s": 0.0,
        "executions": 100,
        "took_s": 5.0,
        "pending": 0,
        "ready": 2,
        "busy": 0,
        **more,
    }
    return LoadSample(at_s=at_s, **given)


def served(sizing: Sizing) -> Sizing:
    """It knows how long an execution takes."""
    sizing.look(load(0.0, executed=0, succeeded=0, executions=0, took_s=0.0), 2)
    sizing.look(load(0.1), 2)
    return sizing


def looks(sizing: Sizing, seconds: float, count: int, **more: Any) -> list[Change]:
    """The changes of looks at the same load, for so long."""
    times = (0.2 + LOOK_EVERY_S * number for number in range(round(seconds / LOOK_EVERY_S)))
    found = (sizing.look(load(at_s, **more), count) for at_s in times)
    return [change for change in found if change is not None]


def test_one_more_where_the_queue_is_too_long_for_two_looks() -> None:
    """Ten that wait for two instances of 50 ms each wait for 250 ms."""
    queue = {"pending": 10, "busy": 2}
    sizing = served(Sizing(1, 4, target_s=0.2))
    assert sizing.look(load(0.2, **queue), 2) is None
    assert sizing.look(load(0.3, **queue), 2) == Change(
        3, "requests wait 250 ms, 150 ms are allowed"
    )
    sizing = served(Sizing(1, 4, target_s=0.2))
    assert sizing.look(load(0.2, **queue), 2) is None
    assert sizing.look(load(0.3), 2) is None  # it is gone
    assert sizing.look(load(0.4, **queue), 2) is None
    assert not looks(served(Sizing(1, 4, target_s=0.4)), 0.3, 2, **queue)


def test_not_while_the_queue_is_soon_gone() -> None:
    def last(fewer: int) -> Change | None:
        sizing = served(Sizing(1, 4, target_s=0.2))
        for number in range(7):
            queue = load(0.2 + number / 10, pending=60 - fewer * number, busy=2)
            change = sizing.look(queue, 2)
        return change

    assert last(fewer=1)
    assert last(fewer=5) is None


def test_not_where_an_instance_is_free_or_none_is_there() -> None:
    """What waits then waits for its batch to fill, or for a worker that starts again."""
    sizing = served(Sizing(1, 4, target_s=0.2))
    assert not looks(sizing, 1, 2, pending=10, busy=1)
    assert not looks(served(Sizing(1, 4, target_s=0.2)), 1, 2, pending=10, ready=0)


def test_one_more_where_what_was_served_had_waited() -> None:
    """On average: 33 ms are 150 ms at p99."""
    sizing = served(Sizing(1, 4, target_s=0.2))
    found = [looks_once(sizing, number) for number in range(1, 7)]
    assert found[:5] == [None] * 5
    assert found[5] == Change(3, "requests wait 37.5 ms on average, 32.6 ms are allowed")


def looks_once(sizing: Sizing, number: int) -> Change | None:
    """Ten more were served, which waited for 100 ms each."""
    count = 100 + 10 * number
    counted = {"executed": count, "succeeded": count, "executions": count, "took_s": count / 20}
    return sizing.look(load(0.1 + number / 10, **counted, waited_s=1.0 * number), 2)


def test_an_execution_that_hangs_makes_wait() -> None:
    sizing = served(Sizing(1, 4, target_s=1.0))
    assert not looks(sizing, 0.8, 2, pending=1, busy=2)
    (first, *_) = looks(sizing, 2, 2, pending=1, busy=2)
    assert first.total == 3


def test_without_a_target_they_may_wait_for_the_delay_or_an_execution() -> None:
    queue = {"pending": 10, "busy": 2}  # 250 ms
    assert looks(served(Sizing(1, 4, delay_s=0.05)), 0.3, 2, **queue)
    assert not looks(served(Sizing(1, 4, delay_s=0.06)), 0.3, 2, **queue)
    assert looks(served(Sizing(1, 4)), 0.3, 2, **queue)
    assert not looks(served(Sizing(1, 4)), 0.3, 2, pending=9, busy=2)
    assert not looks(Sizing(1, 4), 1, 2, **queue)  # nothing has been executed yet


def test_one_less_where_it_was_not_needed_for_twenty_seconds() -> None:
    assert not looks(served(Sizing(1, 4)), 18, 2)
    (first, *_) = looks(served(Sizing(1, 4)), 21, 2)
    assert first == Change(1, "no more than 0.0 were busy for 20 s")
    assert not looks(served(Sizing(1, 4)), 21, 2, busy=1)
    assert looks(served(Sizing(1, 4)), 21, 3, busy=1)
    assert not looks(served(Sizing(2, 4)), 21, 2)


def test_who_is_missed_soon_after_is_kept_for_longer() -> None:
    sizing = served(Sizing(1, 4))
    looks(sizing, 21, 2)
    sizing.changed(21.2, 2, 1)
    sizing.changed(30.0, 1, 2)
    found = [sizing.look(load(30 + number / 10), 2) for number in range(450)]
    first = next(number for number, change in enumerate(found) if change)
    assert first > 370
    assert found[first] == Change(1, "no more than 0.0 were busy for 40 s")


def test_the_bounds_hold_whatever_it_was_before() -> None:
    assert Sizing(2, 4).look(load(0.0), 1) == Change(2, "at least 2")
    assert Sizing(2, 4).look(load(0.0), 6) == Change(5, "at most 4")


states = st.builds(
    lambda more, pending, ready, busy: (more, pending, ready, min(ready, busy)),
    *(st.integers(0, 50), st.integers(0, 100), st.integers(0, 6), st.integers(0, 6)),
)


@given(st.lists(states, max_size=300), st.floats(0, 1), st.floats(0, 1))
def test_one_at_a_time_within_the_bounds(
    found: list[tuple[int, int, int, int]], target_s: float, delay_s: float
) -> None:
    """Whatever is counted; and never one less while requests wait for those that there are."""
    sizing, count, done = Sizing(2, 5, target_s, delay_s), 3, 0
    for number, (more, pending, ready, busy) in enumerate(found):
        done, at_s = done + more, number / 10
        change = sizing.look(
            LoadSample(at_s, done, done, done / 50, done, done / 20, pending, ready, busy), count
        )
        if change is not None:
            assert abs(change.total - count) == 1 and 2 <= change.total <= 5
            sizing.changed(at_s, count, change.total)
            count = change.total


def test_what_a_scheduler_reports() -> None:
    statistics = {
        "success": 12,
        "cache_hit": 2,
        "failures": {"BACKEND": 1, "REJECTED": 5},
        "queue_ns": 5 * 10**8,
        "compute_seconds": {"count": 4, "sum": 0.25},
        "pending": 3,
        "executing": 8,
        "instances": {"idle": 1, "busy": 2, "expected": 1, "gone": 0, "doomed": 0},
    }
    expected = LoadSample(7.0, 11, 10, 0.5, 4, 0.25, 3, 3, 2)
    assert LoadSample.of(statistics, 7.0) == expected
    assert LoadSample.of(statistics, 7.0, decoupled=True) == expected._replace(busy=3)
