"""The adaptive batcher on non-linear curves, compared with the best fixed rules."""

from dataclasses import replace

import pytest

from shmserve.scheduler.batchers.adaptive import AdaptiveBatcher
from shmserve.scheduler.batchers.estimates import SizeTimes
from shmserve.scheduler.settings import Batching
from tests.rigs.batching_curves import NAMED_CURVES, Curve, Load, compare, step
from tests.rigs.batching_simulation import MS, Simulation

CURVES = {curve.name: curve for curve in NAMED_CURVES}
SCATTERED_CURVE = Curve("scattered step", step(7, 16, 93), 0.3, 0.2, 2.5)


def learn_times(curve: Curve, sizes: list[int], batches: int = 400) -> SizeTimes:
    """Return the estimates for a model that has run batches of these sizes."""
    size_times, timer = SizeTimes(32), curve.timer(1, 1.0)
    for number in range(batches):
        size = sizes[number % len(sizes)]
        size_times.observe(size, timer(size, 0))
    return size_times


@pytest.mark.parametrize(
    ("name", "best_sizes"),
    [
        ("step at 4", {3: 3, 4: 4, 5: 4, 15: 4, 32: 32}),
        ("step at 8", {8: 8, 9: 8, 32: 8}),
        ("step at 12", {12: 12, 13: 12, 32: 12}),
        ("plateau", {8: 8, 20: 20, 32: 32}),
        ("falling", {1: 1, 16: 16, 32: 32}),
        ("tiles of 8", {8: 8, 9: 8, 16: 16, 17: 16}),
        ("line", {1: 1, 16: 16, 32: 32}),
    ],
)
def test_the_best_size_has_the_highest_throughput(name: str, best_sizes: dict[int, int]) -> None:
    times = learn_times(CURVES[name], list(range(1, 33)), 640)
    assert {units: times.best_size(units) for units in best_sizes} == best_sizes
    for size in (1, 8, 32):
        assert times.expected_ns(size) == pytest.approx(CURVES[name].ms[size - 1] * MS, rel=0.15)


def test_a_cliff_is_found_by_bisection() -> None:
    size_times, timer = learn_times(Curve("", step(8, 20, 100)), [2, 32]), step(8, 20, 100)
    tried_sizes: list[int] = []
    while (size := size_times.find_trial(32)[0]) and len(tried_sizes) < 32:
        tried_sizes.append(size)
        size_times.observe(size, timer[size - 1] * MS)
    assert len(tried_sizes) <= 7 and size_times.best_size(32) == 8


def test_a_drift_moves_the_times_of_sizes_that_do_not_occur() -> None:
    size_times = learn_times(CURVES["line"], list(range(1, 33)), 640)
    before_ns = size_times.expected_ns(32)
    for number in range(400):
        size = 1 + number % 8
        size_times.observe(size, 2 * (10 + 0.5 * size) * MS)
    assert size_times.expected_ns(4) == pytest.approx(24 * MS, rel=0.1)
    assert 1.4 * before_ns < size_times.expected_ns(32) < 2.1 * before_ns


@pytest.mark.parametrize("seed", range(4))
def test_times_that_scatter_are_no_drift_of_sizes_that_do_not_occur(seed: int) -> None:
    curve, size_times = SCATTERED_CURVE, learn_times(SCATTERED_CURVE, [4, 32], 200)
    before_ns, timer = size_times.expected_ns(32), curve.timer(seed, 1.0)
    for number in range(2000):
        size = 1 + number % 7
        size_times.observe(size, timer(size, 0))
    assert size_times.expected_ns(32) == pytest.approx(before_ns, rel=0.25)


def test_in_doubt_the_larger_size_is_best_unless_all_is_late() -> None:
    size_times = learn_times(SCATTERED_CURVE, [7] * 10 + [32] * 10, 20)
    assert size_times.best_size(32) == 32 and size_times.best_size(32, out_of_reach=True) == 7


