"""The estimates and decisions of the adaptive batcher on simulated models and loads."""

import random
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.scheduler.batchers import Batch, Batcher, CloseReason, DynamicBatcher, WaitUntil
from shmserve.scheduler.batchers.adaptive import AdaptiveBatcher, MissBudget, WaitingChoice
from shmserve.scheduler.batchers.estimates import Arrivals, SizeTimes
from shmserve.scheduler.settings import Batching
from tests.rigs.batching_simulation import (
    MS,
    Item,
    Simulation,
    exponential_pauses,
    linear,
    uniform_pauses,
)


def adaptive_batcher(target_ms: float = 60, size: int = 32, delay_ms: float = 0) -> AdaptiveBatcher:
    rules = Batching(size, frozenset({size}), int(delay_ms * MS), int(target_ms * MS))
    return AdaptiveBatcher(rules)


def fixed_batcher(delay_ms: float, max_batch_size: int = 32) -> DynamicBatcher:
    """Return a batcher with this delay. 0 means prefer_latency."""
    return DynamicBatcher(Batching(max_batch_size, frozenset({max_batch_size}), int(delay_ms * MS)))


# --- estimates of batch durations -----------------------------------------------------------------


@given(st.floats(0.1, 100), st.floats(0.0, 10), st.integers(0, 1000))
def test_the_time_model_learns_a_line(setup_ms: float, each_ms: float, seed: int) -> None:
    sizes, time = random.Random(seed), SizeTimes(64)
    for _ in range(100):
        size = sizes.randint(1, 32)
        time.observe(size, (setup_ms + each_ms * size) * MS)
    assert time.is_known
    for size in (8, 64):
        assert time.expected_ns(size) == pytest.approx((setup_ms + size * each_ms) * MS, rel=0.1)
    assert time.setup_ns == pytest.approx(setup_ms * MS, rel=0.01)


def test_noise_and_outliers_hardly_change_the_model() -> None:
    sizes, time = random.Random(5), SizeTimes(64)
    for number in range(400):
        size = sizes.randint(1, 16)
        took_ns = (10 + size) * MS * sizes.uniform(0.9, 1.1)
        time.observe(size, took_ns * (40 if number % 29 == 0 else 1))
    assert time.expected_ns(8) == pytest.approx(18 * MS, rel=0.25)


def test_a_lasting_change_is_learned() -> None:
    sizes, time = random.Random(5), SizeTimes(64)
    for factor in (1, 5, 1):
        for _ in range(300):
            size = sizes.randint(1, 16)
            time.observe(size, (10 + size) * MS * factor)
        assert time.setup_ns == pytest.approx(10 * MS * factor, rel=0.05)
        assert time.expected_ns(8) == pytest.approx(18 * MS * factor, rel=0.05)


@pytest.mark.parametrize("factor", [5, 2, 0.5, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_a_change_is_learned_despite_noise_and_outliers(factor: float, seed: int) -> None:
    rng, time = random.Random(seed), SizeTimes(64)
    for slowdown in (1, factor):
        for _ in range(300):
            size = rng.randint(1, 16)
            took_ns = (10 + size) * MS * slowdown * rng.uniform(0.9, 1.1)
            time.observe(size, took_ns * (10 if rng.random() < 0.03 else 1))
    assert time.expected_ns(8) == pytest.approx(18 * MS * factor, rel=0.1)


def test_one_slow_size_does_not_change_the_others() -> None:
    time = SizeTimes(64)
    for took_ms in (20, 60):
        for size in (4, 8) * 50:
            time.observe(size, took_ms * MS if size == 8 else 10 * MS)
    assert time.expected_ns(4) == pytest.approx(10 * MS, rel=0.1)


def test_one_batch_size_determines_no_slope() -> None:
    time = SizeTimes(512)
    for _ in range(50):
        time.observe(4, 10 * MS)
    assert time.setup_ns == pytest.approx(10 * MS)
    assert time.expected_ns(64) == pytest.approx(10 * MS)
    for size in (1, 8) * 50:
        time.observe(size, (2 + size) * MS)
    assert time.expected_ns(40) - time.expected_ns(39) == pytest.approx(MS, rel=0.05)
    for size in (1, 8) * 100:
        time.observe(size, (2 + size) * MS)
    assert time.setup_ns == pytest.approx(2 * MS, rel=0.05)
    for _ in range(1000):
        time.observe(8, 10 * MS)
    assert time.setup_ns == pytest.approx(2 * MS, rel=0.05)
    assert time.expected_ns(63) == pytest.approx(65 * MS, rel=0.05)


def test_the_first_execution_does_not_count() -> None:
    time = SizeTimes(512)
    time.observe(1, 1e12)
    for _ in range(20):
        time.observe(1, 5 * MS)
    assert time.expected_ns(1) == pytest.approx(5 * MS)


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(0, 1e12)), max_size=60))
def test_estimated_times_are_never_negative(observations: list[tuple[int, float]]) -> None:
    time = SizeTimes(512)
    for units, took_ns in observations:
        time.observe(units, took_ns)
    assert time.setup_ns >= -1e-3
    assert all(time.expected_ns(size) >= 0 for size in range(1, 513))


