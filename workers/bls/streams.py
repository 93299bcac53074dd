"""Streamed calls: of decoupled models, with credit for responses."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from shmserve.errors import ShmserveError, from_code
from shmserve.ipc.inflight import Response
from shmserve.ipc.messages.inference import FIRST_CREDIT, MOST_UNREAD_BYTES, Responded
from shmserve.workers.bls.calls import Call, CallRouter
from shmserve.workers.bls.request import CallRequest, CallResponse

_GRANTED_TOGETHER = FIRST_CREDIT // 2
_BYTES_TOGETHER = MOST_UNREAD_BYTES // 4

Item = CallResponse | ShmserveError


class StreamCall(Call):
    """`items` are the responses that have come and were not taken; `over`: no more will come.
    `begun`, of an event loop, is told of the first."""

    __slots__ = ("_owed", "_owed_bytes", "begun", "cancelled", "items", "over")
    takes_many = True

    def __init__(
        self, router: CallRouter, request: CallRequest, begun: asyncio.Future[None] | None = None
    ) -> None:
        super().__init__(router, request)
        self.items: deque[Item] = deque()
        self.over = False
        self.cancelled = False  # nobody takes what may come yet
        self.begun = begun
        self._owed = 0  # responses that were taken, and are not granted again yet
        self._owed_bytes = 0

    def awaited(self) -> bool:
        return not self.cancelled

    def respond(self, message: Response) -> None:
        if not isinstance(message, Responded):
            super().respond(message)
        elif self.cancelled:
            self.router.discard(self.endpoint, message.body)
        elif message.code:
            self._add(from_code(message.code, message.message), message.final)
        elif message.body:
            self._add(self.router.read(self, message.body), message.final)
        elif message.final:
            # Triton's iterator ends with an empty response where the end came by itself.
            self._add(CallResponse([], {}), True)

    def end(self, outcome: Item) -> None:
        if not self.cancelled:
            self._add(outcome, True)

    def _add(self, item: Item, final: bool) -> None:
        self.items.append(item)
        self.over = self.over or final
        self.router.wake()
        begun, self.begun = self.begun, None
        if begun is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended
                begun.get_loop().call_soon_threadsafe(_resolve, begun)

    def ready(self) -> bool:
        """Whether there is something to take, or nothing will come any more."""
        return bool(self.items) or self.over or self.cancelled

    def wait(self) -> None:
        """Wait until it is `ready`."""
        if not self.ready():
            self.router.waiting.until(self.ready)

    @property
    def finished(self) -> bool:
        """Whether all has been taken."""
        return not self.items and (self.over or self.cancelled)

    def take(self) -> Item | None:
        """Wait for the next response; None when there is none any more."""
        self.wait()
        try:
            item = self.items.popleft()
        except IndexError:
            return None
        self._owed += 1
        if isinstance(item, CallResponse):
            self._owed_bytes += sum(len(output.raw) for output in item.outputs)
        if self._owed >= _GRANTED_TOGETHER or self._owed_bytes >= _BYTES_TOGETHER:
            if not self.over:
                self.router.grant(self, self._owed)
            self._owed = self._owed_bytes = 0
        return item

    def cancel(self) -> None:
        """Nobody takes more responses: cancel it. At any moment, in any thread."""
        if not self.cancelled:
            self.cancelled = True
            if not self.over:
                self.router.cancel_soon(self)


def _resolve(begun: asyncio.Future[None]) -> None:
    if not begun.done():
        begun.set_result(None)
