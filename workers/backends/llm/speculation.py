"""Speculative decoding: proposals for the next tokens, which `sampler.verify` checks exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from shmserve.ipc.messages.generation import Row
from shmserve.workers.backends.llm.model.passes import Passes
from shmserve.workers.backends.llm.sampler import (
    PROPOSAL,
    Proposal,
    process,
    sample,
)
from shmserve.workers.backends.llm.sequences import TokenSequence

_LONGEST, _SHORTEST = 4, 2  # maximum and minimum number of tokens of an ending that must be equal
_MAX_DRAFT_INPUT = 512  # tokens of a sequence that a draft model reads per step


class Proposer(Protocol):
    """The interface of a method that proposes tokens."""

    def propose(self, rows: Sequence[tuple[TokenSequence, Row]]) -> dict[int, Proposal]:
        """Return up to `row.draft` tokens for each sequence, by its number."""


class NgramProposer(Proposer):
    """A proposer of the tokens that followed the last occurrence of a sequence's ending."""

    def propose(self, rows: Sequence[tuple[TokenSequence, Row]]) -> dict[int, Proposal]:
        return {
            sequence.number: Proposal(followers(sequence.tokens, row.draft))
            for sequence, row in rows
        }


def followers(tokens: Sequence[int], count: int) -> list[int]:
    """Return up to `count` tokens behind the last earlier occurrence of the longest ending."""
    token_array = np.array(tokens)
    for length in range(_LONGEST, _SHORTEST - 1, -1):
        if len(token_array) <= length:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(token_array[:-1], length)
        matches = np.flatnonzero((windows == token_array[-length:]).all(1))
        if len(matches):
            begin = int(matches[-1]) + length
            return list(map(int, token_array[begin : begin + count]))
    return []


class DraftModel(Proposer):
    """A proposer that runs a smaller model.

    The model has a KV cache of its own over the same blocks, and reads the tokens of a sequence
    before it proposes for it.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    def propose(self, rows: Sequence[tuple[TokenSequence, Row]]) -> dict[int, Proposal]:
        proposals = {sequence.number: Proposal() for sequence, _ in rows}
        ready = self._catch_up(rows)
        most = max((row.draft for _, row in ready), default=0)
        for round_ in range(most):
            drafting = [(sequence, row) for sequence, row in ready if row.draft > round_]
            logits = self._next(drafting, proposals)
            self._extend(logits, drafting, proposals)
        for sequence, row in ready:
            sequence.drafted = len(sequence.tokens) + row.draft - 1
        return proposals

    def _catch_up(
        self, rows: Sequence[tuple[TokenSequence, Row]]
    ) -> list[tuple[TokenSequence, Row]]:
        """Compute earlier tokens of sequences in the draft model.

        Returns:
            The rows whose sequences are computed, for which the model can propose tokens.
        """
        late = [
            (sequence, row)
            for sequence, row in rows
            if len(sequence.tokens) - sequence.drafted > _MAX_DRAFT_INPUT
        ]
        if late:
            reading = self._passes.empty()
            for sequence, _ in late:
                begin, end = sequence.drafted, sequence.drafted + _MAX_DRAFT_INPUT
                reading.add(sequence.tokens[begin:end], begin, sequence.table)
                sequence.drafted = end
            self._passes.logits(reading, [])
        return [each for each in rows if each not in late]

    def _next(
        self, rows: Sequence[tuple[TokenSequence, Row]], proposals: dict[int, Proposal]
    ) -> torch.Tensor:
        """Return the logits behind each sequence and its proposed tokens."""
        reading = self._passes.empty()
        logit_rows: list[int] = []
        for sequence, _ in rows:
            drafts = proposals[sequence.number].tokens
            begin = len(sequence.tokens) + len(drafts) - 1 if drafts else sequence.drafted
            tokens = drafts[-1:] or sequence.tokens[begin:]
            logit_rows.append(reading.add(tokens, begin, sequence.table) + len(tokens) - 1)
        return self._passes.logits(reading, logit_rows)

    def _extend(
        self,
        logits: torch.Tensor,
        rows: Sequence[tuple[TokenSequence, Row]],
        proposals: dict[int, Proposal],
    ) -> None:
        sampled = [sequence.sampled_row(proposals[sequence.number].tokens) for sequence, _ in rows]
        process(logits, sampled)
        tokens, chances = sample(logits, sampled, PROPOSAL)
        for index, (sequence, _) in enumerate(rows):
            proposal = proposals[sequence.number]
            proposal.tokens.append(tokens[index])
            if index in chances:
                proposal.chances.append(chances[index])
