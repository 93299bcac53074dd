"""The status of a call: our errors mapped to gRPC's code, details and trailing metadata (pure)."""

from __future__ import annotations

from urllib.parse import quote

import grpc

from shmserve.errors import QueueFull, ShmserveError

Ending = tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]

DONE: Ending = (grpc.StatusCode.OK, "", ())
INTERNAL: Ending = (grpc.StatusCode.INTERNAL, "internal error", ())
OVER: Ending = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ())

_STATUS = {
    "INVALID_ARG": grpc.StatusCode.INVALID_ARGUMENT,
    "ALREADY_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
    "CANCELLED": grpc.StatusCode.CANCELLED,
    "UNKNOWN": grpc.StatusCode.UNKNOWN,
    "NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "UNSUPPORTED": grpc.StatusCode.UNIMPLEMENTED,
    "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
    "PERMISSION_DENIED": grpc.StatusCode.PERMISSION_DENIED,
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "INTERNAL": grpc.StatusCode.INTERNAL,
}
_MOST_DETAILS = 7000  # bytes, as they are sent
_WRITTEN_PLAINLY = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


def ending_of(error: ShmserveError) -> Ending:
    """The status of a call that failed with this."""
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, QueueFull):
        # gRPC's own word for Retry-After.
        metadata = (("grpc-retry-pushback-ms", str(error.retry_after_s * 1000)),)
    return _STATUS[error.code], _fitting(error.message), metadata


def _fitting(text: str) -> str:
    """The text, or what of it a client takes: it refuses a status of more than 8 KB in all."""
    if len(text) * 12 <= _MOST_DETAILS:  # four bytes a character, each written as %XX
        return text
    size = 0
    for at, char in enumerate(text):
        size += len(quote(char, safe=_WRITTEN_PLAINLY))
        if size > _MOST_DETAILS:
            return f"{text[:at]}..."
    return text
