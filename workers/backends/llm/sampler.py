"""Sampling: from logits to tokens, for all rows of a step together.

bias ─> penalties ─> least length ─> grammar ─> temperature ─> top-k ─> top-p ─> min-p ─> draw

The order is that of transformers. Every draw is a hash of (seed, sample, position). A text
therefore depends neither on the other rows of the step nor on the time and instance. A grammar (a
JSON schema or a regular expression) restricts the tokens that may be next.

Proposed tokens are verified (speculative decoding). A deterministic proposal (n-grams, a greedy
draft) is accepted where the model's own draw is the same token, so texts do not change. A token
that a draft model has drawn is accepted by rejection sampling (Leviathan et al., 2023; Chen et al.,
2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shmserve.workers.backends.llm.parameters import GenerationParameters

# Purposes of independent draws at one position.
TOKEN, ACCEPTANCE, PROPOSAL = range(3)
_FIRST_LOOK = 1024  # number of candidates that are searched for the top-p before all are sorted
_BITS = (1 << 64) - 1
# Temperature below which quotients may overflow, and the lowest temperature.
_COLD, _COLDEST = 1e-3, 1e-30


@dataclass(slots=True)
class SampledRow:
    """A row of logits to sample from.

    Attributes:
        tokens: The tokens of the sequence before the row.
        prompt: The number of tokens of the prompt.
        allowed: The tokens that the grammar allows, as bits in int32 words.
    """

    parameters: GenerationParameters
    sample: int
    tokens: Sequence[int]
    prompt: int
    ends: tuple[int, ...]
    allowed: torch.Tensor | None = None

    @property
    def generated(self) -> int:
        """Return the number of tokens after the prompt."""
        return len(self.tokens) - self.prompt

    def draw(self, purpose: int = TOKEN) -> float:
        """Return the random number of the row for a purpose, in [0, 1)."""
        state = self.parameters.seed & _BITS
        for part in (self.sample, self.generated, purpose):
            state = _mixed(state ^ _mixed(part + 1))
        return (state >> 41) / (1 << 23)


class TokenLogprobs(NamedTuple):
    """The log probability of a token in the model's own distribution, and the likeliest tokens.

    Its `rank` is 1 if no token is likelier.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]
    rank: int = 1


