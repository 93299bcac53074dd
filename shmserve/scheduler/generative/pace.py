"""What a step costs, learned from those that were run, and what follows from it: how much of a
prompt fits a step, how far to speculate, and whether a preempted sequence is swapped (pure).

A step's time is taken as a + b * sampled tokens + c * prompt tokens + d * keys read, none of them
negative: least squares over the steps, of which the older count for less, and over first guesses,
which stand where the steps do not say (ridge regression; an active set as of Lawson and Hanson,
"Solving Least Squares Problems").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

_FORGETTING = 0.98
_NOISE = 0.1  # of a step's time
# First guesses in ms, and how far off each may be: of a small model on a processor.
_FIRST = (5.0, 1.0, 0.5, 10.0)
_SPREAD = (20.0, 5.0, 2.0, 100.0)
_SURE = tuple(spread**-2 for spread in _SPREAD)
_KEYS = 1e5  # a unit of the last term
CHUNK = 16  # prompts are cut at multiples of it, so that their rows are computed alike
_EWMA = 0.1
_OUTLIER = 4  # times what was expected: more does not count for more
PROBE_STEPS = 50
_GUESSED = 2  # tokens, as which a first guess of the acceptance counts
_GAIN = 1.15  # that proposals have to promise: an estimate is some percent off


class StepWork(NamedTuple):
    """The work of a step: tokens that decode, those of prompts, and (query, key) pairs."""

    decoded: int = 0
    prefilled: int = 0
    pairs: int = 0

    @property
    def terms(self) -> tuple[float, float, float, float]:
        """The terms of the model."""
        return (1.0, float(self.decoded), float(self.prefilled), self.pairs / _KEYS)


def _fitted(matrix: list[list[float]], moments: list[float]) -> list[float]:
    """The weights for normal equations and the first guesses: what would be negative is 0."""
    weights, used = [0.0] * 4, [0, 1, 2, 3]
    while used:
        rows = [
            [*(matrix[row][column] + _SURE[row] * (row == column) for column in used), moments[row]]
            for row in used
        ]
        for row, equation in zip(used, rows, strict=True):
            equation[-1] += _SURE[row] * _FIRST[row]
        found = _solved(rows)
        if min(found) >= 0:
            for row, weight in zip(used, found, strict=True):
                weights[row] = weight
            break
        del used[found.index(min(found))]
    return weights


def _solved(rows: list[list[float]]) -> list[float]:
    """The solution of positive definite equations, each with its right side last, by
    elimination; they are changed."""
    for pivot, top in enumerate(rows):
        for below in rows[pivot + 1 :]:
            factor = below[pivot] / top[pivot]
            for column in range(pivot, len(top)):
                below[column] -= factor * top[column]
    found: list[float] = []
    for pivot in range(len(rows) - 1, -1, -1):
        *before, right = rows[pivot]
        known = sum(c * x for c, x in zip(reversed(before), found, strict=False))
        found.append((right - known) / before[pivot])
    return found[::-1]


@dataclass(slots=True, eq=False)
class StepTimes:
    """The model of a step's time in ms, and of a block's copy."""

    _weights: list[float] = field(default_factory=partial(list, _FIRST))
    # The normal equations of the steps that were seen.
    _matrix: list[list[float]] = field(default_factory=lambda: [[0.0] * 4 for _ in range(4)])
    _moments: list[float] = field(default_factory=lambda: [0.0] * 4)
    copy_ms: float = 0.05  # of a block
    draft_ms: float = 0.2  # of a token that is proposed

    def expect(self, load: StepWork) -> float:
        """The time in ms that a step is expected to take."""
        return max(sum(w * x for w, x in zip(self._weights, load.terms, strict=True)), 1e-3)

    @property
    def prompt_token_ms(self) -> float:
        """What a token of a prompt adds."""
        return max(self._weights[2], 1e-3)

    def observe(self, load: StepWork, took_ms: float) -> None:
        """A step has taken so long. One without work says nothing of others."""
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
        """So many blocks were copied in this time."""
        self.copy_ms += _EWMA * (took_ms / blocks - self.copy_ms)

    def drafted(self, tokens: int, took_ms: float) -> None:
        """So many tokens were proposed, one after the other, in this time. Where a draft model read
        a prompt first, it is not the proposals that took so long."""
        self.draft_ms += _EWMA * (min(took_ms / tokens, _OUTLIER * self.draft_ms) - self.draft_ms)

    def swap_pays(self, blocks: int, tokens: int) -> bool:
        """Whether to copy blocks out and back costs less than to compute their tokens again."""
        pairs = tokens * tokens
        again_ms = tokens * self.prompt_token_ms + self._weights[3] * pairs / _KEYS
        return 2 * blocks * self.copy_ms < again_ms

    def chunk(self, load: StepWork, begin: int, target_ms: float) -> int:
        """The tokens of a prompt, behind its first `begin`, that fit a step beside `load` within
        the target, a multiple of 16; one multiple at least where no others are computed, so that
        prompts get on."""
        room = max(target_ms - self.expect(load), 0.0)
        # Each token reads those before it: what n of them take is linear * n + square * n * n.
        square = self._weights[3] / _KEYS
        linear = self.prompt_token_ms + square * begin
        count = int(2 * room / (linear + math.sqrt(linear * linear + 4 * square * room)))
        return max(count // CHUNK * CHUNK, 0 if load.prefilled else CHUNK)

    def draft_length(self, decoding: int, acceptance: float, most: int) -> int:
        """The tokens to propose for each of so many sequences that decode together, where each is
        accepted with this probability: as many as yield most tokens a ms (Leviathan et al., "Fast
        Inference from Transformers via Speculative Decoding", 2023); perhaps none."""
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
    """How many of a request's proposed tokens were accepted, and when to propose any again."""

    rate: float = 0.7
    _pause: int = 0
    _seen: int = _GUESSED

    def length(self, wanted: int, threshold: float) -> int:
        """The tokens to propose in this step: `wanted`, or none while it pauses; after a pause one
        step tries again."""
        if self._pause:
            self._pause -= 1
            return 0
        if self.rate < threshold or not wanted:
            self._pause = PROBE_STEPS
            self.rate = max(self.rate, threshold)
            return 0
        return wanted

    def observe(self, proposed: int, accepted: int) -> None:
        """A step has accepted so many of those that were proposed: a run that ended early says
        nothing of what came behind."""
        for index in range(min(accepted + 1, proposed)):
            self._seen += 1
            weight = max(1 / self._seen, _EWMA)
            self.rate += weight * ((index < accepted) - self.rate)
