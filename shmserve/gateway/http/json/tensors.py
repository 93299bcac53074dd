"""The codec of tensor data in JSON: lists of values to little-endian bytes and back.

A list may be flat or nested; its values are in row-major order. Integers that exceed their datatype
wrap, as in Triton. FP16 and BF16 have no JSON representation.
"""

from __future__ import annotations

import asyncio
import json
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import orjson

from shmserve.errors import Internal, InvalidArgument, clip
from shmserve.gateway.http.json.parser import JsonFault
from shmserve.gateway.inference.body_arrival import MallocTrim
from shmserve.ipc.tensors.arrays import NUMPY_DTYPES
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, element_count

# The number of values that are encoded at a time, in about a millisecond.
_VALUES_PER_PART = 32 * 1024
# Tensors of more bytes are encoded in several turns of the event loop.
_MAX_BYTES_PER_TURN = 64 * 1024

_STRUCT_CODES = {
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP32": "f",
    "FP64": "d",
}
_CAST_FORMATS = {"BOOL": "?", **_STRUCT_CODES}
_FLOAT_DATATYPES = frozenset(("FP32", "FP64"))
_BINARY_ONLY_DATATYPES = frozenset(("FP16", "BF16"))
_REAL_TYPES = frozenset((int, float))


def split_values(values: list[Any]) -> Iterator[list[Any]]:
    """Yield the values of nested lists in parts that take a millisecond each to decode."""
    values, _ = _flatten_with_types(values)
    for index in range(0, len(values), _VALUES_PER_PART):
        yield values[index : index + _VALUES_PER_PART]


def _flatten_with_types(values: list[Any]) -> tuple[list[Any], set[type]]:
    """Return the values of nested lists as one list, and the set of their types."""
    value_types = set(map(type, values))
    while list in value_types:
        if len(value_types) == 1:
            values = list(chain.from_iterable(values))
        else:
            values = list(chain.from_iterable(v if type(v) is list else (v,) for v in values))
        value_types = set(map(type, values))
    return values, value_types


def create_packer(datatype: str, count: int) -> Callable[..., bytes] | None:
    """Return a function that converts `count` numbers to bytes; None if only `decode` can.

    The function raises struct.error or OverflowError for values that only `decode` can handle.
    """
    struct_code = _STRUCT_CODES.get(datatype)
    return None if struct_code is None else struct.Struct(f"<{count}{struct_code}").pack


def create_unpacker(
    datatype: str, shape: tuple[int, ...]
) -> Callable[[bytes], tuple[Any, ...]] | None:
    """Return a function that converts bytes to the values of a JSON array.

    Returns:
        None for BYTES and for datatypes that JSON cannot represent.
    """
    code = _CAST_FORMATS.get(datatype)
    return None if code is None else struct.Struct(f"<{element_count(shape)}{code}").unpack


def decode(values: list[Any], datatype: str, count: int, name: str) -> bytes:
    """Return the bytes of a tensor of `count` elements, given a flat or nested list.

    Raises:
        JsonFault: The type or the number of the values is wrong.
        InvalidArgument: The datatype has no JSON representation.
    """
    return b"".join(decode_parts((values,), datatype, count, name))


def decode_parts(
    parts: Iterable[list[Any]], datatype: str, count: int, name: str
) -> Iterator[bytes]:
    """Yield the bytes of each part of the values, with the checks of `decode`."""
    if datatype in _BINARY_ONLY_DATATYPES:
        raise InvalidArgument(
            f"receiving {datatype} data via JSON is not supported. "
            f"Please use the binary data format for input {name}"
        )
    actual_count = 0
    for part in parts:
        values, value_types = _flatten_with_types(part)
        data = _pack_values(values, value_types, datatype, name)
        actual_count += len(values)
        if actual_count > count:
            initial = "s" if datatype == "BYTES" else "S"
            raise JsonFault(
                f"Unable to parse 'data': {initial}hape does not match true shape of 'data' field "
                f"(input '{name}': its shape has {count} elements, more are given)"
            )
        yield data
    if actual_count < count:
        raise JsonFault(
            "Failed to parse 'data' field: shape does not match true shape (input "
            f"'{name}': its shape has {count} elements, {actual_count} are given)"
        )


def _pack_values(values: list[Any], value_types: set[type], datatype: str, name: str) -> bytes:
    if not values:
        return b""
    if datatype == "BYTES":
        return _pack_strings(values, name)
    if datatype == "BOOL":
        if value_types != {bool}:
            raise _misfit_error(values, lambda item: type(item) is bool, "boolean", "boolean", name)
        return bytes(values)
    code = _STRUCT_CODES[datatype]
    if datatype in _FLOAT_DATATYPES:
        if not value_types <= _REAL_TYPES:
            raise _misfit_error(
                values, lambda value: type(value) in _REAL_TYPES, "number", "double", name
            )
        return array(code, values).tobytes()
    if len(value_types) == 1 and int in value_types:
        with suppress(OverflowError):
            return array(code, values).tobytes()
    return _pack_wrapped_integers(values, datatype, name)


def _pack_wrapped_integers(values: list[Any], datatype: str, name: str) -> bytes:
    """Return the bytes of integers wrapped to the datatype; raise JsonFault for other values."""
    is_signed = _STRUCT_CODES[datatype].islower()
    wide_dtype, minimum, json_type = (
        (np.int64, -(2**63), "signed") if is_signed else (np.uint64, 0, "unsigned")
    )

    def fits(value: Any) -> bool:
        return type(value) is int and minimum <= value <= np.iinfo(wide_dtype).max

    if not all(map(fits, values)):
        raise _misfit_error(values, fits, f"{json_type}-integer", f"{json_type}-integer", name)
    return np.array(values, wide_dtype).astype(NUMPY_DTYPES[datatype]).tobytes()


