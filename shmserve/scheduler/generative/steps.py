"""Steps of an engine: their plan, and a learned model of their duration (pure).

The model decides how much of a prompt fits a step, how many tokens to draft, and whether a
preempted sequence is swapped. A step's duration is a + b * sampled tokens + c * prompt tokens + d *
keys read, with non-negative weights. The weights are fitted by exponentially weighted least squares
with first guesses as the prior. (This is ridge regression; the active set is that of Lawson and
Hanson, "Solving Least Squares Problems".)
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.messages.generation import Row, Step, Stepped
from shmserve.scheduler.generative.sequences import Sequence
from shmserve.scheduler.tables import GenerationStats

_STEP_DECAY = 0.98  # decay, per step, of the weights in the fit of durations
_RELATIVE_NOISE = 0.1  # standard deviation, as a share of a step's duration
# First guesses of the weights of `StepWork.terms`, in ms for a small model on a CPU, and the
# standard deviation of each.
_INITIAL_WEIGHTS = (5.0, 1.0, 0.5, 10.0)
_INITIAL_DEVIATIONS = (20.0, 5.0, 2.0, 100.0)
_INITIAL_PRECISIONS = tuple(spread**-2 for spread in _INITIAL_DEVIATIONS)
_PAIRS_UNIT = 1e5  # the unit of (query, key) pairs in the model of durations
# Prompts are split at multiples of CHUNK, because other splits change the bits of the results.
CHUNK = 16
_AVERAGE_GAIN = 0.1  # weight of the newest observation in averages
_MAX_DURATION_RATIO = 4  # observed durations are capped at this multiple of the expected duration
PROBE_STEPS = 50  # steps between two probes of a request's draft tokens
_INITIAL_TOKENS = 2  # weight of the first guess of the acceptance, in observed tokens
_MIN_DRAFT_SPEEDUP = 1.15  # the least expected speedup of drafts: estimates are some percent off


class StepWork(NamedTuple):
    """The work of a step: decoded tokens, prompt tokens, and (query, key) pairs."""

    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    attention_pairs: int = 0

    @property
    def terms(self) -> tuple[float, float, float, float]:
        """Return the work as the four terms of the linear model of durations."""
        decoded_tokens, prefilled_tokens, pairs = self
        return 1.0, float(decoded_tokens), float(prefilled_tokens), pairs / _PAIRS_UNIT


def _fit_weights(products: list[list[float]], right_sides: list[float]) -> list[float]:
    """Solve the normal equations, with the first guesses as the prior; no weight is negative."""
    weights, indices = [0.0] * 4, [0, 1, 2, 3]
    while indices:
        rows = [
            [
                *(products[row][i] + _INITIAL_PRECISIONS[row] * (row == i) for i in indices),
                right_sides[row] + _INITIAL_PRECISIONS[row] * _INITIAL_WEIGHTS[row],
            ]
            for row in indices
        ]
        solution = _solve(rows)
        if min(solution) >= 0:
            for row, weight in zip(indices, solution, strict=True):
                weights[row] = weight
            break
        del indices[solution.index(min(solution))]
    return weights


def _solve(equations: list[list[float]]) -> list[float]:
    """Solve positive definite equations, each with its right side last, by elimination in place."""
    for pivot, pivot_equation in enumerate(equations):
        for equation in equations[pivot + 1 :]:
            factor = equation[pivot] / pivot_equation[pivot]
            for column in range(pivot, len(pivot_equation)):
                equation[column] -= factor * pivot_equation[column]
    solution: list[float] = []
    for pivot in range(len(equations) - 1, -1, -1):
        *coefficients, right_side = equations[pivot]
        partial_sum = sum(c * x for c, x in zip(reversed(coefficients), solution, strict=False))
        solution.append((right_side - partial_sum) / coefficients[pivot])
    return solution[::-1]


@dataclass(slots=True, eq=False)
class StepTimes:
    """The model of the durations of a step, of a block copy and of a draft token, in ms."""

    _weights: list[float] = field(default_factory=partial(list, _INITIAL_WEIGHTS))
    # The normal equations of the least squares fit to the observed steps.
    _normal_matrix: list[list[float]] = field(default_factory=lambda: [[0.0] * 4 for _ in range(4)])
    _right_sides: list[float] = field(default_factory=partial(list, [0.0] * 4))
    copy_ms: float = 0.05  # duration of copying a block
    draft_ms: float = 0.2  # duration of proposing a draft token

    def expected_ms(self, work: StepWork) -> float:
        """Return the expected duration of a step in ms."""
        return max(sum(w * x for w, x in zip(self._weights, work.terms, strict=True)), 1e-3)

    @property
    def prompt_token_ms(self) -> float:
        """Return the duration that a prompt token adds."""
        return max(self._weights[2], 1e-3)

    def observe(self, work: StepWork, took_ms: float) -> None:
        """Learn from the duration of a step; a step without work is ignored."""
        if not (work.decoded_tokens or work.prefilled_tokens):
            return
        precision = (_RELATIVE_NOISE * max(took_ms, 1.0)) ** -2
        for row, (row_sums, term) in enumerate(zip(self._normal_matrix, work.terms, strict=True)):
            right_side = self._right_sides[row]
            self._right_sides[row] = _STEP_DECAY * right_side + precision * term * took_ms
            for column, other_term in enumerate(work.terms):
                row_sums[column] = _STEP_DECAY * row_sums[column] + precision * term * other_term
        self._weights = _fit_weights(self._normal_matrix, self._right_sides)

    def observe_copies(self, block_count: int, took_ms: float) -> None:
        """Learn from the duration of block copies."""
        self.copy_ms += _AVERAGE_GAIN * (took_ms / block_count - self.copy_ms)

    def observe_drafts(self, token_count: int, took_ms: float) -> None:
        """Learn from the duration of successive draft tokens.

        The duration is capped, because a draft model may have read a prompt first.
        """
        bounded_ms = min(took_ms / token_count, _MAX_DURATION_RATIO * self.draft_ms)
        self.draft_ms += _AVERAGE_GAIN * (bounded_ms - self.draft_ms)

    def swap_pays(self, block_count: int, token_count: int) -> bool:
        """Check whether copying blocks out and back costs less than recomputing their tokens."""
        pairs = token_count * token_count
        recompute_ms = token_count * self.prompt_token_ms + self._weights[3] * pairs / _PAIRS_UNIT
        return 2 * block_count * self.copy_ms < recompute_ms

    def fitting_tokens(self, work: StepWork, computed_tokens: int, target_ms: float) -> int:
        """Return how many prompt tokens can be added to a step that meets the latency target.

        The result is a multiple of 16, and at least 16 if the step has no other prompt tokens.

        Args:
            work: The work that the step contains already.
            computed_tokens: The number of earlier tokens of the prompt, which are computed.
            target_ms: The latency target of the step.
        """
        budget_ms = max(target_ms - self.expected_ms(work), 0.0)
        # Each token reads all tokens before it: n tokens take linear * n + square * n * n.
        square = self._weights[3] / _PAIRS_UNIT
        linear = self.prompt_token_ms + square * computed_tokens
        count = int(2 * budget_ms / (linear + math.sqrt(linear * linear + 4 * square * budget_ms)))
        return max(count // CHUNK * CHUNK, 0 if work.prefilled_tokens else CHUNK)

    def draft_length(self, decoding: int, acceptance: float, max_length: int) -> int:
        """Return the number of draft tokens per sequence with the highest token rate, possibly 0.

        See Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.

        Args:
            decoding: The number of sequences that decode together.
            acceptance: The probability that a draft token is accepted.
            max_length: The maximum number of draft tokens per sequence.
        """
        best_length, best_rate = 0, _MIN_DRAFT_SPEEDUP / self.expected_ms(StepWork(decoding))
        tokens, chance = 1.0, 1.0
        for length in range(1, max_length + 1):
            chance *= acceptance
            tokens += chance
            took_ms = self.expected_ms(StepWork(decoding * (1 + length))) + length * self.draft_ms
            if tokens / took_ms > best_rate:
                best_length, best_rate = length, tokens / took_ms
        return best_length


@dataclass(slots=True, eq=False)
class Acceptance:
    """The acceptance rate of a request's draft tokens, and a pause while it is too low."""

    rate: float = 0.7  # estimated probability that a draft token is accepted
    _remaining_pause_steps: int = 0
    _observed_tokens: int = _INITIAL_TOKENS

    def draft_count(self, drafts: int, min_rate: float) -> int:
        """Return the number of draft tokens of this step: `drafts`, or 0 during a pause.

        A pause begins when the rate is below `min_rate`. One step after each pause drafts again.
        """
        if self._remaining_pause_steps:
            self._remaining_pause_steps -= 1
            return 0
        if self.rate < min_rate or not drafts:
            self._remaining_pause_steps = PROBE_STEPS
            self.rate = max(self.rate, min_rate)
            return 0
        return drafts

    def observe(self, proposed_count: int, accepted_count: int) -> None:
        """Update the rate after a step; draft tokens after the first rejected one do not count."""
        for index in range(min(accepted_count + 1, proposed_count)):
            self._observed_tokens += 1
            weight = max(1 / self._observed_tokens, _AVERAGE_GAIN)
            self.rate += weight * ((index < accepted_count) - self.rate)


