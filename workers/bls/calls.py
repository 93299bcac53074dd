"""Calls of other models: with one response, or with a stream of responses."""

from __future__ import annotations

import asyncio
from collections import deque

from shmserve.errors import ShmserveError, from_code
from shmserve.ipc.credit import ReadWindow
from shmserve.ipc.messages.inference import Responded
from shmserve.workers.bls.request import CallRequest, CallResponse, Outcome
from shmserve.workers.bls.router import BlsCall, CallRouter, complete_soon, decoupled_error


class UnaryBlsCall(BlsCall):
    """An in-flight call with one response.

    Attributes:
        future: The future that receives the outcome of an asynchronous call; None if the caller
            blocks.
        outcome: The response or the error of a blocking call; None until the call has completed.
    """

    __slots__ = ("future", "outcome")

    def __init__(
        self,
        router: CallRouter,
        request: CallRequest,
        future: asyncio.Future[CallResponse] | None = None,
    ) -> None:
        super().__init__(router, request)
        self.future = future
        self.outcome: Outcome | None = None

    def is_awaited(self) -> bool:
        return self.future is None or not self.future.done()

    def receive(self, message: Responded) -> None:
        # Only a decoupled model sends this message: the model was reloaded after the call.
        self.router.schedulers.discard(self.endpoint, message)
        if message.final:
            self.end(decoupled_error(self.request.model))

    def end(self, outcome: Outcome) -> None:
        if self.future is not None:
            complete_soon(self.future, outcome)
        else:
            self.outcome = outcome
            self.router.shared_wait.wake()

    def wait(self) -> CallResponse:
        """Wait for the response to a blocking call.

        Raises:
            ShmserveError: The call has failed with this error.
        """
        self.router.shared_wait.wait_until(lambda: self.outcome is not None)
        assert self.outcome is not None
        if isinstance(self.outcome, ShmserveError):
            raise self.outcome
        return self.outcome


class StreamBlsCall(BlsCall):
    """An in-flight call with any number of responses.

    Attributes:
        is_abandoned: Whether the caller ignores further responses.
        first_response: A future that the first response completes; None if no coroutine awaits it.
        outcomes: The responses and errors received and not taken yet.
        has_received_all: Whether the last response has been received.
        window: The flow-control window of the reader.
    """

    __slots__ = ("first_response", "has_received_all", "is_abandoned", "outcomes", "window")
    accepts_stream = True

    def __init__(
        self,
        router: CallRouter,
        request: CallRequest,
        first_response: asyncio.Future[None] | None = None,
    ) -> None:
        super().__init__(router, request)
        self.outcomes: deque[Outcome] = deque()
        self.has_received_all = False
        self.is_abandoned = False
        self.first_response = first_response
        self.window = ReadWindow()

    def is_awaited(self) -> bool:
        return not self.is_abandoned

    def receive(self, message: Responded) -> None:
        if self.is_abandoned:
            self.router.schedulers.discard(self.endpoint, message)
        elif message.code:
            self._add(from_code(message.code, message.message), message.final)
        elif message.schema:
            self._add(self.router.read(self, message), message.final)
        elif message.final:
            # Triton's iterator ends with an empty response if the final flag arrives on its own.
            self._add(CallResponse([], {}), True)

    def end(self, outcome: Outcome) -> None:
        if not self.is_abandoned:
            self._add(outcome, True)

    def _add(self, outcome: Outcome, final: bool) -> None:
        self.outcomes.append(outcome)
        self.has_received_all = self.has_received_all or final
        self.router.shared_wait.wake()
        future, self.first_response = self.first_response, None
        if future is not None:
            complete_soon(future, None)

    def has_next(self) -> bool:
        """Return whether `take` would not block."""
        return bool(self.outcomes) or self.has_received_all or self.is_abandoned

    def wait(self) -> None:
        """Wait until `take` would not block."""
        if not self.has_next():
            self.router.shared_wait.wait_until(self.has_next)

    @property
    def is_finished(self) -> bool:
        """Return whether every response has been taken."""
        return not self.outcomes and (self.has_received_all or self.is_abandoned)

    def take(self) -> Outcome | None:
        """Wait for the next response and return it; None after the last one."""
        self.wait()
        try:
            outcome = self.outcomes.popleft()
        except IndexError:
            return None
        outputs = outcome.outputs if isinstance(outcome, CallResponse) else ()
        credit = self.window.record_read(sum(len(output.raw) for output in outputs))
        if credit and not self.has_received_all:
            self.router.credit(self, credit)
        return outcome

    def cancel(self) -> None:
        """Send the model a cancellation. Responses before the end can still be taken."""
        if not self.has_received_all and not self.is_abandoned:
            self.router.cancel(self, keeps_reading=True)

    def abandon(self) -> None:
        """Cancel the call and ignore further responses.

        May be called at any time and in any thread.
        """
        if not self.is_abandoned:
            self.is_abandoned = True
            if not self.has_received_all:
                self.router.cancel(self)
