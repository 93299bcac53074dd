"""The fingerprint of a gRPC request, by which those are known that were prepared
(prepared_requests.py): the message without the tensors' bytes.

Programs send the same request again and again with other numbers in it. A serialized
ModelInferRequest has its tensors' bytes (`raw_input_contents`, the field with the highest number)
at its end, so what stands before them is a key: names, shapes and parameters need not be parsed and
checked twice. One whose tensors are all in regions is a key as a whole. The request's id and its
place in a sequence, which differ from one to the next, are cut out of the key. A request that is
not written like this takes the long way.

A parameter is an entry of a map, as protobuf has them: its key is field 1, its value field 2, a
message of one field whose number is that of the value's type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shmserve.gateway.inference.request import ANONYMOUS, RequestIdentity
from shmserve.ipc.tensors.inference import (
    INLINE_LIMIT,
    LONGEST_CORRELATION_ID,
    SEQUENCE_END,
    SEQUENCE_START,
)

ID, PARAMETER = 0x1A, 0x22  # the tags of these fields of a request
# Where the key of a parameter begins in it, and that of those which say the place in a sequence.
KEY_AT, OF_SEQUENCE = 2, b"sequence_"

_CORRELATION_ID = b"\x0a\x0bsequence_id\x12"
_INT64, _STRING = 0x10, 0x1A
_FLAGS = {
    b"\x0a" + key + b"\x12\x02\x08" + value: (bit, bit * value[0])
    for key, bit in ((b"\x0esequence_start", SEQUENCE_START), (b"\x0csequence_end", SEQUENCE_END))
    for value in (b"\0", b"\1")
}


def identity(ids: Sequence[bytes], parameters: Sequence[bytes]) -> RequestIdentity | None:
    """The identity in these fields, of which the last holds; None for any other form."""
    correlation_id: int | str | None = 0
    flags = 0
    for entry in parameters:
        if (flag := _FLAGS.get(entry)) is not None:
            flags = flags & ~flag[0] | flag[1]
        elif entry.startswith(_CORRELATION_ID):
            correlation_id = _value(entry[len(_CORRELATION_ID) :])
            if correlation_id is None:
                return None
        else:
            return None
    try:
        request_id = ids[-1].decode() if ids else ""
    except UnicodeDecodeError:
        return None
    assert correlation_id is not None
    return RequestIdentity(request_id, correlation_id, flags)


def _value(value: bytes) -> int | str | None:
    """An InferParameter with its size, of a number or a text."""
    if len(value) < 3 or value[0] != len(value) - 1:
        return None
    if value[1] == _INT64:
        number = shift = 0
        for byte in value[2:]:
            number |= (byte & 127) << shift
            shift += 7
        ended = value[-1] < 128 and all(byte > 127 for byte in value[2:-1])
        return number if ended and number < 1 << 64 else None
    text = value[3:]
    if value[1] != _STRING or value[2] != len(text) or len(text) > LONGEST_CORRELATION_ID:
        return None
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


RAW_INPUT = 0x3A  # the tag of field 7, length-delimited
EARLIER = frozenset((0x0A, 0x12, ID, PARAMETER, 0x2A, 0x32))  # those of fields 1 to 6
_MOST_BYTES = INLINE_LIMIT + 4096
_LONGEST_HEAD = 2048
MOST_SHIFT = 28  # protobuf takes no length of more than five bytes

Key = tuple[bytes, tuple[int, ...]]


class Split(NamedTuple):
    """The fingerprint of a request, its raw contents, and what its fingerprint does not say."""

    key: Key
    contents: list[bytes]
    identity: RequestIdentity


def split(raw: bytes) -> Split | None:
    """A small request without parsing it; None if it has no fingerprint."""
    if len(raw) > _MOST_BYTES:
        return None
    contents: list[bytes] = []
    ids: list[bytes] = []
    places: list[bytes] = []
    head: list[bytes] = []  # what is kept of it before the first cut, and between others
    kept = at = head_end = 0
    end = len(raw)
    while at < end:
        start = at
        tag = raw[at]
        at += 1
        size = shift = 0
        while at < end:
            byte = raw[at]
            at += 1
            size |= (byte & 127) << shift
            if byte < 128:
                break
            shift += 7
        else:
            return None
        if shift > MOST_SHIFT or size > end - at:
            return None
        if tag == RAW_INPUT:
            contents.append(raw[at : at + size])
        elif tag in EARLIER and not contents:
            head_end = at + size
            cut = ids if tag == ID else None
            if tag == PARAMETER and raw.startswith(OF_SEQUENCE, at + KEY_AT):
                cut = places
            if cut is not None:
                cut.append(raw[at:head_end])
                head.append(raw[kept:start])
                kept = head_end
        else:
            return None
        at += size
    if head_end > _LONGEST_HEAD:
        return None
    itself = identity(ids, places) if head else ANONYMOUS
    if itself is None:
        return None
    head.append(raw[kept:head_end])
    return Split((b"".join(head), tuple(map(len, contents))), contents, itself)
