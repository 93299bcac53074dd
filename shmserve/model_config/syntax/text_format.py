"""The parser of protobuf text format into a schema-less syntax tree with positions.

The grammar is https://protobuf.dev/reference/protobuf/textformat-spec without extensions and Any,
which no field of a configuration contains. Protobuf's own parser is not used because it stops at
the first unknown name, whereas this server reports all mistakes at once. Its `Tokenizer` is not
used because it is slower, accepts any character and unknown escape sequences, reads `A-B` and `1-1`
as one token, and publishes positions only through errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from shmserve.errors import clip
from shmserve.model_config.syntax import MAX_DEPTH, Entry, Lines, Malformed, MessageValue, Scalar

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
    rb"\\(?:([abfnrtv\\'\"?])|([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|)"
)
_PLAIN = dict(zip(b"abfnrtv\\'\"?", b"\a\b\f\n\r\t\v\\'\"?", strict=True))
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
        self._next = 0

    def run(self) -> MessageValue:
        root = MessageValue("1:1")
        while self._peek().kind != "end":
            root.entries.append(self._entry(1))
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
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._tokens[self._next]
        self._next += token.kind != "end"
        return token

    def _is_mark(self, *marks: str) -> bool:
        token = self._peek()
        return token.kind == "mark" and token.text in marks

    def _error(self, expected: str) -> Malformed:
        token = self._peek()
        token_text = token.text if token.kind == "end" else f'"{clip(token.text)}"'
        return Malformed(self._at(token.offset), f"expected {expected}, found {token_text}")

    def _entry(self, depth: int) -> Entry:
        name = self._peek()
        if name.kind != "word":
            raise self._error("a field name")
        self._take()
        colon = self._is_mark(":")
        if colon:
            self._take()
        elif not self._is_mark("{", "<", "["):
            raise self._error(f'":" or "{{" after "{clip(name.text)}"')
        listed = self._is_mark("[")
        values = self._list(depth) if listed else [self._value(depth)]
        if self._is_mark(",", ";"):
            self._take()
        return Entry(name.text, values, listed, colon, self._at(name.offset))

    def _list(self, depth: int) -> list[Scalar | MessageValue]:
        self._take()
        values: list[Scalar | MessageValue] = []
        if not self._is_mark("]"):
            values.append(self._value(depth))
            while self._is_mark(","):
                self._take()
                values.append(self._value(depth))
        if not self._is_mark("]"):
            raise self._error('"," or "]" in the list')
        self._take()
        return values

    def _value(self, depth: int) -> Scalar | MessageValue:
        if self._is_mark("{", "<"):
            return self._block(depth)
        token = self._peek()
        if token.kind == "string":
            return self._strings()
        negative = self._is_mark("-")
        if negative:
            self._take()
        value = self._take()
        at = self._at(token.offset)
        sign = "-" if negative else ""
        if value.kind == "number":
            number = self._number(value)
            return Scalar("number", -number if negative else number, sign + value.text, at)
        if value.kind == "word" and not (negative and not _is_float_word(value.text)):
            return Scalar("word", sign + value.text, sign + value.text, at)
        self._next -= value.kind != "end"
        raise self._error("a value")

    def _block(self, depth: int) -> MessageValue:
        opening = self._take()
        if depth >= MAX_DEPTH:
            raise Malformed(self._at(opening.offset), f"nested deeper than {MAX_DEPTH}")
        block = MessageValue(self._at(opening.offset))
        closing = _CLOSING[opening.text]
        while not self._is_mark(closing):
            if self._peek().kind != "word":
                expected = f'"{closing}" (for "{opening.text}" at {block.at}) or a field name'
                raise self._error(expected)
            block.entries.append(self._entry(depth + 1))
        self._take()
        return block

    def _strings(self) -> Scalar:
        first_token = self._peek()
        parts = []
        while self._peek().kind == "string":
            parts.append(self._take())
        value = b"".join(self._unescape(part) for part in parts)
        source = " ".join(part.text for part in parts)
        return Scalar("string", value, source, self._at(first_token.offset))

    def _unescape(self, token: _Token) -> bytes:
        def replace(match: re.Match[bytes]) -> bytes:
            plain, octal, hexadecimal, short, long = match.groups()
            if plain:
                return bytes([_PLAIN[plain[0]]])
            code = int(octal, 8) if octal else int(hexadecimal or short or long or b"-1", 16)
            if octal or hexadecimal:
                if code < 256:
                    return bytes([code])
            elif 0 <= code < 0x110000 and not 0xD800 <= code < 0xE000:
                return chr(code).encode()
            raise Malformed(self._at(token.offset), "the string has an invalid escape sequence")

        return _ESCAPE.sub(replace, token.text[1:-1].encode("utf-8", "surrogatepass"))

    def _number(self, token: _Token) -> int | float:
        text = token.text.lower()
        if len(text) > _MAX_DIGITS:
            raise Malformed(self._at(token.offset), "the number is too long")
        if text.startswith("0x"):
            return int(text, 16)
        if text.isdigit():
            octal = len(text) > 1 and text[0] == "0"
            if octal and ("8" in text or "9" in text):
                raise Malformed(self._at(token.offset), f'"{text}" is not an octal number')
            return int(text, 8 if octal else 10)
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
