"""Texts of which only the beginning is compared."""


class Beginning(str):
    """A text that is equal to every text that begins with it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and other.startswith(str(self))

    __hash__ = str.__hash__


EXPIRED_TEXT = Beginning("Request timeout expired")
