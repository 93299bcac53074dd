"""The source of a configuration: the lines of its problems, and the parser of text format.

`parse_text` returns a tree with positions; it has no schema. message_builder.py converts the tree
to a message, and stores the positions in a `Source`.

The grammar of text format is https://protobuf.dev/reference/protobuf/textformat-spec without
extensions and Any, which no field of a configuration contains. Protobuf's own parser is not used
because it stops at the first unknown name, whereas this server reports all mistakes together. Its
`Tokenizer` is not used because it is slower, accepts any character and unknown escape sequences,
reads `A-B` and `1-1` as one token, and publishes positions only through errors.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from google.protobuf.message import Message

from shmserve.errors import InvalidArgument, clip
from shmserve.proto.model_config_pb2 import ModelConfig

# ("output", 0, "name") is output[0].name. `map_key` returns the element for a key of a map.
Key = tuple[str | int, ...]


class Problem(NamedTuple):
    """A problem with the value of a key.

    Attributes:
        key: The key.
        text: The message.
        related_keys: Further keys whose values the message refers to.
        position: The position ("12:7") of a value that could not be read; otherwise "".
    """

    key: Key
    text: str
    related_keys: tuple[Key, ...] = ()
    position: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """The text that a configuration is read from.

    Attributes:
        origin: The name of the text ("m/config.pbtxt"); "" if there is no text.
        positions: The position of every key in the text.
        problems: The problems of values that could not be read.
        python_class_source: The source of the Python class that completes the configuration.
    """

    origin: str = ""
    positions: Mapping[Key, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    python_class_source: Source | None = None

    def with_problem(self, key: Key, text: str) -> Source:
        """Return this source with one more value that could not be read.

        Args:
            key: The key of the value.
            text: The reason.
        """
        problem = Problem(key, text, position=self.positions.get(key, ""))
        return replace(self, problems=(*self.problems, problem))

    def raise_for_problems(
        self,
        config: ModelConfig,
        problems: Iterable[Problem] = (),
        error_type: type[InvalidArgument] = InvalidArgument,
    ) -> None:
        """Raise `error_type` if the text or `config` has problems, with one line per problem.

        A line has the format `ORIGIN:LINE:COLUMN: KEY: TEXT`. A missing key has the position of the
        message that lacks it, and no position if that message is the whole text. A value that the
        text does not contain has the position in the Python class if the class sets it, or else no
        origin. A problem that may result from an unread value is omitted.
        """
        texts = [(p.position, f"{key_text(p.key)}: {p.text}") for p in self.problems]
        rows = [f"{position_text(self.origin, position)} {text}" for position, text in texts]
        unread_keys = _UnreadKeys(self)
        for problem in problems:
            if not any(map(unread_keys.concerns, (problem.key, *problem.related_keys))):
                prefix = self._prefix(problem.key, config)
                rows.append(f"{prefix}{key_text(problem.key)}: {problem.text}")
        if rows:
            raise error_type("\n".join(dict.fromkeys(rows)))

    def _prefix(self, key: Key, config: ModelConfig) -> str:
        position = self._find_position(key, config)
        if position is not None:
            return f"{position_text(self.origin, position)} "
        class_positions = self.python_class_source.positions if self.python_class_source else {}
        class_keys = [key[:end] for end in range(len(key), 0, -1) if key[:end] in class_positions]
        if self.python_class_source is None or not class_keys:
            return ""
        return f"{position_text(self.python_class_source.origin, class_positions[class_keys[0]])} "

    def _find_position(self, key: Key, config: ModelConfig) -> str | None:
        """Return the position of `key` or of the message that lacks it; None if not in the text."""
        for end in range(len(key), 0, -1):
            if key[:end] in self.positions:
                return self.positions[key[:end]]
            if _has_value(config, key[:end]):
                return None
        return "" if self.origin else None


UNWRITTEN = Source()  # the source of a configuration that was not read from a text


class _UnreadKeys:
    """The parts of a configuration that are unknown because values could not be read."""

    def __init__(self, source: Source) -> None:
        self._positions = source.positions
        self._unread = {problem.key for problem in source.problems}
        self._incomplete = {key[:end] for key in self._unread for end in range(1, len(key))}
        # An unknown name may be a misspelling of any field that its message lacks.
        self._maybe_misspelt = {key[:-1] for key in self._unread if key not in source.positions}

    def concerns(self, key: Key) -> bool:
        """Check whether the unread parts of the text may contain a value for `key`."""
        enclosing_keys = (key[:end] for end in range(1, len(key) + 1))
        is_unread = key in self._incomplete or not self._unread.isdisjoint(enclosing_keys)
        return is_unread or (key not in self._positions and key[:-1] in self._maybe_misspelt)


def position_text(origin: str, position: str) -> str:
    """Return the prefix of a line: `ORIGIN:LINE:COLUMN:`, or `ORIGIN:` without a position."""
    return f"{origin}:{position}:" if position else f"{origin}:"


def key_text(key: Key) -> str:
    """Return a key in the notation of configurations: output[0].name."""
    parts = (
        f"[{part}]" if isinstance(part, int) else part if part[:1] == "[" else f".{clip(part)}"
        for part in key
    )
    return "".join(parts).removeprefix(".")


def map_key(name: str | int) -> str | int:
    """Return the element of a `Key` for a map's entry: `["a"]` for the name "a"."""
    return name if isinstance(name, int) else f"[{json.dumps(name)}]"


