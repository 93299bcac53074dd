"""A parser of clients' JSON with limits, and typed access with Triton's error texts (pure).

orjson does not report duplicate keys. A JSON text contains one colon for each member, and further
colons only in strings. The parsed value has fewer members than the text if a key occurs twice.
A value with as many members as colons therefore has no duplicate keys. Nearly always, all members
are where an inference request may have members, so that counting them is fast.

Nearly all bytes of a large body are numbers in `"data": [...]`. `loads_large` cuts these arrays
out, and `Numbers.parts` parses them in slices, so that the event loop handles other requests in
between.
"""

from __future__ import annotations

import gc
import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from shmserve.common.names import DoubledName, members
from shmserve.errors import Internal, InvalidArgument, clip, nearest
from shmserve.ipc.tensors.descriptors import MAX_UINT64

MOST_DEEP = 100
# The limit of objects, and of members. An object takes the time of many numbers.
MOST_MEMBERS = 256 * 1024

LARGE = 1024 * 1024
_LONGEST_LENIENT = 8 * LARGE
_WORTH_CUTTING = 64 * 1024
_SLICE = 128 * 1024
_BLANK = b" \t\r\n"
# Arrays of numbers contain no quote and no brace. The pattern finds the few long arrays by their
# beginning, since looking at each of millions of short arrays would take seconds.
_LONG_ARRAY = rb'"data"[ \t\r\n]*+:[ \t\r\n]*+(\[)[^"{}]{%d}'

_UNREADABLE = "failed to parse the request JSON buffer: "
_TOO_MANY = f"more than {MOST_MEMBERS} objects or members"
_TOO_DEEP = f"JSON nesting depth exceeds maximum allowed limit ({MOST_DEEP})"
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_STRING_OR_INF = re.compile(rb'"(?:[^"\\]|\\.)*+"|\bInf\b', re.DOTALL)


class JsonFault(Internal):
    """The error for a client's invalid JSON, to which Triton responds with status 500."""

    server_fault = False


class DuplicateKey(InvalidArgument):
    """The error for a key that occurs twice in an object of a client's JSON."""

    def __init__(self, fault: DoubledName) -> None:
        super().__init__(f"{_UNREADABLE}{fault}")
        self.name = fault.name


def loads(raw: bytes) -> Any:
    """Parse JSON; NaN, Infinity, -Infinity and Inf are numbers, as in Triton, in up to 8 MiB.

    Raises:
        JsonFault: The text is not JSON.
        DuplicateKey: A key occurs twice in an object.
        InvalidArgument: The nesting is deeper than 100, or there are far too many members.
    """
    if len(raw) > 2 * MOST_MEMBERS and any(_too_many(raw, mark) for mark in (b"{", b":")):
        raise InvalidArgument(_UNREADABLE + _TOO_MANY)
    try:
        value = orjson.loads(raw) if len(raw) < LARGE else _loads_large(raw)
    except orjson.JSONDecodeError as error:
        return _loads_lenient(raw, error)
    plain = raw.count(b":") == _members_of_request(value)
    objects = _OBJECTS_IN_REQUEST if plain else raw.count(b"{")
    if objects + raw.count(b"[") > MOST_DEEP and _too_deep(raw):
        raise InvalidArgument(_TOO_DEEP)
    if not plain and (fault := _duplicate_key(raw, value)) is not None:
        raise DuplicateKey(fault)
    return value


def loads_members(raw: bytes) -> Any:
    """Parse JSON like `loads`; in a text that nests too deep, members of the top may be 0.

    The depth of values that are not read is then no error. This applies to texts of up to 1 MiB.
    """
    if len(raw) > LARGE or not _too_deep(raw):
        return loads(raw)
    text = np.frombuffer(_STRING_OR_INF.sub(lambda match: b"_" * len(match[0]), raw), np.uint8)
    steps = _STEPS[text]
    depth = np.cumsum(steps, dtype=np.int32)
    begins = (steps > 0) & (depth == 2)
    ends = (steps < 0) & (depth == 1)
    shallow = np.where(begins, np.uint8(ord("0")), np.frombuffer(raw, np.uint8))
    return loads(shallow[begins | ((depth < 2) & ~ends)].tobytes())


def _loads_large(raw: bytes) -> Any:
    # The garbage collector would repeatedly scan millions of new lists, which have no cycles. The
    # scans would take most of the time, during which the event loop handles nothing else.
    collected = gc.isenabled()
    gc.disable()
    try:
        return orjson.loads(raw)
    finally:
        if collected:
            gc.enable()


