"""Schedules and sweeps of loads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import InvalidArgument
from shmserve.perf.load import KINDS, constant, loads_of, poisson, schedule

RATES = st.floats(0.5, 1e6)


def first(schedule: Iterator[int], count: int) -> list[int]:
    return list(itertools.islice(schedule, count))


@given(RATES, st.sampled_from(sorted(KINDS)), st.integers(0, 9))
def test_a_schedule_never_goes_back_and_is_the_same_each_time(
    rate: float, kind: str, seed: int
) -> None:
    found = first(schedule(kind, rate, seed), 50)
    assert found == sorted(found)
    assert found[0] >= 0
    assert found == first(schedule(kind, rate, seed), 50)


@given(RATES, st.integers(1, 100_000))
def test_a_constant_schedule_does_not_drift(rate: float, number: int) -> None:
    (at,) = itertools.islice(constant(rate), number, number + 1)
    assert at == pytest.approx(number * 1e9 / rate, abs=1)


def test_random_arrivals_are_poisson() -> None:
    found = first(poisson(1000.0, 1), 20_001)
    gaps = [after - before for before, after in itertools.pairwise(found)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1e6, rel=0.03)
    # Of an exponential distribution the standard deviation is the mean.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(
        mean, rel=0.05
    )


@pytest.mark.parametrize(
    ("text", "values"),
    [("4", [4]), ("1,2,8", [1, 2, 8]), ("1:3", [1, 2, 3]), ("8:32:8", [8, 16, 24, 32])],
)
def test_a_sweep_is_a_list_or_a_range(text: str, values: list[float]) -> None:
    assert loads_of(text, "concurrency", int) == values


def test_rates_may_be_fractions() -> None:
    assert loads_of("0.1:0.3:0.1", "rate", float) == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "1.5", "3:1", "1:3:0", "1:2:3:4", "1,,2"])
def test_what_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--concurrency: "):
        loads_of(text, "concurrency", int)


def test_nobody_measures_a_million_loads() -> None:
    with pytest.raises(InvalidArgument, match="1000000 loads, at most 1000"):
        loads_of("1:1000000", "rate", float)
    with pytest.raises(InvalidArgument, match="--rate: 'inf'"):
        loads_of("inf", "rate", float)
