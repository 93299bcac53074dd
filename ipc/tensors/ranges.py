"""Bounds checks: the one place where offsets and sizes that come from outside are checked."""

from __future__ import annotations

from shmserve.errors import InvalidArgument

LARGEST = 2**63 - 1
LARGEST_UNSIGNED = 2**64 - 1


def whole(value: object, field: str) -> int:
    """`value` as an integer in [0, 2**63); bools, floats and strings are refused.

    Raises InvalidArgument naming `field`.
    """
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise InvalidArgument(
            f"'{field}' must be an integer in [0, {LARGEST}], got {str(value)[:40]!r}"
        )
    return value


def fits(offset: int, byte_size: int, limit: int) -> bool:
    """Whether [offset, offset + byte_size) lies within [0, limit); all in bytes.

    Written without a sum, so it reads the same in a language whose integers wrap.
    """
    return 0 <= offset <= limit and 0 <= byte_size <= limit - offset
