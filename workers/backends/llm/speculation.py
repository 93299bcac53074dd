"""Speculative decoding: proposals for the next tokens, and their exact verification.

What was proposed without chance (n-grams, a greedy draft) is accepted where the model's own draw is
the same token, which leaves every text as it is without proposals. What a draft model has drawn is
accepted by rejection sampling (Leviathan et al., 2023; Chen et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch

from shmserve.ipc.messages.generation import Row
from shmserve.workers.backends.llm.model.passes import Passes
from shmserve.workers.backends.llm.sampler import (
    ACCEPTANCE,
    PROPOSAL,
    SampledRow,
    distribution,
    pick,
    process,
    sample,
)
from shmserve.workers.backends.llm.sequences import TokenSequence

_LONGEST, _SHORTEST = 4, 2  # tokens that have to be the same
_MOST_BEHIND = 512  # tokens of a sequence that a draft model reads in one step


@dataclass(slots=True)
class Proposal:
    """Tokens that may follow a sequence; `chances` [tokens, vocabulary] are the probabilities with
    which each was drawn, where it was drawn."""

    tokens: list[int] = field(default_factory=list)
    chances: list[torch.Tensor] = field(default_factory=list)


class Proposer(Protocol):
    """A way to propose tokens."""

    def propose(self, rows: Sequence[tuple[TokenSequence, Row]]) -> dict[int, Proposal]:
        """Up to `row.draft` tokens behind each sequence, by its number."""


class NgramProposer:
    """Proposes what followed when a sequence last had the tokens that it ends with."""

    def propose(self, rows: Sequence[tuple[TokenSequence, Row]]) -> dict[int, Proposal]:
        """As `Proposer.propose` says."""
        return {
            sequence.number: Proposal(followers(sequence.tokens, row.draft))
            for sequence, row in rows
        }


def followers(tokens: Sequence[int], count: int) -> list[int]:
    """Up to `count` tokens that followed the last earlier occurrence of the longest ending."""
    known = np.array(tokens)
    for length in range(_LONGEST, _SHORTEST - 1, -1):
        if len(known) <= length:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(known[:-1], length)
        found = np.flatnonzero((windows == known[-length:]).all(1))
        if len(found):
            begin = int(found[-1]) + length
            return list(map(int, known[begin : begin + count]))
    return []


class DraftModel:
    """Proposes what a smaller model says. It has a KV cache of its own, over the same blocks, and
    catches up with a sequence where it has to propose for it."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    def propose(self, rows: Sequence[tuple[TokenSequence, Row]]) -> dict[int, Proposal]:
        """As `Proposer.propose` says."""
        made = {sequence.number: Proposal() for sequence, _ in rows}
        ready = self._catch_up(rows)
        most = max((row.draft for _, row in ready), default=0)
        for round_ in range(most):
            going = [(sequence, row) for sequence, row in ready if row.draft > round_]
            logits = self._next(going, made)
            self._extend(logits, going, made)
        for sequence, row in ready:
            sequence.drafted = len(sequence.tokens) + row.draft - 1
        return made

    def _catch_up(
        self, rows: Sequence[tuple[TokenSequence, Row]]
    ) -> list[tuple[TokenSequence, Row]]:
        """Those that it can propose for now: of the others it has read a part."""
        late = [
            (sequence, row)
            for sequence, row in rows
            if len(sequence.tokens) - sequence.drafted > _MOST_BEHIND
        ]
        if late:
            reading = self._passes.empty()
            for sequence, _ in late:
                begin, end = sequence.drafted, sequence.drafted + _MOST_BEHIND
                reading.add(sequence.tokens[begin:end], begin, sequence.table)
                sequence.drafted = end
            self._passes.logits(reading, [])
        return [each for each in rows if each not in late]

    def _next(
        self, rows: Sequence[tuple[TokenSequence, Row]], made: dict[int, Proposal]
    ) -> torch.Tensor:
        """The logits behind each sequence and what is proposed for it."""
        reading = self._passes.empty()
        wanted: list[int] = []
        for sequence, _ in rows:
            drafts = made[sequence.number].tokens
            begin = len(sequence.tokens) + len(drafts) - 1 if drafts else sequence.drafted
            tokens = drafts[-1:] or sequence.tokens[begin:]
            wanted.append(reading.add(tokens, begin, sequence.table) + len(tokens) - 1)
        return self._passes.logits(reading, wanted)

    def _extend(
        self,
        logits: torch.Tensor,
        rows: Sequence[tuple[TokenSequence, Row]],
        made: dict[int, Proposal],
    ) -> None:
        sampled = [sequence.sampled_row(made[sequence.number].tokens) for sequence, _ in rows]
        process(logits, sampled)
        tokens, chances = sample(logits, sampled, PROPOSAL)
        for place, (sequence, _) in enumerate(rows):
            proposal = made[sequence.number]
            proposal.tokens.append(tokens[place])
            if place in chances:
                proposal.chances.append(chances[place])


class Check(NamedTuple):
    """The rows of one sequence to verify, from `first` on: one for each proposed token, and one
    behind the last."""

    first: int
    proposal: Proposal


def verify(
    logits: torch.Tensor, rows: Sequence[SampledRow], checks: Sequence[Check]
) -> list[list[int]]:
    """The tokens that each sequence goes on with, from processed logits of all its rows: what was
    proposed as far as that is accepted, and one token more."""
    drawn, _ = sample(logits, rows)
    wanted = distribution(logits, rows) if any(each.proposal.chances for each in checks) else None
    found: list[list[int]] = []
    for first, proposal in checks:
        own = drawn[first : first + len(proposal.tokens) + 1]
        if wanted is not None and proposal.chances:
            part = slice(first, first + len(own))
            found.append(_rejection(wanted[part], rows[part], proposal, own[-1]))
            continue
        same = [token == mine for token, mine in zip(proposal.tokens, own, strict=False)]
        accepted = same.index(False) if False in same else len(same)
        found.append(own[: accepted + 1])
    return found


def _rejection(
    wanted: torch.Tensor, rows: Sequence[SampledRow], proposal: Proposal, bonus: int
) -> list[int]:
    """Accept each token with the probability min(1, p / q); behind the first that is rejected the
    next is drawn from what p has more than q, behind all `bonus` follows."""
    tokens: list[int] = []
    for token, chance, mine, row in zip(
        proposal.tokens, proposal.chances, wanted, rows, strict=False
    ):
        if row.draw(ACCEPTANCE) * float(chance[token]) < float(mine[token]):
            tokens.append(token)
            continue
        rest = (mine - chance).clamp_min(0)
        if float(rest.sum()) <= 1e-6:
            rest = mine
        return tokens + pick(rest.unsqueeze(0), [row.draw()])
    return [*tokens, bonus]
