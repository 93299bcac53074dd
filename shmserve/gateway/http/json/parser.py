"""A parser of clients' JSON with limits, and typed access with Triton's error texts.

orjson does not report duplicate keys. The parser detects them by counting: a JSON text contains one
colon for each member, and further colons only in strings. If a key occurs twice, the parsed value
has fewer members than the text. Counting is fast for most requests, which have members only in the
objects that an inference request may contain.

Nearly all bytes of a large body are numbers in `"data": [...]`. `loads_large` cuts these arrays
out, and `NumberArray.parts` parses them in slices, so that the event loop handles other requests in
between.
"""

from __future__ import annotations

import gc
import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import orjson
from numpy.typing import NDArray

from shmserve.common.names import DuplicateKeyError, reject_duplicate_keys
from shmserve.errors import Internal, InvalidArgument, clip, nearest
from shmserve.ipc.tensors.descriptors import MAX_UINT64

MAX_DEPTH = 100
# The limit of objects, and of members: parsing an object takes as long as parsing many numbers.
MAX_MEMBERS = 256 * 1024

LARGE_BYTES = 1024 * 1024  # the long arrays of texts of at least this size are parsed in slices
MAX_OBJECTS = 4096  # number of objects that are parsed and converted in 5 ms
_MAX_LENIENT_BYTES = 8 * LARGE_BYTES  # larger texts have NaN and infinity only in arrays
_MIN_CUT_BYTES = 64 * 1024  # the smallest array that is cut out of a text
_SLICE_BYTES = 128 * 1024  # the size of a slice of a long array
_WHITE_SPACE = b" \t\r\n"
# Arrays of numbers contain no quote and no brace. The pattern finds the few long arrays by their
# beginning, since looking at each of millions of short arrays would take seconds.
_LONG_ARRAY_PATTERN = rb'"data"[ \t\r\n]*+:[ \t\r\n]*+(\[)[^"{}]{%d}'

_PARSE_ERROR = "failed to parse the request JSON buffer: "
_TOO_MANY = f"more than {MAX_MEMBERS} objects or members"
_TOO_DEEP = f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})"
_DEPTH_STEPS = np.zeros(256, np.int8)  # by byte: the change of the nesting depth
_DEPTH_STEPS[list(b"[{")] = 1
_DEPTH_STEPS[list(b"]}")] = -1
_STRING_OR_INF = re.compile(rb'"(?:[^"\\]|\\.)*+"|\bInf\b', re.DOTALL)


class JsonFault(Internal):
    """The error for a client's invalid JSON, to which Triton responds with status 500."""

    server_fault = False


class DuplicateKey(InvalidArgument):
    """The error for a key that occurs twice in an object of a client's JSON."""

    def __init__(self, fault: DuplicateKeyError) -> None:
        super().__init__(f"{_PARSE_ERROR}{fault}")
        self.name = fault.name


def loads(json_text: bytes) -> Any:
    """Parse JSON, in which NaN, Infinity, -Infinity and Inf are numbers, as in Triton.

    In a text of more than 8 MiB, these numbers are errors.

    Raises:
        JsonFault: The text is not JSON.
        DuplicateKey: A key occurs twice in an object.
        InvalidArgument: The text nests deeper than 100, or has more than `MAX_MEMBERS` members.
    """
    if len(json_text) > 2 * MAX_MEMBERS and any(
        _has_too_many(json_text, mark) for mark in (b"{", b":")
    ):
        raise InvalidArgument(_PARSE_ERROR + _TOO_MANY)
    try:
        is_small = len(json_text) < _MIN_CUT_BYTES
        value = orjson.loads(json_text) if is_small else _loads_large(json_text)
    except orjson.JSONDecodeError as error:
        return _loads_lenient(json_text, error)
    has_request_members = json_text.count(b":") == _count_request_members(value)
    object_count = _OBJECTS_IN_REQUEST if has_request_members else json_text.count(b"{")
    if object_count + json_text.count(b"[") > MAX_DEPTH and _is_too_deep(json_text):
        raise InvalidArgument(_TOO_DEEP)
    if not has_request_members and (fault := _find_duplicate_key(json_text, value)) is not None:
        raise DuplicateKey(fault)
    return value


