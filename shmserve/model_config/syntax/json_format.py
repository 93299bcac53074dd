"""Conversion from proto3 JSON to a tree, and from a message to JSON.

Messages are converted to exactly the JSON of GET /v2/models/NAME/config.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from shmserve.model_config.syntax import MAX_DEPTH, Entry, Lines, Malformed, MessageValue, Scalar
from shmserve.model_config.syntax.message_builder import FLOATS, is_map, is_repeated

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


def decode_json(text: str, members: Callable[[list[tuple[str, Any]]], Any]) -> Any:
    """Return the value of a JSON text, read as leniently as by protobuf's reader.

    Args:
        text: The text.
        members: The constructor of an object from its members (json's `object_pairs_hook`).

    Raises:
        ValueError: The text is not JSON; the message refers to standard JSON.
        Exception: Any exception of `members`.
    """
    try:
        return json.loads(text, object_pairs_hook=members)
    except json.JSONDecodeError as error:
        try:
            return json.loads(_LENIENT.sub(_to_standard_json, text), object_pairs_hook=members)
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
        Malformed: A member is no JSON value, a list contains a list, or the nesting exceeds
            `MAX_DEPTH`.
    """
    positions: Iterator[str] = repeat("")
    if text:
        # Decoded objects keep the order of the text, so that positions are consumed in that order.
        positions = map(Lines(text).at, (match.start() for match in _FIRST_TOKEN.finditer(text)))
    return _block(value, next(positions), positions, 1)


def _block(value: dict[Any, Any], at: str, positions: Iterator[str], depth: int) -> MessageValue:
    if depth > MAX_DEPTH:
        raise Malformed(at, f"nested deeper than {MAX_DEPTH}")
    block = MessageValue(at)
    for name, member in value.items():
        name_at = next(positions)
        if member is None:
            next(positions)
            continue
        listed = isinstance(member, list | tuple)
        if listed:
            next(positions)
        member_values = [
            _value(item, positions, depth) for item in (member if listed else [member])
        ]
        values = [value for value in member_values if value is not None]
        block.entries.append(Entry(str(name), values, listed, True, name_at))
    return block


def _value(value: object, positions: Iterator[str], depth: int) -> Scalar | MessageValue | None:
    at = next(positions)
    if value is None:
        return None
    if isinstance(value, dict):
        return _block(value, at, positions, depth + 1)
    if isinstance(value, bool):
        return Scalar("bool", value, "true" if value else "false", at)
    if isinstance(value, int | float):
        return Scalar("number", value, _number_source(value), at)
    if isinstance(value, str):
        return Scalar("string", value.encode("utf-8", "surrogatepass"), f'"{value}"', at)
    kind = "a list in a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
    raise Malformed(at, f"unexpected value: {kind}")


def to_dict(message: Message) -> dict[str, Any]:
    """Return a message as a JSON object: all primitive fields, and the submessages that are set."""
    fields: dict[str, Any] = {}
    for target in cast("list[FieldDescriptor]", message.DESCRIPTOR.fields):
        value: Any = getattr(message, target.name)
        if is_map(target):
            entry = cast("Descriptor", target.message_type)
            is_scalar = entry.fields_by_name["value"].message_type is None
            fields[target.name] = {
                str(key): value[key] if is_scalar else to_dict(value[key]) for key in sorted(value)
            }
        elif is_repeated(target):
            fields[target.name] = [_json_value(target, item) for item in value]
        elif _is_always_shown(target) or message.HasField(target.name):
            fields[target.name] = _json_value(target, value)
    return fields


def _is_always_shown(target: FieldDescriptor) -> bool:
    # A proto3 `optional` field is the only member of a oneof named after it; JSON treats it as a
    # primitive field.
    group = target.containing_oneof
    return target.message_type is None and (group is None or group.name == f"_{target.name}")


def _json_value(target: FieldDescriptor, value: Any) -> Any:
    if target.message_type is not None:
        return to_dict(value)
    if target.enum_type is not None:
        enum_value = target.enum_type.values_by_number.get(value)
        return enum_value.name if enum_value else value
    if target.cpp_type in FLOATS:
        return _json_float(value, is_single=target.cpp_type == FieldDescriptor.CPPTYPE_FLOAT)
    return value


def _json_float(value: float, *, is_single: bool) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if is_single:
        stored = struct.pack("f", value)
        # The shortest text that reads back as the same float32; 9 digits always suffice.
        for digits in range(6, 10):
            rounded = float(f"{value:.{digits}g}")
            if _pack_float32(rounded) == stored:
                return rounded
    return value


def _pack_float32(value: float) -> bytes | None:
    try:
        return struct.pack("f", value)
    except OverflowError:  # the value is the largest float32, rounded up
        return None


def _number_source(value: int | float) -> str:
    # repr() rejects integers of thousands of digits.
    return repr(value) if not 1e100 <= abs(value) < math.inf else "a huge number"
