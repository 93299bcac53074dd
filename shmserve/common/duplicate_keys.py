"""Duplicate keys of JSON objects, refused: parsers keep one of the values and say nothing (pure).

Two readers of one text may then see two requests, so such a text is refused.
"""

from __future__ import annotations

from typing import Any

_LONGEST_SHOWN = 64


class DoubledName(ValueError):
    """A JSON object has two members of one `name`, None where that is not known."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        if name is None:
            super().__init__("duplicate keys in an object")
            return
        shown = name if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]}..."
        super().__init__(f"duplicate key '{shown}' in an object")


def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of its members, as json's `object_pairs_hook`; raises DoubledName."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise DoubledName(name)
        found[name] = value
    return found
