"""Outboxes, the links that messages are posted to: they leave together at the end of a turn."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any, Protocol


class Outbox(Protocol):
    """A link with messages that wait to be sent, which are `pending`."""

    @property
    def pending(self) -> Sized:
        """What `flush` sends; empty: nothing."""

    def flush(self) -> object:
        """Send what is queued."""

    def close(self, linger_s: float = 0.0) -> None:
        """End the link; what was sent has this long to arrive."""


class ClientLinks(Protocol):
    """The links to clients; `malformed` counts unreadable frames from them."""

    @property
    def malformed(self) -> int:
        """Unreadable frames so far."""

    def to(self, peer: bytes) -> Callable[[Any], object]:
        """What queues a message for whoever has this address."""


class Peers(Protocol):
    """Messages to workers, by address; `malformed` counts unreadable ones from them."""

    @property
    def malformed(self) -> int:
        """Unreadable frames so far."""

    def post(self, peer: bytes, message: Any) -> None:
        """Queue a message for one of them."""


class ControlLink(Protocol):
    """Messages to the supervisor; `malformed` counts unreadable ones from it."""

    malformed: int

    def post(self, message: Any) -> None:
        """Queue a message."""
