"""The headers of a call: method, deadline, metadata and encodings; and its status (pure).

All calls of a connection whose header fields are the same bytes share one head
(http2/header_blocks.py). Errors are mapped to gRPC's status code, details and trailing metadata.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from enum import IntEnum
from urllib.parse import quote

from shmserve.errors import Internal, QueueFull, ShmserveError
from shmserve.gateway.http2.header_blocks import Fields, parse_content_length


class StatusCode(IntEnum):
    """The status codes of gRPC."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


Ending = tuple[StatusCode, str, tuple[tuple[str, str], ...]]

SUCCEEDED: Ending = (StatusCode.OK, "", ())
INTERNAL_FAILURE: Ending = (StatusCode.INTERNAL, Internal().message, ())
# Calls whose request is missing, late or malformed end with these statuses.
REQUEST_TIMEOUT: Ending = (StatusCode.UNAVAILABLE, "the request did not arrive in time", ())
# The error text is Triton's.
MISSING_REQUEST: Ending = (StatusCode.INTERNAL, "Unable to parse request", ())
UNKNOWN_METHOD: Ending = (StatusCode.UNIMPLEMENTED, "Method not found!", ())
DEADLINE_EXPIRED: Ending = (StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ())

# The statuses of the server's error codes, of which most have gRPC's names.
_STATUS_BY_CODE = {
    **StatusCode.__members__,
    "INVALID_ARG": StatusCode.INVALID_ARGUMENT,
    "UNSUPPORTED": StatusCode.UNIMPLEMENTED,
}
_MAX_DETAILS_BYTES = 7000  # maximum size of the percent-encoded details in bytes
_UNESCAPED = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

Metadata = Sequence[tuple[str, str | bytes]]

# Spellings of the encodings of messages.
ENCODINGS = ("identity", "deflate", "gzip")

_PROTOCOL_FIELDS = frozenset((b"te", b"content-type", b"content-length", b"accept-encoding"))
_is_timeout = re.compile(rb"([0-9]+)([HMSmun])").fullmatch
_STRICT_FIELD = (b"triton_grpc_error", b"true")
_SECONDS_BY_UNIT = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MAX_TIMEOUT_S = 1e9
_MAX_TIMEOUT_DIGITS = 30  # maximum number of digits of a timeout
_MAX_NAME_LENGTH = 64  # characters of an unknown encoding's name in an error


class CallHead:
    """The head of a call.

    Attributes:
        timeout_s: The time until the deadline, or None.
        encoding: The encoding of the request's messages.
        accepted_encodings: The encodings that the client accepts.
        data_size: The content-length of the request, or -1.
        traceparent: The W3C trace context, or "".
        strict: Whether the first failed request of a ModelStreamInfer ends the call.
        refusal: The status of a head that is invalid or asks for an unsupported feature.
        status: The HTTP status of the response.
    """

    __slots__ = (
        *("_fields", "_metadata", "accepted_encodings", "data_size", "encoding", "path", "refusal"),
        *("status", "strict", "timeout_s", "traceparent"),
    )

    def __init__(self, fields: Fields) -> None:
        self.data_size = parse_content_length(fields)
        self._fields = fields
        self._metadata: Metadata | None = None
        self.status = 200
        self.refusal: Ending | None = None
        values = dict(fields)
        self.path = values[b":path"].decode("latin-1")
        content_type = values.get(b"content-type", b"")
        if values[b":method"] != b"POST":
            self._set_refusal(405, StatusCode.UNIMPLEMENTED, "the method must be POST")
        elif not content_type.startswith(b"application/grpc") or content_type.startswith(
            b"application/grpc-web"
        ):
            self._set_refusal(415, StatusCode.UNKNOWN, "the content-type is not application/grpc")
        self.timeout_s = self._parse_timeout(values.get(b"grpc-timeout"))
        self.encoding = values.get(b"grpc-encoding", b"identity").decode("latin-1")
        if self.encoding not in ENCODINGS:
            details = f"compression algorithm '{self.encoding[:_MAX_NAME_LENGTH]}' is not supported"
            self._set_refusal(200, StatusCode.UNIMPLEMENTED, details)
        self.traceparent = values.get(b"traceparent", b"").decode("latin-1")
        self.strict = _STRICT_FIELD in fields
        accept_encoding = values.get(b"grpc-accept-encoding", b"").decode("latin-1")
        self.accepted_encodings = frozenset(name.strip() for name in accept_encoding.split(","))

    def _set_refusal(self, status: int, code: StatusCode, details: str) -> None:
        if self.refusal is None:
            self.status, self.refusal = status, (code, details, ())

    def _parse_timeout(self, value: bytes | None) -> float | None:
        if value is None:
            return None
        match = _is_timeout(value)
        if match is None or len(value) > _MAX_TIMEOUT_DIGITS:
            self._set_refusal(200, StatusCode.INTERNAL, "malformed grpc-timeout")
            return None
        return min(int(match[1]) * _SECONDS_BY_UNIT[match[2]], _MAX_TIMEOUT_S)

    @property
    def metadata(self) -> Metadata:
        """Return the client's metadata in order. Values of keys that end in "-bin" are bytes."""
        if self._metadata is None:
            self._metadata = [
                item
                for name, value in self._fields
                if name[:1] != b":"
                and name not in _PROTOCOL_FIELDS
                and not name.startswith(b"grpc-")
                for item in _metadata_items(name, value)
            ]
        return self._metadata


def _metadata_items(name: bytes, value: bytes) -> Metadata:
    key = name.decode("latin-1")
    if not key.endswith("-bin"):
        return [(key, _decode_text(value))]
    # Some clients join several values by commas.
    parts = map(_decode_binary, value.split(b","))
    return [(key, decoded) for decoded in parts if decoded is not None]


def _decode_text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _decode_binary(value: bytes) -> bytes | None:
    """Decode base64 with optional padding; return None for other bytes."""
    try:
        return base64.b64decode(value.strip() + b"=" * (-len(value.strip()) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


def ending_from_error(error: ShmserveError) -> Ending:
    """Return the status of a call that failed with this error."""
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, QueueFull):
        # The equivalent of HTTP's Retry-After.
        metadata = (("grpc-retry-pushback-ms", str(error.retry_after_s * 1000)),)
    if error.traceparent:
        metadata += (("traceparent", error.traceparent),)
    return _STATUS_BY_CODE[error.code], _shorten_details(error.message), metadata


def percent_encode(text: str) -> bytes:
    """Return the details of a status as gRPC sends them."""
    return quote(text, safe=_UNESCAPED).encode()


def _shorten_details(details: str) -> str:
    """Return the text, shortened so that the trailers fit into the 8 KB that clients accept."""
    # Each character has at most four bytes, each written as %XX.
    if len(details) * 12 <= _MAX_DETAILS_BYTES:
        return details
    size = 0
    for index, char in enumerate(details):
        size += len(quote(char, safe=_UNESCAPED))
        if size > _MAX_DETAILS_BYTES:
            return f"{details[:index]}..."
    return details