def _mixed(value: int) -> int:
    """Apply the finaliser of splitmix64 (Steele et al., 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _BITS
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _BITS
    return value ^ (value >> 31)


def sample(
    logits: torch.Tensor, rows: Sequence[SampledRow], purpose: int = TOKEN
) -> tuple[list[int], dict[int, torch.Tensor]]:
    """Sample a token for each row.

    Args:
        logits: Processed logits, [rows, vocabulary].
        rows: The rows.
        purpose: The purpose of the random numbers.

    Returns:
        The tokens, and the distribution of each row that was drawn, by its index.
    """
    tokens = _likeliest(logits)
    warm = [index for index, row in enumerate(rows) if row.parameters.temperature]
    if not warm:
        return tokens, {}
    chosen = [rows[index] for index in warm]
    chances = distribution(logits if len(warm) == len(rows) else logits[warm], chosen)
    drawn = pick(chances, [row.draw(purpose) for row in chosen])
    for index, token in zip(warm, drawn, strict=True):
        tokens[index] = token
    return tokens, dict(zip(warm, chances, strict=True))


def _likeliest(logits: torch.Tensor) -> list[int]:
    """Return the likeliest token of each row; of equal logits, the first.

    On a CPU numpy is five times as fast as torch.
    """
    near = logits.numpy() if logits.device.type == "cpu" else logits
    tokens: list[int] = near.argmax(-1).tolist()
    return tokens


def pick(probabilities: torch.Tensor, draws: Sequence[float]) -> list[int]:
    """Return the token of each row at which the cumulative probability passes its draw."""
    sums = probabilities.cumsum(-1)
    targets = torch.tensor(draws, dtype=sums.dtype, device=sums.device).unsqueeze(1) * sums[:, -1:]
    indices = torch.searchsorted(sums, targets, right=True).squeeze(1)
    tokens: list[int] = indices.clamp_max(sums.shape[1] - 1).tolist()
    return tokens


def process(logits: torch.Tensor, rows: Sequence[SampledRow]) -> None:
    """Apply bias, penalties, least length and grammar to logits, in place."""
    for line, row in zip(logits, rows, strict=True):
        parameters = row.parameters
        if parameters.restricted:
            _restrict(line, row)
        if parameters.penalised:
            _penalise(line, row)
        if row.allowed is not None:
            _mask(line, row.allowed)
        if row.generated < parameters.min_tokens:
            ends = [*row.ends, *parameters.stop_token_ids]
            before, line[ends] = line[ends], -math.inf
            if row.allowed is not None and line.max() == -math.inf:
                line[ends] = before  # the grammar has ended, so only end tokens are allowed


def _restrict(line: torch.Tensor, row: SampledRow) -> None:
    """Apply the bias of tokens, the allowed tokens, and the forbidden sequences of tokens."""
    parameters = row.parameters
    if parameters.logit_bias:
        ids = torch.tensor(list(parameters.logit_bias), device=line.device)
        line[ids] += torch.tensor(list(parameters.logit_bias.values()), device=line.device)
    if parameters.allowed_token_ids:
        allowed = torch.tensor(parameters.allowed_token_ids, device=line.device)
        logits = line[allowed]
        line.fill_(-math.inf)
        line[allowed] = logits
    if parameters.forbidden is not None:
        line[parameters.forbidden(row.tokens[row.prompt :])] = -math.inf


def _penalise(line: torch.Tensor, row: SampledRow) -> None:
    parameters = row.parameters
    tokens = torch.tensor(row.tokens, device=line.device)
    if parameters.repetition_penalty != 1.0:
        distinct = torch.unique(tokens)
        logits, penalty = line[distinct], parameters.repetition_penalty
        line[distinct] = torch.where(logits < 0, logits * penalty, logits / penalty)
    present, counts = torch.unique(tokens[row.prompt :], return_counts=True)
    line[present] -= parameters.frequency_penalty * counts + parameters.presence_penalty


def _mask(line: torch.Tensor, allowed: torch.Tensor) -> None:
    """Forbid all tokens but those whose bits are set, lowest first, in int32 words."""
    bits = (allowed.unsqueeze(1) >> torch.arange(32)) & 1
    permitted = bits.flatten()[: len(line)].bool().to(line.device)
    line[len(permitted) :] = -math.inf
    line[: len(permitted)].masked_fill_(~permitted, -math.inf)


def distribution(logits: torch.Tensor, rows: Sequence[SampledRow]) -> torch.Tensor:
    """Return the probabilities with which each row of processed logits is sampled.

    A greedy row has probability one for its likeliest token.
    """
    settings = [row.parameters for row in rows]
    cold = [index for index, each in enumerate(settings) if not each.temperature]
    temperatures = torch.tensor([max(each.temperature or 1.0, _COLDEST) for each in settings])
    if min(each.temperature or 1.0 for each in settings) < _COLD:
        # Differences from the largest logit do not overflow.
        logits = logits - logits.amax(-1, keepdim=True)
    scaled = logits / temperatures.to(logits.device).unsqueeze(1)
    least = _least(scaled, settings)
    if least is not None:
        scaled.masked_fill_(scaled < least.unsqueeze(1), -math.inf)
    probs = scaled.softmax(-1)
    if cold:
        best = logits[cold].argmax(-1)
        probs[cold] = torch.nn.functional.one_hot(best, logits.shape[1]).to(probs.dtype)
    return probs


def _least(scaled: torch.Tensor, settings: Sequence[GenerationParameters]) -> torch.Tensor | None:
    """Return the least logit of each row that may be sampled, or None for no limit."""
    least = None
    if any(setting.top_k or setting.top_p < 1 for setting in settings):
        most = max(setting.top_k for setting in settings)
        least = _nucleus(scaled, settings, max(_FIRST_LOOK, most))
    if any(setting.min_p for setting in settings):
        shares = torch.tensor([setting.min_p for setting in settings], device=scaled.device)
        floor = scaled.amax(-1) + shares.log()
        least = floor if least is None else torch.maximum(least, floor)
    return least


def _nucleus(
    scaled: torch.Tensor, settings: Sequence[GenerationParameters], width: int
) -> torch.Tensor:
    """Return the least logit that top-k and top-p keep, sought among the `width` likeliest."""
    vocabulary, device = scaled.shape[1], scaled.device
    width = min(width, vocabulary)
    values = scaled.topk(width).values
    counts = torch.tensor([each.top_k or vocabulary for each in settings], device=device)
    # A disabled limit keeps all tokens, regardless of rounding.
    shares = [each.top_p if each.top_p < 1 else math.inf for each in settings]
    outside = torch.arange(width, device=device) >= counts.unsqueeze(1)
    inner = values.masked_fill(outside, -math.inf)
    whole = torch.where(counts <= width, inner.logsumexp(-1), scaled.logsumexp(-1))
    probabilities = (inner - whole.unsqueeze(1)).exp()
    before = probabilities.cumsum(-1) - probabilities
    inside = (before < torch.tensor(shares, device=device).unsqueeze(1)) & ~outside
    sizes = inside.sum(-1).clamp_min(1)
    if width < vocabulary and any(
        count == width and each.top_p < 1 and not each.top_k
        for count, each in zip(sizes.tolist(), settings, strict=True)
    ):
        return _nucleus(scaled, settings, vocabulary)
    least = values.gather(1, sizes.unsqueeze(1) - 1).squeeze(1)
    free = [not each.top_k and each.top_p >= 1 for each in settings]
    return least.masked_fill(torch.tensor(free, device=device), -math.inf)


@dataclass(slots=True)
class Proposal:
    """Proposed tokens that may follow a sequence.

    Attributes:
        chances: The distribution [tokens, vocabulary] from which each token was drawn, if it was
            drawn.
    """

    tokens: list[int] = field(default_factory=list)
    chances: list[torch.Tensor] = field(default_factory=list)


class Check(NamedTuple):
    """The rows of one sequence to verify, from `first`: one per proposed token, and one more."""

    first: int
    proposal: Proposal


def verify(
    logits: torch.Tensor, rows: Sequence[SampledRow], checks: Sequence[Check]
) -> list[list[int]]:
    """Return the tokens that continue each sequence, given processed logits of all rows.

    These tokens are the accepted part of the proposal, and one more token.
    """
    drawn, _ = sample(logits, rows)
    target = distribution(logits, rows) if any(check.proposal.chances for check in checks) else None
    accepted_tokens: list[list[int]] = []
    for first, proposal in checks:
        own = drawn[first : first + len(proposal.tokens) + 1]
        if target is not None and proposal.chances:
            part = slice(first, first + len(own))
            accepted_tokens.append(_rejection(target[part], rows[part], proposal, own[-1]))
            continue
        same = [token == sampled for token, sampled in zip(proposal.tokens, own, strict=False)]
        accepted = same.index(False) if False in same else len(same)
        accepted_tokens.append(own[: accepted + 1])
    return accepted_tokens


def _rejection(
    target: torch.Tensor, rows: Sequence[SampledRow], proposal: Proposal, bonus: int
) -> list[int]:
    """Accept each token with the probability min(1, p / q).

    The first rejected token is replaced by a draw from the excess of p over q. `bonus` follows if
    all tokens are accepted.
    """
    tokens: list[int] = []
    for token, chance, target_chances, row in zip(
        proposal.tokens, proposal.chances, target, rows, strict=False
    ):
        if row.draw(ACCEPTANCE) * float(chance[token]) < float(target_chances[token]):
            tokens.append(token)
            continue
        rest = (target_chances - chance).clamp_min(0)
        if float(rest.sum()) <= 1e-6:
            rest = target_chances
        return tokens + pick(rest.unsqueeze(0), [row.draw()])
    return [*tokens, bonus]


def logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Return the log probabilities of tokens and of the `top` likeliest ones in each row.

    `logits` are raw, [rows, vocabulary].
    """
    scores = logits.log_softmax(-1)
    picked = scores.gather(1, torch.tensor(tokens, device=scores.device).unsqueeze(1)).squeeze(1)
    best = scores.topk(min(top, scores.shape[1]))
    ranks = (scores > picked.unsqueeze(1)).sum(1) + 1
    columns = (picked, best.indices, best.values, ranks)
    return [
        TokenLogprobs(token, value, list(zip(ids, values, strict=True)), rank)
        for token, value, ids, values, rank in zip(
            tokens, *(column.tolist() for column in columns), strict=True
        )
    ]


def candidates(logits: torch.Tensor, count: int) -> tuple[list[int], list[float]]:
    """Return the best tokens of one row of raw logits [vocabulary], for beam search, best first.

    Returns:
        The tokens and their log probabilities.
    """
    best = logits.log_softmax(-1).topk(min(count, len(logits)))
    return best.indices.tolist(), best.values.tolist()
