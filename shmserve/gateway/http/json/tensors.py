"""The codec of tensor data in JSON: lists of values to little-endian bytes and back (pure).

A list may be flat or nested in any way; the values count, row-major. Integers that are too wide for
their datatype wrap, as in Triton. FP16 and BF16 have no JSON form.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import orjson

from shmserve.errors import Internal, InvalidArgument
from shmserve.gateway.http.json.parser import JsonFault, mistyped
from shmserve.ipc.tensors.datatypes import ITEM_SIZE, NUMPY, element_count

# Values turned into text at a time: about a millisecond's work.
_STEP = 32 * 1024

_CODE = {
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
_FORMAT = {"BOOL": "?", **_CODE}
_FLOATS = frozenset(("FP32", "FP64"))
_NO_JSON = frozenset(("FP16", "BF16"))
_REAL = frozenset((int, float))


def flat(values: list[Any]) -> list[Any]:
    """The values of nested lists, in order, as one list."""
    return _flat(values)[0]


def parts(values: list[Any]) -> Iterator[list[Any]]:
    """The values of nested lists, in order, a millisecond's work at a time."""
    values = flat(values)
    for at in range(0, len(values), _STEP):
        yield values[at : at + _STEP]


def _flat(values: list[Any]) -> tuple[list[Any], set[type]]:
    """The values and what types they have."""
    kinds = set(map(type, values))
    while list in kinds:
        if len(kinds) == 1:
            values = list(chain.from_iterable(values))
        else:
            values = list(chain.from_iterable(v if type(v) is list else (v,) for v in values))
        kinds = set(map(type, values))
    return values, kinds


def decode(values: list[Any], datatype: str, count: int, name: str) -> bytes:
    """The bytes of a tensor of `count` elements from its JSON value, a flat or nested list.

    Raises JsonFault when the values are of the wrong kind or number, InvalidArgument for a datatype
    without a JSON form.
    """
    _refuse_halves(datatype, name)
    values, kinds = _flat(values)
    data = _packed(values, kinds, datatype)
    _check_count(len(values), count, datatype, name)
    if len(values) < count:
        raise _too_few(len(values), count, name)
    return data


def decode_parts(
    parts: Iterable[list[Any]], datatype: str, count: int, name: str
) -> Iterator[bytes]:
    """Like `decode`, from the list's values in parts: their bytes, part by part."""
    _refuse_halves(datatype, name)
    got = 0
    for part in parts:
        values, kinds = _flat(part)
        data = _packed(values, kinds, datatype)
        got += len(values)
        _check_count(got, count, datatype, name)
        yield data
    if got < count:
        raise _too_few(got, count, name)


def _refuse_halves(datatype: str, name: str) -> None:
    if datatype in _NO_JSON:
        raise InvalidArgument(
            f"receiving {datatype} data via JSON is not supported. "
            f"Please use the binary data format for input {name}"
        )


def _check_count(got: int, count: int, datatype: str, name: str) -> None:
    if got > count:
        first = "s" if datatype == "BYTES" else "S"
        raise JsonFault(
            f"Unable to parse 'data': {first}hape does not match true shape of 'data' field (input "
            f"'{name}': its shape has {count} elements, more are given)"
        )


def _too_few(got: int, count: int, name: str) -> JsonFault:
    return JsonFault(
        "Failed to parse 'data' field: shape does not match true shape (input "
        f"'{name}': its shape has {count} elements, {got} are given)"
    )


def _packed(values: list[Any], kinds: set[type], datatype: str) -> bytes:
    if not values:
        return b""
    code = _CODE.get(datatype)
    if code is None:
        return _packed_bools(values, kinds) if datatype == "BOOL" else _packed_strings(values)
    if datatype in _FLOATS:
        if not kinds <= _REAL:
            raise JsonFault("Unable to parse 'data': attempt to access JSON non-number as double")
        return array(code, values).tobytes()
    if len(kinds) == 1 and int in kinds:
        try:
            return array(code, values).tobytes()
        except OverflowError:
            return _wrapped(values, datatype, signed=code.islower())
    raise mistyped("data", "signed-integer" if code.islower() else "unsigned-integer")


