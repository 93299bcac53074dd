"""Conversion of texts to configurations, which are protobuf messages, and of messages to JSON.

source.py parses a text to a tree, from which `Builder` fills a message. `Builder` reports all
violations of the schema. `to_dict` returns exactly the JSON of GET /v2/models/NAME/config.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from shmserve.common.names import reject_duplicate_keys
from shmserve.errors import InvalidArgument, clip, nearest
from shmserve.model_config.json_source import decode_json, tree_from_json
from shmserve.model_config.source import (
    Entry,
    Key,
    Malformed,
    MessageValue,
    Problem,
    Scalar,
    Source,
    map_key,
    parse_text,
    position_text,
)
from shmserve.proto.model_config_pb2 import ModelConfig

_INT_RANGES: dict[int, tuple[int, int]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
FLOAT_TYPES = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)
_FLOAT_WORDS = {
    "inf": math.inf,
    "infinity": math.inf,
    "-inf": -math.inf,
    "-infinity": -math.inf,
    "nan": math.nan,
    "-nan": math.nan,
}
_BOOL_WORDS = {"true": True, "True": True, "t": True, "false": False, "False": False, "f": False}

# The datatypes to suggest for common wrong names (both without TYPE_), where the most similar name
# would be a wrong suggestion.
_SUGGESTED_TYPES = {
    "BYTES": "STRING",
    "HALF": "FP16",
    "FLOAT16": "FP16",
    "FLOAT": "FP32",
    "FLOAT32": "FP32",
    "DOUBLE": "FP64",
    "FLOAT64": "FP64",
    "BFLOAT16": "BF16",
    "INT": "INT32",
    "LONG": "INT64",
}
_JSON_FLOATS = {b"Infinity": math.inf, b"-Infinity": -math.inf, b"NaN": math.nan}
_JSON_BOOLS: dict[Any, bool] = {b"true": True, b"false": False}
_JSON_INTEGER = re.compile(rb"-?[0-9]{1,40}")
_JSON_NUMBER = re.compile(rb"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def read_pbtxt(text: str, file_name: str = "config.pbtxt") -> tuple[ModelConfig, Source]:
    """Return the configuration in a protobuf text as far as it can be read, and its source.

    Values that do not fit the schema become problems of the source, so that `validate` reports them
    together with its own.

    Raises:
        InvalidArgument: The text is malformed. The message has one line, for the position where the
            parser stopped.
    """
    return _build(Builder(), partial(parse_text, text), file_name)


def read_json(value: str | dict[str, Any], origin: str = "config") -> tuple[ModelConfig, Source]:
    """Return the configuration in proto3 JSON as far as it can be read, and its source.

    The reader is as lenient as protobuf's. It accepts snake_case and camelCase names, numbers and
    booleans in strings, a single value for a list, names without quotes, and trailing commas.

    Args:
        value: JSON text, or a decoded object, whose keys have no positions.
        origin: The name of the text in error texts.

    Raises:
        InvalidArgument: `value` is not a JSON object.
    """
    text = value if isinstance(value, str) else ""
    try:
        content = decode_json(value, reject_duplicate_keys) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidArgument(f"{origin}: not valid JSON: {reason}") from None
    if not isinstance(content, dict):
        raise InvalidArgument(f"{origin}: expected a JSON object, found {type(content).__name__}")
    return _build(Builder(is_json=True), partial(tree_from_json, content, text), origin)


def from_json(value: str | dict[str, Any], origin: str = "config") -> ModelConfig:
    """Return the configuration in proto3 JSON; see `read_json`.

    Raises:
        InvalidArgument: The text has mistakes. Each has a line in the message:
            `origin:LINE:COLUMN: key.path[0]: problem, value found, nearest known name`.
    """
    config, source = read_json(value, origin)
    source.raise_for_problems(config)
    return config


def _build(
    builder: Builder, read_tree: Callable[[], MessageValue], origin: str
) -> tuple[ModelConfig, Source]:
    config = ModelConfig()
    try:
        builder.fill(config, read_tree())
    except Malformed as error:
        raise InvalidArgument(f"{position_text(origin, error.position)} {error.message}") from None
    return config, Source(origin, builder.positions, tuple(builder.problems))


class _Misfit(Exception):
    """Raised for a value that does not fit its field; the text is the reason."""


@dataclass(slots=True)
class Builder:
    """A builder of one message.

    Attributes:
        is_json: Whether values follow the rules of proto3 JSON.
        positions: The positions, as in `Source`.
        problems: The problems, as in `Source`.
    """

    is_json: bool = False
    positions: dict[Key, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def fill(self, message: Message, block: MessageValue, path: Key = ()) -> None:
        """Set every entry of `block` on `message`, and add violations of the schema to `problems`.

        A list element that does not fit becomes an empty element, so that the indices of the other
        elements do not change.
        """
        descriptor = cast("Descriptor", message.DESCRIPTOR)
        set_fields: dict[str, str] = {}
        for entry in block.entries:
            field = self._find_field(descriptor, entry)
            if field is None:
                self._add_problem(
                    entry.position, (*path, entry.name), _unknown_field(descriptor, entry.name)
                )
                continue
            field_path = (*path, field.name)
            self.positions.setdefault(field_path, entry.position)
            conflict = _describe_conflict(field, set_fields)
            if conflict:
                self._add_problem(entry.position, field_path, conflict)
                continue
            self._set(message, field, entry, field_path)

    def _add_problem(self, position: str, key: Key, text: str) -> None:
        self.problems.append(Problem(key, text, position=position))

    def _find_field(self, descriptor: Descriptor, entry: Entry) -> FieldDescriptor | None:
        descriptor_field = descriptor.fields_by_name.get(entry.name)
        if descriptor_field is None and self.is_json:
            descriptor_field = descriptor.fields_by_camelcase_name.get(entry.name)
        return descriptor_field

    def _set(self, message: Message, field: FieldDescriptor, entry: Entry, path: Key) -> None:
        is_message = field.message_type is not None
        if not is_message and not entry.has_colon:
            self._add_problem(entry.position, path, 'expected ":" between the name and its value')
            return
        if is_map(field):
            self._set_map(message, field, entry, path)
            return
        is_list_field = is_repeated(field)
        if entry.is_list and not is_list_field:
            self._add_problem(entry.position, path, "takes one value, found a list")
            return
        for value in entry.values:
            value_path = path
            if is_list_field:
                value_path = (*path, len(getattr(message, field.name)))
                self.positions[value_path] = value.position if entry.is_list else entry.position
            try:
                if is_message:
                    self._set_message(message, field, value, value_path)
                else:
                    _assign(message, field, self._convert_scalar(field, value))
            except _Misfit as misfit:
                self._add_problem(value.position, value_path, str(misfit))
                if is_list_field:
                    _add_empty(getattr(message, field.name), field)

    def _set_message(
        self, message: Message, field: FieldDescriptor, value: Scalar | MessageValue, path: Key
    ) -> None:
        if isinstance(value, Scalar):
            raise _Misfit(f"expected {{ ... }}, found {clip(value.source)}")
        child = getattr(message, field.name)
        if is_repeated(field):
            child = child.add()
        else:
            child.SetInParent()
        self.fill(child, value, path)

    def _set_map(self, message: Message, field: FieldDescriptor, entry: Entry, path: Key) -> None:
        if self.is_json and entry.is_list:
            self._add_problem(entry.position, path, "expected { ... }, found a list")
            return
        container: Any = getattr(message, field.name)
        for value in entry.values:
            if isinstance(value, Scalar):
                text = f"expected {{ ... }}, found {clip(value.source)}"
                self._add_problem(value.position, path, text)
                continue
            position = value.position if entry.is_list else entry.position
            text_block = MessageValue(position, value.entries)
            pairs = map(_pair, value.entries) if self.is_json else [text_block]
            for block in pairs:
                pair = container.GetEntryClass()()
                problem_count = len(self.problems)
                self.fill(pair, block, path)
                if len(self.problems) == problem_count:
                    self.positions[*path, map_key(pair.key)] = block.position
                    _store_pair(container, pair)

    def _convert_scalar(self, field: FieldDescriptor, value: Scalar | MessageValue) -> Any:
        if isinstance(value, MessageValue):
            raise _Misfit(f"expected {_describe_kind(field)}, found {{ ... }}")
        cpp_type = field.cpp_type
        if cpp_type in _INT_RANGES:
            return self._convert_integer(field, value)
        if cpp_type in FLOAT_TYPES:
            return self._convert_float(field, value)
        if cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return self._convert_bool(value)
        if cpp_type == FieldDescriptor.CPPTYPE_ENUM:
            return self._convert_enum(field, value)
        if value.kind != "string" or not isinstance(value.value, bytes):
            raise _Misfit(f"expected a string, found {clip(value.source)}")
        try:
            return value.value.decode("utf-8")
        except UnicodeDecodeError:
            raise _Misfit("the string is not valid UTF-8") from None

    def _convert_integer(self, field: FieldDescriptor, value: Scalar) -> int:
        number = self._find_number(value)
        if self.is_json and isinstance(number, float) and number.is_integer():
            number = int(number)
        if not isinstance(number, int):
            raise _Misfit(f"expected an integer, found {clip(value.source)}")
        minimum, maximum = _INT_RANGES[field.cpp_type]
        if not minimum <= number <= maximum:
            raise _Misfit(f"{clip(value.source)} is out of range [{minimum}, {maximum}]")
        return number

    def _convert_float(self, field: FieldDescriptor, value: Scalar) -> float:
        number = self._find_number(value)
        if number is None and value.kind == "word":
            number = _FLOAT_WORDS.get(str(value.value).lower())
        if number is None:
            raise _Misfit(f"expected {_describe_kind(field)}, found {clip(value.source)}")
        try:
            return float(number)
        except OverflowError:
            return math.inf if number > 0 else -math.inf

    def _find_number(self, value: Scalar) -> int | float | None:
        if value.kind == "number" and isinstance(value.value, int | float):
            return value.value
        if self.is_json and value.kind == "string" and isinstance(value.value, bytes):
            return _number_in_string(value.value)
        return None

    def _convert_bool(self, value: Scalar) -> bool:
        if isinstance(value.value, bool):
            return value.value
        if self.is_json:
            if value.value in _JSON_BOOLS:
                return _JSON_BOOLS[value.value]
        else:
            if value.kind == "word" and value.value in _BOOL_WORDS:
                return _BOOL_WORDS[str(value.value)]
            if value.kind == "number" and value.value in (0, 1) and isinstance(value.value, int):
                return bool(value.value)
        raise _Misfit(f"expected true or false, found {clip(value.source)}")

    def _convert_enum(self, field: FieldDescriptor, value: Scalar) -> int:
        enum = field.enum_type
        assert enum is not None
        if isinstance(value.value, bytes):
            name = value.value.decode("utf-8", "replace").upper() if self.is_json else ""
        else:
            name = str(value.value) if value.kind == "word" else ""
        if name in enum.values_by_name:
            return int(enum.values_by_name[name].number)
        number = self._find_number(value)
        if isinstance(number, int) and number in enum.values_by_number:
            return number
        raise _Misfit(f"unknown value {clip(value.source)}{_enum_hint(enum, name or value.source)}")


def is_repeated(field: FieldDescriptor) -> bool:
    """Check whether a field holds a list or a map."""
    # protobuf 5 has only `label`, which newer runtimes deprecate in favour of `is_repeated`.
    is_repeated_field = getattr(field, "is_repeated", None)
    if is_repeated_field is not None:
        return bool(is_repeated_field)
    return bool(getattr(field, "label") == FieldDescriptor.LABEL_REPEATED)  # noqa: B009


def is_map(field: FieldDescriptor) -> bool:
    """Check whether a field holds a map."""
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _describe_conflict(field: FieldDescriptor, set_fields: dict[str, str]) -> str | None:
    """Return why a singular field cannot be set, or None, and record the field in `set_fields`.

    A field is rejected if it, or another field of its oneof, is set already.
    """
    if is_repeated(field):
        return None
    oneof_name = field.containing_oneof.name if field.containing_oneof else field.name
    earlier_field = set_fields.get(oneof_name)
    set_fields[oneof_name] = field.name
    if earlier_field is None:
        return None
    if earlier_field == field.name:
        return "is set more than once"
    return f'cannot be set together with "{earlier_field}"'


def _assign(message: Message, field: FieldDescriptor, value: Any) -> None:
    if is_repeated(field):
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


def _add_empty(container: Any, field: FieldDescriptor) -> None:
    if field.message_type is not None:
        container.add()
    else:
        container.append("" if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else 0)


def _store_pair(container: Any, pair: Any) -> None:
    if pair.DESCRIPTOR.fields_by_name["value"].message_type is not None:
        container[pair.key].CopyFrom(pair.value)
    else:
        container[pair.key] = pair.value


def _pair(entry: Entry) -> MessageValue:
    """Convert a JSON map's entry `"NAME": VALUE` to text format: { key: "NAME" value: VALUE }."""
    key = Scalar("string", entry.name.encode("utf-8", "surrogatepass"), entry.name, entry.position)
    value = Entry("value", entry.values, entry.is_list, True, entry.position)
    return MessageValue(entry.position, [Entry("key", [key], False, True, entry.position), value])


