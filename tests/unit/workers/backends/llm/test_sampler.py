"""The sampler: equal to transformers' logits processors, and draws that are reproducible."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shmserve.workers.backends.llm import grammars, sampler, worker_engine
from shmserve.workers.backends.llm.parameters import GenerationParameters, parse
from tests.rigs.llm_rig import llm_rig

VOCABULARY = 3000
PROMPT, EMITTED_TOKENS = [5, 9, 9, 200], [9, 7, 7]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_k": 7},
    {"top_p": 0.6},
    {"top_p": 0.999},  # selects more tokens than the first search contains
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"repetition_penalty": 1.4},
    {"min_tokens": 4, "stop_token_ids": (44,)},
    {"logit_bias": {3: 5.0, 9: -100.0}, "repetition_penalty": 0.8, "top_k": 20},
]


def new_row(**fields: Any) -> sampler.SampledRow:
    parameters = GenerationParameters(**{"seed": 1, **fields})
    end_tokens = (2, *parameters.stop_token_ids)
    return sampler.SampledRow(parameters, 0, [*PROMPT, *EMITTED_TOKENS], len(PROMPT), end_tokens)


def expected_probabilities(logits: torch.Tensor, parameters: GenerationParameters) -> torch.Tensor:
    steps = LogitsProcessorList()
    if parameters.logit_bias:
        bias = [[[token], value] for token, value in parameters.logit_bias.items()]
        steps.append(SequenceBiasLogitsProcessor(bias))
    if parameters.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(parameters.repetition_penalty))
    if parameters.min_tokens:
        end_tokens = [2, *parameters.stop_token_ids]
        min_tokens = parameters.min_tokens
        steps.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), min_tokens, end_tokens))
    steps.append(TemperatureLogitsWarper(parameters.temperature))
    if parameters.top_k:
        steps.append(TopKLogitsWarper(parameters.top_k))
    if parameters.top_p < 1:
        steps.append(TopPLogitsWarper(parameters.top_p))
    if parameters.min_p:
        steps.append(MinPLogitsWarper(parameters.min_p))
    ids = torch.tensor([[*PROMPT, *EMITTED_TOKENS]])
    probabilities: torch.Tensor = steps(ids, logits.unsqueeze(0).clone()).softmax(-1)[0]
    return probabilities


def test_distributions_equal_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(SETTINGS), VOCABULARY, generator=generator) * 2
    rows = [new_row(**settings) for settings in SETTINGS]
    targets = [
        expected_probabilities(line, row.parameters) for line, row in zip(logits, rows, strict=True)
    ]
    sampler.process(logits, rows)
    probabilities = sampler.distribution(logits, rows)  # all rows in one call
    for index, settings in enumerate(SETTINGS):
        assert torch.allclose(probabilities[index], targets[index], atol=1e-6), settings


def test_penalties_of_presence_and_frequency() -> None:
    logits = torch.zeros(1, 20)
    row = new_row(presence_penalty=0.5, frequency_penalty=0.25)
    row.tokens, row.prompt_length = [1, 1, 3, 4, 4], 1
    sampler.process(logits, [row])
    assert logits[0, :6].tolist() == [0.0, -0.75, 0.0, -0.75, -1.0, 0.0]


def test_only_allowed_tokens_are_sampled() -> None:
    bits = torch.zeros(2, dtype=torch.int32)
    bits[0], bits[1] = -(1 << 31) | 1, 4  # allows the tokens 31, 0 and 34
    row = new_row(temperature=0.0)
    row.allowed_bits = bits
    logits = torch.arange(100.0).unsqueeze(0)
    sampler.process(logits, [row])
    assert logits[0].isfinite().nonzero().flatten().tolist() == [0, 31, 34]


def test_draws_depend_only_on_seed_sample_and_position() -> None:
    logits = torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(0))
    rows = [new_row(seed=seed, temperature=1.5) for seed in range(8)]
    batched_tokens, _ = sampler.sample(logits, rows)
    single_tokens = [sampler.sample(logits[n : n + 1], rows[n : n + 1])[0][0] for n in range(8)]
    assert batched_tokens == single_tokens
    numbers = {new_row(seed=seed).draw(purpose) for seed in range(50) for purpose in range(3)}
    for sample in range(50):
        row = new_row()
        row.sample = sample
        numbers.add(row.draw())
    assert len(numbers) == 199  # sample 0 of seed 1 was in the set before


def test_sampled_tokens_follow_their_probabilities() -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    logits = torch.tensor(probabilities).log().float().repeat(20_000, 1)
    rows = [new_row(seed=seed) for seed in range(20_000)]
    counts = Counter(sampler.sample(logits, rows)[0])
    frequencies = [counts[token] for token in range(4)]
    assert chisquare(frequencies, probabilities * 20_000).pvalue > 1e-4


def test_a_draft_token_that_the_grammar_rejects_does_not_change_probabilities() -> None:
    target, draft = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.5, 0.0, 0.5])
    rows: list[sampler.SampledRow] = []
    checks: list[sampler.DraftCheck] = []
    for seed in range(4000):
        row = new_row(seed=seed)
        (token,) = sampler.pick(draft.unsqueeze(0), [row.draw(sampler.PROPOSAL)])
        accepted_tokens = [token] if target[token] else []
        checks.append(sampler.DraftCheck(len(rows), sampler.Proposal(accepted_tokens, [draft])))
        rows += [row] * (1 + len(accepted_tokens))
    texts = sampler.verify(target.log().repeat(len(rows), 1), rows, checks)
    counts = Counter(tokens[0] for tokens in texts)
    assert chisquare([counts[0], counts[1]]).pvalue > 1e-4


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.zeros(3, 50)
    logits[:, 7] = 30.0
    mixed_rows = [new_row(temperature=0.0), new_row(), new_row(temperature=0.0)]
    assert sampler.sample(logits, mixed_rows)[0] == [7] * 3


def test_logprobs_are_computed_from_the_models_logits() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    first_entry, second = sampler.logprobs(logits, [4, 5], 3)
    expected = logits.log_softmax(-1)
    assert first_entry.logprob == pytest.approx(expected[0, 4].item())
    top = expected[1].topk(3)
    assert second.top == list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    many_logits = logits.repeat(20, 1)
    assert sampler.logprobs(many_logits, [4, 5] * 20, 3) == [first_entry, second] * 20
    tokens, scores = sampler.candidates(logits[0], 4)
    assert scores == sorted(scores, reverse=True) and len(tokens) == 4


Folder = Callable[..., Path]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of functions that only grammars need."""
    call_counts: Counter[str] = Counter()

    def count_calls(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call_counted(*arguments: Any) -> Any:
            call_counts[name] += 1
            return original(*arguments)

        monkeypatch.setattr(owner, name, call_counted)

    for owner, name in (
        (worker_engine, "allowed_tokens"),
        (grammars, "_bitmask"),
        (grammars.Grammars, "matcher"),
        (sampler, "_mask"),
    ):
        count_calls(owner, name)
    return call_counts


def test_requests_without_a_grammar_call_no_grammar_code(
    folder: Folder, tmp_path: Path, calls: Counter[str]
) -> None:
    fields: dict[str, Any] = {"input_ids": [5, 6, 7], "max_tokens": 9, "ignore_eos": True}
    with llm_rig(tmp_path / "rig", folder()) as scheduler:
        for key in range(1, 5):
            scheduler.add(key, **fields, n=2)
        scheduler.run()
        assert not calls
        scheduler.add(5, **fields)
        scheduler.generate(6, input_ids=[5, 6, 7], max_tokens=9, regex="[ab]{4}")
        rows = len(scheduler.tokens(6))
        assert calls == {"matcher": 1, "allowed_tokens": rows, "_bitmask": rows, "_mask": rows}


def test_allowed_tokens_and_bad_words() -> None:
    logits = torch.zeros(2, 10)
    allowed_only = GenerationParameters(allowed_token_ids=(2, 3), logit_bias={2: 1.0})
    banned = GenerationParameters(forbidden_after=lambda tokens: np.array([4, len(tokens), 4]))
    rows = [
        sampler.SampledRow(parameters, 0, [*PROMPT, *EMITTED_TOKENS], len(PROMPT), ())
        for parameters in (allowed_only, banned)
    ]
    sampler.process(logits, rows)
    assert logits[0].isfinite().nonzero().flatten().tolist() == [2, 3]
    assert logits[0, 2] == 1
    assert (~logits[1].isfinite()).nonzero().flatten().tolist() == [3, 4]


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-30, 1e-6, 1e-3])
def test_a_temperature_near_zero_is_the_likeliest_token(temperature: float) -> None:
    logits = torch.tensor([[1e4, -1e4, 1.0, 1e4 + 1]])
    row = sampler.SampledRow(GenerationParameters(temperature=temperature), 0, [1], 1, ())
    assert sampler.distribution(logits, [row])[0].tolist() == [0, 0, 0, 1]


