"""The engine of a worker, which executes the steps that a scheduler plans, in order.

Step ──> copy blocks, begin sequences, propose drafts ──> forward ──> sample, verify ──> Stepped

The file has the prompts and sequences, the methods that propose draft tokens (speculative decoding;
`sampler.verify` accepts or rejects the tokens), and the engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shmserve.errors import InvalidArgument
from shmserve.ipc.messages.generation import BeamSearch, Prepared, Row, RowResult, Step, Stepped
from shmserve.workers.backends.llm.grammars import allowed_tokens, matcher_error
from shmserve.workers.backends.llm.message_parsers import MessageFormat
from shmserve.workers.backends.llm.model.transformer import Passes
from shmserve.workers.backends.llm.parameters import GenerationParameters
from shmserve.workers.backends.llm.sampler import (
    PROPOSAL,
    DraftCheck,
    Proposal,
    SampledRow,
    TokenLogprobs,
    candidates,
    logprobs,
    process,
    sample,
    verify,
)

_NO_ALLOWED_TOKEN = "the other parameters forbid all tokens that it allows"
_MAX_NGRAM, _MIN_NGRAM = 4, 2  # the longest and the shortest n-gram, in tokens
_MAX_DRAFT_INPUT = 512  # tokens of a sequence that a draft model reads per step


@dataclass(slots=True, eq=False)
class Prompt:
    """The state that all sequences of a request share.

    Attributes:
        end_tokens: The tokens that end a text, with those of the parameter `stop_token_ids`.
        grammar: The matcher of the grammar, of which each sequence has a copy, or None.
        resumed_tokens: The tokens that another instance generated, by sample; a part of the input.
        replayed_tokens: As `resumed_tokens`, but computed again, because the request needs their
            log probabilities.
        top_logprobs: The number of likeliest tokens to report for each token of the prompt; -1: no
            log probabilities.
        offsets: The index in the prompt's text at which each token begins; empty unless the log
            probabilities of the response include the prompt's (`echo`).
        logprobs_by_position: The log probabilities computed so far for the prompt's tokens.
        cached_tokens: The number of prompt tokens found in the KV cache; -1: not known yet.
        message_format: The format of the message if it may contain tool calls or reasoning.
        message_grammar: The grammar of the message, or "". Its rule `body` is the grammar of the
            parameters.
        eos: The end token that is not reported as stop reason; -1: none.
    """

    key: int  # of the request
    tokens: list[int]  # of the prompt
    parameters: GenerationParameters
    end_tokens: tuple[int, ...]
    grammar: Any = None
    resumed_tokens: dict[int, list[int]] = field(default_factory=dict)
    replayed_tokens: dict[int, list[int]] = field(default_factory=dict)
    top_logprobs: int = -1
    offsets: Sequence[int] = ()
    logprobs_by_position: dict[int, TokenLogprobs] = field(default_factory=dict)
    cached_tokens: int = -1
    message_format: MessageFormat | None = None
    message_grammar: str = ""
    eos: int = -1

    @property
    def needs_compilation(self) -> bool:
        """Return whether the prompt has a grammar or bad words, which are compiled."""
        parameters = self.parameters
        return bool(parameters.grammar[0] or self.message_grammar or parameters.bad_words)

    def begin_sequence(self, number: int, sample: int) -> TokenSequence:
        """Return a sequence of the prompt and the resumed tokens of a sample."""
        resumed_tokens = self.resumed_tokens.get(sample, [])
        matcher = self.grammar.deep_copy() if self.grammar is not None else None
        if matcher is not None:
            matcher.consume_tokens(resumed_tokens)
        tokens = [*self.tokens, *resumed_tokens]
        replayed_tokens = self.replayed_tokens.get(sample, [])
        return TokenSequence(
            number, self, sample, tokens, [], matcher, replayed_tokens=replayed_tokens
        )

    def describe(self, priority: int) -> Prepared:
        """Return the message that describes the prompt to the scheduler.

        Args:
            priority: The priority of the request, unless its parameters set another one.
        """
        parameters = self.parameters
        beams: list[BeamSearch] = []
        if parameters.beams:
            penalty, early_stopping = parameters.length_penalty, parameters.early_stopping
            beams = [BeamSearch(parameters.beams, penalty, early_stopping, list(self.end_tokens))]
        return Prepared(
            self.key,
            np.array(self.tokens, np.int32).tobytes(),
            max(parameters.max_tokens, 1),
            parameters.samples or 1,
            parameters.priority or priority,
            self.top_logprobs >= 0,
            not (beams or self.replayed_tokens),
            beams,
            bool(self.replayed_tokens),
        )


@dataclass(slots=True, eq=False)
class TokenSequence:
    """A sequence of tokens that is being generated.

    Attributes:
        number: The scheduler's number of the sequence.
        sample: The index of the sample in its request.
        tokens: The tokens of the prompt and the generated tokens.
        matcher: The state of its grammar, or None.
        draft_computed: The number of tokens whose keys and values the draft model has stored.
        replayed_tokens: Generated tokens that `append` uses instead of the sampled ones.
    """

    number: int
    prompt: Prompt
    sample: int
    tokens: list[int]
    block_table: list[int]
    matcher: Any = None
    draft_computed: int = 0
    replayed_tokens: list[int] = field(default_factory=list)

    def fork(self, number: int, sample: int, token: int) -> TokenSequence:
        """Return a copy of the sequence, followed by `token` unless `token` is -1."""
        tokens = [*self.tokens, token] if token >= 0 else self.tokens[:]
        matcher = self.matcher.deep_copy() if self.matcher is not None else None
        replayed_tokens = self.prompt.replayed_tokens.get(sample, [])
        copied_fields = tokens, self.block_table[:], matcher, self.draft_computed, replayed_tokens
        return TokenSequence(number, self.prompt, sample, *copied_fields)

    def add_blocks(self, row: Row, block_size: int) -> None:
        """Keep the table's first `row.kept_blocks` blocks, and replace the rest by `row.blocks`."""
        if row.kept_blocks < len(self.block_table):
            self.draft_computed = min(self.draft_computed, row.kept_blocks * block_size)
        self.block_table[row.kept_blocks :] = row.blocks

    def sampled_row(self, drafts: list[int], mask: Any = None) -> SampledRow:
        """Return the inputs for sampling the token that follows the sequence and `drafts`."""
        prompt = self.prompt
        tokens = [*self.tokens, *drafts] if drafts else self.tokens
        size = len(prompt.tokens)
        return SampledRow(prompt.parameters, self.sample, tokens, size, prompt.end_tokens, mask)

    def append(self, tokens: list[int]) -> tuple[list[int], str]:
        """Append tokens until the sequence ends; return them, and the finish reason or ""."""
        prompt_length = len(self.prompt.tokens)
        if self.replayed_tokens:
            position = len(self.tokens) - prompt_length
            replayed_tokens = self.replayed_tokens[position : position + len(tokens)]
            tokens = [*replayed_tokens, *tokens[len(replayed_tokens) :]]
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            if token in self.prompt.end_tokens:
                return tokens[:count], "stop"
            if len(self.tokens) - prompt_length >= self.prompt.parameters.max_tokens:
                return tokens[:count], "length"
        return tokens, ""


