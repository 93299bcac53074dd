"""Sockets in the event loop: a link to a scheduler or to the supervisor.

What is posted during a turn of the loop leaves as one frame at its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from shmserve.ipc.transport.dealer import Dealer

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0


class Link:
    """A `Dealer` whose messages go to `on_message` and whose posts are flushed once a turn."""

    def __init__(
        self,
        endpoint: str,
        identity: str,
        on_message: Callable[[Any], None],
    ) -> None:
        self.endpoint = endpoint
        self._dealer = Dealer(endpoint, identity)
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._dealer.fd, self._drain)
        self._flushing = False
        self._closed = False

    def post(self, message: Any) -> None:
        """Send a message at the end of this turn of the loop."""
        self._dealer.post(message)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def hurry(self) -> None:
        """Send what is posted now: nothing else will come this turn that could go with it."""
        self._flush()

    def _flush(self) -> None:
        if not self._flushing:
            return  # hurried already
        self._flushing = False
        if not self._closed:
            self._dealer.flush()

    def _drain(self) -> None:
        for message in self._dealer.receive():
            try:
                self._on_message(message)
            except Exception:
                logger.exception("a %s could not be handled", type(message).__name__)

    @property
    def connected(self) -> bool:
        """Whether the other end is there, as far as is known."""
        return self._dealer.connected

    def hear_out(self) -> None:
        """Handle all that has been said: whoever is there has ended."""
        while self._dealer.wait(0):
            self._drain()

    def retire(self) -> None:
        """Receive no more; close once the last posts are on their way."""
        if not self._closed:
            self._flush()
            self._deafen()
            self._loop.call_later(_LAST_WORDS_S, self._dealer.close)

    def close(self) -> None:
        """Close now."""
        if not self._closed:
            self._deafen()
            self._dealer.close()

    def _deafen(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._dealer.fd)