def find_repeats(values: Iterable[tuple[Key, Any]]) -> Iterator[tuple[Key, Any, Key]]:
    """Yield each repeated value: its key, the value, and the first key with that value."""
    first_keys: dict[Any, Key] = {}
    for key, value in values:
        first_key = first_keys.setdefault(value, key)
        if first_key is not key:
            yield key, value, first_key


def _has_value(config: ModelConfig, key: Key) -> bool:
    """Check whether the configuration has a value at `key`. List indices in `key` must exist."""
    node: Any = config
    for part in key:
        if isinstance(node, Message):
            node = {field.name: value for field, value in node.ListFields()}.get(str(part))
            if node is None:
                return False
        elif isinstance(part, int):
            node = node[part]
    return True


# --- the tree

# The schema has 8 levels. The recursion limit of Python is far higher.
MAX_DEPTH = 64

Kind = Literal["word", "number", "string", "bool"]


@dataclass(frozen=True, slots=True)
class Scalar:
    """A scalar value of a given kind.

    The kind is `word` (enum, true, inf), `number`, `string` (bytes) or, in JSON, `bool`. `source`
    is the text of the value for error texts, `position` its position ("12:7").
    """

    kind: Kind
    value: str | int | float | bytes | bool
    source: str  # the text of the value
    position: str  # the position ("12:7")


@dataclass(frozen=True, slots=True)
class Entry:
    """A field of a message: `name: value`.

    Only an entry with `is_list` (in brackets) may have several values, or none. `has_colon` is true
    if a colon follows the name.
    """

    name: str
    values: list[Scalar | MessageValue]
    is_list: bool  # whether the value is a list
    has_colon: bool  # whether a colon follows the name
    position: str  # the position ("12:7")


@dataclass(frozen=True, slots=True)
class MessageValue:
    """The entries of a message, in order."""

    position: str
    entries: list[Entry] = field(default_factory=list)


class Malformed(Exception):
    """The error of text that cannot be parsed; `position` is "12:7", or "" if unknown."""

    def __init__(self, position: str, message: str) -> None:
        super().__init__(message)
        self.position = position
        self.message = message


class Lines:
    """The line starts of a text, which convert offsets to positions."""

    def __init__(self, text: str) -> None:
        self._starts = [0] + [match.end() for match in re.finditer("\n", text)]

    def position(self, offset: int) -> str:
        """Return "LINE:COLUMN" of an offset, both from 1 and counted in characters."""
        line = bisect_right(self._starts, offset)
        return f"{line}:{offset - self._starts[line - 1] + 1}"


# --- text format

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\n\f\v]+|\#[^\n]*)
  | (?P<string>"(?:[^"\\\n]|\\[^\n])*"|'(?:[^'\\\n]|\\[^\n])*')
  | (?P<number>(?:0[xX][0-9a-fA-F]+|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fF]?)
     (?![A-Za-z0-9_.]))
  | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
  | (?P<mark>[{}<>\[\]:;,-])
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(
    rb"\\(?:([abfnrtv\\'\"?])|([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[\s\S]?)"
)
_SIMPLE_ESCAPES = dict(zip(b"abfnrtv\\'\"?", b"\a\b\f\n\r\t\v\\'\"?", strict=True))
_CLOSING = {"{": "}", "<": ">"}
_MAX_DIGITS = 1000  # int() rejects thousands of digits with an unsuitable error

TokenKind = Literal["string", "number", "word", "mark", "end"]


@dataclass(frozen=True, slots=True)
class _Token:
    kind: TokenKind
    text: str
    offset: int


def parse_text(text: str) -> MessageValue:
    """Return the tree of a text-format message.

    Raises:
        Malformed: The text is malformed; the position is "line:column", both from 1.
    """
    return _Parser(text).run()