def loads_members(json_text: bytes) -> Any:
    """Parse JSON like `loads`, but replace deeply nested members by 0.

    If a text of up to 1 MiB nests too deep, each array or object in the outermost object becomes 0.
    The depth of values that the caller does not read is therefore not an error.
    """
    if len(json_text) > LARGE_BYTES or not _is_too_deep(json_text):
        return loads(json_text)
    masked_text = _STRING_OR_INF.sub(lambda match: b"_" * len(match[0]), json_text)
    masked_bytes = np.frombuffer(masked_text, np.uint8)
    depth_steps = _DEPTH_STEPS[masked_bytes]
    depths = np.cumsum(depth_steps, dtype=np.int32)
    is_member_start = (depth_steps > 0) & (depths == 2)
    is_member_end = (depth_steps < 0) & (depths == 1)
    shallow_text = np.where(is_member_start, np.uint8(ord("0")), np.frombuffer(json_text, np.uint8))
    return loads(shallow_text[is_member_start | ((depths < 2) & ~is_member_end)].tobytes())


def loads_checked(json_text: bytes) -> Any:
    """Parse JSON from a trusted program, without the checks of `loads`."""
    try:
        return _loads_large(json_text)
    except orjson.JSONDecodeError:  # it contains NaN or Infinity
        return loads(json_text)


def _loads_large(json_text: bytes) -> Any:
    # The garbage collector would repeatedly scan millions of new lists, which have no cycles. The
    # scans would take most of the time, during which the event loop handles nothing else.
    was_gc_enabled = gc.isenabled()
    gc.disable()
    try:
        return orjson.loads(json_text)
    finally:
        if was_gc_enabled:
            gc.enable()


def _loads_lenient(json_text: bytes, strict_error: orjson.JSONDecodeError) -> Any:
    if json_text.startswith(b"\xef\xbb\xbf"):
        return loads(json_text[3:])
    if _is_too_deep(json_text):
        raise InvalidArgument(_TOO_DEEP)
    # No variable may hold the exception: its traceback would refer to the text in a cycle.
    reason = f"{_PARSE_ERROR}{strict_error.msg.partition(': line')[0]}. at {strict_error.pos}"
    # Only the json module parses NaN and infinity. It takes ten times as long as orjson, and would
    # block the event loop for larger texts. Their long arrays are cut out and parsed in slices.
    if len(json_text) > _MAX_LENIENT_BYTES or (b"NaN" not in json_text and b"Inf" not in json_text):
        raise JsonFault(reason)
    with_infinity = _STRING_OR_INF.sub(_spell_infinity, json_text)
    try:
        value = json.loads(
            with_infinity,
            parse_float=_parse_finite,
            parse_int=_parse_int_or_float,
            object_pairs_hook=reject_duplicate_keys,
        )
        orjson.dumps(value)  # raises for an unpaired surrogate, which is not text
    except DuplicateKeyError as error:
        raise DuplicateKey(error) from None
    except json.JSONDecodeError as error:
        raise JsonFault(f"{_PARSE_ERROR}{error.msg}. at {error.pos}") from None
    except (ValueError, TypeError, RecursionError):
        raise JsonFault(reason) from None
    return value


def _spell_infinity(match: re.Match[bytes]) -> bytes:
    return b"Infinity" if match[0] == b"Inf" else match[0]


def _parse_finite(text: str) -> float:
    value = float(text)
    if value - value != 0.0:
        raise ValueError("number too big to be stored in double")
    return value


def _parse_int_or_float(text: str) -> int | float:
    value = int(text) if len(text) < 32 else float(text)
    return value if -(2**63) <= value <= MAX_UINT64 else float(value)


def has_many_objects(json_text: bytes) -> bool:
    """Return whether a JSON text has so many objects that parsing and conversion take 5 ms."""
    return _has_too_many(json_text, b"{", MAX_OBJECTS)


def _has_too_many(json_text: bytes, mark: bytes, limit: int = MAX_MEMBERS) -> bool:
    return json_text.count(mark) > limit and len(_select_outside_strings(json_text, mark)) > limit


