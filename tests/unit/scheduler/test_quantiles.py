"""The sketch of the last minute: exact in rank, near in value, and forgetful in time."""

from hypothesis import given
from hypothesis import strategies as st

from shmserve.scheduler.tables import (
    ACCURACY,
    Quantiles,
)

SECOND = 1_000_000_000
ALL = (0.0, 0.5, 0.9, 0.99, 0.999, 1.0)


@given(st.lists(st.integers(-5, 10**12), min_size=1, max_size=300))
def test_a_quantile_is_near_the_value_of_its_rank(values: list[int]) -> None:
    sketch = Quantiles()
    for value in values:
        sketch.observe(value, 5)
    ranked = sorted(max(0, value) for value in values)
    for quantile, found in sketch.report(ALL, 6):
        assert quantile is not None and found is not None
        exact = ranked[int(quantile * (len(ranked) - 1))]
        assert abs(found - exact) <= ACCURACY * exact * 1.000001


def test_nothing_observed_is_no_value() -> None:
    assert Quantiles().report((0.5, 0.9), 77) == [[0.5, None], [0.9, None]]


def test_what_is_older_than_a_minute_is_forgotten() -> None:
    sketch = Quantiles()
    at = 1_000 * SECOND
    sketch.observe(100, at)
    sketch.observe(7_000, at + 30 * SECOND)

    def median(now_ns: int) -> int:
        ((_, value),) = sketch.report((1.0,), now_ns)
        return 0 if value is None else int(round(value, -2))

    assert median(at + 47 * SECOND) == 7_000
    ((_, least),) = sketch.report((0.0,), at + 47 * SECOND)
    assert least is not None and round(least) == 100
    ((_, least),) = sketch.report((0.0,), at + 61 * SECOND)
    assert least is not None and round(least, -2) == 7_000
    assert median(at + 91 * SECOND) == 0
    sketch.observe(300, at + 3_600 * SECOND)
    assert median(at + 3_600 * SECOND) == 300