_SequenceRow = tuple[TokenSequence, Row]  # a sequence and its row of a step
# Returns up to `row.draft_count` proposed tokens for each sequence, by sequence number.
Propose = Callable[[Sequence[_SequenceRow]], dict[int, Proposal]]


def propose_ngrams(rows: Sequence[_SequenceRow]) -> dict[int, Proposal]:
    """Propose tokens from each sequence itself (prompt lookup decoding; Saxena, 2023)."""
    return {s.number: Proposal(ngram_draft(s.tokens, row.draft_count)) for s, row in rows}


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
            draft_start = int(matches[-1]) + length
            return list(map(int, token_array[draft_start : draft_start + count]))
    return []


class DraftModel:
    """A smaller model that proposes tokens.

    Its KV cache has the same blocks as the target model's, so both models use one block table.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    @torch.inference_mode()
    def propose(self, rows: Sequence[_SequenceRow]) -> dict[int, Proposal]:
        """Return the draft tokens of each sequence, by the number of the sequence."""
        proposals = {sequence.number: Proposal() for sequence, _ in rows}
        # The maximum length of the draft model may be shorter than that of the target model.
        max_length = self._passes.positions
        rows = [(s, row) for s, row in rows if len(s.tokens) + row.draft_count <= max_length]
        ready_rows = self._catch_up(rows)
        max_drafts = max((row.draft_count for _, row in ready_rows), default=0)
        for draft_index in range(max_drafts):
            draft_rows = [(s, row) for s, row in ready_rows if row.draft_count > draft_index]
            self._append_drafts(self._next_logits(draft_rows, proposals), draft_rows, proposals)
        for sequence, row in ready_rows:
            sequence.draft_computed = len(sequence.tokens) + row.draft_count - 1
        return proposals

    def _catch_up(self, rows: Sequence[_SequenceRow]) -> list[_SequenceRow]:
        """Compute earlier tokens of sequences that the draft model has not computed yet.

        Returns:
            The rows for whose sequences the model can propose tokens.
        """
        late_rows = [
            (s, row) for s, row in rows if len(s.tokens) - s.draft_computed > _MAX_DRAFT_INPUT
        ]
        if late_rows:
            batch = self._passes.empty()
            for sequence, _ in late_rows:
                begin, end = sequence.draft_computed, sequence.draft_computed + _MAX_DRAFT_INPUT
                batch.add(sequence.tokens[begin:end], begin, sequence.block_table)
                sequence.draft_computed = end
            self._passes.logits(batch, [])
        return [pair for pair in rows if pair not in late_rows]

    def _next_logits(self, rows: Sequence[_SequenceRow], proposals: dict[int, Proposal]) -> Tensor:
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
        self, logits: Tensor, rows: Sequence[_SequenceRow], proposals: dict[int, Proposal]
    ) -> None:
        sampled_rows = [s.sampled_row(proposals[s.number].tokens) for s, _ in rows]
        process(logits, sampled_rows)
        tokens, distributions = sample(logits, sampled_rows, PROPOSAL)
        for index, (sequence, _) in enumerate(rows):
            proposal = proposals[sequence.number]
            proposal.tokens.append(tokens[index])
            if index in distributions:
                proposal.probabilities.append(distributions[index])


class SequenceOutput(NamedTuple):
    """The tokens that a step has added to a sequence.

    `tokens` is empty if the step has only computed log probabilities of the prompt.
    """

    sequence: TokenSequence
    tokens: list[int]  # the new tokens
    finish_reason: str
    logprobs: list[TokenLogprobs]


@dataclass(slots=True)
class RowPlan:
    """A row of a step in its forward pass.

    Attributes:
        masks: The tokens that the grammar allows after each draft token, as int32 bitmasks.
        logit_row: The index of its first row of logits.
    """

    sequence: TokenSequence
    row: Row
    proposal: Proposal
    masks: list[Tensor]
    logit_row: int = 0


@dataclass(eq=False)
class WorkerEngine:
    """The executor of one model's steps, with its sequences.

    Attributes:
        prompts: The prompts of the prepared requests by key.
        emit: Receives the outputs of a step.
        fail: Fails the requests with these keys with an error.
    """

    passes: Passes  # runs the model
    propose: Propose | None  # returns draft tokens
    prompts: Mapping[int, Prompt]
    emit: Callable[[list[SequenceOutput]], None]
    fail: Callable[[set[int], Exception], None]
    _sequences: dict[int, TokenSequence] = field(default_factory=dict)  # by number
    _last_step: int = 0  # number of the step

    def step(self, message: Step) -> Stepped:
        """Execute a step; sequences whose requests have ended are reported as skipped."""
        start_ns = time.perf_counter_ns()
        self.passes.cache.copy(message.swap_out, message.swap_in, message.copies)
        self._begin_sequences(message)
        rows = self._prepare_rows(message)
        prepared_ns = time.perf_counter_ns()
        plans = self._plan_rows(rows)
        planned_ns = time.perf_counter_ns()
        logits = self._forward(plans)
        computed_ns = time.perf_counter_ns()
        results = self._sample_rows(plans, logits)
        skipped_numbers = [r.sequence for r in message.rows if r.sequence not in self._sequences]
        for sequence in message.ended:
            self._sequences.pop(sequence, None)
        return Stepped(
            message.step,
            results,
            gather_ns=planned_ns - start_ns,
            forward_ns=computed_ns - planned_ns,
            sample_ns=time.perf_counter_ns() - computed_ns,
            draft_ns=planned_ns - prepared_ns,
            skipped=skipped_numbers,
        )

    def fail_step(self, message: Step, error: Exception) -> Stepped:
        """Fail the requests of a step that has raised an error; return the result of the step."""
        sequences, numbers = self._sequences, [row.sequence for row in message.rows]
        started_keys = {sequences[number].prompt.key for number in numbers if number in sequences}
        unstarted_keys = {new.key for new in message.new_sequences if new.sequence not in sequences}
        self.fail(started_keys | unstarted_keys, error)
        for sequence in message.ended:
            sequences.pop(sequence, None)
        return Stepped(message.step, [], 0, 0, 0, skipped=numbers)

    def _begin_sequences(self, message: Step) -> None:
        if message.step <= self._last_step:
            # A successor of the scheduler numbers sequences and steps from the beginning.
            self._sequences.clear()
        self._last_step = message.step
        for new in message.new_sequences:
            parent = self._sequences.get(new.parent) if new.parent else None
            prompt = self.prompts.get(new.key)
            if parent is not None:
                sequence = parent.fork(new.sequence, new.sample, new.token)
            elif prompt is not None and not new.parent:
                sequence = prompt.begin_sequence(new.sequence, new.sample)
            else:
                continue  # its request has ended; `step` reports the sequence as skipped
            self._sequences[new.sequence] = sequence

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
        draft_rows = [pair for pair in rows if pair[1].draft_count]
        proposals = self.propose(draft_rows) if self.propose and draft_rows else {}
        plans: list[RowPlan] = []
        for sequence, row in rows:
            proposal = proposals.get(row.sequence, Proposal())
            masks: list[Tensor] = []
            if row.samples_next and sequence.matcher is not None:
                proposal.tokens, masks = allowed_tokens(sequence.matcher, proposal.tokens)
                error = matcher_error(sequence.matcher, sequence.prompt.parameters.grammar_name)
                if error is not None:
                    self.fail({sequence.prompt.key}, error)
                    del self._sequences[row.sequence]  # `step` reports the sequence as skipped
                    continue
            plans.append(RowPlan(sequence, row, proposal, masks))
        return plans

    def _forward(self, plans: list[RowPlan]) -> Tensor:
        """Run the model; return the logits of rows that are sampled or need log probabilities."""
        batch = self.passes.empty()
        logit_rows: list[int] = []
        for plan in plans:
            row, sequence = plan.row, plan.sequence
            end = row.start + row.count
            tokens = [*sequence.tokens[row.start : end], *plan.proposal.tokens]
            is_prompt = row.start < len(sequence.prompt.tokens)
            pass_row = batch.add(tokens, row.start, sequence.block_table, is_prompt)
            plan.logit_row = len(logit_rows)
            rows_without_logits = row.count - row.samples_next
            first_logit_row = pass_row + (0 if self._scores_prompt(plan) else rows_without_logits)
            logit_rows += range(first_logit_row, pass_row + len(tokens))
        if not plans:
            return torch.empty(0)
        return self.passes.logits(batch, logit_rows)

    @staticmethod
    def _scores_prompt(plan: RowPlan) -> bool:
        prompt = plan.sequence.prompt
        return prompt.top_logprobs >= 0 and plan.row.start < len(prompt.tokens) - 1

    # --- results

    @torch.inference_mode()
    def _sample_rows(self, plans: list[RowPlan], logits: Tensor) -> list[RowResult]:
        for plan in plans:
            if self._scores_prompt(plan):
                plan.logit_row += self._score_prompt(plan, logits)
        results: list[RowResult] = []
        sampled_plans: list[RowPlan] = []
        for plan in plans:
            if plan.sequence.prompt.parameters.beams and plan.row.samples_next:
                results.append(_beam_candidates(plan, logits[plan.logit_row]))
            elif plan.row.samples_next:
                sampled_plans.append(plan)
        return results + self._sample_tokens(sampled_plans, logits) if sampled_plans else results

    def _sample_tokens(self, plans: list[RowPlan], logits: Tensor) -> list[RowResult]:
        """Sample the next token of each sequence, and verify its draft tokens."""
        sampled_rows: list[SampledRow] = []
        logit_rows: list[int] = []
        checks: list[DraftCheck] = []
        for plan in plans:
            tokens = plan.proposal.tokens
            checks.append(DraftCheck(len(sampled_rows), plan.proposal))
            logit_rows += range(plan.logit_row, plan.logit_row + len(tokens) + 1)
            for count in range(len(tokens) + 1):
                mask = plan.masks[count] if plan.masks else None
                sampled_rows.append(plan.sequence.sampled_row(tokens[:count], mask))
        row_logits = logits if len(logit_rows) == len(logits) else logits[logit_rows]
        # The log probabilities are those of the unprocessed logits.
        needs_logprobs = any(row.parameters.logprobs >= 0 for row in sampled_rows)
        raw_logits = row_logits.clone() if needs_logprobs else None
        process(row_logits, sampled_rows)
        accepted_tokens = verify(row_logits, sampled_rows, checks)
        checked_rows = [
            (plan, check, tokens)
            for plan, check, tokens in zip(plans, checks, accepted_tokens, strict=True)
            if self._check_allowed(plan, tokens, row_logits[check.first_row :])
        ]
        outputs = [self._append_tokens(*checked_row, raw_logits) for checked_row in checked_rows]
        self.emit(outputs)
        return [
            RowResult(o.sequence.number, o.tokens, o.finish_reason, len(check.proposal.tokens))
            for o, (_, check, _) in zip(outputs, checked_rows, strict=True)
        ]

    def _check_allowed(self, plan: RowPlan, tokens: list[int], logits: Tensor) -> bool:
        """Return whether sampled tokens are allowed; fail the request if no token is allowed."""
        prompt, parameters = plan.sequence.prompt, plan.sequence.prompt.parameters
        is_restricted = parameters.is_restricted or plan.masks
        if not is_restricted or logits[range(len(tokens)), tokens].min() > -math.inf:
            return True
        name = "bad_words" if parameters.bad_words else "thinking_token_budget"
        name = "allowed_token_ids" if parameters.allowed_token_ids else name
        name = parameters.grammar_name if plan.masks else name
        self.fail({prompt.key}, InvalidArgument(f"{name}: {_NO_ALLOWED_TOKEN}"))
        del self._sequences[plan.row.sequence]  # `step` reports the sequence as skipped
        return False

    def _append_tokens(
        self, plan: RowPlan, check: DraftCheck, tokens: list[int], raw_logits: Tensor | None
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
        scores: list[TokenLogprobs] = []
        if raw_logits is not None and prompt.parameters.logprobs >= 0:
            rows = raw_logits[check.first_row : check.first_row + len(tokens)]
            scores = logprobs(rows, tokens, prompt.parameters.logprobs)
        return SequenceOutput(sequence, tokens, finish_reason, scores)

    def _score_prompt(self, plan: RowPlan, logits: Tensor) -> int:
        """Record the log probabilities of the prompt's tokens that a row predicts.

        Returns:
            The number of rows of logits before the rows that are sampled.
        """
        prompt, row = plan.sequence.prompt, plan.row
        last_target = min(row.start + row.count, len(prompt.tokens) - 1)
        targets = prompt.tokens[row.start + 1 : last_target + 1]
        rows = logits[plan.logit_row : plan.logit_row + len(targets)]
        scores = logprobs(rows, targets, prompt.top_logprobs)
        for position, score in enumerate(scores, row.start + 1):
            prompt.logprobs_by_position.setdefault(position, score)
        self.emit([SequenceOutput(plan.sequence, [], "", [])])
        return row.count - row.samples_next


def _beam_candidates(plan: RowPlan, logits: Tensor) -> RowResult:
    prompt = plan.sequence.prompt
    count = max(2, 1 + len(prompt.end_tokens)) * prompt.parameters.beams
    tokens, scores = candidates(logits, count)
    return RowResult(plan.sequence.number, [], candidates=tokens, scores=scores)
