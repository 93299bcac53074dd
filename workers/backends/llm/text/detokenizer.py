"""Text from tokens as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"  # what the bytes of a part of a character are decoded to
_MOST_HELD = 16  # tokens; so many bytes without a character are no character


class Detokenizer:
    """The text of one sequence. Tokens are decoded together with those of the last text before
    them, since what a token means depends on what it follows; one that leaves a character
    unfinished waits."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._tokens: list[int] = []  # those of the last text, and those that wait
        self._read = 0  # the former
        self._before = ""

    def add(self, token: int) -> str:
        """The text that is complete with another token."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(_REPLACEMENT) and len(self._tokens) - self._read < _MOST_HELD:
            return ""
        return self._take(text)

    def flush(self) -> str:
        """The text of all that waits: nothing follows."""
        return self._take(self._decode(self._tokens))

    def _take(self, text: str) -> str:
        new = text[len(self._before) :]
        del self._tokens[: self._read]
        self._read = len(self._tokens)
        self._before = self._decode(self._tokens)
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip)
        return text


class StopStrings:
    """The stop strings of one sequence. What may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str], included: bool) -> None:
        self._stops = stops
        self._included = included
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """The text that is no part of a stop string, and whether one was found; of several it is
        the one that is complete first."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stops]
        places = [(begin + len(stop), begin) for begin, stop in found if begin >= 0]
        if places:
            end, begin = min(places)
            self._held = ""
            return text[: end if self._included else begin], True
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """What was held back: nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of a text with which a stop string begins."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if stop.startswith(text[-size:])), 0)