EXTREME_VALUES: dict[str, tuple[Any, Any]] = {
    "temperature": (1e-300, 100.0),
    "top_p": (1e-300, 1.0),
    "top_k": (1, 1 << 24),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "min_tokens": (0, 16),
}


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("name", EXTREME_VALUES)
@pytest.mark.parametrize("bound_index", [0, 1])
def test_extreme_parameters_are_a_distribution(name: str, bound_index: int, scale: float) -> None:
    parameters = parse({name: EXTREME_VALUES[name][bound_index]}, {}, VOCABULARY)
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(0)) * scale
    logits[0, 5:7] = -torch.inf
    best_token = int(logits.argmax())
    row = sampler.SampledRow(parameters, 0, [*PROMPT, 9, best_token], len(PROMPT), (2,))
    if "penalty" in name:
        sampler.process(logits, [row])
    chances = sampler.distribution(logits, [row])[0]
    assert chances.isfinite().all() and float(chances.sum()) == pytest.approx(1, abs=1e-4)
    assert not chances[5:7].any()
    greedy_settings = {("temperature", 0), ("top_p", 0), ("top_k", 0), ("min_p", 1)}
    if (name, bound_index) in greedy_settings and (scale >= 1 or name in ("top_k", "min_p")):
        assert float(chances[best_token]) == pytest.approx(1)
    assert 0 <= row.draw() < 1
    assert 0 <= sampler.pick(chances.unsqueeze(0), [row.draw()])[0] < VOCABULARY
