"""JSON from clients: parsing within limits, duplicate keys refused, and typed access with Triton's
texts (pure).

The parser does not report duplicate keys. A text has a colon for each member that it spells out,
and more of them only in strings. What was parsed has as many members as were spelled out, or fewer
where a name stood twice. So where there are as many members as colons, no name does; and nearly
always all of the members are in the places that an inference request has for them, which are
quickly counted.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from shmserve.common.duplicate_keys import DoubledName, members
from shmserve.errors import Internal, InvalidArgument, clip, nearest
from shmserve.ipc.tensors.ranges import LARGEST_UNSIGNED

MOST_DEEP = 100
# Of objects, and of their members. No request needs more, and each takes the time of many numbers.
MOST_MEMBERS = 256 * 1024

_LARGE = 1024 * 1024
_LONGEST_LENIENT = 8 * _LARGE

_UNREADABLE = "failed to parse the request JSON buffer: "
_TOO_MANY = f"more than {MOST_MEMBERS} objects or members"
_TOO_DEEP = f"JSON nesting depth exceeds maximum allowed limit ({MOST_DEEP})"
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_STRING_OR_INF = re.compile(rb'"(?:[^"\\]|\\.)*+"|\bInf\b', re.DOTALL)


class JsonFault(Internal):
    """The JSON is not what the protocol asks for: the client's fault, but Triton answers 500."""

    server_fault = False


class DuplicateKey(InvalidArgument):
    """A `name` that stands twice in one object of a client's text."""

    def __init__(self, fault: DoubledName) -> None:
        super().__init__(f"{_UNREADABLE}{fault}")
        self.name = fault.name


def loads(raw: bytes) -> Any:
    """Parse JSON; NaN, Infinity, -Infinity and Inf are numbers, as in Triton, in up to 8 MiB.

    Raises JsonFault for what is not JSON, DuplicateKey for a name that stands twice in one object,
    InvalidArgument for nesting deeper than 100 and for far too many members.
    """
    if len(raw) > 2 * MOST_MEMBERS and any(_too_many(raw, mark) for mark in (b"{", b":")):
        raise InvalidArgument(_UNREADABLE + _TOO_MANY)
    try:
        value = orjson.loads(raw) if len(raw) < _LARGE else _loads_large(raw)
    except orjson.JSONDecodeError as error:
        return _loads_lenient(raw, error)
    plain = raw.count(b":") == members_of_request(value)
    objects = OBJECTS_IN_REQUEST if plain else raw.count(b"{")
    if objects + raw.count(b"[") > MOST_DEEP and _too_deep(raw):
        raise InvalidArgument(_TOO_DEEP)
    if not plain and (fault := doubled(raw, value)) is not None:
        raise DuplicateKey(fault)
    return value


def _loads_large(raw: bytes) -> Any:
    # Millions of arrays that are being made are looked at again and again by the collector of
    # cycles, which finds none: that would be most of the time, in which nothing else is handled.
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
    # No variable may hold the exception: with its frames, and the text, it would wait for the
    # collector.
    reason = f"{_UNREADABLE}{strict.msg.partition(': line')[0]}. at {strict.pos}"
    # What is larger has its numbers in arrays, which are read in slices (large_arrays.py). As one
    # piece it would keep everybody waiting for ten times as long as with the quick parser.
    if len(raw) > _LONGEST_LENIENT or (b"NaN" not in raw and b"Inf" not in raw):
        raise JsonFault(reason)
    spelled = _STRING_OR_INF.sub(_spelled_out, raw)
    try:
        value = json.loads(
            spelled, parse_float=_finite, parse_int=_whole, object_pairs_hook=members
        )
        orjson.dumps(value)  # half a surrogate pair is not text
    except DoubledName as found:
        raise DuplicateKey(found) from None
    except json.JSONDecodeError as error:
        raise JsonFault(f"{_UNREADABLE}{error.msg}. at {error.pos}") from None
    except (ValueError, TypeError, RecursionError):
        raise JsonFault(reason) from None
    return value


def _spelled_out(found: re.Match[bytes]) -> bytes:
    return b"Infinity" if found[0] == b"Inf" else found[0]


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0.0:
        raise ValueError("number too big to be stored in double")
    return value


def _whole(text: str) -> int | float:
    value = int(text) if len(text) < 32 else float(text)
    return value if -(2**63) <= value <= LARGEST_UNSIGNED else float(value)


