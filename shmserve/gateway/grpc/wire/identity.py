"""Which request a ModelInferRequest is, read from the fields that say so without protobuf: its id,
and its place in a sequence (pure).

A parameter is an entry of a map, as protobuf has them: its key is field 1, its value field 2, a
message of one field whose number is that of the value's type.
"""

from __future__ import annotations

from collections.abc import Sequence

from shmserve.gateway.inference.request import RequestIdentity
from shmserve.ipc.tensors.inference import LONGEST_CORRELATION_ID, SEQUENCE_END, SEQUENCE_START

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
    """What these fields say, of which the last holds; None: something else, or in other words."""
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
