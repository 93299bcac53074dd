"""Configurations in JSON: parsed to the tree of source.py, with positions.

The reader is as lenient as protobuf's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

from shmserve.model_config.source import MAX_DEPTH, Entry, Lines, Malformed, MessageValue, Scalar

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
        starts = (match.start() for match in _FIRST_TOKEN.finditer(text))
        positions = map(Lines(text).position, starts)
    return _block_from_json(value, next(positions), positions, 1)


def _block_from_json(
    value: dict[Any, Any], position: str, positions: Iterator[str], depth: int
) -> MessageValue:
    if depth > MAX_DEPTH:
        raise Malformed(position, f"nested deeper than {MAX_DEPTH}")
    block = MessageValue(position)
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
    position = next(positions)
    if value is None:
        return None
    if isinstance(value, dict):
        return _block_from_json(value, position, positions, depth + 1)
    if isinstance(value, bool):
        return Scalar("bool", value, "true" if value else "false", position)
    if isinstance(value, int | float):
        return Scalar("number", value, _number_source(value), position)
    if isinstance(value, str):
        return Scalar("string", value.encode("utf-8", "surrogatepass"), f'"{value}"', position)
    kind = "a list in a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
    raise Malformed(position, f"unexpected value: {kind}")


def _number_source(value: int | float) -> str:
    # repr() rejects integers of thousands of digits.
    return repr(value) if not 1e100 <= abs(value) < math.inf else "a huge number"