# --- predictions of arrivals ----------------------------------------------------------------------


def test_a_burst_ends_when_every_client_has_sent() -> None:
    arrivals, clock = Arrivals(), count(0, MS)
    for _ in range(80):
        for queued_count in (1, 2, 3):
            arrivals.record_arrival(next(clock), queued_count, 5 * MS)
        now_ns = [next(clock) for _ in range(20)][-1]
        arrivals.record_batch(now_ns, 0, 5 * MS)
    assert now_ns < arrivals.wait_until_ns <= now_ns + 2 * MS
    burst_arrivals = list(arrivals.burst(8))
    assert len(burst_arrivals) == 3 and burst_arrivals[-1][0] == pytest.approx(3, rel=0.05)
    assert burst_arrivals[-1][1] == pytest.approx(3 * MS, rel=0.1)
    assert len(list(arrivals.burst(2))) == 2
    for queued_count in (1, 2):
        now_ns = next(clock)
        arrivals.record_arrival(now_ns, queued_count, 5 * MS)
        assert arrivals.wait_until_ns > now_ns and len(list(arrivals.burst(8))) == 3 - queued_count
    arrivals.record_arrival(next(clock), 3, 5 * MS)
    assert arrivals.wait_until_ns == 0 and not list(arrivals.burst(8))


def test_a_lone_client_is_no_burst() -> None:
    arrivals, clock = Arrivals(), count(0, 10 * MS)
    for _ in range(40):
        arrivals.record_arrival(next(clock), 1, 5 * MS)
        assert not list(arrivals.burst(8))
        arrivals.record_batch(next(clock), 0, 5 * MS)


# --- whether waiting improves latency ---


@pytest.mark.parametrize("waiting_is_better", [True, False])
def test_the_choice_with_shorter_latencies_is_preferred(waiting_is_better: bool) -> None:
    trial, choices = WaitingChoice(MissBudget()), []
    for _ in range(2400):
        choices.append(trial.should_wait)
        trial.record_batch([MS if trial.should_wait is waiting_is_better else 2 * MS], 0)
    share = choices[480:].count(waiting_is_better) / len(choices[480:])
    assert 0.85 < share < 1


def test_the_better_choice_may_change() -> None:
    trial = WaitingChoice(MissBudget())
    for waiting_is_better in (True, False, True):
        for _ in range(4800):
            trial.record_batch([MS if trial.should_wait is waiting_is_better else 2 * MS], 0)
        choices = []
        for _ in range(480):
            choices.append(trial.should_wait)
            trial.record_batch([MS if trial.should_wait is waiting_is_better else 2 * MS], 0)
        assert choices.count(waiting_is_better) > 400


# --- decisions ------------------------------------------------------------------------------------


def learn_load(
    limit_ms: float, delay_ms: float = 0, gap_ms: float = 1
) -> tuple[AdaptiveBatcher, int]:
    """Return a batcher that has learned 10 ms + 1 ms per request and bursts of 16."""
    batcher = adaptive_batcher(limit_ms, delay_ms=delay_ms)
    clock, now_ns = random.Random(3), 0
    for _ in range(60):
        size = clock.randint(1, 16)
        for queued_count in range(1, 17):
            now_ns += int(gap_ms * MS)
            batcher.record_arrival(now_ns, queued_count)
        now_ns += (10 + size) * MS
        batcher.record_batch(now_ns, 0, size, (10 + size) * MS, [MS])
    batcher._waiting_choice.should_wait = True
    return batcher, now_ns