def _number_in_string(text: bytes) -> int | float | None:
    if text in _JSON_FLOATS:
        return _JSON_FLOATS[text]
    if _JSON_INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _JSON_NUMBER.fullmatch(text) else None


def _describe_kind(field: FieldDescriptor) -> str:
    if field.cpp_type in _INT_RANGES:
        return "an integer"
    if field.cpp_type in FLOAT_TYPES:
        return "a number"
    return {
        FieldDescriptor.CPPTYPE_BOOL: "true or false",
        FieldDescriptor.CPPTYPE_STRING: "a string",
    }.get(field.cpp_type, "one of its names")


def _unknown_field(descriptor: Descriptor, name: str) -> str:
    similar_name = nearest(name.lower(), descriptor.fields_by_name)
    if similar_name:
        return f'no such field; did you mean "{similar_name}"?'
    return f"no such field; known are {', '.join(sorted(descriptor.fields_by_name))}"


def _enum_hint(enum: EnumDescriptor, name: str) -> str:
    # The common prefix (TYPE_, KIND_) is ignored, since it would make all names similar.
    prefix = next(iter(enum.values_by_name)).partition("_")[0] + "_"
    names = {enum_name.removeprefix(prefix).lower(): enum_name for enum_name in enum.values_by_name}
    suffix = name.upper().removeprefix(prefix)
    similar_name = nearest(_SUGGESTED_TYPES.get(suffix, suffix).lower(), names)
    if similar_name:
        return f'; did you mean "{names[similar_name]}"?'
    return f"; expected one of {', '.join(enum.values_by_name)}"


# --- JSON of messages


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


def _is_always_shown(field: FieldDescriptor) -> bool:
    # A proto3 `optional` field is the only member of a oneof named after it; JSON treats it as a
    # primitive field.
    oneof = field.containing_oneof
    return field.message_type is None and (oneof is None or oneof.name == f"_{field.name}")


def _json_value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return to_dict(value)
    if field.enum_type is not None:
        enum_value = field.enum_type.values_by_number.get(value)
        return enum_value.name if enum_value else value
    if field.cpp_type in FLOAT_TYPES:
        return _json_float(value, is_float32=field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT)
    return value


def _json_float(value: float, *, is_float32: bool) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if is_float32:
        stored_bytes = struct.pack("f", value)
        # The shortest text that reads back as the same float32; 9 digits always suffice.
        for digits in range(6, 10):
            rounded_value = float(f"{value:.{digits}g}")
            if _pack_float32(rounded_value) == stored_bytes:
                return rounded_value
    return value


def _pack_float32(value: float) -> bytes | None:
    try:
        return struct.pack("f", value)
    except OverflowError:  # the value is the largest float32, rounded up
        return None
