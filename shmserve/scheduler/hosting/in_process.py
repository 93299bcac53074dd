"""Links between the schedulers of one process: a message is a call, made in the order of posting at
the next delivery, and nothing is packed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

# Takes the sender's address and its message.
Handler = Callable[[Any, Any], None]


class InProcessLinks:
    """Handlers by address: a scheduler's is its endpoint, that of one as a client its identity."""

    def __init__(self) -> None:
        self._handlers: dict[Hashable, Handler] = {}
        self._posted: deque[tuple[Handler, Any, Any]] = deque()

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
        self._posted.append((handler, sender, message))
        return True

    def deliver(self) -> None:
        """Make the calls that were posted."""
        posted, self._posted = self._posted, deque()
        for handler, sender, message in posted:
            handler(sender, message)
