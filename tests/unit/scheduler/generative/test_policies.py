"""The scheduling policies, and decisions based on the measured durations of steps."""

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.messages.generation import Stepped
from shmserve.scheduler.generative.sequences import Generation, Sequence, ranking
from shmserve.scheduler.generative.steps import (
    Acceptance,
    RunningStep,
    StepTimes,
    StepWork,
)
from shmserve.scheduler.tables import GenerationStats

SECOND_NS = 1_000_000_000
NOW = 100 * SECOND_NS


def sequence(number: int, tokens: int, waited_s: float = 0, priority: int = 0) -> Sequence[None]:
    prompt = array("i", [1] * (tokens // 2))
    arrived = NOW - int(waited_s * SECOND_NS)
    max_tokens = tokens - len(prompt)
    generation: Generation[None] = Generation(None, number, arrived, prompt, max_tokens)
    generation.priority = priority
    return Sequence(number, generation, 0, prompt[:])


# The policy, the attributes of the sequence that runs first, and those of the other sequence.
FIRST_SEQUENCES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("fcfs", {"waited_s": 2, "tokens": 900, "priority": 3}, {"waited_s": 1, "tokens": 9}),
    ("sjf", {"tokens": 9, "priority": 3}, {"tokens": 10}),
    ("sjf", {"tokens": 200, "waited_s": 2}, {"tokens": 100, "waited_s": 1}),
    ("sjf", {"tokens": 100, "waited_s": 1}, {"tokens": 210, "waited_s": 2}),
    ("priority", {"tokens": 900, "priority": 0}, {"tokens": 9, "priority": 1}),
    ("priority", {"tokens": 9, "priority": 1}, {"tokens": 10, "priority": 1}),
    ("priority", {"tokens": 9, "priority": 1, "waited_s": 10.1}, {"tokens": 9, "priority": 0}),
    # Sequences that wait longer than the maximum of 30 s run in order of arrival.
    ("sjf", {"tokens": 90_000, "waited_s": 31}, {"tokens": 9, "waited_s": 29}),
    ("priority", {"tokens": 9, "priority": 9, "waited_s": 32}, {"tokens": 9, "waited_s": 31}),
)


@pytest.mark.parametrize(("policy", "first_values", "second_values"), FIRST_SEQUENCES)
@pytest.mark.parametrize("numbers", [(1, 2), (2, 1)])
def test_the_order_of_sequences(
    policy: str,
    first_values: dict[str, Any],
    second_values: dict[str, Any],
    numbers: tuple[int, int],
) -> None:
    rank = ranking(EngineSettings.of({"scheduling_policy": policy}), NOW)
    earlier_sequence, later_sequence = (
        sequence(number, **{"tokens": 9, **policy_value})
        for number, policy_value in zip(numbers, (first_values, second_values), strict=True)
    )
    assert rank(earlier_sequence) < rank(later_sequence)


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority"])
def test_ties_are_broken_by_arrival_then_by_number(policy: str) -> None:
    rank = ranking(EngineSettings.of({"scheduling_policy": policy, "max_wait_time_ms": 1}), NOW)
    first, second, last = (sequence(3, 9, 2), sequence(1, 9, 1), sequence(2, 9, 1))
    assert sorted([last, second, first], key=rank) == [first, second, last]


def learn_step_times(steps: int = 400) -> StepTimes:
    """Return estimates of steps of 4 ms, 1 ms per decoded and 0.25 ms per prompt token."""
    step_times = StepTimes()
    for step in range(steps):
        load = StepWork(step % 9, step % 7 * 16, step % 5 * 1000)
        step_times.observe(load, 4 + load.decoded_tokens + load.prefilled_tokens / 4)
    return step_times


def test_the_time_of_a_step_is_learned() -> None:
    step_times = learn_step_times()
    assert step_times.expected_ms(StepWork(8, 0)) == pytest.approx(12, rel=0.05)
    assert step_times.prompt_token_ms == pytest.approx(0.25, rel=0.05)


def test_similar_steps_do_not_distort_the_estimate() -> None:
    """One request for a long time, empty steps, prompts, and cheap draft tokens."""
    step_times = StepTimes()
    for _ in range(3):
        for keys in range(300):
            step_times.observe(StepWork(1, 0, keys), 11.3)
        step_times.observe(StepWork(), 0.07)
        assert step_times.expected_ms(StepWork(1, 0, 300)) == pytest.approx(11.3, rel=0.05)
        assert step_times.draft_length(1, 0.8, 4)
        step_times.observe(StepWork(0, 174, 30_000), 100.0)
        for keys in range(174, 230):
            step_times.observe(StepWork(5, 0, keys), 10.0)
            assert step_times.draft_length(1, 0.8, 4)
        assert step_times.expected_ms(StepWork(5, 0, 230)) == pytest.approx(10.0, rel=0.05)
        step_times.observe(StepWork(3, 0, 231), 10.5)
        assert step_times.draft_length(1, 0.8, 4)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 64), st.integers(0, 512), st.integers(0, 10**6), st.floats(0.01, 500)
        ),
        max_size=40,
    ),
    st.integers(1, 64),
    st.floats(0.5, 200),
)
def test_the_estimate_converges_to_repeated_observations(
    observations: list[tuple[int, int, int, float]], decoded_count: int, took_ms: float
) -> None:
    step_times = StepTimes()
    for *step_work, observed_ms in observations:
        step_times.observe(StepWork(*step_work), observed_ms)
    for _ in range(600):
        step_times.observe(StepWork(decoded_count), took_ms)
    assert step_times.expected_ms(StepWork(decoded_count)) == pytest.approx(took_ms, rel=0.05)
    assert step_times.prompt_token_ms > 0


