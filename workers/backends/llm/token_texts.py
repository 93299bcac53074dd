"""Detokenisation: the bytes of tokens, and the incremental text of a sequence with stop strings."""

from __future__ import annotations

import bisect
import codecs
import functools
import itertools
import json.decoder
import json.scanner
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shmserve.workers.backends.llm.message_parsers import overlap

_REPLACEMENT = "\ufffd"  # decoders replace the bytes of an incomplete character by this character
_LONG_JSON = 1 << 16  # number of characters of a long JSON text
_MAX_HELD_TOKENS = 16  # longer invalid sequences are not incomplete characters
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON cannot represent
# The suffix of tokens that end a word, in the description of a decoder.
_WORD_SUFFIX = re.compile(rb'"type":"BPEDecoder","suffix":("(?:[^"\\]|\\.)+")')

T = TypeVar("T")


@functools.cache
def _byte_by_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary (GPT-2) represents."""
    visible_bytes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    invisible_bytes = [byte for byte in range(256) if byte not in visible_bytes]
    by_character = {chr(byte): byte for byte in visible_bytes}
    return by_character | {chr(256 + index): byte for index, byte in enumerate(invisible_bytes)}


def with_pauses(values: Iterable[T]) -> Iterator[T]:
    """Yield values, and release the GIL after every 64 of them.

    Otherwise a loop over many values delays the streams of the model, whose threads wait for the
    interpreter's switch interval each time that they need the GIL.
    """
    for number, value in enumerate(values, 1):
        yield value
        if not number % 64:
            time.sleep(0)


class _PausingDecoder(json.JSONDecoder):
    """A decoder of JSON that releases the GIL after every 64 values."""

    def __init__(self) -> None:
        super().__init__()
        value_numbers = itertools.count(1)

        def with_pause(scan: Callable[[str, int], Any]) -> Callable[[str, int], Any]:
            def scan_once(text: str, index: int) -> Any:
                if not next(value_numbers) % 64:
                    time.sleep(0)
                return scan(text, index)

            return scan_once

        def parse_object(start: Any, strict: bool, scan: Any, *options: Any) -> Any:
            return python_decoder.JSONObject(start, strict, with_pause(scan), *options)

        # The type hints lack json's parser that is written in Python.
        python_decoder: Any = json.decoder
        scanner: Any = json.scanner
        self.parse_object = parse_object
        self.parse_array = lambda start, scan: python_decoder.JSONArray(start, with_pause(scan))
        self.scan_once = scanner.py_make_scanner(self)


def parse_json(text: str) -> Any:
    """Parse JSON. A long text is parsed in Python, since the C parser would hold the GIL.

    Raises:
        ValueError: The text is not JSON, or nested too deeply.
    """
    try:
        return _PausingDecoder().decode(text) if len(text) > _LONG_JSON else json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def token_entry(
    token: int, text: str, logprob: float, token_bytes: list[int], shows_id: bool
) -> dict[str, Any]:
    """Return a token and its log probability in the form that the OpenAI API's handlers read.

    If `shows_id`, the member `token` has the id of the token instead of its text.
    """
    shown_text = f"token_id:{token}" if shows_id else text
    shown_logprob = max(logprob, _MIN_LOGPROB)
    return {"token_id": token, "token": shown_text, "logprob": shown_logprob, "bytes": token_bytes}


def encode_logprobs(lists_by_name: Mapping[str, Iterable[Any]]) -> bytes:
    """Return lists of tokens as JSON with a line for each token.

    The gateway parses many tokens line by line, since the parser of JSON holds the GIL.
    """
    encoded_lists = (
        b'"%b":[\n%b\n]' % (name.encode(), b",\n".join(map(orjson.dumps, tokens)))
        for name, tokens in lists_by_name.items()
    )
    return b"{%b}" % b",".join(encoded_lists)


class TokenTexts:
    """The bytes of single tokens within a text; safe to use in any thread.

    A decoder strips the space at the beginning or at the end of a text, and replaces incomplete
    characters. The bytes of a token include its space, and may be a part of a character.

    Attributes:
        special: The tokens that `skip_special_tokens` removes from a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added_tokens = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token for token, text in added_tokens.items() if text.special)
        state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b""
        suffix_match = _WORD_SUFFIX.search(state)
        self._word_suffix = json.loads(suffix_match[1]) if suffix_match else ""
        self._byte_level, self._byte_fallback = b'"ByteLevel"' in state, b'"ByteFallback"' in state
        self.bytes_of = functools.lru_cache(1 << 18)(self._bytes_of)
        self.text_and_bytes = functools.lru_cache(1 << 18)(self._text_and_bytes)

    def _bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; empty if the tokenizer lacks the token."""
        piece = self.tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            values = [_byte_by_character().get(character) for character in piece]
            return piece.encode() if None in values else bytes(values)  # type: ignore[arg-type]
        byte_match = _BYTE_TOKEN.fullmatch(piece) if self._byte_fallback else None
        if byte_match is not None:
            return bytes([int(byte_match[1], 16)])
        if self._word_suffix:
            return piece.replace(self._word_suffix, " ").encode()
        # The decoder may strip the space of the first of two equal tokens, but not of the second.
        text_once, text_twice = self.decode([token]), self.decode([token, token])
        return text_twice[len(text_once) :].encode()

    @functools.cached_property
    def _sorted_tokens(self) -> tuple[list[bytes], list[int]]:
        """Return the sorted bytes of the tokens that are not special, and these tokens."""
        tokens = self.tokenizer.get_vocab().values()
        pairs = sorted((self.bytes_of(t), t) for t in with_pauses(tokens) if t not in self.special)
        return [data for data, _ in pairs], [token for _, token in pairs]

    @functools.cached_property
    def _joined_tokens(self) -> tuple[bytes, list[int]]:
        """Return the bytes of `_sorted_tokens` with 0xFF, which no text contains, after each token.

        The second result is the index of each 0xFF.
        """
        pieces, _ = self._sorted_tokens
        ends = itertools.accumulate(len(piece) + 1 for piece in pieces)
        return b"".join(b"%b\xff" % piece for piece in pieces), [end - 1 for end in ends]

    def beginning_with(self, data: bytes) -> list[int]:
        """Return the tokens whose bytes begin with `data`."""
        pieces, tokens = self._sorted_tokens
        start_index = bisect.bisect_left(pieces, data)
        end = bisect.bisect_right(pieces, data, start_index, key=lambda piece: piece[: len(data)])
        return tokens[start_index:end]

    def containing(self, data: bytes) -> list[int]:
        """Return the tokens whose bytes contain `data` at any position."""
        text, ends = self._joined_tokens
        matches = re.finditer(re.escape(data), text)
        indices = {bisect.bisect_left(ends, match.end()) for match in with_pauses(matches)}
        return [self._sorted_tokens[1][index] for index in indices]

    def ends_word(self, token: int) -> bool:
        """Return whether the decoder writes a space after a token once another token follows."""
        return bool(self._word_suffix) and self.bytes_of(token)[-1:] == b" "

    def begins_inside_character(self, token: int) -> bool:
        """Return whether the first byte of a token continues a UTF-8 character."""
        data = self.bytes_of(token)
        return bool(data) and data[0] & 0xC0 == 0x80

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of these tokens, as the tokenizer decodes them."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    def _text_and_bytes(self, token: int) -> tuple[str, list[int]]:
        """Return the text of a token's bytes, and the bytes as integers."""
        data = self.bytes_of(token)
        return data.decode(errors="replace"), list(data)

    def count_complete(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens before an incomplete character at the end of `tokens`."""
        count = len(tokens)
        while size := self._incomplete_bytes(tokens[max(count - _MAX_HELD_TOKENS, 0) : count]):
            while size > 0:
                count -= 1
                size -= len(self.bytes_of(tokens[count]))
        return count

    def _incomplete_bytes(self, tokens: Sequence[int]) -> int:
        """Return the number of bytes of an incomplete character at the end of `tokens`."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(map(self.bytes_of, tokens)))
        return len(decoder.getstate()[0])

    def offsets(self, tokens: Sequence[int], text: str, skip_special_tokens: bool) -> list[int]:
        """Return the index in `text` of the character in which each token begins.

        `text` is the decoding of the tokens. A leading space that the decoder strips has the
        index 0. The result never decreases.
        """
        indices: list[int] = []
        length = 0
        for token in tokens:
            is_skipped = skip_special_tokens and token in self.special
            data = b"" if is_skipped else self.bytes_of(token)
            character_count = sum(byte & 0xC0 != 0x80 for byte in data)
            indices.append(length - (not is_skipped and self.begins_inside_character(token)))
            length += character_count
        stripped_length = 0 if self._word_suffix else max(length - len(text), 0)
        offsets = (min(max(index - stripped_length, 0), len(text)) for index in indices)
        # A byte after a skipped token may continue no character.
        return list(itertools.accumulate(offsets, max))


class BadWords:
    """A filter of the tokens that would complete a forbidden word.

    A word is forbidden in any tokenization, and as a part of another word. The tokenizer may have
    more tokens than the `vocab_size` tokens of the model.
    """

    def __init__(self, words: Iterable[str], texts: TokenTexts, vocab_size: int) -> None:
        self._bytes_of = texts.bytes_of
        self._words = [word.encode() for word in words]
        self._max_bytes = max(map(len, self._words))
        # For each beginning of a word: the tokens that complete the word after it.
        tokens_by_beginning = {b"": {t for word in self._words for t in texts.containing(word)}}
        for word in self._words:
            for size in range(1, len(word)):
                tokens = texts.beginning_with(word[size:])
                tokens_by_beginning.setdefault(word[:size], set()).update(tokens)
        self._completing_tokens = {
            beginning: np.array(sorted(t for t in tokens if t < vocab_size), np.int64)
            for beginning, tokens in tokens_by_beginning.items()
        }

    def forbidden_after(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        """Return the tokens that would complete a word after the tokens of a text."""
        tail = b""
        for token in reversed(tokens):
            if len(tail) >= self._max_bytes:
                break
            tail = self._bytes_of(token) + tail
        endings = (tail[len(tail) - size :] for size in range(min(self._max_bytes, len(tail) + 1)))
        completing_tokens = self._completing_tokens
        return np.concatenate(
            [completing_tokens[end] for end in endings if end in completing_tokens]
        )


class Detokenizer:
    """The incremental text of one sequence, which follows a prompt.

    The text of a token depends on the tokens before it. New tokens are therefore decoded together
    with the tokens of the last returned text (the context). Tokens of an incomplete character are
    held back, also at the end of the prompt.
    """

    def __init__(
        self, texts: TokenTexts, skip_special_tokens: bool, prompt: Sequence[int] = ()
    ) -> None:
        self._decode = functools.partial(texts.decode, skip_special_tokens=skip_special_tokens)
        self._token_texts = texts
        self._skipped = texts.special if skip_special_tokens else frozenset()
        context = [token for token in prompt[-4 * _MAX_HELD_TOKENS :] if token not in self._skipped]
        context = context[-_MAX_HELD_TOKENS:]
        while context and texts.begins_inside_character(context[0]):
            del context[0]  # byte-fallback decoders replace characters beside an incomplete one
        self._tokens = context  # the context's tokens, then the tokens held back
        self._context_count = texts.count_complete(self._tokens)  # number of tokens
        self._context_text = self._decode(self._tokens[: self._context_count])
        # numbers of characters
        self._emitted_length = self._held_length = self._replaced_length = self._position = 0

    def position_of(self, token: int) -> int:
        """Return the index of the character in which the next token begins.

        Must be called once for each token, before `add`: the result never decreases.
        A space that the decoder writes only before another token is counted. An incomplete
        character that the token does not continue is also counted, since U+FFFD replaces it.
        """
        delayed_space_count = bool(self._tokens) and self._token_texts.ends_word(self._tokens[-1])
        continues_character = self._token_texts.begins_inside_character(token)
        replaced_length = 0 if continues_character else self._replaced_length
        length = self._emitted_length + self._held_length + delayed_space_count + replaced_length
        # A token may continue the last of several incomplete characters.
        self._position = max(self._position, length)
        return self._position

    def add(self, token: int) -> str:
        """Append a token; return the text that is complete with it, or ""."""
        if token in self._skipped:
            return ""
        self._tokens.append(token)
        text, held_tokens = self._decode(self._tokens), len(self._tokens) - self._context_count
        if text.endswith(_REPLACEMENT) and held_tokens < _MAX_HELD_TOKENS:
            # rstrip may also have removed replaced characters at the end of the context.
            context_length = len(self._context_text)
            complete_length = max(len(text.rstrip(_REPLACEMENT)), context_length)
            self._held_length = complete_length - context_length
            self._replaced_length = max(len(text) - complete_length, 0)
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """Return the text of the tokens held back."""
        return self._advance(self._decode(self._tokens))

    def _advance(self, text: str) -> str:
        """Return the part of `text` that is new, which follows the text of the context.

        The tokens of the new text become the next context.
        """
        pending_tokens = self._tokens[self._context_count :]
        # Byte-fallback decoders replace the bytes before an invalid byte, too, even in the context.
        is_extended = text.startswith(self._context_text)
        new_text = text[len(self._context_text) :] if is_extended else self._decode(pending_tokens)
        self._tokens, self._context_count = pending_tokens, len(pending_tokens)
        self._context_text = self._decode(pending_tokens)
        self._emitted_length += len(new_text)
        self._held_length = self._replaced_length = 0
        return new_text


class StopStrings:
    """The search for stop strings in one sequence. Text that may begin a stop string is held back.

    Args:
        stops: The stop strings.
        includes_stop: Whether the text includes the stop string.
    """

    def __init__(self, stops: Sequence[str], includes_stop: bool) -> None:
        self._stops = stops
        self._includes_stop = includes_stop
        self._held_text = ""
        self._ignored_length = 0  # of the held text; stop strings that end in it are ignored

    def add(self, text: str, can_stop: bool = True) -> tuple[str, str]:
        """Append text; return the text that is not held back, and the stop string found, or "".

        If several stop strings occur, the one that ends first is found. If several end at the same
        position, the first of them in the request is found, as in vLLM. A stop string that ends in
        text without `can_stop` is ignored, but the text may begin a later stop string.
        """
        if not self._stops:
            return text, ""
        text = self._held_text + text
        ignored_length = self._ignored_length if can_stop else len(text)
        positions = [
            (text.find(stop, max(ignored_length - len(stop) + 1, 0)), stop) for stop in self._stops
        ]
        matches = [(begin + len(stop), begin, stop) for begin, stop in positions if begin >= 0]
        if matches:
            end, begin, stop = min(matches, key=itemgetter(0))
            self._held_text = ""
            return text[: end if self._includes_stop else begin], stop
        count = max(overlap(text, stop) for stop in self._stops)
        self._held_text = text[len(text) - count :]
        self._ignored_length = max(ignored_length - (len(text) - count), 0)
        return text[: len(text) - count], ""

    def flush(self) -> str:
        """Return the text that was held back because it may have begun a stop string."""
        text, self._held_text = self._held_text, ""
        return text
