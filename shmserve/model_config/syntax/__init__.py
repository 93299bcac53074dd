"""The syntax of configurations: a tree of nested entries with their positions, without a schema.

json_format.py       JSON to a tree, and a message to JSON
message_builder.py   a tree to a message
text_format.py       protobuf text format to a tree
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Literal

# Far above what the schema nests (8), far below what would exhaust the interpreter's stack.
MAX_DEPTH = 64

Kind = Literal["word", "number", "string", "bool"]


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value: a `word` (enum, true, inf), `number`, `string` (bytes) or, in JSON, `bool`."""

    kind: Kind
    value: str | int | float | bytes | bool
    source: str
    at: str


@dataclass(frozen=True, slots=True)
class Entry:
    """`name: value`; several `values`, or none, only where `listed` (written in brackets)."""

    name: str
    values: list[Scalar | MessageValue]
    listed: bool
    colon: bool
    at: str


@dataclass(frozen=True, slots=True)
class MessageValue:
    """The entries between braces, in order."""

    at: str
    entries: list[Entry] = field(default_factory=list)


class Malformed(Exception):
    """The text cannot be read at all; `at` is a position ("12:7"), "" where there is none."""

    def __init__(self, at: str, message: str) -> None:
        super().__init__(message)
        self.at = at
        self.message = message


class Lines:
    """The lines of a text: what position an offset is."""

    def __init__(self, text: str) -> None:
        self._starts = [0] + [match.end() for match in re.finditer("\n", text)]

    def at(self, offset: int) -> str:
        """ "LINE:COLUMN", both from 1, the column in characters."""
        line = bisect_right(self._starts, offset)
        return f"{line}:{offset - self._starts[line - 1] + 1}"