def _too_many(raw: bytes, mark: bytes) -> bool:
    return raw.count(mark) > MOST_MEMBERS and len(outside_strings(raw, mark)) > MOST_MEMBERS


def _too_deep(raw: bytes) -> bool:
    # Brackets in strings are no nesting, and must not hide any.
    steps = _STEPS[outside_strings(raw, b"[]{}")]
    return bool(np.cumsum(steps, dtype=np.int32).max(initial=0) > MOST_DEEP)


# The members of a request, of its inputs and of its outputs.
_MEMBERS = ("id", "inputs", "outputs", "parameters", "name", "shape", "datatype", "data")
_MOST_LOOKED_AT = 16  # of an object's unknown members


def misspelt(holder: Any) -> Iterator[tuple[str, str]]:
    """The members of an object of a request that mean nothing, and what is likely meant by each."""
    strange = [] if type(holder) is not dict else [n for n in holder if n not in _MEMBERS]
    for name in strange[:_MOST_LOOKED_AT]:
        near = nearest(name, _MEMBERS)
        if near and near not in holder:
            yield name, near


def missing(field: str, holder: Any) -> JsonFault:
    """The text for a member that is not there, and what of `holder` is likely meant to be it."""
    hint = "".join(
        f"; did you mean it by '{clip(name)}'?" for name, near in misspelt(holder) if near == field
    )
    return JsonFault(
        f"Unable to parse '{field}': attempt to access non-existing object member '{field}'{hint}"
    )


def mistyped(field: str, kind: str, tensor: str = "") -> JsonFault:
    """The text for a member, perhaps of an input, that is not a `kind`: "string", "array",
    "unsigned-integer", ..."""
    whose = f" (input '{tensor}')" if tensor else ""
    return JsonFault(
        f"Unable to parse '{field}': attempt to access JSON non-{kind} as {kind}{whose}"
    )


def mistyped_value(kind: str) -> JsonFault:
    """The text for a value that is not a `kind`, where Triton does not say whose it is."""
    return JsonFault(f"attempt to access JSON non-{kind} as {kind}")


def member_string(holder: dict[str, Any], field: str) -> str:
    """A member that must be there and a string."""
    value = holder.get(field)
    if type(value) is not str:
        raise mistyped(field, "string") if field in holder else missing(field, holder)
    return value


def member_array(holder: Any, field: str) -> list[Any]:
    """A member that must be there and an array; `holder` may be anything."""
    if type(holder) is not dict or field not in holder:
        raise missing(field, holder)
    value = holder[field]
    if type(value) is not list:
        raise mistyped(field, "array")
    return value


def unsigned(value: Any, field: str) -> int:
    """`value` as an integer in [0, 2**64)."""
    if type(value) is not int or not 0 <= value <= LARGEST_UNSIGNED:
        raise mistyped(field, "unsigned-integer")
    return value


def boolean(value: Any, field: str) -> bool:
    """`value` as true or false."""
    if type(value) is not bool:
        raise mistyped(field, "boolean")
    return value


_ALL = frozenset(range(256))
_HOLDERS = frozenset((dict, list))
# Finding which name it is takes tens of milliseconds at most.
_LONGEST_NAMED = 1024 * 1024

# One in another: the request, a tensor, its parameters, and an empty one without a colon.
OBJECTS_IN_REQUEST = 4


def members_of_request(value: Any) -> int:
    """The number of members where an inference request has some; others are left out."""
    if type(value) is not dict:
        return 0
    count = len(value)
    for held in value.values():
        if type(held) is list:
            for tensor in held:
                if type(tensor) is dict:
                    count += len(tensor)
                    if "parameters" in tensor and type(tensor["parameters"]) is dict:
                        count += len(tensor["parameters"])
        elif type(held) is dict:
            count += len(held)
    return count


def doubled(raw: bytes, value: Any) -> DoubledName | None:
    """The fault of the text of `value`; None: there is none."""
    if _colons(raw) == _members(value):
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


def _colons(raw: bytes) -> int:
    return len(outside_strings(raw, b":"))


def outside_strings(raw: bytes, marks: bytes) -> NDArray[np.uint8]:
    """The bytes among `marks` that stand outside of the strings of a JSON text, in order.

    What follows the first fault of a text that is not JSON may be taken for a string or not.
    """
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    kept = np.frombuffer(raw.translate(None, bytes(_ALL.difference(marks, b'"'))), np.uint8)
    quotes = kept == ord('"')
    found: NDArray[np.uint8] = kept[~(quotes | np.logical_xor.accumulate(quotes))]
    return found
