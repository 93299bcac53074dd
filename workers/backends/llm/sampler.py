"""Sampling: from logits to tokens, for all rows of a step together.

bias ─> penalties ─> grammar ─> min_tokens ─> temperature ─> top-k ─> top-p ─> min-p ─> draw

The order is as in transformers. Random numbers are hashes of (seed, sample, position, purpose).
A text therefore depends neither on the other rows of the step nor on the time and instance. A
grammar (a JSON schema or a regular expression) restricts the next tokens.

Draft tokens are verified (speculative decoding). A deterministic draft token (n-grams, a greedy
draft model) is accepted if the model samples the same token, so texts do not change. A token that a
draft model has sampled is accepted by rejection sampling (Leviathan et al., 2023; Chen et al.,
2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shmserve.workers.backends.llm.parameters import GenerationParameters

# The purposes for which independent random numbers are drawn at one position.
TOKEN, ACCEPTANCE, PROPOSAL = range(3)
_TOP_P_CANDIDATES = 1024  # likeliest tokens in which top-p is evaluated before all are sorted
_UINT64_MASK = (1 << 64) - 1
# Logits divided by a temperature below the first value may overflow. Lower temperatures than the
# second value are raised to it.
_LOW_TEMPERATURE, _MIN_TEMPERATURE = 1e-3, 1e-30


@dataclass(slots=True)
class SampledRow:
    """The sampling parameters and the earlier tokens of a row of logits.

    Attributes:
        sample: The index of the sample in its request.
        tokens: The tokens of the sequence up to the sampled one.
        prompt_length: The number of tokens of the prompt.
        end_tokens: The tokens that end a text, with those of the parameter `stop_token_ids`.
        allowed_bits: The tokens that the grammar allows, as bits of int32 words [vocabulary / 32].
    """

    parameters: GenerationParameters
    sample: int
    tokens: Sequence[int]
    prompt_length: int
    end_tokens: tuple[int, ...]
    allowed_bits: Tensor | None = None

    @property
    def generated_count(self) -> int:
        """Return the number of tokens after the prompt."""
        return len(self.tokens) - self.prompt_length

    def draw(self, purpose: int = TOKEN) -> float:
        """Return the row's random number for a purpose, in [0, 1)."""
        state = self.parameters.seed & _UINT64_MASK
        for part in (self.sample, self.generated_count, purpose):
            state = _mix(state ^ _mix(part + 1))
        return (state >> 41) / (1 << 23)


