"""Speculation by a draft model: texts are distributed as without it, at every setting of sampling.

Two Markov chains generate tokens: one drafts for the other. The joint distribution of the first
tokens is known.
"""

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from scipy.stats import chisquare

from shmserve.workers.backends.llm.parameters import GenerationParameters
from shmserve.workers.backends.llm.sampler import (
    PROPOSAL,
    DraftCheck,
    Proposal,
    SampledRow,
    distribution,
    pick,
    sample,
    verify,
)

SYMBOLS, LENGTH = 5, 2
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7}, {"temperature": 1.5}, {"temperature": 1.0, "top_k": 3, "top_p": 0.8},
    {"temperature": 1.0}, {"temperature": 0.7, "top_k": 2}, {"temperature": 1.5, "min_p": 0.2},
)  # fmt: skip
_BATCH_TEXTS = 10_000  # texts
MIN_P_VALUE = 1e-4  # smallest accepted p-value


def chain(seed: int) -> torch.Tensor:
    return torch.randn(SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(seed)) * 1.5


def rows(texts: list[list[int]], options: GenerationParameters, seeds: range) -> list[SampledRow]:
    """Return a row for each text; all texts begin with token 0 and have seeds of their own."""
    return [
        SampledRow(replace(options, seed=seed), 0, [0, *text], 1, ())
        for seed, text in zip(seeds, texts, strict=True)
    ]


def speculate_texts(
    target: torch.Tensor, draft: torch.Tensor, parameters: GenerationParameters, seeds: range
) -> list[tuple[int, ...]]:
    """Return texts of LENGTH + 1 tokens, for which the draft proposed LENGTH tokens."""
    proposals = [Proposal() for _ in seeds]
    for _ in range(LENGTH):
        sampled = rows([entry.tokens for entry in proposals], parameters, seeds)
        chances = distribution(draft[[row.tokens[-1] for row in sampled]], sampled)
        drawn_tokens = pick(chances, [row.draw(PROPOSAL) for row in sampled])
        for proposal, token, probability in zip(proposals, drawn_tokens, chances, strict=True):
            proposal.tokens.append(token)
            proposal.probabilities.append(probability)
    by_length = [
        rows([p.tokens[:size] for p in proposals], parameters, seeds) for size in range(LENGTH + 1)
    ]
    checked = [row for text in zip(*by_length, strict=True) for row in text]
    checks = [DraftCheck(index * (LENGTH + 1), entry) for index, entry in enumerate(proposals)]
    texts = verify(target[[row.tokens[-1] for row in checked]], checked, checks)
    for _ in range(LENGTH):
        sampled = rows(texts, parameters, seeds)
        next_tokens, _ = sample(target[[row.tokens[-1] for row in sampled]], sampled)
        texts = [[*text, token] for text, token in zip(texts, next_tokens, strict=True)]
    return [tuple(text[: LENGTH + 1]) for text in texts]


def chance(settings: dict[str, Any], texts: int, first_seed: int = 0) -> float:
    """Return the p-value of the texts under the distribution of the target alone."""
    target, draft = chain(1), chain(2)
    parameters = GenerationParameters(**settings)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(first_seed, first_seed + texts, _BATCH_TEXTS):
        seeds = range(seed, min(seed + _BATCH_TEXTS, first_seed + texts))
        counts.update(speculate_texts(target, draft, parameters, seeds))
    step = distribution(target, [SampledRow(parameters, 0, [0], 1, ())] * SYMBOLS).double().tolist()
    joint = {
        text: math.prod(step[previous][token] for previous, token in itertools.pairwise((0, *text)))
        for text in itertools.product(range(SYMBOLS), repeat=LENGTH + 1)
    }
    assert all(joint[text] for text in counts)
    frequent_texts = [text for text, probability in joint.items() if probability * texts >= 8]
    found = [counts[text] for text in frequent_texts]
    expected = [joint[text] * texts for text in frequent_texts]
    found, expected = ([*found, texts - sum(found) + 1], [*expected, texts - sum(expected) + 1])
    return float(chisquare(found, expected, sum_check=False).pvalue)


def run(size: int, first_seed: int = 0) -> str:
    """Check this number of texts at each of the settings. Raises AssertionError."""
    p_values = {str(settings): chance(settings, size, first_seed) for settings in SETTINGS}
    for settings, figures in p_values.items():
        assert figures > MIN_P_VALUE, f"{settings}: p = {figures:g}"
    text = ", ".join(f"{settings} {figures:.3f}" for settings, figures in p_values.items())
    return f"{size} texts at each of {len(SETTINGS)} settings are distributed as without: p {text}"
