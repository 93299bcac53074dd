"""A request that was submitted, and its one response."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from shmserve.client.errors import TimedOut
from shmserve.client.memory.views import nothing
from shmserve.client.request.prepare import PackedRequest
from shmserve.client.request.results import Result, discard, read
from shmserve.client.server.state import ServerState
from shmserve.errors import Internal, QueueFull, ShmserveError, Unavailable, Unsupported, from_code
from shmserve.ipc.inflight import InflightRequest, Response
from shmserve.ipc.messages.inference import Failed, Finished, Release, Responded
from shmserve.ipc.tensors.descriptors import Place
from shmserve.ipc.tensors.inference import runs_once
from shmserve.ipc.transport.records import MalformedMessage

DECOUPLED = "model '%s' gives any number of responses to a request: `stream` yields them"


class RequestSender(Protocol):
    """The channel that a request is submitted by: see `RequestChannel`."""

    @property
    def server(self) -> ServerState:
        """The server's state."""

    def send(self, pending: ClientRequest) -> None:
        """Queue it, perhaps again."""

    def cancel(self, pending: ClientRequest) -> None:
        """Cancel it."""

    def moved(self, pending: ClientRequest) -> bool:
        """Submit it to who serves the model now, if that is another."""

    def release(self, endpoint: str, release: Release) -> None:
        """Tell a worker that its outputs have been read."""


class ClientRequest(InflightRequest):
    """A request that was submitted. `outcome`: None until it is answered; `on_done` hears of it."""

    __slots__ = ("abandoned", "again", "built", "channel", "end", "on_done", "outcome")

    def __init__(
        self,
        channel: RequestSender,
        built: PackedRequest,
        on_done: Callable[[ClientRequest], None] | None,
    ) -> None:
        self.endpoint = built.model.endpoint
        self.responses = 0
        self.channel = channel
        self.built = built
        self.end = built.end
        self.on_done = on_done
        self.outcome: Result | ShmserveError | None = None
        self.abandoned = False
        self.again = False  # it was submitted once more, since what should have come is lost

    def result(self) -> Result:
        """The result; raises the error that it ended with."""
        outcome = self.outcome
        if isinstance(outcome, Result):
            return outcome
        assert outcome is not None
        self.outcome = None
        try:
            raise outcome
        finally:
            del outcome  # no cycle of it and its traceback, which would keep the request's memory

    def awaited(self) -> bool:
        return not self.abandoned

    def respond(self, message: Response) -> None:
        if type(message) is Finished:
            self._finish(message.body)
        elif type(message) is Failed:
            self.done(self.error(message.code, message.message, message.retry_after_s))
        elif type(message) is Responded:  # its model was loaded again, and is another one
            self.discard(message)
            self.done(Unsupported(DECOUPLED % self.built.model.name))
            self.channel.cancel(self)

    def error(self, code: str, text: str, retry_after_s: int = 0) -> ShmserveError:
        """The exception for the server's error: after the request's time TimedOut, which the server
        may know of first."""
        if retry_after_s > 0:
            return QueueFull(text, retry_after_s)
        if code == "UNAVAILABLE" and 0 < self.built.options.deadline_ns <= time.monotonic_ns():
            return TimedOut(text)
        return from_code(code, text)

    def discard(self, message: Response) -> None:
        """Release the outputs of a response that nobody reads: they take up a worker's memory."""
        if isinstance(message, Finished | Responded):
            discard(self, message.body)

    def _finish(self, body: bytes) -> None:
        channel = self.channel
        # What was read gives the memory back, or keeps it for the arrays over it.
        end, self.end = self.end, nothing
        outcome: Result | ShmserveError
        try:
            outcome = read(self, body)
        except ShmserveError as error:
            self.end = end
            over = self.again or self.abandoned or runs_once(self.submit.work)
            if isinstance(error, Unavailable) and not over:
                self.again = True  # its worker died before the response was read
                channel.send(self)
                return
            outcome = error
        except MalformedMessage:
            self.end = end
            outcome = Internal("the response cannot be read")
        self.done(outcome)

    def copied(self, place: Place) -> bytes:
        """A copy of what is in a worker's memory."""
        return self.channel.server.copied(place)

    def release(self, release: Release) -> None:
        """Tell a worker that its outputs have been read."""
        self.channel.release(self.endpoint, release)

    def goes_elsewhere(self, message: Failed) -> bool:
        return self.channel.moved(self)

    def free(self) -> None:
        end, self.end = self.end, nothing
        end()

    def ready(self) -> bool:
        """Whether there is something for who waits."""
        return self.outcome is not None

    def done(self, outcome: Result | ShmserveError) -> None:
        """That is how it ended; who waits for it hears so."""
        if self.abandoned:
            return
        self.outcome = outcome
        on_done, self.on_done = self.on_done, None  # it may refer to this: no cycle stays
        if on_done is not None:
            on_done(self)
