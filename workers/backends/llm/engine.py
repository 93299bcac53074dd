"""The engine of a worker, which executes the steps that a scheduler plans, in order.

Step ──> begin, copy blocks, propose ──> forward ──> sample, verify ──> Stepped
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shmserve.errors import InvalidArgument
from shmserve.ipc.messages.generation import Row, RowResult, Step, Stepped
from shmserve.workers.backends.llm.grammars import allowed_tokens, failure
from shmserve.workers.backends.llm.model.passes import Passes
from shmserve.workers.backends.llm.sampler import (
    Check,
    Proposal,
    SampledRow,
    TokenLogprobs,
    candidates,
    logprobs,
    process,
    verify,
)
from shmserve.workers.backends.llm.sequences import Prompt, TokenSequence
from shmserve.workers.backends.llm.speculation import Proposer

NO_TOKEN = "response_format: the other parameters forbid all tokens that the grammar allows"


class Emitted(NamedTuple):
    """The tokens that a step has added to a sequence; none if its prompt was scored in part."""

    sequence: int
    prompt: Prompt
    sample: int
    tokens: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs]


@dataclass(slots=True)
class Planned:
    """A planned row in its pass, with the indices of its first row and of its first logits."""

    sequence: TokenSequence
    row: Row
    proposal: Proposal
    masks: list[torch.Tensor]
    begin: int = 0
    logits: int = 0


@dataclass(eq=False)
class WorkerEngine:
    """The executor of one model's steps, with its sequences.

    Attributes:
        prompts: The prepared requests by key.
        emit: Receives the tokens that a step has added.
        fail: Ends the requests of these keys with an error.
    """

    passes: Passes
    proposer: Proposer | None
    prompts: Mapping[int, Prompt]
    emit: Callable[[list[Emitted]], None]
    fail: Callable[[set[int], Exception], None]
    _sequences: dict[int, TokenSequence] = field(default_factory=dict)
    _last: int = 0

    def step(self, message: Step) -> Stepped:
        """Execute a step, except for sequences whose requests have ended."""
        started = time.perf_counter_ns()
        self._begin(message)
        self.passes.cache.copy(message.out, message.back, message.within)
        rows = self._prepared(message)
        proposed = time.perf_counter_ns()
        planned = self._plan(rows)
        gathered = time.perf_counter_ns()
        logits = self._forward(planned)
        computed = time.perf_counter_ns()
        results = self._results(planned, logits)
        lost = [row.sequence for row in message.rows if row.sequence not in self._sequences]
        for number in message.ended:
            self._sequences.pop(number, None)
        return Stepped(
            message.step,
            results,
            gather_ns=gathered - started,
            forward_ns=computed - gathered,
            sample_ns=time.perf_counter_ns() - computed,
            draft_ns=gathered - proposed,
            lost=lost,
        )

    def keys(self, message: Step) -> set[int]:
        """Return the keys of the requests whose sequences have rows in a step."""
        live = self._sequences
        return {live[row.sequence].prompt.key for row in message.rows if row.sequence in live}

    def _begin(self, message: Step) -> None:
        if message.step <= self._last:
            # Another scheduler has taken over, which restarts the numbering of sequences.
            self._sequences.clear()
        self._last = message.step
        for begin in message.begin:
            parent = self._sequences.get(begin.parent) if begin.parent else None
            prompt = self.prompts.get(begin.key)
            if parent is not None:
                sequence = parent.fork(begin.sequence, begin.sample, begin.token)
            elif prompt is not None and not begin.parent:
                sequence = prompt.begin(begin.sequence, begin.sample)
            else:
                continue  # its request has ended, which the step's result reports to the scheduler
            self._sequences[begin.sequence] = sequence

    def _prepared(self, message: Step) -> list[tuple[TokenSequence, Row]]:
        rows: list[tuple[TokenSequence, Row]] = []
        for row in message.rows:
            sequence = self._sequences.get(row.sequence)
            if sequence is not None:
                sequence.add_blocks(row, self.passes.cache.block_size)
                if sequence.prompt.cached < 0:
                    sequence.prompt.cached = min(row.start, len(sequence.prompt.tokens))
                rows.append((sequence, row))
        # Sorted by length, so that rows of an attention call have similar widths.
        return sorted(rows, key=lambda each: each[1].start)

    def _plan(self, rows: list[tuple[TokenSequence, Row]]) -> list[Planned]:
        """Return the rows with their proposals, and the tokens that their grammars allow."""
        drafting = [each for each in rows if each[1].draft] if self.proposer else []
        proposals = self.proposer.propose(drafting) if self.proposer and drafting else {}
        planned: list[Planned] = []
        for sequence, row in rows:
            proposal = proposals.get(row.sequence, Proposal())
            masks: list[torch.Tensor] = []
            if row.samples and sequence.matcher is not None:
                proposal.tokens, masks = allowed_tokens(sequence.matcher, proposal.tokens)
                error = failure(sequence.matcher)
                if error is not None:
                    self.fail({sequence.prompt.key}, error)
                    # The step's result reports this to the scheduler.
                    del self._sequences[row.sequence]
                    continue
            planned.append(Planned(sequence, row, proposal, masks))
        return planned

    def _forward(self, planned: list[Planned]) -> torch.Tensor:
        """Return the logits of all rows that are sampled or need log probabilities."""
        rows = self.passes.empty()
        logit_rows: list[int] = []
        for each in planned:
            row, sequence = each.row, each.sequence
            end = row.start + row.count
            tokens = [*sequence.tokens[row.start : end], *each.proposal.tokens]
            prompt = row.start < len(sequence.prompt.tokens)
            each.begin = rows.add(tokens, row.start, sequence.table, prompt)
            each.logits = len(logit_rows)
            first = 0 if self._scores_prompt(each) else row.count - row.samples
            logit_rows += range(each.begin + first, each.begin + len(tokens))
        if not planned:
            return torch.empty(0)
        return self.passes.logits(rows, logit_rows)

    @staticmethod
    def _scores_prompt(each: Planned) -> bool:
        prompt = each.sequence.prompt
        return prompt.scored >= 0 and each.row.start < len(prompt.tokens) - 1

    # --- results

    @torch.inference_mode()
    def _results(self, planned: list[Planned], logits: torch.Tensor) -> list[RowResult]:
        for each in planned:
            if self._scores_prompt(each):
                each.logits += self._score_prompt(each, logits)
        results: list[RowResult] = []
        sampling: list[Planned] = []
        for each in planned:
            if each.sequence.prompt.parameters.beams and each.row.samples:
                results.append(_beam(each, logits[each.logits]))
            elif each.row.samples:
                sampling.append(each)
        return results + self._sampled(sampling, logits) if sampling else results

    def _sampled(self, sampling: list[Planned], logits: torch.Tensor) -> list[RowResult]:
        """Sample the next token of each sequence, and verify its proposals."""
        sampled: list[SampledRow] = []
        logit_rows: list[int] = []
        checks: list[Check] = []
        for each in sampling:
            tokens = each.proposal.tokens
            checks.append(Check(len(sampled), each.proposal))
            logit_rows += range(each.logits, each.logits + len(tokens) + 1)
            for count in range(len(tokens) + 1):
                mask = each.masks[count] if each.masks else None
                sampled.append(each.sequence.sampled_row(tokens[:count], mask))
        row_logits = logits if len(logit_rows) == len(logits) else logits[logit_rows]
        raw = _raw(row_logits, sampled)
        process(row_logits, sampled)
        accepted = verify(row_logits, sampled, checks)
        parts = zip(sampling, checks, accepted, strict=True)
        emitted = [self._append(each, check, tokens, raw) for each, check, tokens in parts]
        self.emit(emitted)
        return [
            RowResult(each.sequence, each.tokens, each.finish_reason, len(check.proposal.tokens))
            for each, check in zip(emitted, checks, strict=True)
        ]

    def _append(
        self, each: Planned, check: Check, tokens: list[int], raw: torch.Tensor | None
    ) -> Emitted:
        """Add the sampled tokens to a sequence."""
        sequence, prompt = each.sequence, each.sequence.prompt
        before = len(sequence.tokens)
        tokens, finish_reason = sequence.take(tokens)
        # The draft model's keys and values are valid up to the last accepted token.
        sequence.drafted = min(sequence.drafted, before + len(tokens) - 1)
        matcher = sequence.matcher
        if matcher is not None and not matcher.is_stopped():
            matcher.consume_tokens(tokens[:-1] if finish_reason else tokens)
            if finish_reason == "stop" and tokens[-1] in prompt.ends and not matcher.is_accepting():
                self.fail({prompt.key}, InvalidArgument(NO_TOKEN))
        scores: list[TokenLogprobs] = []
        if raw is not None and prompt.parameters.logprobs >= 0:
            rows = raw[check.first : check.first + len(tokens)]
            scores = logprobs(rows, tokens, prompt.parameters.logprobs)
        return Emitted(sequence.number, prompt, sequence.sample, tokens, finish_reason, scores)

    def _score_prompt(self, each: Planned, logits: torch.Tensor) -> int:
        """Record the log probabilities of a prompt's tokens.

        Returns:
            The number of rows of logits before those that are sampled.
        """
        prompt, row = each.sequence.prompt, each.row
        last = min(row.start + row.count, len(prompt.tokens) - 1)
        targets = prompt.tokens[row.start + 1 : last + 1]
        rows = logits[each.logits : each.logits + len(targets)]
        scores = logprobs(rows, targets, prompt.scored)
        for position, score in enumerate(scores, row.start + 1):
            prompt.scores_by_position.setdefault(position, score)
        self.emit([Emitted(each.sequence.number, prompt, each.sequence.sample, [], "", [])])
        return row.count - row.samples


def _beam(each: Planned, logits: torch.Tensor) -> RowResult:
    prompt = each.sequence.prompt
    count = max(2, 1 + len(prompt.ends)) * prompt.parameters.beams
    tokens, scores = candidates(logits, count)
    return RowResult(each.sequence.number, [], candidates=tokens, scores=scores)


def _raw(logits: torch.Tensor, rows: list[SampledRow]) -> torch.Tensor | None:
    """Copy the unprocessed logits if log probabilities are requested."""
    return logits.clone() if any(row.parameters.logprobs >= 0 for row in rows) else None