class _Parser:
    def __init__(self, text: str) -> None:
        self._lines = Lines(text)
        self._tokens = self._tokenise(text)
        self._next_index = 0

    def run(self) -> MessageValue:
        root = MessageValue("1:1")
        while self._peek().kind != "end":
            root.entries.append(self._parse_entry(1))
        return root

    def _tokenise(self, text: str) -> list[_Token]:
        tokens: list[_Token] = []
        offset = 0
        while offset < len(text):
            match = _TOKEN.match(text, offset)
            if match is None:
                raise Malformed(self._lines.position(offset), _describe_unreadable(text, offset))
            if match.lastgroup != "space":
                kind: TokenKind = match.lastgroup  # type: ignore[assignment]
                tokens.append(_Token(kind, match.group(), offset))
            offset = match.end()
        tokens.append(_Token("end", "the end of the file", offset))
        return tokens

    def _position(self, token: _Token) -> str:
        return self._lines.position(token.offset)

    def _peek(self) -> _Token:
        return self._tokens[self._next_index]

    def _take(self) -> _Token:
        token = self._tokens[self._next_index]
        self._next_index += token.kind != "end"
        return token

    def _next_is(self, *marks: str) -> bool:
        token = self._peek()
        return token.kind == "mark" and token.text in marks

    def _expected_error(self, expected_text: str) -> Malformed:
        token = self._peek()
        token_text = token.text if token.kind == "end" else f'"{clip(token.text)}"'
        return Malformed(self._position(token), f"expected {expected_text}, found {token_text}")

    def _parse_entry(self, depth: int) -> Entry:
        name = self._peek()
        if name.kind != "word":
            raise self._expected_error("a field name")
        self._take()
        has_colon = self._next_is(":")
        if has_colon:
            self._take()
        elif not self._next_is("{", "<", "["):
            raise self._expected_error(f'":" or "{{" after "{clip(name.text)}"')
        is_list = self._next_is("[")
        values = self._parse_list(depth) if is_list else [self._parse_value(depth)]
        if self._next_is(",", ";"):
            self._take()
        return Entry(name.text, values, is_list, has_colon, self._position(name))

    def _parse_list(self, depth: int) -> list[Scalar | MessageValue]:
        self._take()
        values: list[Scalar | MessageValue] = []
        if not self._next_is("]"):
            values.append(self._parse_value(depth))
            while self._next_is(","):
                self._take()
                values.append(self._parse_value(depth))
        if not self._next_is("]"):
            raise self._expected_error('"," or "]" in the list')
        self._take()
        return values

    def _parse_value(self, depth: int) -> Scalar | MessageValue:
        if self._next_is("{", "<"):
            return self._parse_block(depth)
        token = self._peek()
        if token.kind == "string":
            return self._parse_strings()
        is_negative = self._next_is("-")
        if is_negative:
            self._take()
        value = self._take()
        position = self._position(token)
        sign = "-" if is_negative else ""
        if value.kind == "number":
            number = self._parse_number(value)
            return Scalar("number", -number if is_negative else number, sign + value.text, position)
        if value.kind == "word" and not (is_negative and not _is_float_word(value.text)):
            return Scalar("word", sign + value.text, sign + value.text, position)
        self._next_index -= value.kind != "end"
        raise self._expected_error("a value")

    def _parse_block(self, depth: int) -> MessageValue:
        opening = self._take()
        if depth >= MAX_DEPTH:
            raise Malformed(self._position(opening), f"nested deeper than {MAX_DEPTH}")
        block = MessageValue(self._position(opening))
        closer = _CLOSING[opening.text]
        while not self._next_is(closer):
            if self._peek().kind != "word":
                opening_text = f'"{opening.text}" at {block.position}'
                raise self._expected_error(f'"{closer}" (for {opening_text}) or a field name')
            block.entries.append(self._parse_entry(depth + 1))
        self._take()
        return block

    def _parse_strings(self) -> Scalar:
        first_token = self._peek()
        string_tokens = []
        while self._peek().kind == "string":
            string_tokens.append(self._take())
        value = b"".join(self._unescape(part) for part in string_tokens)
        source = " ".join(part.text for part in string_tokens)
        return Scalar("string", value, source, self._position(first_token))

    def _unescape(self, token: _Token) -> bytes:
        def replace(match: re.Match[bytes]) -> bytes:
            simple_escape, octal, hexadecimal, short_code, long_code = match.groups()
            if simple_escape:
                return bytes([_SIMPLE_ESCAPES[simple_escape[0]]])
            code_point = (
                int(octal, 8) if octal else int(hexadecimal or short_code or long_code or b"-1", 16)
            )
            if octal or hexadecimal:
                if code_point < 256:
                    return bytes([code_point])
            elif 0 <= code_point < 0x110000 and not 0xD800 <= code_point < 0xE000:
                return chr(code_point).encode()
            escape = match[0].decode(errors="replace")
            raise Malformed(self._position(token), f"invalid escape '{escape}' in the string")

        return _ESCAPE.sub(replace, token.text[1:-1].encode("utf-8", "surrogatepass"))

    def _parse_number(self, token: _Token) -> int | float:
        text = token.text.lower()
        if len(text) > _MAX_DIGITS:
            raise Malformed(self._position(token), f"number longer than {_MAX_DIGITS} characters")
        if text.startswith("0x"):
            return int(text, 16)
        if text.isdigit():
            is_octal = len(text) > 1 and text[0] == "0"
            if is_octal and ("8" in text or "9" in text):
                raise Malformed(self._position(token), f'"{text}" is not an octal number')
            return int(text, 8 if is_octal else 10)
        return float(text.rstrip("f"))


def _is_float_word(text: str) -> bool:
    return text.lower() in ("inf", "infinity", "nan")


def _describe_unreadable(text: str, offset: int) -> str:
    character = text[offset]
    if character in "\"'":
        return "the string is not closed on its line"
    if character.isdigit() or character == ".":
        return f'"{clip(text[offset : offset + 20].split()[0])}" is not a number'
    return f"unexpected character {character!a}"
