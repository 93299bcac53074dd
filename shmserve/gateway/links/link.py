"""Message links in the event loop, with write coalescing; the one to the supervisor has
notifications, and requests with their responses.

What is posted during a turn of the loop is sent as one frame at its end.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

from shmserve.errors import from_code
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.transport.dealer import Dealer

logger = logging.getLogger(__name__)

_CLOSE_DELAY_S = 1.0


class Link:
    """A `Dealer` whose messages go to `on_message` and whose posts are flushed once a turn."""

    def __init__(self, endpoint: str, identity: str, on_message: Callable[[Any], None]) -> None:
        self.endpoint = endpoint
        self._dealer = Dealer(endpoint, identity)
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._dealer.fd, self._receive)
        self._flushing = False
        self._closed = False

    def post(self, message: Any) -> None:
        """Send a message at the end of this turn of the loop."""
        self._dealer.post(message)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send now what is posted: nothing else will come this turn that could be coalesced."""
        if not self._flushing:
            return  # done already
        self._flushing = False
        if not self._closed:
            self._dealer.flush()

    def _receive(self) -> None:
        for message in self._dealer.receive():
            try:
                self._on_message(message)
            except Exception:
                logger.exception("a %s could not be handled", type(message).__name__)

    @property
    def connected(self) -> bool:
        """Whether the other end is there, as far as is known."""
        return self._dealer.connected

    def receive_remaining(self) -> None:
        """Handle all messages that are here: the other end is gone."""
        while self._dealer.wait(0):
            self._receive()

    def retire(self) -> None:
        """Receive no more; close once the last posts are on their way."""
        if not self._closed:
            self.flush()
            self._stop_reading()
            self._loop.call_later(_CLOSE_DELAY_S, self._dealer.close)

    def close(self) -> None:
        """Close now."""
        if not self._closed:
            self._stop_reading()
            self._dealer.close()

    def _stop_reading(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._dealer.fd)


logger = logging.getLogger(__name__)


class SupervisorLink(Link):
    """The link to the supervisor. `on_message` gets everything but the responses to `ask`."""

    def __init__(self, endpoint: str, identity: str, on_message: Callable[[Any], None]) -> None:
        super().__init__(endpoint, identity, self._take)
        self._on_notification = on_message
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def ask(self, kind: Callable[..., Any], *fields: Any) -> dict[str, Any]:
        """Send a request, a message of this kind with these fields behind its number; raises what
        it is refused with.

        A caller who is cancelled only stops waiting: the supervisor finishes what it was asked for.
        """
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            self.post(kind(number, *fields))
            return await future
        finally:
            del self._pending[number]

    def _take(self, message: Any) -> None:
        match message:
            case m.Answered(number, payload):
                future = self._pending.get(number)
                if future is not None and not future.done():
                    future.set_result(payload)
            case m.Refused(number, code, text):
                future = self._pending.get(number)
                if future is not None and not future.done():
                    future.set_exception(from_code(code, text))
            case _:
                self._on_notification(message)
