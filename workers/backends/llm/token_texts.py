"""Tokens as text: their bytes, and the incremental text of a sequence up to a stop string."""

from __future__ import annotations

import bisect
import codecs
import functools
import re
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from shmserve.workers.backends.llm.message_parsers import overlap

_REPLACEMENT = "\ufffd"  # the character that stands for an incomplete character
_MAX_HELD_TOKENS = 16  # longer invalid sequences are no characters
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@functools.cache
def _byte_of() -> dict[str, int]:
    """Return the byte of each character of byte-level vocabularies (GPT-2)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in visible]
    shown = {chr(byte): byte for byte in visible}
    return shown | {chr(256 + index): byte for index, byte in enumerate(rest)}


class TokenTexts:
    """The bytes of single tokens, as they follow other tokens; safe to use in any thread.

    A decoder removes the space at the beginning of a text, and replaces incomplete characters. The
    bytes of a token have its space, and are exact for a part of a character.

    Attributes:
        special: The tokens that `skip_special_tokens` removes from a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token for token, each in added.items() if each.special)
        state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b""
        self._byte_level, self._byte_fallback = b'"ByteLevel"' in state, b'"ByteFallback"' in state
        self.bytes_of = functools.lru_cache(1 << 18)(self._bytes_of)
        self.shown = functools.lru_cache(1 << 18)(self._shown)

    def _bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; they are empty for a token that the tokenizer lacks."""
        piece = self.tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            values = [_byte_of().get(character) for character in piece]
            return piece.encode() if None in values else bytes(values)  # type: ignore[arg-type]
        byte = _BYTE.fullmatch(piece) if self._byte_fallback else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        # The decoder may strip the first of two equal tokens, but not the second.
        first, twice = self.decode([token]), self.decode([token, token])
        return twice[len(first) :].encode()

    @functools.cached_property
    def _sorted(self) -> tuple[list[bytes], list[int]]:
        """Return the bytes of the tokens that are text, sorted, and the tokens in this order."""
        tokens = self.tokenizer.get_vocab().values()
        pairs = sorted(
            (self.bytes_of(token), token) for token in tokens if token not in self.special
        )
        return [data for data, _ in pairs], [token for _, token in pairs]

    def beginning(self, data: bytes) -> list[int]:
        """Return the tokens whose bytes begin with `data`."""
        pieces, tokens = self._sorted
        first = bisect.bisect_left(pieces, data)
        last = bisect.bisect_right(pieces, data, first, key=lambda piece: piece[: len(data)])
        return tokens[first:last]

    def containing(self, data: bytes) -> list[int]:
        """Return the tokens whose bytes contain `data`."""
        pieces, tokens = self._sorted
        return [token for piece, token in zip(pieces, tokens) if data in piece]  # noqa: B905

    def continues(self, token: int) -> bool:
        """Return whether a token begins inside a character."""
        data = self.bytes_of(token)
        return bool(data) and data[0] & 0xC0 == 0x80

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    def _shown(self, token: int) -> tuple[str, list[int]]:
        """Return the text of a token's own bytes, and these bytes as numbers."""
        data = self.bytes_of(token)
        return data.decode(errors="replace"), list(data)

    def complete(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens before an incomplete character at the end of `tokens`."""
        count = len(tokens)
        while missing := self._incomplete(tokens[max(count - _MAX_HELD_TOKENS, 0) : count]):
            while missing > 0:
                count -= 1
                missing -= len(self.bytes_of(tokens[count]))
        return count

    def _incomplete(self, tokens: Sequence[int]) -> int:
        """Return the number of bytes of an incomplete character at the end."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(map(self.bytes_of, tokens)))
        return len(decoder.getstate()[0])

    def offsets(self, tokens: Sequence[int], text: str, skip_special_tokens: bool) -> list[int]:
        """Return the index in `text`, their decoding, of the character that each token begins in.

        A space that the decoder strips belongs to the first token.
        """
        begins: list[int] = []
        count = 0
        for token in tokens:
            silent = skip_special_tokens and token in self.special
            data = b"" if silent else self.bytes_of(token)
            begun = sum(byte & 0xC0 != 0x80 for byte in data)
            begins.append(count - (not silent and self.continues(token)))
            count += begun
        stripped = max(count - len(text), 0)
        return [max(offset - stripped, 0) for offset in begins]


class BadWords:
    """Words that a text must not contain.

    A word is forbidden in any division into tokens, and as a part of another word.
    """

    def __init__(self, words: Iterable[str], texts: TokenTexts) -> None:
        self._bytes_of = texts.bytes_of
        self._words = [word.encode() for word in words]
        self._longest = max(map(len, self._words))
        self._whole = [token for word in self._words for token in texts.containing(word)]
        # The tokens that begin with the rest of a word, by its beginning.
        self._rests: dict[bytes, list[int]] = {}
        for word in self._words:
            for size in range(1, len(word)):
                self._rests.setdefault(word[:size], []).extend(texts.beginning(word[size:]))

    def after(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that are forbidden after the tokens of a text."""
        tail = b""
        for token in reversed(tokens):
            if len(tail) >= self._longest:
                break
            tail = self._bytes_of(token) + tail
        tokens_after = self._whole[:]
        for size in range(1, min(self._longest, len(tail) + 1)):
            tokens_after += self._rests.get(tail[len(tail) - size :], ())
        return tokens_after


class Detokenizer:
    """The incremental text of one sequence, which follows a prompt.

    Tokens are decoded together with those of the text before them, since a token's text depends on
    what it follows. A token that leaves a character incomplete is held back, and so are tokens at
    the end of the prompt.
    """

    def __init__(
        self, texts: TokenTexts, skip_special_tokens: bool, prompt: Sequence[int] = ()
    ) -> None:
        self._decode = functools.partial(texts.decode, skip_special_tokens=skip_special_tokens)
        self._skipped = texts.special if skip_special_tokens else frozenset()
        context = [token for token in prompt[-4 * _MAX_HELD_TOKENS :] if token not in self._skipped]
        context = context[-_MAX_HELD_TOKENS:]
        while context and texts.continues(context[0]):
            del context[0]  # byte-fallback decoders replace characters beside an incomplete one
        self._tokens = context  # tokens of the last text, followed by the pending ones
        self._read = texts.complete(self._tokens)  # the number of tokens of the last text
        self._before = self._decode(self._tokens[: self._read])
        self._consumed = self._ahead = 0

    @property
    def position(self) -> int:
        """Return the number of complete characters, including characters held back."""
        return self._consumed + self._ahead

    def add(self, token: int) -> str:
        """Append a token, and return the text that is complete now."""
        if token in self._skipped:
            return ""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(_REPLACEMENT) and len(self._tokens) - self._read < _MAX_HELD_TOKENS:
            self._ahead = max(len(text.rstrip(_REPLACEMENT)) - len(self._before), 0)
            return ""
        return self._take(text)

    def flush(self) -> str:
        """Return the text of all tokens held back."""
        return self._take(self._decode(self._tokens))

    def _take(self, text: str) -> str:
        pending = self._tokens[self._read :]
        # An invalid byte makes byte-fallback decoders replace the bytes before it, too.
        valid = text.startswith(self._before)
        new = text[len(self._before) :] if valid else self._decode(pending)
        self._tokens, self._read = pending, len(pending)
        self._before = self._decode(pending)
        self._consumed += len(new)
        self._ahead = 0
        return new


class StopStrings:
    """The stop strings of one sequence. Text that may begin a stop string is held back."""

    def __init__(self, stops: Sequence[str], included: bool) -> None:
        self._stops = stops
        self._included = included
        self._held = ""

    def add(self, text: str) -> tuple[str, str]:
        """Append text.

        Return the text outside of stop strings, and the stop string that was found, or "".

        If there are several stop strings, the one that ends first counts. Of those that end
        together, the first in the request counts, as in vLLM.
        """
        if not self._stops:
            return text, ""
        text = self._held + text
        positions = [(text.find(stop), stop) for stop in self._stops]
        matches = [(begin + len(stop), begin, stop) for begin, stop in positions if begin >= 0]
        if matches:
            end, begin, stop = min(matches, key=lambda match: match[0])
            self._held = ""
            return text[: end if self._included else begin], stop
        count = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - count :]
        return text[: len(text) - count], ""

    def flush(self) -> str:
        """Return the text held back."""
        text, self._held = self._held, ""
        return text
