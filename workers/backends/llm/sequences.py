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
    """A running request: the state that its sequences share.

    Attributes:
        grammar: The matcher that is copied for each sequence, or None.
        resumed: The tokens that each sample generated on another instance.
        replayed: The same, if their log probabilities are wanted; they are generated again.
        scored: The number of likeliest tokens to report for each token of the prompt; -1: no log
            probabilities.
        scores_by_position: The log probabilities of the prompt's tokens by position.
        offsets: The index of each token in the text of the prompt, if its log probabilities belong
            to those of the text.
        cached: The number of tokens that were not computed; -1 if that is not known yet.
        message: The format of the message, if its text has calls or reasoning.
        frame: The grammar of the message, in which that of the parameters is the content's.
        eos: The end token that is no stop reason; -1 if there is none.
    """

    key: int
    tokens: list[int]
    parameters: GenerationParameters
    ends: tuple[int, ...]
    grammar: Any = None
    resumed: dict[int, list[int]] = field(default_factory=dict)
    replayed: dict[int, list[int]] = field(default_factory=dict)
    scored: int = -1
    offsets: Sequence[int] = ()
    scores_by_position: dict[int, TokenLogprobs] = field(default_factory=dict)
    cached: int = -1
    message: MessageFormat | None = None
    frame: str = ""
    eos: int = -1

    def begin(self, number: int, sample: int) -> TokenSequence:
        """Return a sequence that begins with the prompt, and the resumed tokens of its sample."""
        earlier = self.resumed.get(sample, [])
        matcher = self.grammar.deep_copy() if self.grammar is not None else None
        if matcher is not None:
            matcher.consume_tokens(earlier)
        tokens, replayed = [*self.tokens, *earlier], self.replayed.get(sample, [])
        return TokenSequence(number, self, sample, tokens, [], matcher, replayed=replayed)


@dataclass(slots=True, eq=False)
class TokenSequence:
    """A sequence: its `tokens` and its block `table`.

    Attributes:
        matcher: The state of its grammar.
        replayed: The tokens after the prompt that are known.
        drafted: The number of tokens whose keys and values the draft model has in these blocks.
    """

    number: int
    prompt: Prompt
    sample: int
    tokens: list[int]
    table: list[int]
    matcher: Any = None
    drafted: int = 0
    replayed: list[int] = field(default_factory=list)

    def fork(self, number: int, sample: int, token: int) -> TokenSequence:
        """Return a sequence with the same tokens, followed by `token` unless that is -1."""
        tokens = [*self.tokens, token] if token >= 0 else self.tokens[:]
        matcher = self.matcher.deep_copy() if self.matcher is not None else None
        prompt, table = self.prompt, self.table[:]
        replayed = prompt.replayed.get(sample, [])
        return TokenSequence(number, prompt, sample, tokens, table, matcher, self.drafted, replayed)

    def add_blocks(self, row: Row, block_size: int) -> None:
        """Take the blocks of a row."""
        if row.keep < len(self.table):
            self.drafted = min(self.drafted, row.keep * block_size)
        self.table[row.keep :] = row.blocks

    def sampled_row(self, drafts: list[int], allowed: Any = None) -> SampledRow:
        """Return the row that is sampled behind the tokens and `drafts`."""
        prompt = self.prompt
        tokens = [*self.tokens, *drafts] if drafts else self.tokens
        return SampledRow(
            prompt.parameters, self.sample, tokens, len(prompt.tokens), prompt.ends, allowed
        )

    def take(self, tokens: list[int]) -> tuple[list[int], str]:
        """Append tokens until the sequence ends; return those taken, and the finish reason."""
        parameters, ends = self.prompt.parameters, self.prompt.ends
        first = len(self.prompt.tokens)
        if self.replayed:
            replayed = self.replayed[len(self.tokens) - first :][: len(tokens)]
            tokens = [*replayed, *tokens[len(replayed) :]]
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            finish_reason = ""
            if token in ends or token in parameters.stop_token_ids:
                finish_reason = "stop"
            elif len(self.tokens) - first >= parameters.max_tokens:
                finish_reason = "length"
            if finish_reason:
                return tokens[:count], finish_reason
        return tokens, ""
