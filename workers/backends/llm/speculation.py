"""Speculative decoding: proposers of draft tokens, which `sampler.verify` accepts or rejects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from shmserve.ipc.messages.generation import Row
from shmserve.workers.backends.llm.model.passes import Passes
from shmserve.workers.backends.llm.sampler import PROPOSAL, Proposal, process, sample
from shmserve.workers.backends.llm.sequences import TokenSequence

_MAX_NGRAM, _MIN_NGRAM = 4, 2  # number of tokens
_MAX_DRAFT_INPUT = 512  # tokens of a sequence that a draft model reads per step

_SequenceRow = tuple[TokenSequence, Row]


class Proposer(Protocol):
    """The interface of the methods that propose draft tokens."""

    def propose(self, rows: Sequence[_SequenceRow]) -> dict[int, Proposal]:
        """Return up to `row.draft_count` proposed tokens for each sequence, by sequence number."""


class NgramProposer(Proposer):
    """A proposer of tokens from the sequence itself (prompt lookup decoding; Saxena, 2023)."""

    def propose(self, rows: Sequence[_SequenceRow]) -> dict[int, Proposal]:
        return {
            sequence.number: Proposal(ngram_draft(sequence.tokens, row.draft_count))
            for sequence, row in rows
        }


def ngram_draft(tokens: Sequence[int], count: int) -> list[int]:
    """Return up to `count` tokens that followed the last earlier occurrence of the final n-gram.

    The longest n-gram that occurs earlier is used.
    """
    token_array = np.array(tokens)
    for length in range(_MAX_NGRAM, _MIN_NGRAM - 1, -1):
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

    Its KV cache has the same blocks as the target model's, so both models use one block table.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    def propose(self, rows: Sequence[_SequenceRow]) -> dict[int, Proposal]:
        proposals = {sequence.number: Proposal() for sequence, _ in rows}
        ready = self._catch_up(rows)
        max_drafts = max((row.draft_count for _, row in ready), default=0)
        for round_ in range(max_drafts):
            draft_rows = [(sequence, row) for sequence, row in ready if row.draft_count > round_]
            logits = self._next_logits(draft_rows, proposals)
            self._append_drafts(logits, draft_rows, proposals)
        for sequence, row in ready:
            sequence.draft_computed = len(sequence.tokens) + row.draft_count - 1
        return proposals

    def _catch_up(self, rows: Sequence[_SequenceRow]) -> list[_SequenceRow]:
        """Compute earlier tokens of sequences that the draft model has not computed yet.

        Returns:
            The rows for whose sequences the model can propose tokens.
        """
        behind_rows = [
            (sequence, row)
            for sequence, row in rows
            if len(sequence.tokens) - sequence.draft_computed > _MAX_DRAFT_INPUT
        ]
        if behind_rows:
            batch = self._passes.empty()
            for sequence, _ in behind_rows:
                begin, end = sequence.draft_computed, sequence.draft_computed + _MAX_DRAFT_INPUT
                batch.add(sequence.tokens[begin:end], begin, sequence.block_table)
                sequence.draft_computed = end
            self._passes.logits(batch, [])
        return [pair for pair in rows if pair not in behind_rows]

    def _next_logits(
        self, rows: Sequence[_SequenceRow], proposals: dict[int, Proposal]
    ) -> torch.Tensor:
        """Return the logits after each sequence and its draft tokens, [rows, vocabulary]."""
        batch = self._passes.empty()
        logit_rows: list[int] = []
        for sequence, _ in rows:
            drafts = proposals[sequence.number].tokens
            begin = len(sequence.tokens) + len(drafts) - 1 if drafts else sequence.draft_computed
            tokens = drafts[-1:] or sequence.tokens[begin:]
            logit_rows.append(batch.add(tokens, begin, sequence.block_table) + len(tokens) - 1)
        return self._passes.logits(batch, logit_rows)

    def _append_drafts(
        self, logits: torch.Tensor, rows: Sequence[_SequenceRow], proposals: dict[int, Proposal]
    ) -> None:
        sampled = [sequence.sampled_row(proposals[sequence.number].tokens) for sequence, _ in rows]
        process(logits, sampled)
        tokens, distributions = sample(logits, sampled, PROPOSAL)
        for index, (sequence, _) in enumerate(rows):
            proposal = proposals[sequence.number]
            proposal.tokens.append(tokens[index])
            if index in distributions:
                proposal.probabilities.append(distributions[index])