def test_the_batcher_waits_for_a_burst_and_not_past_its_end() -> None:
    batcher, now_ns = learn_load(1000, gap_ms=0.1)
    queue: list[Item] = []
    for queued_count in range(1, 16):
        now_ns += MS // 10
        queue.append(Item(now_ns))
        batcher.record_arrival(now_ns, queued_count)
        decision = batcher.decide(now_ns, queue, 0)
        assert isinstance(decision, WaitUntil) and now_ns < decision.end_ns < now_ns + MS
    batcher.record_arrival(now_ns, 16)
    queue.append(Item(now_ns))
    assert batcher.decide(now_ns, queue, 0) == Batch(16, CloseReason.IDLE)


def test_the_batcher_waits_no_longer_than_the_setup_of_an_execution() -> None:
    batcher, now_ns = learn_load(1000, gap_ms=1)
    start_ns, queue, queued_count = now_ns, [], 0
    while True:
        now_ns, queued_count = now_ns + MS, queued_count + 1
        queue.append(Item(now_ns))
        batcher.record_arrival(now_ns, 3)  # more requests seem to be in transit
        decision = batcher.decide(now_ns, queue, 0)
        if isinstance(decision, Batch):
            break
    assert decision == Batch(queued_count, CloseReason.IDLE) and now_ns - start_ns <= 12 * MS


def test_the_batcher_does_not_wait_where_the_target_would_be_missed() -> None:
    batcher, now_ns = learn_load(14, gap_ms=0.1)
    batcher.record_arrival(now_ns, 1)
    assert isinstance(batcher.decide(now_ns, [Item(now_ns)], 0), WaitUntil)
    assert batcher.decide(now_ns, [Item(now_ns - 4 * MS)], 0) == Batch(1, CloseReason.TARGET)


