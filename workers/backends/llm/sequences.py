"""Sequences of a worker: their tokens, their blocks, and their requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shmserve.ipc.messages.generation import Row
from shmserve.workers.backends.llm.message_parsers import MessageFormat
from shmserve.workers.backends.llm.parameters import GenerationParameters
from shmserve.workers.backends.llm.sampler import SampledRow, TokenLogprobs


@dataclass(slots=True, eq=False)
class Prompt:
    """The state that all sequences of a request share.

    Attributes:
        end_tokens: The tokens that end a text.
        grammar: The matcher of the grammar, of which each sequence has a copy, or None.
        resumed_tokens: The tokens that another instance generated, by sample. They are input.
        replayed_tokens: As `resumed_tokens`, for requests that need their log probabilities. They
            are sampled again.
        top_logprobs: The number of likeliest tokens to report for each token of the prompt; -1: no
            log probabilities.
        offsets: The index in the prompt's text at which each token begins; empty unless the log
            probabilities of the response include those of the prompt (`echo`).
        logprobs_by_position: The log probabilities of the prompt's tokens that were computed.
        cached_tokens: The number of prompt tokens found in the KV cache; -1: not known yet.
        message_format: The format of the message if it may contain tool calls or reasoning.
        message_grammar: The grammar of the message, or "". Its rule `body` is the grammar of the
            parameters.
        eos: The end token that is not reported as stop reason; -1: none.
    """

    key: int
    tokens: list[int]
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

    def begin_sequence(self, number: int, sample: int) -> TokenSequence:
        """Return a sequence of the prompt and the resumed tokens of a sample."""
        resumed = self.resumed_tokens.get(sample, [])
        matcher = self.grammar.deep_copy() if self.grammar is not None else None
        if matcher is not None:
            matcher.consume_tokens(resumed)
        tokens, replayed = [*self.tokens, *resumed], self.replayed_tokens.get(sample, [])
        return TokenSequence(number, self, sample, tokens, [], matcher, replayed_tokens=replayed)


@dataclass(slots=True, eq=False)
class TokenSequence:
    """A sequence in generation.

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
        """Return a copy of the sequence, followed by `token` unless that is -1."""
        tokens = [*self.tokens, token] if token >= 0 else self.tokens[:]
        matcher = self.matcher.deep_copy() if self.matcher is not None else None
        replayed = self.prompt.replayed_tokens.get(sample, [])
        state = tokens, self.block_table[:], matcher, self.draft_computed, replayed
        return TokenSequence(number, self.prompt, sample, *state)

    def add_blocks(self, row: Row, block_size: int) -> None:
        """Replace the block table from entry `row.kept_blocks` on by the blocks of a row."""
        if row.kept_blocks < len(self.block_table):
            self.draft_computed = min(self.draft_computed, row.kept_blocks * block_size)
        self.block_table[row.kept_blocks :] = row.blocks

    def sampled_row(self, drafts: list[int], allowed: Any = None) -> SampledRow:
        """Return the row to sample from after the tokens and `drafts`."""
        prompt = self.prompt
        tokens = [*self.tokens, *drafts] if drafts else self.tokens
        return SampledRow(
            prompt.parameters, self.sample, tokens, len(prompt.tokens), prompt.end_tokens, allowed
        )

    def append(self, tokens: list[int]) -> tuple[list[int], str]:
        """Append tokens until the sequence ends; return them, and the finish reason or ""."""
        parameters, end_tokens = self.prompt.parameters, self.prompt.end_tokens
        prompt_length = len(self.prompt.tokens)
        if self.replayed_tokens:
            replayed = self.replayed_tokens[len(self.tokens) - prompt_length :][: len(tokens)]
            tokens = [*replayed, *tokens[len(replayed) :]]
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            finish_reason = ""
            if token in end_tokens or token in parameters.stop_token_ids:
                finish_reason = "stop"
            elif len(self.tokens) - prompt_length >= parameters.max_tokens:
                finish_reason = "length"
            if finish_reason:
                return tokens[:count], finish_reason
        return tokens, ""
