"""The syntax of configurations: text format and JSON are parsed to a tree with positions.

The tree has no schema: message_builder.py converts it to a message. The grammar of text format is
https://protobuf.dev/reference/protobuf/textformat-spec without extensions and Any, which no field
of a configuration contains. Protobuf's own parser is not used because it stops at the first unknown
name, whereas this server reports all mistakes together. Its `Tokenizer` is not used because it is
slower, accepts any character and unknown escape sequences, reads `A-B` and `1-1` as one token, and
publishes positions only through errors.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal

from shmserve.errors import clip

# The schema has 8 levels. The recursion limit of Python is far higher.
MAX_DEPTH = 64

Kind = Literal["word", "number", "string", "bool"]


@dataclass(frozen=True, slots=True)
class Scalar:
    """A scalar value of a given kind.

    The kind is `word` (enum, true, inf), `number`, `string` (bytes) or, in JSON, `bool`. `source`
    is the text of the value for error texts, `at` its position ("12:7").
    """

    kind: Kind
    value: str | int | float | bytes | bool
    source: str  # the text of the value
    at: str  # the position ("12:7")


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
    at: str  # the position ("12:7")


@dataclass(frozen=True, slots=True)
class MessageValue:
    """The entries of a message, in order."""

    at: str
    entries: list[Entry] = field(default_factory=list)


class Malformed(Exception):
    """The error of text that cannot be parsed; `at` is a position ("12:7"), or "" if unknown."""

    def __init__(self, at: str, message: str) -> None:
        super().__init__(message)
        self.at = at
        self.message = message


class Lines:
    """The line starts of a text, which convert offsets to positions."""

    def __init__(self, text: str) -> None:
        self._starts = [0] + [match.end() for match in re.finditer("\n", text)]

    def at(self, offset: int) -> str:
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


def parse(text: str) -> MessageValue:
    """Return the tree of a text-format message.

    Raises:
        Malformed: The text is malformed; the position is "line:column", both from 1.
    """
    return _Parser(text).run()


class _Parser:
    def __init__(self, text: str) -> None:
        self._at = Lines(text).at
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
                raise Malformed(self._at(offset), _describe_unreadable(text, offset))
            if match.lastgroup != "space":
                kind: TokenKind = match.lastgroup  # type: ignore[assignment]
                tokens.append(_Token(kind, match.group(), offset))
            offset = match.end()
        tokens.append(_Token("end", "the end of the file", offset))
        return tokens

    def _peek(self) -> _Token:
        return self._tokens[self._next_index]

    def _take(self) -> _Token:
        token = self._tokens[self._next_index]
        self._next_index += token.kind != "end"
        return token

    def _next_is(self, *marks: str) -> bool:
        token = self._peek()
        return token.kind == "mark" and token.text in marks

    def _expected_error(self, expected: str) -> Malformed:
        token = self._peek()
        token_text = token.text if token.kind == "end" else f'"{clip(token.text)}"'
        return Malformed(self._at(token.offset), f"expected {expected}, found {token_text}")

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
        return Entry(name.text, values, is_list, has_colon, self._at(name.offset))

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
        at = self._at(token.offset)
        sign = "-" if is_negative else ""
        if value.kind == "number":
            number = self._parse_number(value)
            return Scalar("number", -number if is_negative else number, sign + value.text, at)
        if value.kind == "word" and not (is_negative and not _is_float_word(value.text)):
            return Scalar("word", sign + value.text, sign + value.text, at)
        self._next_index -= value.kind != "end"
        raise self._expected_error("a value")

    def _parse_block(self, depth: int) -> MessageValue:
        opening = self._take()
        if depth >= MAX_DEPTH:
            raise Malformed(self._at(opening.offset), f"nested deeper than {MAX_DEPTH}")
        block = MessageValue(self._at(opening.offset))
        closing = _CLOSING[opening.text]
        while not self._next_is(closing):
            if self._peek().kind != "word":
                expected_text = f'"{closing}" (for "{opening.text}" at {block.at}) or a field name'
                raise self._expected_error(expected_text)
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
        return Scalar("string", value, source, self._at(first_token.offset))

    def _unescape(self, token: _Token) -> bytes:
        def replace(match: re.Match[bytes]) -> bytes:
            simple_escape, octal, hexadecimal, short, long = match.groups()
            if simple_escape:
                return bytes([_SIMPLE_ESCAPES[simple_escape[0]]])
            code_point = int(octal, 8) if octal else int(hexadecimal or short or long or b"-1", 16)
            if octal or hexadecimal:
                if code_point < 256:
                    return bytes([code_point])
            elif 0 <= code_point < 0x110000 and not 0xD800 <= code_point < 0xE000:
                return chr(code_point).encode()
            escape = match[0].decode(errors="replace")
            raise Malformed(self._at(token.offset), f"invalid escape '{escape}' in the string")

        return _ESCAPE.sub(replace, token.text[1:-1].encode("utf-8", "surrogatepass"))

    def _parse_number(self, token: _Token) -> int | float:
        text = token.text.lower()
        if len(text) > _MAX_DIGITS:
            raise Malformed(self._at(token.offset), f"number longer than {_MAX_DIGITS} characters")
        if text.startswith("0x"):
            return int(text, 16)
        if text.isdigit():
            is_octal = len(text) > 1 and text[0] == "0"
            if is_octal and ("8" in text or "9" in text):
                raise Malformed(self._at(token.offset), f'"{text}" is not an octal number')
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


# --- JSON

_QUOTED = r'"(?:[^"\\]++|\\.)*+"|\'(?:[^\'\\]++|\\.)*+\''
# The first token of a name or a value in JSON.
_FIRST_TOKEN = re.compile(rf"{_QUOTED}|[{{\[]|[^\s{{}}\[\]:,\"']+", re.DOTALL)
# Extensions of JSON that protobuf's reader accepts: strings in single quotes, names without quotes,
# trailing commas.
_LENIENT = re.compile(
    rf"(?P<text>{_QUOTED})|(?<![\w$])(?P<name>[A-Za-z_$][\w$]*+)(?=\s*+:)"
    r"|(?<![\[{,])(?P<comma>,)(?=\s*+[}\]])",
    re.DOTALL,
)
_TO_QUOTE = re.compile(r'\\.|"', re.DOTALL)


def decode_json(text: str, build_object: Callable[[list[tuple[str, Any]]], Any]) -> Any:
    """Return the value of a JSON text, read as leniently as by protobuf's reader.

    Args:
        text: The text.
        build_object: The constructor of an object from its members (json's `object_pairs_hook`).

    Raises:
        ValueError: The text is not JSON; the message refers to standard JSON.
        Exception: Any exception of `build_object`.
    """
    try:
        return json.loads(text, object_pairs_hook=build_object)
    except json.JSONDecodeError as error:
        try:
            return json.loads(_LENIENT.sub(_to_standard_json, text), object_pairs_hook=build_object)
        except json.JSONDecodeError:
            raise error from None


def _to_standard_json(match: re.Match[str]) -> str:
    text = match.group()
    match match.lastgroup:
        case "name":
            return f'"{text}"'
        case "comma":
            return ""
    return text if text.startswith('"') else f'"{_TO_QUOTE.sub(_requote, text[1:-1])}"'


def _requote(match: re.Match[str]) -> str:
    text = match.group()
    return {"\\'": "'", '"': '\\"'}.get(text, text)


def tree_from_json(value: dict[str, Any], text: str = "") -> MessageValue:
    """Return the tree of a decoded JSON object, without null members and elements.

    Args:
        value: The decoded object.
        text: The text that it was decoded from, for positions; "" if there is none.

    Raises:
        Malformed: A member is not a JSON value, a list contains a list, or the nesting exceeds
            `MAX_DEPTH`.
    """
    positions: Iterator[str] = repeat("")
    if text:
        # Decoded objects keep the order of the text, so that positions are consumed in that order.
        positions = map(Lines(text).at, (match.start() for match in _FIRST_TOKEN.finditer(text)))
    return _block_from_json(value, next(positions), positions, 1)


def _block_from_json(
    value: dict[Any, Any], at: str, positions: Iterator[str], depth: int
) -> MessageValue:
    if depth > MAX_DEPTH:
        raise Malformed(at, f"nested deeper than {MAX_DEPTH}")
    block = MessageValue(at)
    for name, member in value.items():
        name_position = next(positions)
        if member is None:
            next(positions)
            continue
        is_list = isinstance(member, list | tuple)
        if is_list:
            next(positions)
        elements = member if is_list else [member]
        member_values = [_value_from_json(item, positions, depth) for item in elements]
        values = [value for value in member_values if value is not None]
        block.entries.append(Entry(str(name), values, is_list, True, name_position))
    return block


def _value_from_json(
    value: object, positions: Iterator[str], depth: int
) -> Scalar | MessageValue | None:
    at = next(positions)
    if value is None:
        return None
    if isinstance(value, dict):
        return _block_from_json(value, at, positions, depth + 1)
    if isinstance(value, bool):
        return Scalar("bool", value, "true" if value else "false", at)
    if isinstance(value, int | float):
        return Scalar("number", value, _number_source(value), at)
    if isinstance(value, str):
        return Scalar("string", value.encode("utf-8", "surrogatepass"), f'"{value}"', at)
    kind = "a list in a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
    raise Malformed(at, f"unexpected value: {kind}")


def _number_source(value: int | float) -> str:
    # repr() rejects integers of thousands of digits.
    return repr(value) if not 1e100 <= abs(value) < math.inf else "a huge number"
