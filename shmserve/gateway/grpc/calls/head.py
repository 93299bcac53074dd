"""The head of a call: its method, deadline, metadata and encodings, read from a request's fields.

One is kept for all calls of a connection whose fields are the same bytes (http2/header_blocks.py).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence

from shmserve.gateway.grpc.status import Ending, StatusCode
from shmserve.gateway.http2.header_blocks import Fields, content_length

Metadata = Sequence[tuple[str, str | bytes]]

# Spellings of the encodings of messages.
ENCODINGS = ("identity", "deflate", "gzip")

_OURS = frozenset((b"te", b"content-type", b"content-length", b"accept-encoding"))
_is_timeout = re.compile(rb"([0-9]+)([HMSmun])").fullmatch
_UNIT_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_LONGEST_S = 1e9
_LONGEST_NUMBER = 30  # digits
_LONGEST_NAME = 64  # of an encoding, as it is told


class CallHead:
    """The head of a call: `timeout_s` until its deadline, None for none; `encoding` of its messages
    and those that its client `accepts`; `data_size` in bytes, -1 if it does not say; the
    `traceparent` of W3C's trace context, "" for none.

    `refusal` is how a call ends that is none, or asks for what there is not; `status` is its HTTP
    status.
    """

    __slots__ = (
        *("_fields", "_metadata", "accepts", "data_size", "encoding", "path", "refusal"),
        *("status", "timeout_s", "traceparent"),
    )

    def __init__(self, fields: Fields) -> None:
        self.data_size = content_length(fields)
        self._fields = fields
        self._metadata: Metadata | None = None
        self.status = 200
        self.refusal: Ending | None = None
        found = dict(fields)
        self.path = found[b":path"].decode("latin-1")
        kind = found.get(b"content-type", b"")
        if found[b":method"] != b"POST":
            self._refuse(405, StatusCode.UNIMPLEMENTED, "a call is a POST")
        elif not kind.startswith(b"application/grpc") or kind.startswith(b"application/grpc-web"):
            self._refuse(415, StatusCode.UNKNOWN, "the content-type is not application/grpc")
        self.timeout_s = self._timeout(found.get(b"grpc-timeout"))
        self.encoding = found.get(b"grpc-encoding", b"identity").decode("latin-1")
        if self.encoding not in ENCODINGS:
            text = f"compression algorithm '{self.encoding[:_LONGEST_NAME]}' is not supported"
            self._refuse(200, StatusCode.UNIMPLEMENTED, text)
        self.traceparent = found.get(b"traceparent", b"").decode("latin-1")
        accepted = found.get(b"grpc-accept-encoding", b"").decode("latin-1")
        self.accepts = frozenset(name.strip() for name in accepted.split(","))

    def _refuse(self, status: int, code: StatusCode, text: str) -> None:
        if self.refusal is None:
            self.status, self.refusal = status, (code, text, ())

    def _timeout(self, said: bytes | None) -> float | None:
        if said is None:
            return None
        matched = _is_timeout(said)
        if matched is None or len(said) > _LONGEST_NUMBER:
            self._refuse(200, StatusCode.INTERNAL, "malformed grpc-timeout")
            return None
        return min(int(matched[1]) * _UNIT_S[matched[2]], _LONGEST_S)

    @property
    def metadata(self) -> Metadata:
        """The metadata that the client sent with it, in its order; bytes where the key says so."""
        if self._metadata is None:
            self._metadata = [
                item
                for name, value in self._fields
                if name[:1] != b":" and name not in _OURS and not name.startswith(b"grpc-")
                for item in _entries(name, value)
            ]
        return self._metadata


def _entries(name: bytes, value: bytes) -> Metadata:
    key = name.decode("latin-1")
    if not key.endswith("-bin"):
        return [(key, _text(value))]
    # Some join several values by commas.
    return [(key, decoded) for part in value.split(b",") if (decoded := _binary(part)) is not None]


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _binary(value: bytes) -> bytes | None:
    """Of base64, whose padding may be left out; None for anything else."""
    try:
        return base64.b64decode(value.strip() + b"=" * (-len(value.strip()) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None
