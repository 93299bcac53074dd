"""The engine: no plan changes a sample's tokens, leaks a block or overtakes a request."""

import random
from array import array
from typing import Any

import pytest

from shmserve.ipc.messages.generation import BeamSearch, RowResult
from shmserve.scheduler.generative.sequences import Beams, Generation, Sequence, SequenceStatus
from tests.simulation.generative import VARIANTS, EngineRig, Schedule, engine_settings
from tests.support.generative_worker import END_TOKEN, VOCABULARY_SIZE


def make_rig(**settings: Any) -> EngineRig:
    return EngineRig(engine_settings(**settings))


def submit(rig: EngineRig, prompt: list[int], max_tokens: int, **settings: Any) -> Generation[None]:
    generation = rig.submit(prompt, max_tokens, **settings)
    assert generation is not None
    return generation


def test_a_request_receives_its_tokens() -> None:
    rig = make_rig()
    generation = submit(rig, list(range(1, 10)), 20)
    rig.drain()
    rig.verify(generation, [0])


# Seed 5197: a sequence with a block for drafts is swapped out, and resumes when blocks are scarce.
# Seed 906: blocks promised to the samples of a one-token prompt stay reserved.
@pytest.mark.parametrize("seed", [*range(3 * len(VARIANTS)), 5197, 906])
def test_any_schedule_generates_the_tokens_of_each_request_alone(seed: int) -> None:
    schedule = Schedule(seed)
    schedule.run()
    if VARIANTS[seed % len(VARIANTS)].get("preemption_mode") == "recompute":
        assert schedule.rig.engine.counts.preemptions["recompute"]


@pytest.mark.parametrize(("blocks", "row_count"), [(14, 4), (20, 4), (20, 8), (64, 8)])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_beam_searches_side_by_side(blocks: int, row_count: int, mode: str) -> None:
    rig = make_rig(kv_cache_blocks=blocks, max_batch_size=row_count, preemption_mode=mode)
    search = BeamSearch(3, 0.7, "false", [END_TOKEN, 7, 19])
    random_ = random.Random(blocks)
    for _ in range(8):
        prompt = [random_.randint(1, VOCABULARY_SIZE) for _ in range(random_.randint(1, 12))]
        submit(rig, prompt, random_.randint(1, 14), beams=search)
        submit(rig, prompt, 10)
    rig.drain()
    for generation in rig.generations.values():
        rig.verify(generation, [0])


def test_beams_without_a_free_row_take_none_from_other_sequences() -> None:
    rig = make_rig(kv_cache_blocks=14, max_batch_size=4, preemption_mode="recompute")
    search = BeamSearch(2, 0.7, "false", [END_TOKEN, 7, 19])
    submit(rig, [1] * 4, 11, beams=search)
    submit(rig, [2] * 8, 13)
    submit(rig, [3] * 9, 13)
    submit(rig, [7], 2, beams=search)
    submit(rig, [8], 2)
    rig.drain()


def test_beams_continue_from_shared_blocks() -> None:
    rig = make_rig()
    submit(rig, [5] * 10, 6, beams=BeamSearch(3, 1.0, "false", []))
    rig.drain()
    counts = rig.engine.counts
    assert counts.prefilled + counts.decoded == 10 + 5 * 3
    assert not any(counts.preemptions.values())


def test_a_shared_prefix_is_computed_once() -> None:
    rig = make_rig()
    prompt = [5] * 33
    submit(rig, prompt, 2)
    rig.drain()
    counts = rig.engine.counts
    prefilled_before = counts.prefilled
    submit(rig, [*prompt, 8], 2)
    rig.drain()
    assert (counts.prefix_hits, counts.prefilled - prefilled_before) == (32, 2)
    submit(rig, prompt, 2, ignores_prefix_cache=True)
    rig.drain()
    assert counts.prefix_hits == 32


def test_swapped_blocks_are_found_by_other_sequences() -> None:
    rig = make_rig(kv_cache_blocks=8, preemption_mode="swap")
    _, second_generation = (submit(rig, [token] * 12, 12) for token in (1, 2))
    rig.drain()
    counts = rig.engine.counts
    assert counts.swapped_in
    tokens, _ = rig.ended[second_generation.key, 0]
    hits_before = counts.prefix_hits
    submit(rig, [*second_generation.prompt, *tokens], 1)
    rig.drain()
    assert len(tokens) == 12
    assert counts.prefix_hits - hits_before == 20


