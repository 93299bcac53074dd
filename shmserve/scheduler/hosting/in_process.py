"""Links between the schedulers of one process: a message is a call, made in the order of posting at
the next delivery, and nothing is packed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

# Takes the sender's address and its message.
Handler = Callable[[Any, Any], None]


class InProcessLinks:
    """Handlers by address: a scheduler's is its endpoint, that of one as a client its identity.
    What was `posted` waits for the next delivery."""

    def __init__(self) -> None:
        self._handlers: dict[Hashable, Handler] = {}
        self.posted: list[tuple[Handler, Any, Any]] = []

    def enter(self, address: Hashable, handler: Handler) -> None:
        """Whoever posts to an address reaches this handler."""
        self._handlers[address] = handler

    def leave(self, address: Hashable) -> None:
        """Withdraw an address; what was posted there arrives."""
        del self._handlers[address]

    def has(self, address: Hashable) -> bool:
        """Whether somebody in this process has that address."""
        return address in self._handlers

    def post(self, address: Hashable, sender: Any, message: Any) -> bool:
        """Queue a message; False: nobody in this process has that address."""
        handler = self._handlers.get(address)
        if handler is None:
            return False
        self.posted.append((handler, sender, message))
        return True

    def deliver(self) -> None:
        """Make the calls that were posted."""
        posted, self.posted = self.posted, []
        for handler, sender, message in posted:
            handler(sender, message)
