"""Steps of an engine: their plan, and a learned model of their duration (pure).

The model decides how much of a prompt fits a step, how many tokens to draft, and whether a
preempted sequence is swapped. A step's duration is a + b * sampled tokens + c * prompt tokens + d *
keys read, with non-negative weights: exponentially weighted least squares with first guesses as the
prior (ridge regression; the active set of Lawson and Hanson, "Solving Least Squares Problems").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from shmserve.ipc.engine_settings import EngineSettings
from shmserve.ipc.messages.generation import Row, Step, Stepped
from shmserve.scheduler.generative.sequences import Sequence
from shmserve.scheduler.tables import GenerationStats

_FORGETTING = 0.98
_NOISE = 0.1  # standard deviation, as a share of a step's duration
# First guesses in ms for a small model on a CPU, and the standard deviation of each.
_FIRST = (5.0, 1.0, 0.5, 10.0)
_SPREAD = (20.0, 5.0, 2.0, 100.0)
_SURE = tuple(spread**-2 for spread in _SPREAD)
_KEYS = 1e5  # the unit of `pairs` in the estimate of durations
CHUNK = 16  # prompts are cut at its multiples, so that equal rows are computed alike
_EWMA = 0.1
_OUTLIER = 4  # observed durations are capped at this multiple of the expected duration
PROBE_STEPS = 50
_GUESSED = 2  # observed tokens that the first guess of the acceptance counts as
_GAIN = 1.15  # the least expected speedup of drafts: estimates are some percent off


class StepWork(NamedTuple):
    """The work of a step: decoded tokens, prompt tokens, and (query, key) pairs."""

    decoded: int = 0
    prefilled: int = 0
    pairs: int = 0

    @property
    def terms(self) -> tuple[float, float, float, float]:
        """Return the work as the four terms of the linear model of durations."""
        return (1.0, float(self.decoded), float(self.prefilled), self.pairs / _KEYS)


def _fitted(matrix: list[list[float]], moments: list[float]) -> list[float]:
    """Return the non-negative weights that solve the normal equations with the first guesses."""
    weights, used = [0.0] * 4, [0, 1, 2, 3]
    while used:
        rows = [
            [*(matrix[row][column] + _SURE[row] * (row == column) for column in used), moments[row]]
            for row in used
        ]
        for row, equation in zip(used, rows, strict=True):
            equation[-1] += _SURE[row] * _FIRST[row]
        solution = _solved(rows)
        if min(solution) >= 0:
            for row, weight in zip(used, solution, strict=True):
                weights[row] = weight
            break
        del used[solution.index(min(solution))]
    return weights


def _solved(rows: list[list[float]]) -> list[float]:
    """Solve positive definite equations, each with its right side last, by elimination in place."""
    for pivot, top in enumerate(rows):
        for below in rows[pivot + 1 :]:
            factor = below[pivot] / top[pivot]
            for column in range(pivot, len(top)):
                below[column] -= factor * top[column]
    solution: list[float] = []
    for pivot in range(len(rows) - 1, -1, -1):
        *before, right = rows[pivot]
        partial_sum = sum(c * x for c, x in zip(reversed(before), solution, strict=False))
        solution.append((right - partial_sum) / before[pivot])
    return solution[::-1]


@dataclass(slots=True, eq=False)
class StepTimes:
    """The model of the duration of a step and of a block copy, in ms."""

    _weights: list[float] = field(default_factory=partial(list, _FIRST))
    # The normal equations of the least squares fit to the observed steps.
    _matrix: list[list[float]] = field(default_factory=lambda: [[0.0] * 4 for _ in range(4)])
    _moments: list[float] = field(default_factory=lambda: [0.0] * 4)
    copy_ms: float = 0.05  # duration of copying a block
    draft_ms: float = 0.2  # duration of proposing a draft token

    def expect(self, load: StepWork) -> float:
        """Return the expected duration of a step in ms."""
        return max(sum(w * x for w, x in zip(self._weights, load.terms, strict=True)), 1e-3)

    @property
    def prompt_token_ms(self) -> float:
        """Return the duration that a prompt token adds."""
        return max(self._weights[2], 1e-3)

    def observe(self, load: StepWork, took_ms: float) -> None:
        """Learn from the duration of a step; a step without work is ignored."""
        if not (load.decoded or load.prefilled):
            return
        certainty = (_NOISE * max(took_ms, 1.0)) ** -2
        for row, (sums, term) in enumerate(zip(self._matrix, load.terms, strict=True)):
            moment = self._moments[row]
            self._moments[row] = _FORGETTING * moment + certainty * term * took_ms
            for column, other in enumerate(load.terms):
                sums[column] = _FORGETTING * sums[column] + certainty * term * other
        self._weights = _fitted(self._matrix, self._moments)

    def copied(self, blocks: int, took_ms: float) -> None:
        """Learn from the duration of block copies."""
        self.copy_ms += _EWMA * (took_ms / blocks - self.copy_ms)

    def drafted(self, tokens: int, took_ms: float) -> None:
        """Learn from the duration of successive draft tokens.

        The duration is capped, because a draft model may have read a prompt first.
        """
        self.draft_ms += _EWMA * (min(took_ms / tokens, _OUTLIER * self.draft_ms) - self.draft_ms)

    def swap_pays(self, blocks: int, tokens: int) -> bool:
        """Check whether copying blocks out and back costs less than recomputing their tokens."""
        pairs = tokens * tokens
        again_ms = tokens * self.prompt_token_ms + self._weights[3] * pairs / _KEYS
        return 2 * blocks * self.copy_ms < again_ms

    def chunk(self, load: StepWork, begin: int, target_ms: float) -> int:
        """Return how many prompt tokens after the first `begin` fit a step within the target.

        The step also contains `load`. The result is a multiple of 16, and at least 16 if the step
        has no other prompt tokens.
        """
        budget_ms = max(target_ms - self.expect(load), 0.0)
        # Each token reads all tokens before it: n tokens take linear * n + square * n * n.
        square = self._weights[3] / _KEYS
        linear = self.prompt_token_ms + square * begin
        count = int(2 * budget_ms / (linear + math.sqrt(linear * linear + 4 * square * budget_ms)))
        return max(count // CHUNK * CHUNK, 0 if load.prefilled else CHUNK)

    def draft_length(self, decoding: int, acceptance: float, most: int) -> int:
        """Return the number of draft tokens per sequence with the highest token rate, possibly 0.

        See Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.

        Args:
            decoding: The number of sequences that decode together.
            acceptance: The probability that a draft token is accepted.
            most: The maximum.
        """
        best, best_rate = 0, _GAIN / self.expect(StepWork(decoding))
        tokens, chance = 1.0, 1.0
        for length in range(1, most + 1):
            chance *= acceptance
            tokens += chance
            took_ms = self.expect(StepWork(decoding * (1 + length))) + length * self.draft_ms
            if tokens / took_ms > best_rate:
                best, best_rate = length, tokens / took_ms
        return best


@dataclass(slots=True, eq=False)
class Acceptance:
    """The acceptance rate of a request's draft tokens, and a pause while it is too low."""

    rate: float = 0.7
    _pause: int = 0
    _seen: int = _GUESSED

    def length(self, drafts: int, threshold: float) -> int:
        """Return the number of draft tokens of this step: `drafts`, or 0 during a pause.

        One step after each pause drafts again.
        """
        if self._pause:
            self._pause -= 1
            return 0
        if self.rate < threshold or not drafts:
            self._pause = PROBE_STEPS
            self.rate = max(self.rate, threshold)
            return 0
        return drafts

    def observe(self, proposed: int, accepted: int) -> None:
        """Learn from a step. Tokens after the first rejected one are not observations."""
        for index in range(min(accepted + 1, proposed)):
            self._seen += 1
            weight = max(1 / self._seen, _EWMA)
            self.rate += weight * ((index < accepted) - self.rate)


