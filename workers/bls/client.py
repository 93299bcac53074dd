"""The BLS client: how a model's code begins calls of other models, and waits for them.

Calls come from the model's thread, from its event loop (many at once), from threads it starts. None
may come from a signal handler: that may have interrupted one of these with the locks held.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from shmserve.workers.bls.calls import Call, CallRouter
from shmserve.workers.bls.request import CallRequest, CallResponse
from shmserve.workers.links.supervisor import SupervisorLink

C = TypeVar("C", bound=Call)


class BlsClient:
    """The calls of one worker, whose arena for large inputs is of `arena_byte_size`."""

    def __init__(self, control: SupervisorLink, arena_byte_size: int) -> None:
        self.router = CallRouter(control, arena_byte_size)

    def begin(self, call: C) -> C:
        """Submit a call. Raises the ShmserveError that it cannot be submitted for."""
        self.router.submit(call)
        self.router.flush()
        return call

    def wait(self, call: Call) -> CallResponse:
        """Wait for the response to a call. Raises the ShmserveError that it ended with."""
        self.router.waiting.until(lambda: call.outcome is not None)
        if isinstance(call.outcome, CallResponse):
            return call.outcome
        assert call.outcome is not None
        raise call.outcome

    def call_soon(self, request: CallRequest) -> asyncio.Future[CallResponse]:
        """`begin`; the future, of the running event loop, gets what `wait` returns or raises.

        Those begun in one turn of the loop are sent as one. Cancelling the future cancels the
        inference.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[CallResponse] = loop.create_future()
        self.submit_soon(Call(self.router, request, future), future)
        return future

    def submit_soon(self, call: Call, future: asyncio.Future[Any]) -> None:
        """Submit a call at the end of this turn of the running loop, which takes responses until
        the future is done; where that is cancelled, so is the call."""
        loop = asyncio.get_running_loop()
        self.router.submit(call)
        loop.call_soon(self.router.flush)
        self.router.waiting.watch(loop)

        def over(ended: asyncio.Future[Any]) -> None:
            self.router.waiting.unwatch(loop)
            if ended.cancelled():
                self.router.cancel_soon(call)

        future.add_done_callback(over)

    def invalidate(self, model: str) -> None:
        """Have the next call of `model` ask anew where it is."""
        self.router.invalidate(model)

    def close(self) -> None:
        """Close every socket; calls in flight get no response."""
        self.router.close()