class RunningStep(NamedTuple):
    """The step that a worker executes.

    Attributes:
        rows: The sequences and their rows, by the sequence's number.
        work: Its tokens and attention pairs.
        copied_blocks: The number of block copies.
        draft_count: The number of draft tokens.
    """

    step: int  # the number of the step
    rows: dict[int, tuple[Sequence[Any], Row]]  # by sequence number
    work: StepWork
    copied_blocks: int  # number of block copies
    draft_count: int

    def observe(self, message: Stepped, times: StepTimes, counts: GenerationStats) -> None:
        """Update the model of durations, and the statistics, from the results of the step."""
        work, took_ns = self.work, message.forward_ns + message.sample_ns
        gather_ns = message.gather_ns - message.draft_ns
        if self.copied_blocks:
            times.observe_copies(self.copied_blocks, gather_ns / 1e6)
        else:
            took_ns += gather_ns
        if self.draft_count:
            times.observe_drafts(self.draft_count, message.draft_ns / 1e6)
        times.observe(work, took_ns / 1e6)
        counts.batch_tokens.observe(work.decoded_tokens + work.prefilled_tokens)
        counts.iteration_seconds.observe(message.gather_ns + message.forward_ns + message.sample_ns)
        phases = counts.phases
        phases["gather"] += gather_ns
        phases["forward"] += message.forward_ns
        phases["sample"] += message.sample_ns
        phases["draft"] += message.draft_ns
        phases["text"] += message.text_ns
        counts.prefilled += work.prefilled_tokens
        counts.decoded += work.decoded_tokens


