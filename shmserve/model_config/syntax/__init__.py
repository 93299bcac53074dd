"""The syntax of configurations: a schema-less tree of nested entries with their positions.

json_format.py       JSON to a tree, and a message to JSON
message_builder.py   a tree to a message
text_format.py       protobuf text format to a tree
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Literal

# The schema nests 8 levels; the interpreter's stack is exhausted only far above this limit.
MAX_DEPTH = 64

Kind = Literal["word", "number", "string", "bool"]


@dataclass(frozen=True, slots=True)
class Scalar:
    """A scalar value of a given kind.

    The kind is `word` (enum, true, inf), `number`, `string` (bytes) or, in JSON, `bool`.
    """

    kind: Kind
    value: str | int | float | bytes | bool
    source: str
    at: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A field of a message: `name: value`.

    Only a `listed` entry (in brackets) may have several values, or none.
    """

    name: str
    values: list[Scalar | MessageValue]
    listed: bool
    colon: bool
    at: str


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