def _wrapped(values: list[int], datatype: str, *, signed: bool) -> bytes:
    try:
        wide = np.array(values, dtype=np.int64 if signed else np.uint64)
    except OverflowError:
        kind = "signed-integer" if signed else "unsigned-integer"
        raise mistyped("data", kind) from None
    return wide.astype(NUMPY[datatype]).tobytes()


def _packed_bools(values: list[bool], kinds: set[type]) -> bytes:
    if kinds != {bool}:
        raise mistyped("data", "boolean")
    return bytes(values)


def _packed_strings(values: list[str]) -> bytes:
    parts: list[bytes] = []
    for value in values:
        if type(value) is not str:
            raise JsonFault(
                "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
            )
        raw = value.encode()
        parts += (len(raw).to_bytes(4, "little"), raw)
    return b"".join(parts)


def encode(data: bytes | memoryview, datatype: str, shape: tuple[int, ...], name: str) -> bytes:
    """The JSON array of a tensor, flat.

    An FP32 value is written as the double it equals, as Triton does. Raises InvalidArgument for
    FP16, BF16 and for BYTES elements that are not UTF-8: they have no JSON form.
    """
    if datatype in _NO_JSON:
        raise InvalidArgument(
            f"sending {datatype} data via JSON is not supported. "
            "Please use the binary data format for output"
        )
    if datatype == "BYTES":
        return b"".join(_string_parts(data, shape, name))
    return _text(data, datatype)


def encode_parts(
    data: bytes | memoryview, datatype: str, shape: tuple[int, ...], name: str
) -> Iterator[bytes]:
    """Like `encode`, in parts that join to the array, each a millisecond's work."""
    if datatype == "BYTES":
        yield from _string_parts(data, shape, name)
        return
    size = _STEP * ITEM_SIZE[datatype]
    if datatype in _NO_JSON or len(data) <= size:
        yield encode(data, datatype, shape, name)
        return
    opening = b"["
    for at in range(0, len(data), size):
        yield opening + _text(data[at : at + size], datatype)[1:-1]
        opening = b","
    yield b"]"


def _text(data: bytes | memoryview, datatype: str) -> bytes:
    values: list[Any] = memoryview(data).cast(_FORMAT[datatype]).tolist()  # type: ignore[call-overload]
    text = orjson.dumps(values)
    if datatype not in _FLOATS or b"null" not in text:  # orjson's word for what is not finite
        return text
    words = [_word(value) for value in values if value - value != 0.0]
    parts = chain.from_iterable(zip(text.split(b"null"), [*words, b""], strict=True))
    return b"".join(parts)


def _word(value: float) -> bytes:
    return b"NaN" if value != value else b"Infinity" if value > 0 else b"-Infinity"


def _string_parts(data: bytes | memoryview, shape: tuple[int, ...], name: str) -> Iterator[bytes]:
    opening, got = b"[", 0
    for values in _strings(memoryview(data), name):
        yield opening + orjson.dumps(values)[1:-1]
        opening, got = b",", got + len(values)
    if got != element_count(shape):
        raise Internal("internal error")
    yield b"]" if got else b"[]"


def _strings(data: memoryview, name: str) -> Iterator[list[str]]:
    values: list[str] = []
    at, pause = 0, _STEP
    while at < len(data):
        start = at + 4
        at = start + int.from_bytes(data[at:start], "little")
        if at > len(data):
            raise Internal("internal error")
        try:
            values.append(str(data[start:at], "utf-8"))
        except UnicodeDecodeError:
            raise InvalidArgument(
                f"output '{name}' holds bytes that are not UTF-8 text. "
                "Please use the binary data format for output"
            ) from None
        if at >= pause or at == len(data):
            yield values
            values, pause = [], at + _STEP