def _is_too_deep(json_text: bytes) -> bool:
    # Brackets in strings are not nesting, and must not hide nesting.
    steps = _DEPTH_STEPS[_select_outside_strings(json_text, b"[]{}")]
    return bool(np.cumsum(steps, dtype=np.int32).max(initial=0) > MAX_DEPTH)


# The members of a request, of its inputs and of its outputs.
_MEMBERS = ("id", "inputs", "outputs", "parameters", "name", "shape", "datatype", "data")
_MAX_COMPARED_NAMES = 16  # the number of unknown members of an object that are compared


def find_misspelt(json_object: Any) -> Iterator[tuple[str, str]]:
    """Yield each unknown member of an object of a request, with the known name it resembles."""
    names = [] if type(json_object) is not dict else [n for n in json_object if n not in _MEMBERS]
    for name in names[:_MAX_COMPARED_NAMES]:
        likely_name = nearest(name, _MEMBERS)
        if likely_name and likely_name not in json_object:
            yield name, likely_name


def missing_error(field: str, json_object: Any) -> JsonFault:
    """Return the error for a missing member, with a hint if `json_object` has a misspelt one."""
    names = (name for name, likely_name in find_misspelt(json_object) if likely_name == field)
    hint = "".join(f"; did you misspell it as '{clip(name)}'?" for name in names)
    return JsonFault(
        f"Unable to parse '{field}': attempt to access non-existing object member '{field}'{hint}"
    )


def mistyped_error(field: str, expected_type: str, tensor: str = "") -> JsonFault:
    """Return the error for a member that is not `expected_type`, such as "unsigned-integer"."""
    suffix = f" (input '{tensor}')" if tensor else ""
    text = f"attempt to access JSON non-{expected_type} as {expected_type}{suffix}"
    return JsonFault(f"Unable to parse '{field}': {text}")


def mistyped_value_error(expected_type: str) -> JsonFault:
    """Return the error for a value that is not `expected_type`, without the member name."""
    return JsonFault(f"attempt to access JSON non-{expected_type} as {expected_type}")


def member_string(members: dict[str, Any], field: str) -> str:
    """Return a required member; raise JsonFault if it is missing or not a string."""
    value = members.get(field)
    if type(value) is not str:
        raise mistyped_error(field, "string") if field in members else missing_error(field, members)
    return value


def member_array(json_value: Any, field: str) -> list[Any]:
    """Return a required member of `json_value`, which may be any JSON value.

    Raises:
        JsonFault: The member is missing or not an array.
    """
    if type(json_value) is not dict or field not in json_value:
        raise missing_error(field, json_value)
    value = json_value[field]
    if type(value) is not list:
        raise mistyped_error(field, "array")
    return value


def is_unsigned(value: Any) -> TypeGuard[int]:
    """Return whether a JSON value is an integer in [0, 2**64)."""
    return type(value) is int and 0 <= value <= MAX_UINT64


def check_unsigned(value: Any, field: str) -> int:
    """Return `value`; raise JsonFault unless it is an integer in [0, 2**64)."""
    if not is_unsigned(value):
        raise mistyped_error(field, "unsigned-integer")
    return value


def check_boolean(value: Any, field: str) -> bool:
    """Return `value`; raise JsonFault unless it is true or false."""
    if type(value) is not bool:
        raise mistyped_error(field, "boolean")
    return value


_ALL_BYTES = frozenset(range(256))
_CONTAINER_TYPES = frozenset((dict, list))
# Errors about larger texts do not name the duplicate key: the search takes 10 ms and more.
_MAX_NAMED_BYTES = 1024 * 1024

# The deepest nesting of objects that `_count_request_members` counts: the request, a tensor, its
# parameters, and an empty object, which has no colon.
_OBJECTS_IN_REQUEST = 4


def _count_request_members(value: Any) -> int:
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


def _find_duplicate_key(json_text: bytes, value: Any) -> DuplicateKeyError | None:
    """Return the error if `json_text`, which was parsed to `value`, has duplicate keys."""
    if len(_select_outside_strings(json_text, b":")) == _count_members(value):
        return None
    if len(json_text) <= _MAX_NAMED_BYTES:
        try:
            json.loads(json_text, object_pairs_hook=reject_duplicate_keys)
        except DuplicateKeyError as duplicate:
            return duplicate
    return DuplicateKeyError(None)


