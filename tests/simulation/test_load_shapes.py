"""Autoscaling under twenty load shapes: capacity follows the load without thrashing."""

import math
from collections.abc import Callable
from random import Random

import pytest

from shmserve.supervisor.models.autoscaler import ScalingPolicy
from tests.rigs.load_shapes import Host, Run, Shape, steps

_EXECUTION_S = 0.05
_TARGET_S = 0.3
_SECONDS = 600.0
_MAX_INSTANCES = 8


def wave(period_s: float, lowest: float = 4, highest: float = 76) -> Shape:
    middle, height = (lowest + highest) / 2, (highest - lowest) / 2
    return lambda at_s: middle + height * math.sin(2 * math.pi * at_s / period_s)


# The load in requests per second, and how often within ten minutes it rises above the capacity of
# the running instances.
SHAPES: dict[str, tuple[Shape, int]] = {
    "hardly any": (steps((1, 0.2)), 0),
    "a fifth of an instance": (steps((1, 4)), 0),
    "half an instance": (steps((1, 10)), 0),
    "most of an instance": (steps((1, 14)), 0),
    "all of an instance": (steps((1, 18)), 0),
    "two instances": (steps((1, 30)), 0),
    "three instances": (steps((1, 50)), 0),
    "five instances": (steps((1, 90)), 0),
    "more than all": (steps((1, 200)), 0),
    "four times as much, each other minute": (steps((60, 16), (60, 64)), 5),
    "a wave of half a minute": (wave(30), 20),
    "a wave of two minutes": (wave(120), 5),
    "a wave of ten minutes": (wave(600), 1),
    "a burst each 5 s": (steps((4.5, 2), (0.5, 80)), 120),
    "a burst each 15 s": (steps((14.5, 2), (0.5, 80)), 40),
    "a burst each 40 s": (steps((38, 2), (2, 80)), 15),
    "busy for ten seconds a minute": (steps((50, 2), (10, 60)), 10),
    "on and off each 3 s": (steps((3, 0), (3, 50)), 100),
    "on and off each half minute": (steps((30, 0), (30, 50)), 10),
    "more and more": (lambda at_s: at_s / 6, 1),
}
EXECUTION_TIMES: dict[str, Callable[[Random], float]] = {
    "constant": lambda random: _EXECUTION_S,
    "exponential": lambda random: random.expovariate(1 / _EXECUTION_S),
}


def run(shape: Shape, times: str = "constant", seconds: float = _SECONDS, seed: int = 1) -> Run:
    policy = ScalingPolicy(1, _MAX_INSTANCES, target_s=_TARGET_S)
    return Host(policy, EXECUTION_TIMES[times], Random(seed)).run(shape, seconds)


@pytest.mark.parametrize("times", EXECUTION_TIMES)
@pytest.mark.parametrize("name", SHAPES)
def test_instances_do_not_oscillate(name: str, times: str) -> None:
    """With a constant load, never or once; regular patterns are anticipated in the end."""
    shape, max_regrets = SHAPES[name]
    for seed in range(2):
        result = run(shape, times, seed=seed)
        assert all(1 <= count <= _MAX_INSTANCES for _, count in result.counts)
        assert result.regrets(within_s=60) <= min(max(max_regrets, times == "exponential"), 4)


@pytest.mark.parametrize("base", [4, 8, 12, 16])
@pytest.mark.parametrize("seed", range(5))
def test_four_times_the_load_is_within_the_target_two_seconds_later(base: int, seed: int) -> None:
    result = run(steps((60, base), (60, 4 * base)), seconds=120, seed=seed)
    assert result.p99_s(40, 60) <= _TARGET_S and result.p99_s(62, 120) <= _TARGET_S
    # The number of instances does not exceed the useful number.
    assert result.count_at(100) <= math.ceil(4 * base * _EXECUTION_S) + 2


def test_an_idle_model_returns_to_the_minimum() -> None:
    result = run(steps((20, 64), (80, 0)), seconds=100)
    assert result.count_at(20) >= 4 and result.count_at(99) == 1
    assert result.counts[-1][0] < 60