def _pack_strings(values: list[str], name: str) -> bytes:
    parts: list[bytes] = []
    for value in values:
        if type(value) is not str:
            text = "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
            raise JsonFault(f"{text} (input '{name}' has {_describe_value(value)})")
        encoded_value = value.encode()
        parts += (len(encoded_value).to_bytes(4, "little"), encoded_value)
    return b"".join(parts)


def _misfit_error(
    values: list[Any], fits: Callable[[Any], bool], json_type: str, expected_text: str, name: str
) -> JsonFault:
    """Return the error that names the first value that is not a `json_type`."""
    found_text = _describe_value(next(value for value in values if not fits(value)))
    return JsonFault(
        f"Unable to parse 'data': attempt to access JSON non-{json_type} as {expected_text} "
        f"(input '{name}' has {found_text})"
    )


def _describe_value(value: Any) -> str:
    return "an object" if type(value) is dict else clip(json.dumps(value))


def encode(data: bytes | memoryview, datatype: str, shape: tuple[int, ...], name: str) -> bytes:
    """Return the flat JSON array of a tensor.

    FP32 values are written as the equal doubles, as in Triton.

    Raises:
        InvalidArgument: The datatype is FP16 or BF16, or an element of BYTES is not UTF-8.
        Internal: The bytes do not match the shape.
    """
    return b"".join(encode_parts(data, datatype, shape, name))


def encode_parts(
    data: bytes | memoryview, datatype: str, shape: tuple[int, ...], name: str
) -> Iterator[bytes]:
    """Yield the parts of the JSON array, which take a millisecond each to encode."""
    if datatype in _BINARY_ONLY_DATATYPES:
        raise InvalidArgument(
            f"sending {datatype} data via JSON is not supported. "
            "Please use the binary data format for output"
        )
    if datatype == "BYTES":
        yield from _string_parts(data, shape, name)
        return
    part_size = _VALUES_PER_PART * ITEM_SIZE[datatype]
    if len(data) <= part_size:
        yield _encode_numbers(data, datatype)
        return
    separator = b"["
    for offset in range(0, len(data), part_size):
        yield separator + _encode_numbers(data[offset : offset + part_size], datatype)[1:-1]
        separator = b","
    yield b"]"


def _encode_numbers(data: bytes | memoryview, datatype: str) -> bytes:
    values: list[Any] = memoryview(data).cast(_CAST_FORMATS[datatype]).tolist()  # type: ignore[call-overload]
    text = orjson.dumps(values)
    # orjson writes NaN and infinity as null, which is replaced.
    if datatype not in _FLOAT_DATATYPES or b"null" not in text:
        return text
    non_finite = [_non_finite_word(value) for value in values if value - value != 0.0]
    parts = chain.from_iterable(zip(text.split(b"null"), [*non_finite, b""], strict=True))
    return b"".join(parts)


def _non_finite_word(value: float) -> bytes:
    return b"NaN" if value != value else b"Infinity" if value > 0 else b"-Infinity"


def _string_parts(data: bytes | memoryview, shape: tuple[int, ...], name: str) -> Iterator[bytes]:
    separator, actual_count = b"[", 0
    for values in _decode_strings(memoryview(data), name):
        yield separator + orjson.dumps(values)[1:-1]
        separator, actual_count = b",", actual_count + len(values)
    if actual_count != element_count(shape):
        raise Internal(f"output '{name}' has {actual_count} strings for the shape {list(shape)}")
    yield b"]" if actual_count else b"[]"


def _decode_strings(data: memoryview, name: str) -> Iterator[list[str]]:
    values: list[str] = []
    position, part_end = 0, _VALUES_PER_PART
    while position < len(data):
        start = position + 4
        position = start + int.from_bytes(data[position:start], "little")
        if position > len(data):
            raise Internal(f"output '{name}' ends within a string")
        try:
            values.append(str(data[start:position], "utf-8"))
        except UnicodeDecodeError:
            raise InvalidArgument(
                f"output '{name}' holds bytes that are not UTF-8 text. "
                "Please use the binary data format for output"
            ) from None
        if position >= part_end or position == len(data):
            yield values
            values, part_end = [], position + _VALUES_PER_PART


async def encode_in_pieces(
    data: bytes | memoryview, datatype: str, shape: tuple[int, ...], name: str, trim: MallocTrim
) -> list[bytes]:
    """Return a tensor as `encode` does, a large one in pieces, each encoded in a turn of the loop.

    Joining the pieces of a large tensor would block the loop.

    Args:
        data: The bytes of the tensor.
        datatype: The datatype.
        shape: The shape.
        name: The name for errors.
        trim: The timer that returns the memory of a long array to the system.

    Raises:
        ShmserveError: The errors of `encode`.
    """
    if len(data) <= _MAX_BYTES_PER_TURN:
        return [encode(data, datatype, shape, name)]
    return await list_in_turns(encode_parts(data, datatype, shape, name), trim)


async def list_in_turns(parts: Iterator[bytes], trim: MallocTrim) -> list[bytes]:
    """Return the parts. Each part is produced in a turn of its own."""
    finished_parts: list[bytes] = []
    for part in parts:
        finished_parts.append(part)
        await asyncio.sleep(0)
    trim.schedule(sum(map(len, finished_parts)))
    return finished_parts
