"""Windows, percentiles, and when one has measured enough."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.perf import measure
from shmserve.perf.load import Mark, Records
from shmserve.perf.measure import Values


def values(samples: list[int]) -> Values:
    return np.sort(np.array(samples, np.int64))


@given(st.lists(st.integers(0, 10**12), min_size=1), st.floats(0.1, 100))
def test_percentiles_use_the_nearest_rank(samples: list[int], percent: float) -> None:
    result = measure.percentile(values(samples), percent)
    min_count = percent / 100 * len(samples) - 1e-6
    assert result in samples
    assert sum(sample <= result for sample in samples) >= min_count
    assert sum(sample < result for sample in samples) < min_count + 1e-5


def test_percentiles_of_a_hundred() -> None:
    ordered_values = values(list(range(1, 101)))
    percentiles = [measure.percentile(ordered_values, p) for p in (50, 90, 99, 99.9, 100)]
    assert percentiles == [50, 90, 99, 100, 100]
    assert measure.percentile(values([]), 50) == 0


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=12), st.floats(0.001, 0.5))
def test_windows_agree_within_a_share_of_their_mean(rates: list[float], tolerance: float) -> None:
    last_rates = rates[-3:]
    mean = sum(last_rates) / len(last_rates)
    distance = max(abs(rate - mean) for rate in last_rates)
    if len(last_rates) < 3:
        assert not measure.agree(rates, tolerance)
    elif abs(distance - tolerance * mean) > 1e-6:
        assert measure.agree(rates, tolerance) == (distance < tolerance * mean)


def test_the_confidence_interval_is_students_t() -> None:
    # Three batches, two degrees of freedom: 4.303 standard errors.
    assert measure.confidence([9.0, 10.0, 11.0]) == pytest.approx(4.303 / math.sqrt(3))
    assert measure.confidence([10.0] * 5) == 0
    assert measure.confidence([10.0]) is None
    assert measure.confidence([1.0, 2.0] * 20) == pytest.approx(
        1.96 * 0.50637 / math.sqrt(40), rel=1e-3
    )


def test_a_window_has_the_requests_ended_in_it_with_latencies_from_the_scheduled_start() -> None:
    records = Records()
    for scheduled_ns, ended_ns in [(0, 5), (1, 9), (2, 20)]:
        records.scheduled_ns.append(scheduled_ns)
        records.ended_ns.append(ended_ns)
    marks = [Mark(0, 0, 0, 0, 0.0), Mark(10, 2, 0, 0, 0.0), Mark(30, 3, 0, 0, 0.0)]
    assert measure.latencies(records, marks[0], marks[1]).tolist() == [5, 8]
    assert measure.window_rates(marks) == [2e8, 5e7]
    assert measure.window_means(records, marks) == [6.5, 18.0]


def test_a_spread_is_in_milliseconds() -> None:
    spread = measure.summarize(np.array([3_000_000, 1_000_000], np.int64))
    assert spread == {
        "mean": 2.0, "p50": 1.0, "p90": 3.0, "p95": 3.0, "p99": 3.0, "p99.9": 3.0, "max": 3.0,
    }  # fmt: skip
    assert set(measure.summarize(np.array([], np.int64)).values()) == {0.0}