def _count_members(value: Any) -> int:
    count = 0
    containers = [value]
    while containers:
        container = containers.pop()
        if type(container) is dict:
            count += len(container)
            container = list(container.values())
        if type(container) is list and not _CONTAINER_TYPES.isdisjoint(map(type, container)):
            containers += [item for item in container if type(item) in _CONTAINER_TYPES]
    return count


def _select_outside_strings(json_text: bytes, marks: bytes) -> NDArray[np.uint8]:
    """Return the bytes among `marks` outside of the strings of a JSON text, in order.

    Behind the first error of a text that is not JSON, the result is undefined.
    """
    if b"\\" in json_text:
        json_text = json_text.replace(b"\\\\", b"").replace(b'\\"', b"")
    irrelevant = bytes(_ALL_BYTES.difference(marks, b'"'))
    characters = np.frombuffer(json_text.translate(None, irrelevant), np.uint8)
    is_quote = characters == ord('"')
    outside: NDArray[np.uint8] = characters[~(is_quote | np.logical_xor.accumulate(is_quote))]
    return outside


@dataclass(frozen=True, slots=True)
class NumberArray:
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
        text, position, depth = self.text, self.start, 0
        while position <= self.stop:
            comma = text.find(b",", position + _SLICE_BYTES, self.stop)
            is_last = comma < 0
            piece = text[position : self.stop if is_last else comma].strip(_WHITE_SPACE)
            open_brackets, depth = depth, depth + piece.count(b"[") - piece.count(b"]")
            is_depth_valid = depth == 0 if is_last else 0 < depth <= MAX_DEPTH
            # Without this check, a cut would hide a comma that does not separate two values.
            has_bare_comma = (
                not piece or piece.endswith(b"[") or (open_brackets and piece.startswith(b"]"))
            )
            if not is_depth_valid or has_bare_comma:
                problem = f"failed to parse the request JSON buffer: malformed array. at {position}"
                raise JsonFault(problem)
            yield loads(b"[" * open_brackets + piece + b"]" * depth)
            if is_last:
                return
            position = comma + 1


def loads_large(body: bytes) -> Any:
    """Parse JSON as `loads` does; large "data" arrays of numbers become `NumberArray`."""
    array_spans = list(_find_arrays(body))
    if not array_spans:
        return loads(body)
    token = secrets.token_hex(16)  # A client cannot guess the string that stands for a cut.
    numbers_by_name: dict[str, NumberArray] = {}
    pieces: list[bytes] = []
    copied_end = 0
    for start, stop in array_spans:
        name = f"{token}.{len(numbers_by_name)}"
        numbers_by_name[name] = NumberArray(body, start, stop)
        pieces += (body[copied_end:start], b'"', name.encode(), b'"')
        copied_end = stop
    pieces.append(body[copied_end:])
    header = loads(b"".join(pieces))
    _insert_numbers(header, numbers_by_name)
    return header


def _insert_numbers(header: Any, numbers_by_name: dict[str, NumberArray]) -> None:
    inputs = header.get("inputs") if type(header) is dict else None
    for tensor in inputs if type(inputs) is list else ():
        data = tensor.get("data") if type(tensor) is dict else None
        if type(data) is str and data in numbers_by_name:
            tensor["data"] = numbers_by_name.pop(data)
    if numbers_by_name:
        raise JsonFault("a large 'data' array is only allowed in an element of 'inputs'")


def _find_arrays(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield the spans of large "data" arrays that contain neither strings nor objects."""
    pattern = re.compile(_LONG_ARRAY_PATTERN % (_MIN_CUT_BYTES - 1))
    position = 0
    while match := pattern.search(body, position):
        key_start, start = match.start(), match.start(1)
        position = match.end()
        if body[key_start - 1 : key_start] == b"\\":
            continue  # the key is inside a string
        # The array ends before the next quote or brace.
        stop = body.find(b'"', position)
        stop = len(body) if stop < 0 else stop
        object_end = body.find(b"}", position, stop)
        stop = body.rfind(b"]", start, stop if object_end < 0 else object_end) + 1
        if stop - start >= _MIN_CUT_BYTES:
            yield start, stop
            position = stop
