"""The status of a call: our errors mapped to gRPC's code, details and trailing metadata (pure)."""

from __future__ import annotations

from enum import IntEnum
from urllib.parse import quote

from shmserve.errors import QueueFull, ShmserveError


class StatusCode(IntEnum):
    """gRPC's own codes."""

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

DONE: Ending = (StatusCode.OK, "", ())
INTERNAL: Ending = (StatusCode.INTERNAL, "internal error", ())
# How a call ends whose request does not come, or is none.
LATE: Ending = (StatusCode.UNAVAILABLE, "the request did not arrive in time", ())
MISSING: Ending = (StatusCode.INTERNAL, "Unable to parse request", ())  # as from Triton
UNKNOWN_METHOD: Ending = (StatusCode.UNIMPLEMENTED, "Method not found!", ())
OVER: Ending = (StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ())

_STATUS = {
    "INVALID_ARG": StatusCode.INVALID_ARGUMENT,
    "ALREADY_EXISTS": StatusCode.ALREADY_EXISTS,
    "CANCELLED": StatusCode.CANCELLED,
    "UNKNOWN": StatusCode.UNKNOWN,
    "NOT_FOUND": StatusCode.NOT_FOUND,
    "UNSUPPORTED": StatusCode.UNIMPLEMENTED,
    "UNAUTHENTICATED": StatusCode.UNAUTHENTICATED,
    "PERMISSION_DENIED": StatusCode.PERMISSION_DENIED,
    "UNAVAILABLE": StatusCode.UNAVAILABLE,
    "INTERNAL": StatusCode.INTERNAL,
}
_MOST_DETAILS = 7000  # bytes, as they are sent
_WRITTEN_PLAINLY = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


def ending_of(error: ShmserveError) -> Ending:
    """The status of a call that failed with this."""
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, QueueFull):
        # gRPC's own word for Retry-After.
        metadata = (("grpc-retry-pushback-ms", str(error.retry_after_s * 1000)),)
    if error.traceparent:
        metadata += (("traceparent", error.traceparent),)
    return _STATUS[error.code], _fitting(error.message), metadata


def percent_encoded(text: str) -> bytes:
    """A status's text as it is sent."""
    return quote(text, safe=_WRITTEN_PLAINLY).encode()


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
