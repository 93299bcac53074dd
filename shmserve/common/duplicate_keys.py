"""Rejection of JSON objects with duplicate keys (pure).

Parsers silently keep one of the values, so that two parsers may read different requests.
"""

from __future__ import annotations

from typing import Any

_LONGEST_SHOWN = 64


class DoubledName(ValueError):
    """The error of a JSON object with a duplicate key; `name` is None if the key is unknown."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        if name is None:
            super().__init__("duplicate keys in an object")
            return
        shown = name if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]}..."
        super().__init__(f"duplicate key '{shown}' in an object")


def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of its members (json's `object_pairs_hook`); raise DoubledName."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise DoubledName(name)
        found[name] = value
    return found
