"""Detects duplicate keys of a JSON text, which the parser does not report (pure).

A text has a colon for each member that it spells out, and more of them only in strings. What was
parsed has as many members as were spelled out, or fewer where a name stood twice. So where there
are as many members as colons, no name does; and nearly always all of the members are in the places
that an inference request has for them, which are quickly counted.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmserve.common.duplicate_keys import DoubledName, members

_ALL = frozenset(range(256))
_HOLDERS = frozenset((dict, list))
# Finding which name it is takes tens of milliseconds at most.
_LONGEST_NAMED = 1024 * 1024

# One in another: the request, a tensor, its parameters, and an empty one without a colon.
OBJECTS_IN_REQUEST = 4


def members_of_request(value: Any) -> int:
    """How many members there are where an inference request has some; others are left out."""
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


def doubled(raw: bytes, value: Any) -> str | None:
    """What is wrong with the text of `value`, "duplicate key 'id' in an object"; None: nothing."""
    if _colons(raw) == _members(value):
        return None
    if len(raw) <= _LONGEST_NAMED:
        try:
            json.loads(raw, object_pairs_hook=members)
        except DoubledName as found:
            return str(found)
    return "duplicate keys in an object"


def _members(value: Any) -> int:
    """How many members there are in all."""
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
    """How many colons of a JSON text stand outside of strings."""
    return len(outside_strings(raw, b":"))


def outside_strings(raw: bytes, marks: bytes) -> NDArray[np.uint8]:
    """Those of the bytes `marks` that stand outside of the strings of a JSON text, in order.

    What follows the first fault of a text that is not JSON may be taken for a string or not.
    """
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    kept = np.frombuffer(raw.translate(None, bytes(_ALL.difference(marks, b'"'))), np.uint8)
    quotes = kept == ord('"')
    found: NDArray[np.uint8] = kept[~(quotes | np.logical_xor.accumulate(quotes))]
    return found
