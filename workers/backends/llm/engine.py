"""The engine of a worker, which executes the steps that a scheduler plans, in order.

Step ──> begin sequences, copy blocks, propose drafts ──> forward ──> sample, verify ──> Stepped
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shmserve.errors import InvalidArgument
from shmserve.ipc.messages.generation import Row, RowResult, Step, Stepped
from shmserve.workers.backends.llm.grammars import allowed_tokens, matcher_error
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

_NO_ALLOWED_TOKEN = "the other parameters forbid all tokens that the grammar allows"


class SequenceOutput(NamedTuple):
    """The tokens that a step has added to a sequence.

    `tokens` is empty if the step has only computed log probabilities of the prompt.
    """

    sequence: int
    prompt: Prompt
    sample: int
    tokens: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs]


@dataclass(slots=True)
class RowPlan:
    """A row of a step in its forward pass.

    Attributes:
        masks: The tokens that the grammar allows after each draft token, as int32 bitmasks.
        pass_row: The index in the pass of the row of its first token.
        logit_row: The index of its first row of logits.
    """

    sequence: TokenSequence
    row: Row
    proposal: Proposal
    masks: list[torch.Tensor]
    pass_row: int = 0
    logit_row: int = 0


@dataclass(eq=False)
class WorkerEngine:
    """The executor of one model's steps, with its sequences.

    Attributes:
        prompts: The prompts of the prepared requests by key.
        emit: Receives the outputs of a step.
        fail: Fails the requests with these keys with an error.
    """

    passes: Passes
    proposer: Proposer | None
    prompts: Mapping[int, Prompt]
    emit: Callable[[list[SequenceOutput]], None]
    fail: Callable[[set[int], Exception], None]
    _sequences: dict[int, TokenSequence] = field(default_factory=dict)
    _last_step: int = 0

    def step(self, message: Step) -> Stepped:
        """Execute a step; sequences whose requests have ended are reported as skipped."""
        started = time.perf_counter_ns()
        self._begin_sequences(message)
        self.passes.cache.copy(message.swap_out, message.swap_in, message.copies)
        rows = self._prepare_rows(message)
        prepared = time.perf_counter_ns()
        plans = self._plan_rows(rows)
        planned = time.perf_counter_ns()
        logits = self._forward(plans)
        computed = time.perf_counter_ns()
        results = self._sample_rows(plans, logits)
        skipped = [row.sequence for row in message.rows if row.sequence not in self._sequences]
        for sequence in message.ended:
            self._sequences.pop(sequence, None)
        return Stepped(
            message.step,
            results,
            gather_ns=planned - started,
            forward_ns=computed - planned,
            sample_ns=time.perf_counter_ns() - computed,
            draft_ns=planned - prepared,
            skipped=skipped,
        )

    def request_keys(self, message: Step) -> set[int]:
        """Return the keys of the requests whose sequences have rows in a step."""
        live = self._sequences
        return {live[row.sequence].prompt.key for row in message.rows if row.sequence in live}

    def _begin_sequences(self, message: Step) -> None:
        if message.step <= self._last_step:
            # A successor of the scheduler numbers sequences and steps from the beginning.
            self._sequences.clear()
        self._last_step = message.step
        for begin in message.new_sequences:
            parent = self._sequences.get(begin.parent) if begin.parent else None
            prompt = self.prompts.get(begin.key)
            if parent is not None:
                sequence = parent.fork(begin.sequence, begin.sample, begin.token)
            elif prompt is not None and not begin.parent:
                sequence = prompt.begin_sequence(begin.sequence, begin.sample)
            else:
                continue  # its request has ended; `step` reports the sequence as skipped
            self._sequences[begin.sequence] = sequence

    def _prepare_rows(self, message: Step) -> list[tuple[TokenSequence, Row]]:
        rows: list[tuple[TokenSequence, Row]] = []
        for row in message.rows:
            sequence = self._sequences.get(row.sequence)
            if sequence is not None:
                sequence.add_blocks(row, self.passes.cache.block_size)
                if sequence.prompt.cached_tokens < 0:
                    sequence.prompt.cached_tokens = min(row.start, len(sequence.prompt.tokens))
                rows.append((sequence, row))
        # Sorted by length, so that rows of an attention call have similar widths.
        return sorted(rows, key=lambda pair: pair[1].start)

    def _plan_rows(self, rows: list[tuple[TokenSequence, Row]]) -> list[RowPlan]:
        """Propose draft tokens, and compute the tokens that grammars allow after each of them."""
        draft_rows = [pair for pair in rows if pair[1].draft_count] if self.proposer else []
        proposals = self.proposer.propose(draft_rows) if self.proposer and draft_rows else {}
        plans: list[RowPlan] = []
        for sequence, row in rows:
            proposal = proposals.get(row.sequence, Proposal())
            masks: list[torch.Tensor] = []
            if row.samples and sequence.matcher is not None:
                proposal.tokens, masks = allowed_tokens(sequence.matcher, proposal.tokens)
                name = sequence.prompt.parameters.grammar_name
                error = matcher_error(sequence.matcher, name)
                if error is not None:
                    self.fail({sequence.prompt.key}, error)
                    del self._sequences[row.sequence]  # `step` reports the sequence as skipped
                    continue
            plans.append(RowPlan(sequence, row, proposal, masks))
        return plans

    def _forward(self, plans: list[RowPlan]) -> torch.Tensor:
        """Run the model; return the logits of rows that are sampled or need log probabilities."""
        batch = self.passes.empty()
        logit_rows: list[int] = []
        for plan in plans:
            row, sequence = plan.row, plan.sequence
            end = row.start + row.count
            tokens = [*sequence.tokens[row.start : end], *plan.proposal.tokens]
            is_prompt = row.start < len(sequence.prompt.tokens)
            plan.pass_row = batch.add(tokens, row.start, sequence.block_table, is_prompt)
            plan.logit_row = len(logit_rows)
            skipped = 0 if self._scores_prompt(plan) else row.count - row.samples
            logit_rows += range(plan.pass_row + skipped, plan.pass_row + len(tokens))
        if not plans:
            return torch.empty(0)
        return self.passes.logits(batch, logit_rows)

    @staticmethod
    def _scores_prompt(plan: RowPlan) -> bool:
        prompt = plan.sequence.prompt
        return prompt.top_logprobs >= 0 and plan.row.start < len(prompt.tokens) - 1

    # --- results

    @torch.inference_mode()
    def _sample_rows(self, plans: list[RowPlan], logits: torch.Tensor) -> list[RowResult]:
        for plan in plans:
            if self._scores_prompt(plan):
                plan.logit_row += self._score_prompt(plan, logits)
        results: list[RowResult] = []
        sampled_plans: list[RowPlan] = []
        for plan in plans:
            if plan.sequence.prompt.parameters.beams and plan.row.samples:
                results.append(_beam_candidates(plan, logits[plan.logit_row]))
            elif plan.row.samples:
                sampled_plans.append(plan)
        return results + self._sample_tokens(sampled_plans, logits) if sampled_plans else results

    def _sample_tokens(self, plans: list[RowPlan], logits: torch.Tensor) -> list[RowResult]:
        """Sample the next token of each sequence, and verify its draft tokens."""
        sampled: list[SampledRow] = []
        logit_rows: list[int] = []
        checks: list[Check] = []
        for plan in plans:
            tokens = plan.proposal.tokens
            checks.append(Check(len(sampled), plan.proposal))
            logit_rows += range(plan.logit_row, plan.logit_row + len(tokens) + 1)
            for count in range(len(tokens) + 1):
                mask = plan.masks[count] if plan.masks else None
                sampled.append(plan.sequence.sampled_row(tokens[:count], mask))
        row_logits = logits if len(logit_rows) == len(logits) else logits[logit_rows]
        raw_logits = _copy_raw(row_logits, sampled)
        process(row_logits, sampled)
        accepted = verify(row_logits, sampled, checks)
        parts = zip(plans, checks, accepted, strict=True)
        outputs = [self._append_tokens(*part, raw_logits) for part in parts]
        self.emit(outputs)
        return [
            RowResult(
                output.sequence, output.tokens, output.finish_reason, len(check.proposal.tokens)
            )
            for output, check in zip(outputs, checks, strict=True)
        ]

    def _append_tokens(
        self, plan: RowPlan, check: Check, tokens: list[int], raw_logits: torch.Tensor | None
    ) -> SequenceOutput:
        """Add the sampled tokens to a sequence and its matcher."""
        sequence, prompt = plan.sequence, plan.sequence.prompt
        length = len(sequence.tokens)
        tokens, finish_reason = sequence.append(tokens)
        # The draft model's keys and values are valid up to the last accepted token.
        sequence.draft_computed = min(sequence.draft_computed, length + len(tokens) - 1)
        matcher = sequence.matcher
        if matcher is not None and not matcher.is_stopped():
            matcher.consume_tokens(tokens[:-1] if finish_reason else tokens)
            ended = finish_reason == "stop" and tokens[-1] in prompt.end_tokens
            if ended and not matcher.is_accepting():
                name = prompt.parameters.grammar_name
                self.fail({prompt.key}, InvalidArgument(f"{name}: {_NO_ALLOWED_TOKEN}"))
        scores: list[TokenLogprobs] = []
        if raw_logits is not None and prompt.parameters.logprobs >= 0:
            rows = raw_logits[check.first_row : check.first_row + len(tokens)]
            scores = logprobs(rows, tokens, prompt.parameters.logprobs)
        sample = sequence.sample
        return SequenceOutput(sequence.number, prompt, sample, tokens, finish_reason, scores)

    def _score_prompt(self, plan: RowPlan, logits: torch.Tensor) -> int:
        """Record the log probabilities of the prompt's tokens that a row predicts.

        Returns:
            The number of rows of logits that precede those to be sampled.
        """
        prompt, row = plan.sequence.prompt, plan.row
        last_target = min(row.start + row.count, len(prompt.tokens) - 1)
        targets = prompt.tokens[row.start + 1 : last_target + 1]
        rows = logits[plan.logit_row : plan.logit_row + len(targets)]
        scores = logprobs(rows, targets, prompt.top_logprobs)
        for position, score in enumerate(scores, row.start + 1):
            prompt.logprobs_by_position.setdefault(position, score)
        self.emit([SequenceOutput(plan.sequence.number, prompt, plan.sequence.sample, [], "", [])])
        return row.count - row.samples


def _beam_candidates(plan: RowPlan, logits: torch.Tensor) -> RowResult:
    prompt = plan.sequence.prompt
    count = max(2, 1 + len(prompt.end_tokens)) * prompt.parameters.beams
    tokens, scores = candidates(logits, count)
    return RowResult(plan.sequence.number, [], candidates=tokens, scores=scores)


def _copy_raw(logits: torch.Tensor, rows: list[SampledRow]) -> torch.Tensor | None:
    """Return a copy of the unprocessed logits if log probabilities are requested, or None."""
    return logits.clone() if any(row.parameters.logprobs >= 0 for row in rows) else None