def test_a_configured_delay_bounds_the_wait() -> None:
    batcher, now_ns = learn_load(1000, delay_ms=0.05, gap_ms=0.1)
    batcher.record_arrival(now_ns, 1)
    assert batcher.decide(now_ns, [Item(now_ns)], 0) == WaitUntil(now_ns + MS // 20)
    assert batcher.decide(now_ns + MS // 20, [Item(now_ns)], 0) == Batch(1, CloseReason.IDLE)


def test_a_deadline_and_a_drain_end_the_wait() -> None:
    batcher, now_ns = learn_load(1000, gap_ms=0.1)
    batcher.record_arrival(now_ns, 1)
    item = Item(now_ns, flush_by_ns=now_ns + 15 * MS)
    assert batcher.decide(now_ns, [item], 15 * MS) == Batch(1, CloseReason.DEADLINE)
    assert isinstance(batcher.decide(now_ns, [item], 0), WaitUntil)
    batcher.flush()
    assert batcher.decide(now_ns, [item], 0) == Batch(1, CloseReason.IDLE)


def test_a_batch_is_split_if_only_the_whole_would_be_late() -> None:
    """Of 10 ms + 1 ms per request: 12 requests take 22 ms; 9 take 19, the other 3 take 13."""
    batcher, now_ns = learn_load(42, gap_ms=0.1)
    older_items = [Item(now_ns - 22 * MS) for _ in range(4)]
    new_items = [Item(now_ns) for _ in range(8)]
    assert batcher.decide(now_ns, older_items + new_items, 0) == Batch(9, CloseReason.TARGET)
    # If some requests are late in any case, the batch is as large as possible to catch up.
    earlier_items = [Item(now_ns - 60 * MS) for _ in range(4)]
    assert batcher.decide(now_ns, earlier_items + new_items, 0) == Batch(12, CloseReason.TARGET)


@st.composite
def batcher_states(draw: st.DrawFn) -> tuple[Batcher, int, list[Item]]:
    """Draw a batcher that has learned any load, the time, and a queue."""
    max_batch_size = draw(st.integers(1, 12))
    batcher: Batcher = adaptive_batcher(draw(st.sampled_from([1, 20, 500])), max_batch_size)
    now_ns = queued = 0
    for step in draw(st.lists(st.integers(0, 30), max_size=120)):
        now_ns += step * MS
        if draw(st.booleans()) or not queued:
            queued += 1
            batcher.record_arrival(now_ns, queued)
        else:
            executed = draw(st.integers(1, min(queued, max_batch_size)))
            queued -= executed
            batcher.record_batch(now_ns, queued, executed, step * MS, [step * MS] * executed)
    item = st.builds(
        Item,
        enqueued_ns=st.integers(now_ns - 40 * MS, now_ns),
        rows=st.integers(1, max_batch_size),
        shape_key=st.sampled_from([b"a", b"a", b"a", b"b"]),
    )
    return batcher, now_ns, draw(st.lists(item, min_size=1, max_size=14))


@given(batcher_states())
def test_decisions_are_legal_and_waits_end(drawn_case: tuple[Batcher, int, list[Item]]) -> None:
    batcher, now_ns, queue = drawn_case
    max_batch_size = batcher._rules.max_batch_size  # type: ignore[attr-defined]
    for _ in range(1000):
        if not queue:
            return
        decision = batcher.decide(now_ns, queue, 0)
        assert decision is not None
        if isinstance(decision, WaitUntil):
            assert decision.end_ns > now_ns
            now_ns = decision.end_ns
            continue
        batch_items = queue[: decision.count]
        assert 1 <= decision.count <= len(queue)
        assert sum(item.rows for item in batch_items) <= max_batch_size
        assert len({item.shape_key for item in batch_items}) == 1
        del queue[: decision.count]
    pytest.fail("it waits for ever")


# --- simulated latency and throughput -------------------------------------------------------------


@pytest.mark.parametrize("clients", [2, 5, 10, 20])
def test_waiting_for_clients_raises_the_throughput(clients: int) -> None:
    """The throughput exceeds that of both fixed strategies, within the target."""
    runs = [
        Simulation(batcher, linear(10, 0.5, noise=0.3)).closed_loop(
            clients, 200 * clients, uniform_pauses(0.4)
        )
        for batcher in (adaptive_batcher(60), fixed_batcher(0), fixed_batcher(5))
    ]
    assert runs[0].per_second > 1.05 * max(runs[1].per_second, runs[2].per_second)
    assert runs[0].percentile_ms(99) < 60


@pytest.mark.parametrize("clients", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("pause_ms", [2, 4, 8])
def test_scattered_requests_are_hardly_delayed(clients: int, pause_ms: float) -> None:
    simulations = [
        Simulation(batcher, linear(4.3, 0.4, noise=0.3)).closed_loop(
            clients, 300 * clients, exponential_pauses(pause_ms)
        )
        for batcher in (adaptive_batcher(30), fixed_batcher(0))
    ]
    assert simulations[0].per_second > 0.97 * simulations[1].per_second


def test_a_single_client_is_not_delayed() -> None:
    simulation, eager = (
        Simulation(batcher, linear(4, 0.5)).closed_loop(1, 200, uniform_pauses(0.4))
        for batcher in (adaptive_batcher(100), fixed_batcher(0))
    )
    assert simulation.per_second > 0.98 * eager.per_second


@pytest.mark.parametrize("per_second", [20, 100, 300, 600])
def test_the_target_is_met_where_possible(per_second: float) -> None:
    """A fixed delay for full batches would miss the target."""
    run = Simulation(adaptive_batcher(40), linear(10, 0.5, noise=0.3)).open_loop(per_second, 3000)
    assert run.percentile_ms(99) < 40
    waiting = Simulation(fixed_batcher(30), linear(10, 0.5, noise=0.3)).open_loop(per_second, 3000)
    assert waiting.percentile_ms(99) > 40


def test_an_overload_is_served_in_full_batches() -> None:
    simulation = Simulation(adaptive_batcher(20), linear(10, 0.5)).open_loop(2000, 4000)
    eager = Simulation(fixed_batcher(0), linear(10, 0.5)).open_loop(2000, 4000)
    assert simulation.per_second > 0.98 * eager.per_second
    assert sum(simulation.sizes) / len(simulation.sizes) > 30
