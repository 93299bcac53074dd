"""Records: dataclasses that travel between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """A slotted dataclass, frozen for the type checker.

    At run time it is not: a frozen one takes five times as long to make, and every request makes
    a dozen in each process.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


class MalformedMessage(Exception):
    """Bytes from a socket are not a message; the text is for our log only."""