def test_a_generation_that_can_never_run_is_rejected() -> None:
    rig = make_rig(kv_cache_blocks=4)
    assert rig.submit([1] * 10, 8) is None
    assert rig.submit([1], 2, beams=BeamSearch(9, 1.0, "false", [])) is None
    assert rig.submit([1] * 10, 2, beams=BeamSearch(4, 1.0, "false", [])) is None
    assert rig.submit([1] * 10, 7) is not None


@pytest.mark.parametrize("preemption", [True, False])
def test_more_samples_than_rows_run_one_after_the_other(preemption: bool) -> None:
    rig = make_rig(kv_cache_blocks=32, max_batch_size=3, enable_preemption=preemption)
    generation = submit(rig, [5] * 9, 4, samples=11)
    rig.drain()
    assert {sample for key, sample in rig.ended if key == generation.key} == set(range(11))
    assert rig.engine.counts.prefilled < 11 * 9  # the samples share the prompt


def test_without_preemption_all_samples_must_fit_together() -> None:
    assert make_rig(kv_cache_blocks=8).submit([1] * 12, 13, samples=4) is not None
    for blocks, all_fit in ((19, True), (18, False)):
        rig = make_rig(kv_cache_blocks=blocks, enable_preemption=False)
        assert (rig.submit([1] * 12, 13, samples=4) is not None) == all_fit
        rig.drain()
        assert not any(rig.engine.counts.preemptions.values())


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_no_sequence_overtakes_an_earlier_waiting_sequence(policy: str, mode: str) -> None:
    rig = make_rig(kv_cache_blocks=17, scheduling_policy=policy, preemption_mode=mode)
    waiting = [submit(rig, [2 + index, 1, 4, 1, 5], 18) for index in range(8)]
    start_order: list[int] = []
    while rig.run_turn():
        started = [g for g in waiting if g.sequences]
        running = [g.sequences[0].status is SequenceStatus.RUNNING for g in started]
        assert running == sorted(running, reverse=True)
        start_order += [g.key for g in started if g.sequences[0].generated_tokens == 1]
    assert start_order == sorted(start_order)
    assert rig.engine.counts.preemptions[mode]


def test_the_last_sequence_in_order_is_preempted() -> None:
    rig = make_rig(kv_cache_blocks=8, scheduling_policy="priority")
    later_generation = submit(rig, [1] * 12, 12, priority=3)
    rig.run_turn()
    first_generation = submit(rig, [2] * 12, 12)
    rig.drain()
    assert (first_generation.preemptions, later_generation.preemptions) == (0, 1)


def test_a_step_that_preempted_admits_no_request() -> None:
    rig = make_rig(kv_cache_blocks=9, max_batch_size=2)
    _, second, third_generation = (
        submit(rig, [token] * length, 12) for token, length in ((1, 12), (2, 16), (3, 4))
    )
    while rig.run_turn():
        if second.sequences and second.sequences[0].status is not SequenceStatus.RUNNING:
            assert third_generation.sequences[0].status is SequenceStatus.WAITING
    assert second.preemptions


def test_sequences_of_the_running_step_are_not_preempted() -> None:
    rig = make_rig(kv_cache_blocks=9, prefill_chunk_size=4)
    long_generation, short_generation = submit(rig, [1] * 28, 2), submit(rig, [2] * 4, 12)
    rig.drain()
    assert (long_generation.preemptions, short_generation.preemptions) == (1, 0)
    for generation in (long_generation, short_generation):
        rig.verify(generation, [0])


@pytest.mark.parametrize("proposals", [1, 3])
def test_accepted_drafts_are_computed_once_and_shared(proposals: int) -> None:
    speculation = {"enabled": True, "adaptive_length": False, "num_spec_tokens": 4}
    rig = EngineRig(engine_settings(speculative_decoding=speculation), proposals)
    first_generation = submit(rig, [4] * 5, 20)
    rig.drain()
    tokens, finish_reason = rig.ended[first_generation.key, 0]
    assert finish_reason == "length"
    # The prompt, and 19 tokens in steps of 4 + 1, 4 + 1, 4 + 1 and 3 + 1.
    assert rig.rows == 5 or proposals < 3
    assert rig.engine.counts.prefilled == 5 and not rig.engine.counts.copied_on_write
    submit(rig, [*first_generation.prompt, *tokens], 1)
    rig.drain()
    assert rig.engine.counts.prefix_hits == 24