@pytest.mark.parametrize(
    ("times_ms", "retried_size"),
    [
        # The slow size 4 hides that sizes up to 8 are as fast as 2. The largest sizes have the best
        # known rate.
        ({2: 20, 4: 60, 9: 300, 32: 100}, 4),
        # No observed size is fast enough to make 5 worth a trial.
        ({5: 40, 16: 15, 32: 15}, 32),
    ],
)
def test_a_possibly_disturbed_size_is_tried_again_under_overload(
    times_ms: dict[int, int], retried_size: int
) -> None:
    size_times = SizeTimes(32)
    for size in (32, *times_ms):
        size_times.observe(size, times_ms[size] * MS)
    for is_late, best_size in ((False, 32), (True, retried_size)):
        for _ in range(96):
            size_times.observe(32, times_ms[32] * MS, out_of_reach=is_late)
        assert size_times.best_size(32, out_of_reach=True) == best_size


@pytest.mark.parametrize("largest_size", [1, 63, 64, 1000, 4096])
def test_large_sizes_share_an_index_and_none_exceeds_the_queue(largest_size: int) -> None:
    size_times = SizeTimes(largest_size)
    for number in range(200):
        size = 1 + number * 7919 % largest_size
        size_times.observe(size, (10 + size) * MS)
    for units in {1, largest_size // 2 + 1, largest_size}:
        assert 1 <= size_times.best_size(units) <= units
        assert size_times.expected_ns(units) == pytest.approx((10 + units) * MS, rel=0.1)


def test_a_cliff_within_the_target() -> None:
    """Sizes up to 8 take 20 ms, larger ones 100 ms. Batches of at most 8 meet the target easily."""
    load = Load(250, requests=7500, length_s=30)
    for seed in (1, 2):
        comparison = compare(CURVES["step at 8"], load, seed, target_ms=80)
        assert comparison.holds and comparison.adaptive.p99_ms < 60, str(comparison)


@pytest.mark.parametrize("seed", [0, 1, 4, 6, 7])
def test_an_early_slowdown_does_not_exclude_the_best_size(seed: int) -> None:
    """The first 1.5 s are 3 times slower; batches of 32 just keep up with the load."""
    timer, run_counts = replace(CURVES["step at 8"], jitter=0.05).timer(seed, 1.0), [0] * 33

    def time_ns(size: int, now_ns: int) -> float:
        run_counts[size] += 1
        is_first_run = size == 8 and run_counts[size] == 1
        return timer(size, now_ns) * 3 ** (is_first_run + (now_ns < 1500 * MS))

    rules = Batching(32, frozenset({32}), 0, 80 * MS)
    simulation = Simulation(AdaptiveBatcher(rules), time_ns).open_loop(250, 4000, seed)
    assert sorted(simulation.latencies[3000:])[500] < rules.target_ns / 2


@pytest.mark.parametrize("seed", [0, 1, 3, 8])
def test_an_overload_from_a_wrong_best_size_ends(seed: int) -> None:
    """Batches of 7 keep up, larger ones do not; noise hides this difference."""
    rate = 0.85 * SCATTERED_CURVE.most_per_second
    rules = Batching(32, frozenset({32}), 0, 400 * MS)
    simulation = Load(rate, requests=8000).run(AdaptiveBatcher(rules), SCATTERED_CURVE, seed)
    assert sorted(simulation.latencies[6000:])[-20] < rules.target_ns


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("step at 4", 0.4), ("step at 8", 0.7), ("step at 12", 0.6), ("two steps", 0.7),
        ("plateau", 0.7), ("falling", 0.6), ("fallen", 0.6), ("tiles of 8", 0.6),
        ("growing faster", 0.6), ("slower", 0.5), ("faster", 0.5), ("bimodal", 0.5),
        ("bimodal step", 0.6),
    ],
)  # fmt: skip
def test_the_target_is_met_where_a_fixed_setting_meets_it(name: str, part: float) -> None:
    curve = CURVES[name]
    rate = part * curve.most_per_second
    comparison = compare(curve, Load(rate, requests=8000, length_s=8000 / rate), 8)
    assert comparison.holds, str(comparison)


@pytest.mark.parametrize("name", ["step at 4", "step at 8", "step at 12", "slower"])
def test_closed_loop_clients_get_equal_throughput(name: str) -> None:
    curve = CURVES[name]
    load = Load(0, 16, 1.0, requests=8000, length_s=16000 / curve.most_per_second)
    comparison = compare(curve, load, 8)
    assert comparison.holds, str(comparison)
