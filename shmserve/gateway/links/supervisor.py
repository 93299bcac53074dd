"""The gateway's link to the supervisor: notifications, and requests with their responses."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any

from shmserve.errors import from_code
from shmserve.gateway.links.link import Link
from shmserve.ipc.messages import supervision as m

logger = logging.getLogger(__name__)


class SupervisorLink:
    """The link to the supervisor. `on_message` gets everything but the responses to `ask`."""

    def __init__(
        self,
        endpoint: str,
        identity: str,
        on_message: Callable[[Any], None],
    ) -> None:
        self._on_message = on_message
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._link = Link(endpoint, identity, self._take)

    def tell(self, message: Any) -> None:
        """Send a notification, which has no response."""
        self._link.post(message)

    def close(self) -> None:
        """Drop the link."""
        self._link.close()

    async def ask(self, kind: Callable[..., Any], *fields: Any) -> dict[str, Any]:
        """Send a request, a message of this kind with these fields behind its number; raises what
        it is refused with.

        A caller who is cancelled only stops waiting: the supervisor finishes what it was asked for.
        """
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            self._link.post(kind(number, *fields))
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
                self._on_message(message)
