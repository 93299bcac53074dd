"""Header forwarding: headers of a client's call that become parameters of its request (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from shmserve.errors import InvalidArgument

_RESERVED = frozenset(
    (
        *("sequence_id", "sequence_start", "sequence_end"),
        *("priority", "timeout", "binary_data_output"),
    )
)


def forwarded_headers(pattern: str, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Those whose names match somewhere, whatever their case, in the order of the headers; of one
    that comes twice the last. An empty pattern matches none.

    Raises InvalidArgument for one that would be a parameter with a meaning to the server, and for
    one that is not UTF-8, which no parameter can be.
    """
    if not pattern:
        return {}
    matches = _compiled(pattern).search
    found = {name: value for name, value in headers if matches(name)}
    for name in found:
        if name.lower() in _RESERVED or name.lower().startswith("triton_"):
            raise InvalidArgument(
                f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
            )
        if not _is_text(found[name]):
            raise InvalidArgument(f"Header '{name}' is not UTF-8 and cannot be forwarded.")
    return found


def _is_text(value: str) -> bool:
    # Parsers have bytes that are not UTF-8 as surrogates.
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


@lru_cache(maxsize=4)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)