def test_a_chunk_fits_the_target_beside_decoding_sequences() -> None:
    step_times = learn_step_times()
    assert (
        step_times.fitting_tokens(StepWork(8, 0), 0, 31.0) == 64
    )  # 19 ms remain, enough for 76 tokens
    assert step_times.fitting_tokens(StepWork(0, 0), 0, 33.0) == 112
    assert step_times.fitting_tokens(StepWork(8, 0), 0, 5.0) == 16
    assert step_times.fitting_tokens(StepWork(8, 16), 0, 5.0) == 0


def test_chunks_shrink_with_the_length_of_the_prefix() -> None:
    """At the end of the prompt, attention costs as much as the linear layers, as on a CPU."""

    def step_ms(load: StepWork) -> float:
        return 5 + load.decoded_tokens + load.prefilled_tokens / 5 + load.attention_pairs * 20e-5

    step_times, chunks = StepTimes(), []
    for _ in range(2):  # the estimates are learned in the first round
        for keys in range(100, 200):
            load = StepWork(4, 0, 4 * keys)
            step_times.observe(load, step_ms(load))
        chunk_start, steps = 0, []
        while chunk_start < 900:
            count = step_times.fitting_tokens(StepWork(4, 0, 800), chunk_start, 50.0)
            load = StepWork(4, count, 800 + count * (chunk_start + count))
            chunk_start += count
            steps.append(step_ms(load))
            step_times.observe(load, steps[-1])
            chunks.append(count)
    assert max(steps) < 53
    assert min(steps[:-1]) > 40  # the prompt makes progress in every step
    assert chunks[-2] < chunks[len(chunks) - len(steps)]


def test_a_copy_that_costs_more_than_computing_does_not_pay() -> None:
    step_times = learn_step_times()
    for _ in range(100):
        step_times.observe_copies(10, 20.0)
    assert step_times.copy_ms == pytest.approx(2.0, rel=0.05)
    assert not step_times.swap_pays(1, 15)  # a swap takes 4 ms, a recomputation 3.75 ms
    assert step_times.swap_pays(1, 17)


def test_drafts_are_as_long_as_pays() -> None:
    step_times = learn_step_times()
    for _ in range(100):
        step_times.observe_drafts(4, 0.4)
    assert step_times.draft_length(1, 0.9, 4) == 4
    assert step_times.draft_length(1, 0.1, 4) == 0
    assert 0 < step_times.draft_length(1, 0.5, 8) < 8
    for _ in range(100):
        step_times.observe_drafts(4, 400.0)
    assert step_times.draft_length(1, 0.9, 4) == 0


def test_a_prompt_that_a_draft_model_reads_does_not_end_its_proposals() -> None:
    step_times = learn_step_times()
    for _ in range(100):
        step_times.observe_drafts(4, 4.0)
    assert step_times.draft_ms == pytest.approx(1.0, rel=0.05)
    step_times.observe_drafts(2, 100.0)
    assert step_times.draft_ms < 1.4
    for _ in range(100):
        step_times.observe_drafts(4, 400.0)
    assert step_times.draft_ms == pytest.approx(100.0, rel=0.05)


def test_a_step_with_copies_and_drafts_is_divided_into_its_parts() -> None:
    times, expected = StepTimes(), StepTimes()
    step = RunningStep(1, {}, StepWork(2), copied_blocks=10, draft_count=4)
    milliseconds = {"gather_ns": 9, "forward_ns": 20, "sample_ns": 3, "draft_ns": 8}
    spent: Any = {name: value * 1_000_000 for name, value in milliseconds.items()}
    step.observe(Stepped(1, [], **spent), times, GenerationStats())
    expected.observe_copies(10, 1.0)
    expected.observe_drafts(4, 8.0)
    expected.observe(StepWork(2), 23.0)
    assert (times.copy_ms, times.draft_ms) == (expected.copy_ms, expected.draft_ms)
    assert times.expected_ms(StepWork(3)) == expected.expected_ms(StepWork(3))


def test_rejected_drafts_cause_a_pause() -> None:
    acceptance = Acceptance()
    assert acceptance.draft_count(4, 0.3) == 4
    while acceptance.rate >= 0.3:
        acceptance.observe(4, 0)
    assert [acceptance.draft_count(4, 0.3) for _ in range(52)] == [0] * 51 + [4]


def test_drafts_after_a_rejected_one_are_not_observations() -> None:
    one_draft, four_drafts = Acceptance(0.5), Acceptance(0.5)
    one_draft.observe(1, 0)
    four_drafts.observe(4, 0)
    assert one_draft.rate == four_drafts.rate < 0.5
    four_drafts.observe(4, 4)
    assert four_drafts.rate > 0.5
