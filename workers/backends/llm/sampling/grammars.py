"""Structured output: a JSON schema or a regular expression as the tokens that may come next."""

from __future__ import annotations

import functools
from typing import Any

import torch

from shmserve.errors import InvalidArgument, clip


class Grammars:
    """Makes matchers for one tokenizer; the library behind it is loaded when the first is asked
    for."""

    def __init__(self, tokenizer_text: str, vocabulary: int, ends: tuple[int, ...]) -> None:
        self._text = tokenizer_text
        self._vocabulary = vocabulary
        self._ends = ends

    @functools.cached_property
    def _tokenizer(self) -> Any:
        import llguidance

        wrapped: Any = llguidance.LLTokenizer  # its types leave the list of ends out
        return wrapped(self._text, n_vocab=self._vocabulary, eos_token=list(self._ends))

    def matcher(self, grammar: tuple[str, str]) -> Any:
        """A matcher at the beginning of (kind, text). Raises InvalidArgument for what is no grammar
        of its kind."""
        import llguidance

        kind, text = grammar
        if not self._ends:
            raise InvalidArgument("response_format: the model has no token that ends a text")
        matcher: Any = llguidance.LLMatcher
        compilers = {
            "json_schema": matcher.grammar_from_json_schema,
            "regex": matcher.grammar_from_regex,
        }
        try:
            made = matcher(self._tokenizer, compilers[kind](text))
            error = made.get_error()
        except ValueError as raised:
            error = str(raised)
        if error:
            name = "regex" if kind == "regex" else "response_format"
            reason = clip(error.splitlines()[0], 200)
            raise InvalidArgument(f"{name}: cannot be compiled: {reason}")
        return made


def allowed_tokens(matcher: Any, drafts: list[int]) -> tuple[list[int], list[torch.Tensor]]:
    """Of `drafts` those that the grammar takes, and the bits of the tokens that it allows before
    each of them and behind the last, int32. The matcher stays where it is."""
    masks = [_bits(matcher)]
    taken: list[int] = []
    for token in drafts:
        if matcher.is_stopped() or not matcher.try_consume_tokens([token]):
            break
        taken.append(token)
        masks.append(_bits(matcher))
    if taken:
        matcher.rollback(len(taken))
    return taken, masks


def _bits(matcher: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)
