"""Speculation: exact at every temperature, and as good as it can be."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from shmserve.workers.backends.llm.sampling.parameters import GenerationParameters
from shmserve.workers.backends.llm.sampling.sampler import (
    PROPOSAL,
    SampledRow,
    distribution,
    pick,
    sample,
)
from shmserve.workers.backends.llm.sampling.speculation import Check, Proposal, followers, verify
from tests.rigs.llm_rig import llm_rig
from tests.unit.workers.backends.llm.conftest import generated

Folder = Callable[..., Path]
SYMBOLS, LENGTH, TIMES = 5, 2, 6_000


def chain(seed: int) -> torch.Tensor:
    """The logits of a Markov chain."""
    return torch.randn(SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(seed)) * 1.5


def rows(texts: list[list[int]], parameters: GenerationParameters) -> list[SampledRow]:
    """A row for each text, all behind token 0 and with seeds of their own."""
    return [
        SampledRow(replace(parameters, seed=seed), 0, [0, *text], 1, ())
        for seed, text in enumerate(texts)
    ]


def spoken(
    target: torch.Tensor, draft: torch.Tensor, parameters: GenerationParameters
) -> list[tuple[int, ...]]:
    """Texts of LENGTH + 1 tokens, for which the draft has proposed LENGTH."""
    proposals = [Proposal() for _ in range(TIMES)]
    for _ in range(LENGTH):
        sampled = rows([each.tokens for each in proposals], parameters)
        chances = distribution(draft[[row.tokens[-1] for row in sampled]], sampled)
        drawn = pick(chances, [row.draw(PROPOSAL) for row in sampled])
        for proposal, token, chance in zip(proposals, drawn, chances, strict=True):
            proposal.tokens.append(token)
            proposal.chances.append(chance)
    by_length = [
        rows([p.tokens[:size] for p in proposals], parameters) for size in range(LENGTH + 1)
    ]
    checked = [row for text in zip(*by_length, strict=True) for row in text]
    checks = [Check(place * (LENGTH + 1), each) for place, each in enumerate(proposals)]
    texts = verify(target[[row.tokens[-1] for row in checked]], checked, checks)
    for _ in range(LENGTH):
        sampled = rows(texts, parameters)
        more, _ = sample(target[[row.tokens[-1] for row in sampled]], sampled)
        texts = [[*text, token] for text, token in zip(texts, more, strict=True)]
    return [tuple(text[: LENGTH + 1]) for text in texts]


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.7}, {"temperature": 1.5}, {"temperature": 1.0, "top_k": 3, "top_p": 0.8}],
)
def test_what_was_drawn_by_a_draft_does_not_change_the_distribution(
    settings: dict[str, Any],
) -> None:
    target, draft = chain(1), chain(2)
    parameters = GenerationParameters(**settings)
    counts = Counter(spoken(target, draft, parameters))
    chances = distribution(target, [SampledRow(parameters, 0, [0], 1, ())] * SYMBOLS).double()
    joint: dict[tuple[int, ...], float] = {
        (first, second, third): float(
            chances[0, first] * chances[first, second] * chances[second, third]
        )
        for first in range(SYMBOLS)
        for second in range(SYMBOLS)
        for third in range(SYMBOLS)
    }
    assert all(joint[key] for key in counts)
    likely = [key for key, chance in joint.items() if chance * TIMES >= 8]
    found = [counts[key] for key in likely]
    rest = TIMES - sum(found)
    wanted = [joint[key] * TIMES for key in likely]
    found, wanted = [*found, rest + 1], [*wanted, TIMES - sum(wanted) + 1]
    assert chisquare(found, wanted, sum_check=False).pvalue > 1e-4


def test_a_draft_that_is_the_model_is_always_right(folder: Folder, tmp_path: Path) -> None:
    path = folder(eos_token_id=[])
    engine = draft_of(path, 3)
    with llm_rig(tmp_path / "rig", path, engine, draft=3) as scheduler:
        for key, temperature in ((1, 0.0), (2, 1.0), (3, 1.7)):
            scheduler.add(
                key, input_ids=[key, 60, 7], temperature=temperature, max_tokens=41, seed=5
            )
        scheduler.run()
        full = [len(each.tokens) for each in scheduler.results if each.drafted == 3]
        assert set(full) == {4}  # what was proposed, and one more
        assert len(full) == 30
        assert scheduler.tokens(1) == generated(path, [1, 60, 7], max_new_tokens=41)


def draft_of(path: Path, count: int) -> dict[str, Any]:
    """Engine settings with a draft model."""
    return {
        "speculative_decoding": {
            "enabled": True,
            "method": "draft",
            "draft_model": str(path),
            "num_spec_tokens": count,
        }
    }


NGRAM = {"speculative_decoding": {"enabled": True, "method": "ngram"}}


@pytest.mark.parametrize("method", ["ngram", "draft"])
@pytest.mark.parametrize("disturbance", ["", "swap", "recompute"])
def test_greedy_texts_stay_as_they_are(
    folder: Folder, tmp_path: Path, method: str, disturbance: str
) -> None:
    path = folder()
    engine = NGRAM if method == "ngram" else draft_of(folder(seed=9, num_hidden_layers=1), 4)
    prompts = {key: [5, 6, 7, 8, 9, key, 5, 6, 7, 8] * 2 for key in (20, 21, 22)}
    with llm_rig(tmp_path / "rig", path, engine, draft=4, chunk=64) as scheduler:
        for key, tokens in prompts.items():
            scheduler.add(key, input_ids=tokens, temperature=0, max_tokens=24)
        for number in range(100):
            if disturbance and number % 3 == 1 and scheduler.running:
                victim = random.Random(number).choice(list(scheduler.running.values()))
                getattr(scheduler, disturbance)(victim)
            scheduler.step()
            if not scheduler.running:
                break
        scheduler.finish()
        for key, tokens in prompts.items():
            assert scheduler.tokens(key) == generated(path, tokens, max_new_tokens=24)
        assert any(each.drafted for each in scheduler.results)


def test_proposals_without_chance_leave_seeded_texts_as_they_are(
    folder: Folder, tmp_path: Path
) -> None:
    texts: list[list[int]] = []
    for place, (engine, draft) in enumerate(((None, 0), (NGRAM, 4))):
        with llm_rig(tmp_path / str(place), folder(), engine, draft=draft) as scheduler:
            prompt = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
            settings: dict[str, Any] = {"temperature": 0.3, "presence_penalty": 0.05, "seed": 3}
            scheduler.add(1, input_ids=prompt, max_tokens=60, ignore_eos=True, **settings)
            scheduler.run()
            texts.append(scheduler.tokens(1))
    assert texts[0] == texts[1]
    accepted = [len(each.tokens) for each in scheduler.results if each.drafted]
    assert max(accepted) > 1


def test_an_end_among_accepted_tokens_is_the_end(folder: Folder, tmp_path: Path) -> None:
    path = folder()
    whole = generated(path, [5, 77, 130], max_new_tokens=20)
    end = whole[7]
    first = whole.index(end) + 1
    with llm_rig(tmp_path / "rig", path, draft_of(path, 8), draft=8) as scheduler:
        scheduler.add(1, input_ids=[5, 77, 130], temperature=0, max_tokens=20, stop_token_ids=[end])
        scheduler.run()
        assert scheduler.tokens(1) == whole[:first]
        assert scheduler.responses[1][-1]["finish_reason"] == ["stop"]


def test_what_followed_before_is_proposed() -> None:
    assert followers([1, 2, 3, 4, 1, 2], 3) == [3, 4, 1]
    assert followers([1, 2, 9, 1, 2, 3, 1, 2], 2) == [3, 1]  # the last time counts
    assert followers([9, 1, 2, 7, 7, 1, 2, 8, 9, 1, 2], 1) == [7]  # the longest ending first
    assert followers([1, 2, 3], 4) == []
    assert followers([1, 1, 1, 1, 1, 1, 1], 2) == [1]