def _loads_lenient(raw: bytes, strict: orjson.JSONDecodeError) -> Any:
    if raw.startswith(b"\xef\xbb\xbf"):
        return loads(raw[3:])
    if _too_deep(raw):
        raise InvalidArgument(_TOO_DEEP)
    # No variable may hold the exception: its traceback would refer to the text in a cycle.
    reason = f"{_UNREADABLE}{strict.msg.partition(': line')[0]}. at {strict.pos}"
    # Larger texts have their numbers in arrays, which are parsed in slices. The json module would
    # block the event loop for ten times as long as orjson.
    if len(raw) > _LONGEST_LENIENT or (b"NaN" not in raw and b"Inf" not in raw):
        raise JsonFault(reason)
    with_infinity = _STRING_OR_INF.sub(_spelled_out, raw)
    try:
        value = json.loads(
            with_infinity, parse_float=_finite, parse_int=_whole, object_pairs_hook=members
        )
        orjson.dumps(value)  # raises for a half surrogate pair, which is not text
    except DoubledName as found:
        raise DuplicateKey(found) from None
    except json.JSONDecodeError as error:
        raise JsonFault(f"{_UNREADABLE}{error.msg}. at {error.pos}") from None
    except (ValueError, TypeError, RecursionError):
        raise JsonFault(reason) from None
    return value


def _spelled_out(match: re.Match[bytes]) -> bytes:
    return b"Infinity" if match[0] == b"Inf" else match[0]


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0.0:
        raise ValueError("number too big to be stored in double")
    return value


def _whole(text: str) -> int | float:
    value = int(text) if len(text) < 32 else float(text)
    return value if -(2**63) <= value <= MAX_UINT64 else float(value)


def _too_many(raw: bytes, mark: bytes) -> bool:
    return raw.count(mark) > MOST_MEMBERS and len(_outside_strings(raw, mark)) > MOST_MEMBERS


def _too_deep(raw: bytes) -> bool:
    # Brackets in strings are not nesting, and must not hide nesting.
    steps = _STEPS[_outside_strings(raw, b"[]{}")]
    return bool(np.cumsum(steps, dtype=np.int32).max(initial=0) > MOST_DEEP)


# The members of a request, of its inputs and of its outputs.
_MEMBERS = ("id", "inputs", "outputs", "parameters", "name", "shape", "datatype", "data")
_MOST_LOOKED_AT = 16  # the number of unknown members of an object that are compared


def misspelt(holder: Any) -> Iterator[tuple[str, str]]:
    """Yield the unknown members of an object of a request, and the likely meant member of each."""
    unknown = [] if type(holder) is not dict else [n for n in holder if n not in _MEMBERS]
    for name in unknown[:_MOST_LOOKED_AT]:
        likely = nearest(name, _MEMBERS)
        if likely and likely not in holder:
            yield name, likely


def missing(field: str, holder: Any) -> JsonFault:
    """Return the error for a missing member, with the misspelt member of `holder`, if any."""
    hint = "".join(
        f"; did you misspell it as '{clip(name)}'?"
        for name, likely in misspelt(holder)
        if likely == field
    )
    return JsonFault(
        f"Unable to parse '{field}': attempt to access non-existing object member '{field}'{hint}"
    )


def mistyped(field: str, kind: str, tensor: str = "") -> JsonFault:
    """Return the error for a member that is not of a `kind`, such as "unsigned-integer"."""
    suffix = f" (input '{tensor}')" if tensor else ""
    return JsonFault(
        f"Unable to parse '{field}': attempt to access JSON non-{kind} as {kind}{suffix}"
    )


def mistyped_value(kind: str) -> JsonFault:
    """Return the error for a value that is not of a `kind`, without the name of the member."""
    return JsonFault(f"attempt to access JSON non-{kind} as {kind}")


def member_string(holder: dict[str, Any], field: str) -> str:
    """Return a required member that is a string."""
    value = holder.get(field)
    if type(value) is not str:
        raise mistyped(field, "string") if field in holder else missing(field, holder)
    return value


def member_array(holder: Any, field: str) -> list[Any]:
    """Return a required member that is an array; `holder` may be any JSON value."""
    if type(holder) is not dict or field not in holder:
        raise missing(field, holder)
    value = holder[field]
    if type(value) is not list:
        raise mistyped(field, "array")
    return value


def unsigned(value: Any, field: str) -> int:
    """Return `value` if it is an integer in [0, 2**64)."""
    if type(value) is not int or not 0 <= value <= MAX_UINT64:
        raise mistyped(field, "unsigned-integer")
    return value


def boolean(value: Any, field: str) -> bool:
    """Return `value` if it is true or false."""
    if type(value) is not bool:
        raise mistyped(field, "boolean")
    return value


_ALL = frozenset(range(256))
_HOLDERS = frozenset((dict, list))
# Naming a duplicate key takes tens of milliseconds at most.
_LONGEST_NAMED = 1024 * 1024

# The depth of objects: the request, a tensor, its parameters, and an empty object without a colon.
_OBJECTS_IN_REQUEST = 4