class Running(NamedTuple):
    """The running step.

    Attributes:
        step: Its number.
        rows: Its sequences and rows, by the sequence's number.
        load: Its work.
        copies: The number of block copies.
        drafts: The number of draft tokens.
    """

    step: int
    rows: dict[int, tuple[Sequence[Any], Row]]
    load: StepWork
    copies: int
    drafts: int

    def observe(self, message: Stepped, times: StepTimes, counts: GenerationStats) -> None:
        """Learn from the duration of the step and count it."""
        load, took_ms = self.load, (message.forward_ns + message.sample_ns) / 1e6
        if self.copies:
            times.copied(self.copies, message.gather_ns / 1e6)
        else:
            took_ms += message.gather_ns / 1e6
        if self.drafts:
            times.drafted(self.drafts, message.draft_ns / 1e6)
        times.observe(load, took_ms - message.draft_ns / 1e6)
        counts.batch_tokens.observe(load.decoded + load.prefilled)
        counts.iteration_seconds.observe(message.gather_ns + message.forward_ns + message.sample_ns)
        phases = counts.phases
        phases["gather"] += message.gather_ns - message.draft_ns
        phases["forward"] += message.forward_ns
        phases["sample"] += message.sample_ns
        phases["draft"] += message.draft_ns
        phases["text"] += message.text_ns
        counts.prefilled += load.prefilled
        counts.decoded += load.decoded


class StepPlan:
    """A step while it is planned: its remaining budgets, and its rows so far."""

    def __init__(self, number: int, settings: EngineSettings) -> None:
        self.step = Step(number, [])
        self.tokens = settings.max_tokens_per_batch
        self.prompt_tokens = settings.max_prefill_tokens
        self.rows: dict[int, tuple[Sequence[Any], Row]] = {}
        self.load = StepWork()
        self.decoding = 1  # the number of decoding sequences
        self.drafts = 0
        self.preempted = False

    def add(self, sequence: Sequence[Any], count: int, drafts: int) -> None:
        """Add a row for the next `count` tokens of a sequence and its drafts.

        Charge the budgets.
        """
        start, samples = sequence.computed, count == sequence.missing
        blocks = sequence.table[sequence.sent_blocks :]
        row = Row(sequence.number, start, count, sequence.sent_blocks, blocks, drafts, samples)
        sequence.sent_blocks = len(sequence.table)
        self.step.rows.append(row)
        self.rows[sequence.number] = (sequence, row)
        self.tokens -= count + drafts
        decodes = samples and count == 1
        if not decodes:
            self.prompt_tokens -= count
        load = self.load
        self.load = StepWork(
            load.decoded + (count + drafts if decodes else 0),
            load.prefilled + (0 if decodes else count),
            load.pairs + count * (start + count),
        )
        self.drafts = max(self.drafts, drafts)
