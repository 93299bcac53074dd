"""Texts of which tests compare only the beginning."""

from __future__ import annotations


class Beginning(str):
    """A text that equals each text that begins with it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and other.startswith(str(self))

    __hash__ = str.__hash__


EXPIRED = Beginning("Request timeout expired (")
