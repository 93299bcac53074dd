"""Streamed calls: of decoupled models, with credit for responses."""

from __future__ import annotations

import asyncio
from collections import deque

from shmserve.errors import ShmserveError, from_code
from shmserve.ipc.credit import ReadWindow
from shmserve.ipc.messages.inference import Responded, Response
from shmserve.workers.bls.calls import Call, CallRouter, settle_soon
from shmserve.workers.bls.request import CallRequest, CallResponse

Item = CallResponse | ShmserveError


class StreamCall(Call):
    """`items` are the responses that have come and were not taken; `over`: no more will come.
    `abandoned`: nobody takes what may come yet. `begun`, of an event loop, is told of the first."""

    __slots__ = ("abandoned", "begun", "items", "over", "window")
    takes_many = True

    def __init__(
        self, router: CallRouter, request: CallRequest, begun: asyncio.Future[None] | None = None
    ) -> None:
        super().__init__(router, request)
        self.items: deque[Item] = deque()
        self.over = False
        self.abandoned = False
        self.begun = begun
        self.window = ReadWindow()

    def awaited(self) -> bool:
        return not self.abandoned

    def respond(self, message: Response) -> None:
        if not isinstance(message, Responded):
            super().respond(message)
        elif self.abandoned:
            self.router.schedulers.discard(self.endpoint, message)
        elif message.code:
            self._add(from_code(message.code, message.message), message.final)
        elif message.schema:
            self._add(self.router.read(self, message), message.final)
        elif message.final:
            # Triton's iterator ends with an empty response where the end came by itself.
            self._add(CallResponse([], {}), True)

    def end(self, outcome: Item) -> None:
        if not self.abandoned:
            self._add(outcome, True)

    def _add(self, item: Item, final: bool) -> None:
        self.items.append(item)
        self.over = self.over or final
        self.router.waiting.wake()
        begun, self.begun = self.begun, None
        if begun is not None:
            settle_soon(begun, None)

    def ready(self) -> bool:
        """Whether there is something to take, or nothing will come any more."""
        return bool(self.items) or self.over or self.abandoned

    def wait(self) -> None:
        """Wait until it is `ready`."""
        if not self.ready():
            self.router.waiting.until(self.ready)

    @property
    def finished(self) -> bool:
        """Whether all has been taken."""
        return not self.items and (self.over or self.abandoned)

    def take(self) -> Item | None:
        """Wait for the next response; None when there is none any more."""
        self.wait()
        try:
            item = self.items.popleft()
        except IndexError:
            return None
        outputs = item.outputs if isinstance(item, CallResponse) else ()
        credit = self.window.read(sum(len(output.raw) for output in outputs))
        if credit and not self.over:
            self.router.credit(self, credit)
        return item

    def cancel(self) -> None:
        """Have its model hear that no more is wanted. What it sends until it ends may be taken."""
        if not self.over and not self.abandoned:
            self.router.cancel_soon(self, listening=True)

    def abandon(self) -> None:
        """Cancel it: nobody takes more responses. At any moment, in any thread."""
        if not self.abandoned:
            self.abandoned = True
            if not self.over:
                self.router.cancel_soon(self)