class StepPlan:
    """A step that is being planned: its remaining budgets, and the rows added so far."""

    def __init__(self, number: int, settings: EngineSettings) -> None:
        self.message = Step(number, [])
        self.token_budget = settings.max_tokens_per_batch
        self.prompt_budget = settings.max_prefill_tokens
        self.draft_budget = 0
        self.rows: dict[int, tuple[Sequence[Any], Row]] = {}
        self.work = StepWork()
        self.decoding_count = 1  # number of sequences that decode
        self.draft_count = 0
        self.has_preempted = False

    def add(self, sequence: Sequence[Any], count: int, drafts: int) -> None:
        """Add a row for the next `count` tokens of a sequence and its drafts.

        The tokens are subtracted from the budgets.
        """
        start, samples_next = sequence.computed_tokens, count == sequence.missing_tokens
        blocks = sequence.table[sequence.sent_blocks :]
        row = Row(sequence.number, start, count, sequence.sent_blocks, blocks, drafts, samples_next)
        sequence.sent_blocks = len(sequence.table)
        self.message.rows.append(row)
        self.rows[sequence.number] = (sequence, row)
        self.token_budget -= count + drafts
        self.draft_budget -= drafts
        is_decode = samples_next and count == 1
        if not is_decode:
            self.prompt_budget -= count
        tokens = (count + drafts, 0) if is_decode else (0, count)
        self.work = StepWork(*map(operator.add, self.work, (*tokens, count * (start + count))))
        self.draft_count = max(self.draft_count, drafts)
