"""Bounds checks of offsets and sizes from clients; no other module has range arithmetic."""

from __future__ import annotations

from shmserve.errors import InvalidArgument

LARGEST = 2**63 - 1
LARGEST_UNSIGNED = 2**64 - 1


def whole(value: object, field: str) -> int:
    """Return `value` as an integer in [0, 2**63); bools, floats and strings are rejected.

    Raises:
        InvalidArgument: The value is no such integer; the text contains the name `field`.
    """
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise InvalidArgument(
            f"'{field}' must be an integer in [0, {LARGEST}], got {str(value)[:40]!r}"
        )
    return value


def fits(offset: int, byte_size: int, limit: int) -> bool:
    """Check whether [offset, offset + byte_size) lies within [0, limit); all in bytes.

    There is no sum, so that the check is also correct in a language whose integers overflow.
    """
    return 0 <= offset <= limit and 0 <= byte_size <= limit - offset
