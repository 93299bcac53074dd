"""The header blocks of responses: the same bytes for every client, made once where they can be."""

from __future__ import annotations

from collections.abc import Sequence

from shmserve.gateway.grpc.calls.head import ENCODINGS
from shmserve.gateway.grpc.status import StatusCode, percent_encoded
from shmserve.gateway.http2.header_blocks import STATUS_200, encode

_FIELDS = (
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", ",".join(ENCODINGS).encode()),
)
_HEAD = STATUS_200 + encode(_FIELDS)
# Of responses whose messages may be compressed so; None: they are not.
HEADS: dict[str | None, bytes] = {
    None: _HEAD,
    **{name: _HEAD + encode(((b"grpc-encoding", name.encode()),)) for name in ENCODINGS},
}
OK = encode(((b"grpc-status", b"0"),))


def start(http_status: int) -> bytes:
    """The start of the only block of a response without messages."""
    if http_status == 200:
        return _HEAD
    return encode(((b":status", str(http_status).encode()), *_FIELDS))


def status(code: StatusCode, details: str, metadata: Sequence[tuple[str, str]]) -> bytes:
    """The trailers of a response."""
    if code is StatusCode.OK and not (details or metadata):
        return OK
    fields = [(b"grpc-status", str(code.value).encode())]
    if details:
        fields.append((b"grpc-message", percent_encoded(details)))
    fields += [(key.encode(), value.encode()) for key, value in metadata]
    return encode(fields)
