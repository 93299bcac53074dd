"""Sequences as the worker has them: their tokens, their blocks, and the requests they belong to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shmserve.ipc.messages.generation import Row
from shmserve.workers.backends.llm.parameters import GenerationParameters
from shmserve.workers.backends.llm.sampler import SampledRow, TokenLogprobs


@dataclass(slots=True, eq=False)
class Prompt:
    """A request that runs: what its sequences share. `grammar` makes a matcher for each; `resumed`
    has the tokens that its samples had elsewhere. Of its prompt's tokens `logprobs` are wanted, if
    that is so, and `known` has them by their positions. `cached` tokens were not computed, -1: not
    known yet."""

    key: int
    tokens: list[int]
    parameters: GenerationParameters
    ends: tuple[int, ...]
    grammar: Any = None
    resumed: dict[int, list[int]] = field(default_factory=dict)
    known: dict[int, TokenLogprobs] = field(default_factory=dict)
    cached: int = -1

    def begin(self, number: int, sample: int) -> TokenSequence:
        """A sequence from the prompt, and from what its sample had already."""
        earlier = self.resumed.get(sample, [])
        matcher = self.grammar.deep_copy() if self.grammar is not None else None
        if matcher is not None:
            matcher.consume_tokens(earlier)
        return TokenSequence(number, self, sample, [*self.tokens, *earlier], [], matcher)


@dataclass(slots=True, eq=False)
class TokenSequence:
    """One sequence: its `tokens`, and its block `table`. Of the first `drafted` tokens the draft
    model has keys and values in these blocks. `matcher`: how far its grammar is."""

    number: int
    prompt: Prompt
    sample: int
    tokens: list[int]
    table: list[int]
    matcher: Any = None
    drafted: int = 0

    def fork(self, number: int, sample: int, token: int) -> TokenSequence:
        """Another sequence with the same beginning, and then `token`, if that is not -1."""
        tokens = [*self.tokens, token] if token >= 0 else self.tokens[:]
        matcher = self.matcher.deep_copy() if self.matcher is not None else None
        return TokenSequence(
            number, self.prompt, sample, tokens, self.table[:], matcher, self.drafted
        )

    def place(self, row: Row, block_size: int) -> None:
        """Take the blocks of a row."""
        if row.keep < len(self.table):
            self.drafted = min(self.drafted, row.keep * block_size)
        self.table[row.keep :] = row.blocks

    def sampled_row(self, drafts: list[int], allowed: Any = None) -> SampledRow:
        """The row that is sampled behind its tokens and these."""
        prompt = self.prompt
        tokens = [*self.tokens, *drafts] if drafts else self.tokens
        return SampledRow(
            prompt.parameters, self.sample, tokens, len(prompt.tokens), prompt.ends, allowed
        )

    def take(self, tokens: list[int]) -> tuple[list[int], str]:
        """Go on with these tokens as far as it does not end: those that it took, and why it has
        ended, if it has."""
        parameters, ends = self.prompt.parameters, self.prompt.ends
        first = len(self.prompt.tokens)
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            over = ""
            if token in ends or token in parameters.stop_token_ids:
                over = "stop"
            elif len(self.tokens) - first >= parameters.max_tokens:
                over = "length"
            if over:
                return tokens[:count], over
        return tokens, ""
