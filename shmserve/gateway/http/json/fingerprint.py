"""The cache of prepared HTTP requests. The key of one is its fingerprint: its text without the
values of its tensors, its id and its place in a sequence.

Programs send the same request again and again with other numbers in it. Of one with binary tensors
the JSON header is the same each time. Of one in JSON it is the text without its numbers:

    {"inputs": [{"name": "X", ..., "data": [1, 2]}]}  ->  {"inputs": [{"name": "X", ..., |}]}  1, 2

What is cut out is an array in any JSON text, and nothing in a string, where the quotes would not
stand like this. So texts that are the same without it say the same but for those arrays.

What a request alone says, its id and its place in a sequence, is cut out of the key as well, as
clients write it: the id where it comes first, the place anywhere, since in a JSON text its pattern
can stand in no string, where its quotes would be escaped. What was cut must be what the whole
header was found to say, before anything is remembered.
"""

from __future__ import annotations

import re
import secrets
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import orjson

from shmserve.gateway.http.json.tensors import packer
from shmserve.gateway.inference.builder import BuiltRequest, Prepared
from shmserve.gateway.inference.request import InferRequest, RequestIdentity
from shmserve.ipc.tensors.inference import LONGEST_CORRELATION_ID, SEQUENCE_END, SEQUENCE_START
from shmserve.ipc.tensors.ranges import LARGEST_UNSIGNED
from shmserve.ipc.tensors.schemas import BoundedCache

_ID = re.compile(rb'\{"id": ?"([ !#-\[\]-~]*)"')
_PLACE = re.compile(
    rb'"sequence_id": ?([1-9][0-9]{0,19}|"[ !#-\[\]-~]{1,%d}"), ?'
    rb'"sequence_start": ?(true|false), ?"sequence_end": ?(true|false)' % LONGEST_CORRELATION_ID
)
_BEGINS_WITH_ID = b'{"id"'
_NO_ID = b'{"id":0'
_NOWHERE = b'"sequence_id":0'


def identity(header: bytes) -> tuple[bytes, RequestIdentity | None]:
    """Cut id and place in a sequence out of a header: what is left of it, and these. The header as
    it is, and None, where it has neither, or not as clients write them."""
    if len(header) > LONGEST_TEXT:
        return header, None
    request_id = ""
    correlation_id: int | str = 0
    flags = at = 0
    kept: list[bytes] = []
    if header[:5] == _BEGINS_WITH_ID and (named := _ID.match(header)) is not None:
        request_id = named[1].decode()
        kept.append(_NO_ID)
        at = named.end()
    if b'"sequence_id"' in header:
        placed = _PLACE.search(header, at)
        if placed is None or header.count(b'"sequence_') != 3:
            return header, None
        given, start, end = placed.groups()
        correlation_id = given[1:-1].decode() if given[:1] == b'"' else int(given)
        if isinstance(correlation_id, int) and correlation_id > LARGEST_UNSIGNED:
            return header, None
        flags = SEQUENCE_START * (start == b"true") | SEQUENCE_END * (end == b"true")
        kept += (header[at : placed.start()], _NOWHERE)
        at = placed.end()
    if not kept:
        return header, None
    kept.append(header[at:])
    return b"".join(kept), RequestIdentity(request_id, correlation_id, flags)


_NUMBERS = re.compile(rb'"data": ?\[([-+.0-9eE, \t\r\n]*+)\]')
LONGEST_TEXT = 64 * 1024
_LONGEST_KEY = 2048

Key = tuple[bytes, int]


def split(header: bytes, tail_size: int) -> tuple[Key, Sequence[bytes]]:
    """The fingerprint of a request, and the texts of its arrays of numbers, if it is all JSON."""
    if tail_size or b'"data":' not in header or len(header) > LONGEST_TEXT:
        return (header, tail_size), ()
    parts = _NUMBERS.split(header)
    return (b"\0".join(parts[::2]), 0), parts[1::2]


def fingerprint(
    header: bytes, tail_size: int
) -> tuple[Key, Sequence[bytes], RequestIdentity | None]:
    """The fingerprint of a request without its identity, the texts of its arrays of numbers, and
    the identity that was cut out, if it has one."""
    if header[:5] != _BEGINS_WITH_ID and b'"sequence_id"' not in header:
        return *split(header, tail_size), None
    kept, itself = identity(header)
    key, arrays = split(kept, tail_size)
    if itself is not None:
        key = key[0], ~key[1]  # that of no header as it came
    return key, arrays, itself


class Known(NamedTuple):
    """A cached request; `packers` make the bytes of its inputs that are given as arrays of numbers,
    of these; `arrays` is the JSON of those arrays, to be formatted with their texts."""

    prepared: Prepared
    packers: list[Callable[..., bytes]]
    arrays: bytes


Cache = BoundedCache[Key, Known]


def repeat(
    cache: Cache, key: Key, body: bytes, at: int, texts: Sequence[bytes]
) -> BuiltRequest | None:
    """The request that is known by `key`, with `texts`, or the binary tensors in `body` from `at`;
    None when it is not known, or it takes the long way to say what is wrong.

    Raises AlreadyExists when an output overlaps another one in flight and may not, Unavailable when
    memory for tensors is full.
    """
    known = cache.find(key)
    if known is None:
        return None
    prepared, packers, arrays = known
    if not packers:
        return prepared.fill(body, at)
    try:
        values = orjson.loads(arrays % tuple(texts))
        datas = [pack(*numbers) for pack, numbers in zip(packers, values, strict=True)]
    except (ValueError, TypeError, struct.error, OverflowError):  # no JSON, or other numbers
        return None
    return prepared.of(datas)


def worth_preparing(cache: Cache, key: Key) -> bool:
    """A request with this key is here; whether one came before, and it is short enough to keep."""
    return len(key[0]) <= _LONGEST_KEY and cache.notice(key)


def remember(
    cache: Cache, key: Key, request: InferRequest, prepared: Prepared, arrays: int
) -> None:
    """Keep what was prepared of a request that came with so many arrays of numbers, if they are
    its tensors."""
    inputs = [tensor for tensor in request.inputs if tensor.data is not None]
    packers = [packer(tensor.datatype, tensor.count) for tensor in inputs]
    form = b"[%b]" % b",".join([b"[%b]"] * arrays)
    known = Known(prepared, [pack for pack in packers if pack is not None], form)
    if len(known.packers) == len(inputs) == arrays and (not arrays or _are_tensors(key[0], arrays)):
        for tensor in inputs:
            tensor.data = None  # this request's values are packed by now, and no other's
        cache.remember(key, known)


def _are_tensors(kept: bytes, arrays: int) -> bool:
    """Whether what was cut out of `kept` is the inputs' data, in their order, and nothing else."""
    token = secrets.token_hex(16)  # a client cannot write a string that means a cut
    marks = [f"{token}{number}" for number in range(arrays)]
    whole = kept
    for mark in marks:
        whole = whole.replace(b"\0", b'"data":["%b"]' % mark.encode(), 1)
    try:
        header = orjson.loads(whole)
    except orjson.JSONDecodeError:
        return False  # it was read with more patience
    datas = [tensor["data"] for tensor in header["inputs"] if "data" in tensor]
    return datas == [[mark] for mark in marks]