class TokenLogprobs(NamedTuple):
    """The log probability of a token in the model's unprocessed distribution.

    Attributes:
        top: The likeliest tokens with their log probabilities, likeliest first.
        rank: The number of tokens that are likelier, plus 1.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]
    rank: int = 1


def _mix(value: int) -> int:
    """Apply the finaliser of splitmix64 (Steele et al., 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _UINT64_MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _UINT64_MASK
    return value ^ (value >> 31)


def sample(
    logits: Tensor, rows: Sequence[SampledRow], purpose: int = TOKEN
) -> tuple[list[int], dict[int, Tensor]]:
    """Sample a token for each row.

    Args:
        logits: Processed logits, [rows, vocabulary].
        rows: The rows.
        purpose: The purpose of the random numbers.

    Returns:
        The tokens, and the distribution [vocabulary] of each row that is not greedy, by row index.
    """
    tokens = _likeliest(logits)
    indices = [index for index, row in enumerate(rows) if row.parameters.temperature]
    if not indices:
        return tokens, {}
    sampled_rows = [rows[index] for index in indices]
    if len(indices) < len(rows):
        logits = logits[indices]
    probabilities = distribution(logits, sampled_rows)
    drawn_tokens = pick(probabilities, [row.draw(purpose) for row in sampled_rows])
    for index, token in zip(indices, drawn_tokens, strict=True):
        tokens[index] = token
    return tokens, dict(zip(indices, probabilities, strict=True))


def _likeliest(logits: Tensor) -> list[int]:
    """Return the likeliest token of each row; of equal logits, the first.

    On CPUs, numpy's argmax is five times as fast as torch's.
    """
    array = logits.numpy() if logits.device.type == "cpu" else logits
    tokens: list[int] = array.argmax(-1).tolist()
    return tokens


def pick(probabilities: Tensor, draws: Sequence[float]) -> list[int]:
    """Return the token of each row at which the cumulative probability exceeds its draw.

    Args:
        probabilities: Probabilities, which need not sum to one, [rows, vocabulary].
        draws: A random number in [0, 1) for each row.
    """
    sums = probabilities.cumsum(-1)
    targets = torch.tensor(draws, dtype=sums.dtype, device=sums.device).unsqueeze(1) * sums[:, -1:]
    indices = torch.searchsorted(sums, targets, right=True).squeeze(1)
    tokens: list[int] = indices.clamp_max(sums.shape[1] - 1).tolist()
    return tokens


def process(logits: Tensor, rows: Sequence[SampledRow]) -> None:
    """Apply biases, penalties, grammars and `min_tokens` to logits [rows, vocabulary], in place."""
    for row_logits, row in zip(logits, rows, strict=True):
        parameters = row.parameters
        if parameters.is_restricted:
            _restrict(row_logits, row)
        if parameters.is_penalised:
            _penalise(row_logits, row)
        if row.allowed_bits is not None:
            _mask(row_logits, row.allowed_bits)
        if row.generated_count < parameters.min_tokens:
            end_tokens = [*row.end_tokens]
            end_logits, row_logits[end_tokens] = row_logits[end_tokens], -math.inf
            if row.allowed_bits is not None and row_logits.max() == -math.inf:
                row_logits[end_tokens] = end_logits  # a completed grammar allows only end tokens


def _restrict(logits: Tensor, row: SampledRow) -> None:
    """Apply `logit_bias`, `allowed_token_ids` and `bad_words` to logits [vocabulary], in place."""
    parameters = row.parameters
    if parameters.logit_bias:
        ids, biases = (torch.from_numpy(part).to(logits.device) for part in parameters.bias_arrays)
        logits[ids] += biases
    if parameters.allowed_token_ids:
        allowed_ids = torch.from_numpy(parameters.allowed_array).to(logits.device)
        allowed_logits = logits[allowed_ids]
        logits.fill_(-math.inf)
        logits[allowed_ids] = allowed_logits
    if parameters.forbidden_after is not None:
        tokens = torch.from_numpy(parameters.forbidden_after(row.tokens[row.prompt_length :]))
        logits[tokens.to(logits.device)] = -math.inf


def _penalise(logits: Tensor, row: SampledRow) -> None:
    parameters = row.parameters
    if parameters.repetition_penalty != 1.0:
        # Duplicate tokens are not removed, because sorting a long context would take longer. Each
        # duplicate assigns the same value again.
        tokens = torch.from_numpy(np.fromiter(row.tokens, np.int64)).to(logits.device)
        old_logits, penalty = logits[tokens], parameters.repetition_penalty
        logits[tokens] = torch.where(old_logits < 0, old_logits * penalty, old_logits / penalty)
    generated_tokens = torch.tensor(row.tokens[row.prompt_length :], device=logits.device)
    present_tokens, counts = torch.unique(generated_tokens.long(), return_counts=True)
    logits[present_tokens] -= parameters.frequency_penalty * counts + parameters.presence_penalty


def _mask(logits: Tensor, allowed_bits: Tensor) -> None:
    """Forbid the tokens whose bits are not set in int32 words, least significant bit first."""
    bits = (allowed_bits.unsqueeze(1) >> torch.arange(32)) & 1
    is_allowed = bits.flatten()[: len(logits)].bool().to(logits.device)
    logits[len(is_allowed) :] = -math.inf
    logits[: len(is_allowed)].masked_fill_(~is_allowed, -math.inf)


def distribution(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """Return the probabilities with which each row of processed logits is sampled.

    A greedy row has probability one for its likeliest token.
    """
    parameters = [row.parameters for row in rows]
    greedy_rows = [index for index, row in enumerate(parameters) if not row.temperature]
    temperatures = [row.temperature or 1.0 for row in parameters]
    if min(temperatures) < _LOW_TEMPERATURE:
        # Differences from the largest logit do not overflow.
        logits = logits - logits.amax(-1, keepdim=True)
    divisors = torch.tensor([max(temperature, _MIN_TEMPERATURE) for temperature in temperatures])
    scaled_logits = logits / divisors.to(logits.device).unsqueeze(1)
    min_logits = _min_logits(scaled_logits, parameters)
    if min_logits is not None:
        scaled_logits.masked_fill_(scaled_logits < min_logits.unsqueeze(1), -math.inf)
    probs = scaled_logits.softmax(-1)
    if greedy_rows:
        likeliest = logits[greedy_rows].argmax(-1)
        probs[greedy_rows] = torch.nn.functional.one_hot(likeliest, logits.shape[1]).to(probs.dtype)
    return probs


def _min_logits(logits: Tensor, parameters: Sequence[GenerationParameters]) -> Tensor | None:
    """Return the smallest logit of each row that top-k, top-p and min-p keep; None: no limit."""
    min_logits = None
    if any(row.top_k or row.top_p < 1 for row in parameters):
        max_top_k = max(row.top_k for row in parameters)
        min_logits = _nucleus_min_logits(logits, parameters, max(_TOP_P_CANDIDATES, max_top_k))
    if any(row.min_p for row in parameters):
        min_p = torch.tensor([row.min_p for row in parameters], device=logits.device)
        min_p_logits = logits.amax(-1) + min_p.log()
        min_logits = min_p_logits if min_logits is None else torch.maximum(min_logits, min_p_logits)
    return min_logits


def _nucleus_min_logits(
    logits: Tensor, parameters: Sequence[GenerationParameters], width: int
) -> Tensor:
    """Return the smallest logit of each row that top-k and top-p keep.

    The nucleus of top-p (Holtzman et al., 2020) is looked for in the `width` likeliest tokens, then
    in all tokens.
    """
    vocab_size, device = logits.shape[1], logits.device
    width = min(width, vocab_size)
    top_values = logits.topk(width).values
    top_ks = torch.tensor([row.top_k or vocab_size for row in parameters], device=device)
    # If top_p is 1, rounding errors of the sums must not remove tokens.
    top_p = [row.top_p if row.top_p < 1 else math.inf for row in parameters]
    beyond_top_k = torch.arange(width, device=device) >= top_ks.unsqueeze(1)
    top_k_values = top_values.masked_fill(beyond_top_k, -math.inf)
    log_totals = torch.where(top_ks <= width, top_k_values.logsumexp(-1), logits.logsumexp(-1))
    probabilities = (top_k_values - log_totals.unsqueeze(1)).exp()
    mass_before = probabilities.cumsum(-1) - probabilities
    is_kept = (mass_before < torch.tensor(top_p, device=device).unsqueeze(1)) & ~beyond_top_k
    kept_counts = is_kept.sum(-1).clamp_min(1)
    if width < vocab_size and any(
        count == width and row.top_p < 1 and not row.top_k
        for count, row in zip(kept_counts.tolist(), parameters, strict=True)
    ):
        return _nucleus_min_logits(logits, parameters, vocab_size)
    min_logits = top_values.gather(1, kept_counts.unsqueeze(1) - 1).squeeze(1)
    is_unlimited = [not row.top_k and row.top_p >= 1 for row in parameters]
    return min_logits.masked_fill(torch.tensor(is_unlimited, device=device), -math.inf)


@dataclass(slots=True)
class Proposal:
    """Draft tokens that may follow a sequence.

    Attributes:
        probabilities: The draft model's distribution [vocabulary] for each token; empty if the
            tokens are deterministic.
    """

    tokens: list[int] = field(default_factory=list)  # the draft tokens
    probabilities: list[Tensor] = field(default_factory=list)


class DraftCheck(NamedTuple):
    """A proposal to verify, and the first of its rows: one for each draft token, and one more."""

    first_row: int  # index of the first row of logits
    proposal: Proposal


def verify(logits: Tensor, rows: Sequence[SampledRow], checks: list[DraftCheck]) -> list[list[int]]:
    """Return the accepted draft tokens of each sequence, followed by a sampled token.

    Args:
        logits: Processed logits, [rows, vocabulary].
        rows: The rows.
        checks: The proposals to verify, with their rows.
    """
    sampled_tokens, _ = sample(logits, rows)
    target = None
    if any(check.proposal.probabilities for check in checks):
        target = distribution(logits, rows)
    continuations: list[list[int]] = []
    for first_row, proposal in checks:
        row_slice = slice(first_row, first_row + len(proposal.tokens) + 1)
        row_tokens = sampled_tokens[row_slice]
        if target is not None and proposal.probabilities:
            tokens = _rejection_sample(target[row_slice], rows[row_slice], proposal, row_tokens[-1])
        else:
            pairs = enumerate(zip(proposal.tokens, row_tokens, strict=False))
            mismatches = (index for index, (draft, token) in pairs if draft != token)
            tokens = row_tokens[: next(mismatches, len(proposal.tokens)) + 1]
        continuations.append(tokens)
    return continuations


def _rejection_sample(
    target: Tensor, rows: Sequence[SampledRow], proposal: Proposal, last_token: int
) -> list[int]:
    """Accept each draft token with the probability min(1, p / q) (Leviathan et al., 2023).

    The first rejected token is replaced by a token sampled from max(p - q, 0). If all tokens are
    accepted, `last_token` follows.

    Args:
        target: The model's distributions p, [tokens, vocabulary].
        rows: The rows, which supply the random numbers.
        proposal: The draft tokens with their distributions q.
        last_token: The token that the model samples after all draft tokens.
    """
    tokens: list[int] = []
    draft_tokens = iter(proposal.tokens)
    for draft_probs, target_probs, row in zip(proposal.probabilities, target, rows, strict=False):
        token = next(draft_tokens, None)  # None: the grammar has rejected the token
        if token is not None and (
            row.draw(ACCEPTANCE) * float(draft_probs[token]) < float(target_probs[token])
        ):
            tokens.append(token)
            continue
        excess = (target_probs - draft_probs).clamp_min(0)
        if float(excess.sum()) <= 1e-6:
            excess = target_probs
        return tokens + pick(excess.unsqueeze(0), [row.draw()])
    return [*tokens, last_token]


_CACHED_ROWS = 8  # rows per pass on a CPU: temporaries fit its cache, which saves 2/3 of the time


def logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Return the log probabilities of each row's token and of its `top` likeliest tokens.

    `logits` are unprocessed, [rows, vocabulary].
    """
    chunk_size = _CACHED_ROWS if logits.device.type == "cpu" else max(len(tokens), 1)
    results: list[TokenLogprobs] = []
    for begin in range(0, len(tokens), chunk_size):
        part = tokens[begin : begin + chunk_size]
        scores = logits[begin : begin + chunk_size].log_softmax(-1)
        indices = torch.tensor(part, device=scores.device).unsqueeze(1)
        token_scores = scores.gather(1, indices).squeeze(1)
        top_scores = scores.topk(min(top, scores.shape[1]))
        ranks = (scores > token_scores.unsqueeze(1)).sum(1) + 1
        columns = (token_scores, top_scores.indices, top_scores.values, ranks)
        rows = zip(part, *(column.tolist() for column in columns), strict=True)
        results += (
            TokenLogprobs(token, value, list(zip(ids, values, strict=True)), rank)
            for token, value, ids, values, rank in rows
        )
    return results


def candidates(logits: Tensor, count: int) -> tuple[list[int], list[float]]:
    """Return the likeliest tokens of a beam, likeliest first, and their log probabilities.

    `logits` are unprocessed, [vocabulary].
    """
    top_scores = logits.log_softmax(-1).topk(min(count, len(logits)))
    return top_scores.indices.tolist(), top_scores.values.tolist()