def _members_of_request(value: Any) -> int:
    """Return the number of members in those objects that an inference request has."""
    if type(value) is not dict:
        return 0
    count = len(value)
    for member in value.values():
        if type(member) is list:
            for tensor in member:
                if type(tensor) is dict:
                    count += len(tensor)
                    if "parameters" in tensor and type(tensor["parameters"]) is dict:
                        count += len(tensor["parameters"])
        elif type(member) is dict:
            count += len(member)
    return count


def _duplicate_key(raw: bytes, value: Any) -> DoubledName | None:
    """Return the error if the text of `value` has duplicate keys."""
    if len(_outside_strings(raw, b":")) == _members(value):
        return None
    if len(raw) <= _LONGEST_NAMED:
        try:
            json.loads(raw, object_pairs_hook=members)
        except DoubledName as found:
            return found
    return DoubledName(None)


def _members(value: Any) -> int:
    count = 0
    holders = [value]
    while holders:
        holder = holders.pop()
        if type(holder) is dict:
            count += len(holder)
            holder = list(holder.values())
        if type(holder) is list and not _HOLDERS.isdisjoint(map(type, holder)):
            holders += [item for item in holder if type(item) in _HOLDERS]
    return count


def _outside_strings(raw: bytes, marks: bytes) -> NDArray[np.uint8]:
    """Return the bytes among `marks` outside of the strings of a JSON text, in order.

    Behind the first error of a text that is not JSON, the result is undefined.
    """
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    irrelevant = bytes(_ALL.difference(marks, b'"'))
    characters = np.frombuffer(raw.translate(None, irrelevant), np.uint8)
    quotes = characters == ord('"')
    outside: NDArray[np.uint8] = characters[~(quotes | np.logical_xor.accumulate(quotes))]
    return outside


@dataclass(frozen=True, slots=True)
class Numbers:
    """The text of a JSON array of numbers, nested or flat."""

    text: bytes
    start: int
    stop: int

    def parts(self) -> Iterator[list[Any]]:
        """Yield the values, a slice at a time, nested as in the text.

        A parser holds the interpreter lock from the first byte to the last: tens of megabytes would
        block the process for hundreds of milliseconds. The text is therefore cut at commas, and
        each slice becomes JSON with the brackets that are open at the cut:

            [[1, 2, 3], [4, | 5, 6], [7]]        ->  [[1, 2, 3], [4]]   [[5, 6], [7]]

        Raises:
            JsonFault: The text is not JSON.
        """
        text, at, depth = self.text, self.start, 0
        while at <= self.stop:
            comma = text.find(b",", at + _SLICE, self.stop)
            last = comma < 0
            piece = text[at : self.stop if last else comma].strip(_BLANK)
            before, depth = depth, depth + piece.count(b"[") - piece.count(b"]")
            ends_well = depth == 0 if last else 0 < depth <= MOST_DEEP
            # A cut would hide a comma with nothing before or behind it.
            bare = not piece or piece.endswith(b"[") or (before and piece.startswith(b"]"))
            if not ends_well or bare:
                raise JsonFault(
                    f"failed to parse the request JSON buffer: malformed array. at {at}"
                )
            yield loads(b"[" * before + piece + b"]" * depth)
            if last:
                return
            at = comma + 1


def loads_large(body: bytes) -> Any:
    """Parse JSON as `loads` does; large arrays of numbers under the key "data" become `Numbers`."""
    spans = list(_arrays(body))
    if not spans:
        return loads(body)
    token = secrets.token_hex(16)  # A client cannot guess the string that stands for a cut.
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
    _insert_numbers(header, cuts)
    return header


def _insert_numbers(header: Any, cuts: dict[str, Numbers]) -> None:
    inputs = header.get("inputs") if type(header) is dict else None
    for tensor in inputs if type(inputs) is list else ():
        data = tensor.get("data") if type(tensor) is dict else None
        if type(data) is str and data in cuts:
            tensor["data"] = cuts.pop(data)
    if cuts:
        raise JsonFault("a large 'data' array is outside of 'inputs'")


def _arrays(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield the spans of large arrays under the key "data" without strings and objects."""
    pattern = re.compile(_LONG_ARRAY % (_WORTH_CUTTING - 1))
    at = 0
    while found := pattern.search(body, at):
        key, start = found.start(), found.start(1)
        at = found.end()
        if body[key - 1 : key] == b"\\":
            continue  # the key is inside a string
        # The array ends before the next quote or brace.
        stop = body.find(b'"', at)
        stop = len(body) if stop < 0 else stop
        brace = body.find(b"}", at, stop)
        stop = body.rfind(b"]", start, stop if brace < 0 else brace) + 1
        if stop - start >= _WORTH_CUTTING:
            yield start, stop
            at = stop
