"""The responses of a model to one HTTP request: their queue, and the response that streams them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable

from shmserve.gateway.context import Gateway
from shmserve.gateway.http.messages import (
    TRACEPARENT,
    ChunkedResponse,
    HttpRequest,
    HttpResponse,
    traced,
)
from shmserve.gateway.inference.builder import BuiltRequest
from shmserve.gateway.inference.submit import (
    Message,
    StreamingRequest,
    is_last,
    prepare_submit,
    submit_streaming,
)
from shmserve.gateway.model_table import GatewayModel
from shmserve.ipc.tensors.inference import Inferred

# Responses that are here are written together up to so many bytes.
_TOGETHER = 32 * 1024


class ResponseQueue:
    """An open request and the queue of responses that have come to it; `news` is set when one does,
    perhaps for several queues. Raises what keeps it from being submitted."""

    def __init__(
        self,
        gateway: Gateway,
        request: HttpRequest,
        model: GatewayModel,
        built: BuiltRequest,
        arrived_ns: int,
        news: asyncio.Event | None = None,
    ) -> None:
        self._here: deque[Message] = deque()
        self._news = news or asyncio.Event()
        client = request.connection.client
        traceparent = request.headers.get(TRACEPARENT, "")
        model, submit = prepare_submit(gateway, model, built, client, arrived_ns, 0, traceparent)
        self.request = submit_streaming(gateway.schedulers, model, built, submit, self._heard)

    def _heard(self, _: StreamingRequest, message: Message) -> None:
        self._here.append(message)
        self._news.set()

    @property
    def headers(self) -> bytes:
        """Of its response: errors that come later have the request's trace by it."""
        trace = self.request.trace
        return b"" if trace is None else traced(trace.context.traceparent)

    @property
    def first(self) -> Message:
        """The one that is next, which is here."""
        return self._here[0]

    @property
    def here(self) -> bool:
        """Whether there is one."""
        return bool(self._here)

    async def wait(self) -> None:
        """Until there is one."""
        while not self._here:
            self._news.clear()
            await self._news.wait()

    async def begun(self) -> Message:
        """The first response, once it is here; the request is cancelled if nobody waits so long."""
        try:
            await self.wait()
        except BaseException:
            self.close()
            raise
        return self._here[0]

    def pop(self, inferred: Inferred | None) -> bool:
        """The first one, which had the outputs `inferred`, is encoded: their memory is free, and
        the model may send another. Returns whether it was the last."""
        message = self._here.popleft()
        self.request.release_outputs(inferred)
        self.request.credit(inferred)
        return is_last(message)

    def close(self) -> None:
        """Cancel the request; responses that are here are discarded."""
        while self._here:
            self.request.discard(self._here.popleft())
        self.request.cancel()


# Encodes the first response that is here: what the client is sent for it, None for nothing, and the
# outputs that it had.
Encode = Callable[[], Awaitable[tuple[bytes | None, Inferred | None]]]


def streaming_response(
    status: int, content_type: bytes, queue: ResponseQueue, encode: Encode
) -> HttpResponse:
    """The response that streams those of a model, a chunk for each that says something.

    Back-pressure: for a client that does not read no more credit is granted, and the model waits.
    The request is cancelled when the client is gone.
    """
    headers = b"Content-Type: %b\r\n" % content_type + queue.headers
    response = ChunkedResponse(status, _encoded(queue, encode), headers)
    response.on_sent = queue.close
    return response


async def _encoded(queue: ResponseQueue, encode: Encode) -> AsyncGenerator[list[bytes], None]:
    """The responses, as many of those that are here as are written together."""
    ended = False
    while not ended:
        await queue.wait()
        events: list[bytes] = []
        size = 0
        while queue.here and size < _TOGETHER and not ended:
            event, inferred = await encode()
            if event is not None:
                events.append(event)
                size += len(event)
            ended = queue.pop(inferred)
        if events:
            yield events
