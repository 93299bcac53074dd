"""What is wrong with a text that is not JSON, in the words of Triton's parser, RapidJSON (pure).

A second reading, done only for an answer that says what failed and where.
"""

from __future__ import annotations

import re

_BLANK = re.compile(rb"[ \t\r\n]*")
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]*')
_HEX = re.compile(rb"[0-9a-fA-F]{4}")
_DIGITS = re.compile(rb"[0-9]*")
_WORDS = {
    first: re.compile(pattern)
    for first, pattern in (
        (b"n", b"n(?:u(?:ll?)?)?"),
        (b"t", b"t(?:r(?:ue?)?)?"),
        (b"f", b"f(?:a(?:l(?:se?)?)?)?"),
    )
}
_NOT_NUMBERS = re.compile(rb"NaN|Inf(?:inity)?")


class _Fault(Exception):
    """Where reading stopped, and why."""

    def __init__(self, text: str, at: int) -> None:
        super().__init__(text)
        self.at = at


def explain(raw: bytes) -> str | None:
    """The fault of a text, "Missing a name for object member. at 1"; None where this finds none.

    Nesting must be bounded by the caller.
    """
    reader = _Reader(raw)
    try:
        reader.document()
    except _Fault as fault:
        return f"{fault} at {fault.at}"
    return None


class _Reader:
    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 0

    def document(self) -> None:
        self._blank()
        if self._peek() in (b"", b"\0"):
            raise _Fault("The document is empty.", self._at)
        self._value()
        self._blank()
        if self._at < len(self._raw):
            raise _Fault("The document root must not be followed by other values.", self._at)

    def _peek(self) -> bytes:
        return self._raw[self._at : self._at + 1]

    def _take(self, wanted: bytes) -> bool:
        found = self._peek() == wanted
        self._at += found
        return found

    def _skip(self, pattern: re.Pattern[bytes]) -> bytes:
        match = pattern.match(self._raw, self._at)
        if match is None:
            return b""
        self._at = match.end()
        return match[0]

    def _blank(self) -> None:
        self._skip(_BLANK)

    def _value(self) -> None:
        first = self._peek()
        if first == b'"':
            self._string()
        elif first == b"{":
            self._object()
        elif first == b"[":
            self._array()
        elif first in _WORDS:
            if self._skip(_WORDS[first]) not in (b"null", b"true", b"false"):
                raise _Fault("Invalid value.", self._at)
        else:
            self._number()

    def _object(self) -> None:
        self._at += 1
        self._blank()
        if self._take(b"}"):
            return
        while True:
            if self._peek() != b'"':
                raise _Fault("Missing a name for object member.", self._at)
            self._string()
            self._blank()
            if not self._take(b":"):
                raise _Fault("Missing a colon after a name of object member.", self._at)
            self._blank()
            self._value()
            self._blank()
            if self._take(b"}"):
                return
            if not self._take(b","):
                raise _Fault("Missing a comma or '}' after an object member.", self._at)
            self._blank()

    def _array(self) -> None:
        self._at += 1
        self._blank()
        if self._take(b"]"):
            return
        while True:
            self._value()
            self._blank()
            if self._take(b"]"):
                return
            if not self._take(b","):
                raise _Fault("Missing a comma or ']' after an array element.", self._at)
            self._blank()

    def _string(self) -> None:
        self._at += 1
        while True:
            self._skip(_PLAIN)
            if self._take(b'"'):
                return
            if self._peek() == b"\\":
                self._escape()
            elif self._peek() in (b"", b"\0"):
                raise _Fault("Missing a closing quotation mark in string.", self._at)
            else:
                raise _Fault("Invalid escape character in string.", self._at)

    def _escape(self) -> None:
        began = self._at
        self._at += 2
        kind = self._raw[began + 1 : began + 2]
        if kind == b"u":
            code = self._hex(began)
            if 0xD800 <= code < 0xE000:
                pair = code < 0xDC00 and self._take(b"\\") and self._take(b"u")
                if not pair or not 0xDC00 <= self._hex(began) < 0xE000:
                    raise _Fault("The surrogate pair in string is invalid.", began)
        elif not kind or kind not in b'"\\/bfnrt':
            raise _Fault("Invalid escape character in string.", began)

    def _hex(self, began: int) -> int:
        digits = self._skip(_HEX)
        if not digits:
            raise _Fault("Incorrect hex digit after \\u escape in string.", began)
        return int(digits, 16)

    def _number(self) -> None:
        began = self._at
        self._take(b"-")
        if self._skip(_NOT_NUMBERS):
            return
        if not self._take(b"0") and not self._skip(_DIGITS):
            raise _Fault("Invalid value.", self._at)
        if self._take(b".") and not self._skip(_DIGITS):
            raise _Fault("Miss fraction part in number.", self._at)
        if self._take(b"e") or self._take(b"E"):
            if not self._take(b"+"):
                self._take(b"-")
            if not self._skip(_DIGITS):
                raise _Fault("Miss exponent in number.", self._at)
        if abs(float(self._raw[began : self._at])) == float("inf"):
            raise _Fault("Number too big to be stored in double.", began)
