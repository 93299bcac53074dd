"""Response streams of requests that are nobody's, as a decoupled model sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shmserve.errors import ShmserveError
from shmserve.ipc.messages.inference import Reply
from shmserve.workers.batch.request import Request, Response
from shmserve.workers.batch.response_stream import ResponseStream, ResponseWriter
from shmserve.workers.links.scheduler import WorkerRequest


class RehearsedStream(ResponseStream):
    """A stream whose responses are dropped; `error` is the first that came in their place."""

    __slots__ = ("_ended", "error")

    def __init__(self, writer: ResponseWriter, request: Request) -> None:
        super().__init__(writer, WorkerRequest(request.work), request)
        self.error: ShmserveError | None = None
        self._ended = threading.Event()

    def wait(self) -> None:
        """Return once the model has ended it."""
        self._ended.wait()

    @property
    def closed(self) -> bool:
        """As `ResponseStream` says."""
        return self._ended.is_set()

    def is_cancelled(self) -> bool:
        """As `ResponseStream` says."""
        return False

    @property
    def may_send(self) -> bool:
        """As `ResponseStream` says."""
        return True

    def send(self, response: Response | None = None, final: bool = False) -> None:
        """As `ResponseStream` says."""
        if response is not None and response.error is not None:
            self.error = self.error or response.error
        if final:
            self._ended.set()

    def on_cancel(self, listener: Callable[[], object]) -> None:
        """As `ResponseStream` says: nobody cancels it."""

    def fail(self, error: ShmserveError) -> None:
        """As `ResponseStream` says."""
        self.send(Response(error=error), final=True)

    def refuse(self, error: ShmserveError) -> Reply | None:
        """As `ResponseStream` says."""
        self.fail(error)
        return None

    def reschedule(self) -> None:
        """As `ResponseStream` says: once is enough."""
        self._ended.set()

    def abandon(self) -> None:
        """As `ResponseStream` says."""
        self._ended.set()
