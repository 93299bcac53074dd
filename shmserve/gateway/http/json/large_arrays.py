"""Incremental parsing of large JSON bodies, so that the loop handles others in between (pure).

A JSON parser holds the interpreter from the first byte to the last: tens of megabytes stop
everything for hundreds of milliseconds, in a thread too. But nearly all of a large body are numbers
in `"data": [...]`. Those arrays are cut out; what is left is small. Each array is then parsed in
slices that are cut at commas and made whole JSON again with the brackets that are open at the cut:

    [[1, 2, 3], [4, | 5, 6], [7]]        ->  [[1, 2, 3], [4]]   [[5, 6], [7]]
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shmserve.gateway.http.json.parser import MOST_DEEP, JsonFault, loads
from shmserve.gateway.http.json.tensors import flat

LARGE = 1024 * 1024
_WORTH_CUTTING = 64 * 1024
_SLICE = 128 * 1024
_BLANK = b" \t\r\n"
# Numbers hold no quote and no brace. A pattern finds the few arrays that are long enough by their
# beginning: a look at each of millions of short ones takes seconds.
_LONG_ARRAY = rb'"data"[ \t\r\n]*+:[ \t\r\n]*+(\[)[^"{}]{%d}'


@dataclass(frozen=True, slots=True)
class Numbers:
    """A JSON array of numbers (nested or flat) that is still text."""

    text: bytes
    start: int
    stop: int

    def parts(self) -> Iterator[list[Any]]:
        """The values, flat, a slice at a time; raises JsonFault for what is not JSON."""
        text, at, depth = self.text, self.start, 0
        while at <= self.stop:
            comma = text.find(b",", at + _SLICE, self.stop)
            last = comma < 0
            piece = text[at : self.stop if last else comma].strip(_BLANK)
            before, depth = depth, depth + piece.count(b"[") - piece.count(b"]")
            ends_well = depth == 0 if last else 0 < depth <= MOST_DEEP
            # A comma with nothing before or behind it would go unnoticed at a cut.
            bare = not piece or piece.endswith(b"[") or (before and piece.startswith(b"]"))
            if not ends_well or bare:
                raise JsonFault(
                    f"failed to parse the request JSON buffer: malformed array. at {at}"
                )
            yield flat(loads(b"[" * before + piece + b"]" * depth))
            if last:
                return
            at = comma + 1


def loads_large(body: bytes) -> Any:
    """Like `parser.loads`, but large arrays of numbers under the key "data" become `Numbers`."""
    spans = list(_arrays(body))
    if not spans:
        return loads(body)
    token = secrets.token_hex(16)  # a client cannot write a string that means a cut
    cuts: dict[str, Numbers] = {}
    pieces: list[bytes] = []
    end = 0
    for start, stop in spans:
        name = f"{token}.{len(cuts)}"
        cuts[name] = Numbers(body, start, stop)
        pieces += (body[end:start], b'"', name.encode(), b'"')
        end = stop
    pieces.append(body[end:])
    header = loads(b"".join(pieces))
    _put_back(header, cuts)
    return header


def _put_back(header: Any, cuts: dict[str, Numbers]) -> None:
    inputs = header.get("inputs") if type(header) is dict else None
    for tensor in inputs if type(inputs) is list else ():
        data = tensor.get("data") if type(tensor) is dict else None
        if type(data) is str and data in cuts:
            tensor["data"] = cuts.pop(data)
    if cuts:
        raise JsonFault("a large 'data' array stands outside of 'inputs'")


def _arrays(body: bytes) -> Iterator[tuple[int, int]]:
    """Spans of large arrays under the key "data" that hold no strings and no objects."""
    pattern = re.compile(_LONG_ARRAY % (_WORTH_CUTTING - 1))
    at = 0
    while found := pattern.search(body, at):
        key, start = found.start(), found.start(1)
        at = found.end()
        if body[key - 1 : key] == b"\\":
            continue  # inside a string
        # It ends before the next quote or brace.
        stop = body.find(b'"', at)
        stop = len(body) if stop < 0 else stop
        brace = body.find(b"}", at, stop)
        stop = body.rfind(b"]", start, stop if brace < 0 else brace) + 1
        if stop - start >= _WORTH_CUTTING:
            yield start, stop
            at = stop