def test_prompts_do_not_delay_decoding_sequences() -> None:
    rig = make_rig(prefill_chunk_size=16, max_prefill_tokens=16, max_tokens_per_batch=16)
    first_generation = submit(rig, [1] * 5, 12)
    rig.run_turn()
    long_generation = submit(rig, [2] * 100, 2)
    for generated_count in range(2, 8):
        rig.run_turn()
        assert first_generation.sequences[0].generated_tokens == generated_count
    # Beside a decoded token, 15 tokens of the budget remain. A chunk below 16 may be cut anywhere.
    assert long_generation.sequences[0].computed_tokens == 6 * 15


def test_prompts_are_cut_at_multiples_of_16() -> None:
    rig = make_rig(prefill_chunk_size=32, max_prefill_tokens=40)
    first, second = submit(rig, [1] * 70, 1), submit(rig, [2] * 70, 1)
    rig.run_turn()
    counts = [s.sequences[0].computed_tokens for s in (first, second)]
    assert counts == [
        32,
        0,
    ]  # the remaining 8 tokens of the step are no multiple of the chunk
    rig = make_rig(prefill_chunk_size=29)
    generation = submit(rig, [1] * 70, 1)
    rig.run_turn()
    assert generation.sequences[0].computed_tokens == 16


def test_a_latency_target_splits_prompts_beside_decoding_sequences() -> None:
    rig = make_rig(target_itl_ms=2.0)
    submit(rig, [1] * 5, 20)
    rig.run_turn()
    long_generation = submit(rig, [2] * 100, 2)
    rig.run_turn()
    assert long_generation.sequences[0].computed_tokens == 16


@pytest.mark.parametrize(("token_ms", "computed"), [(0.1, 200), (1.0, 64)])
def test_chunks_beside_decoding_sequences_take_50_ms_or_have_64_tokens(
    token_ms: float, computed: int
) -> None:
    rig = make_rig(prefill_chunk_size=512, max_prefill_tokens=512, max_tokens_per_batch=512)
    submit(rig, [1] * 5, 20)
    rig.run_turn()
    rig.engine.times._weights = [20.0, 1.0, token_ms, 0.0]
    long_generation = submit(rig, [2] * 200, 2)
    rig.run_turn()
    assert long_generation.sequences[0].computed_tokens == computed


def test_a_finished_request_leaks_nothing_in_the_engine() -> None:
    rig = make_rig(speculative_decoding={"enabled": True})
    search = BeamSearch(3, 1.0, "false", [])
    for _ in range(2):
        submit(rig, [1] * 5, 9)
        submit(rig, [1] * 5, 9, samples=2)
        submit(rig, [1] * 5, 9, beams=search)
    rig.run_turn()
    for generation in list(rig.generations.values())[:3]:
        rig.engine.cancel(generation)
    rig.drain()
    engine = rig.engine
    assert not (
        engine._beams
        or engine._acceptance
        or engine._new_sequences
        or engine._ended_sequence_numbers
    )


def test_a_stream_of_short_requests_starves_no_long_one() -> None:
    rig = make_rig(scheduling_policy="sjf", max_batch_size=2, max_wait_time_ms=50.0)
    long = submit(rig, [1] * 40, 20)
    for iteration in range(200):
        for _ in range(2):
            submit(rig, [2 + iteration % 40], 3)
        rig.run_turn()
        if long.sequences and long.sequences[0].status is SequenceStatus.RUNNING:
            assert iteration > 40
            break
    else:
        raise AssertionError("it never ran")


def test_drafts_leave_tokens_to_other_sequences() -> None:
    speculation = {"enabled": True, "num_spec_tokens": 15, "adaptive_length": False}
    rig = make_rig(max_tokens_per_batch=40, speculative_decoding=speculation)
    for token in (1, 2, 3):
        submit(rig, [token] * 4, 40)
    rig.run_turn()
    submit(rig, [4] * 16, 2)
    assert rig.plan() and rig.engine.running_step is not None
    counts = [row.count for _, row in rig.engine.running_step.rows.values()]
    assert counts == [1, 1, 1, 16] and rig.engine.running_step.draft_count
    rig.complete_step()
    rig.drain()


def test_as_many_beams_continue_beside_several_end_tokens() -> None:
    search = BeamSearch(2, 1.0, "false", [7, 8, 9])
    generation: Generation[None] = Generation(None, 1, 0, array("i", [1]), 5, beams=search)
    beams = Beams(generation)
    scores = [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    result = RowResult(1, [], candidates=[3, 7, 8, 9, 4, 5], scores=scores)
    beams.add(Sequence(1, generation, 0, generation.prompt), result)
    assert [candidate.token for candidate in beams.step()] == [3, 4]
    assert [array("i", hypothesis.tokens).tolist() for hypothesis in beams.hypotheses] == [[7]]
