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
    time_limit,
    traced,
)
from shmserve.gateway.inference.inference import Message, StreamingInference, is_last, submit
from shmserve.gateway.inference.prepare import BuiltRequest
from shmserve.ipc.tensors.inference import Inferred

_MOST_BYTES_AT_ONCE = 32 * 1024  # of responses that are written together


class ResponseQueue:
    """A request in flight, and the queue of its responses.

    Args:
        gateway: The gateway.
        request: The client's request.
        built: The request for the model.
        arrived_ns: The time of arrival.
        news: The event that is set for each response; several queues may share it.

    Raises:
        ShmserveError: The request is refused.
    """

    def __init__(
        self,
        gateway: Gateway,
        request: HttpRequest,
        built: BuiltRequest,
        arrived_ns: int,
        news: asyncio.Event | None = None,
    ) -> None:
        self._messages: deque[Message] = deque()
        self._news = news or asyncio.Event()
        client = request.connection.client
        how = (StreamingInference, self._responded)
        headers = request.headers
        try:
            limit = time_limit(headers)
        except BaseException:
            built.release()
            raise
        trace = headers.get(TRACEPARENT, "")
        asked = (gateway, built, client, arrived_ns, *how)
        self.request = submit(*asked, call_limit=limit, traceparent=trace)

    def _responded(self, _: StreamingInference, message: Message) -> None:
        self._messages.append(message)
        self._news.set()

    @property
    def headers(self) -> bytes:
        """Return the headers of the response, which identify the trace also for later errors."""
        trace = self.request.built.trace
        return b"" if trace is None else traced(trace.context.traceparent)

    @property
    def first(self) -> Message:
        """Return the first response in the queue."""
        return self._messages[0]

    def __bool__(self) -> bool:
        return bool(self._messages)

    async def wait(self) -> None:
        """Wait until the queue contains a response."""
        while not self._messages:
            self._news.clear()
            await self._news.wait()

    async def begun(self) -> Message:
        """Wait for the first response, and return it; a cancellation cancels the request."""
        try:
            await self.wait()
        except BaseException:
            self.close()
            raise
        return self._messages[0]

    def pop(self, inferred: Inferred | None) -> bool:
        """Remove the first response, which was encoded; return whether it was the last one.

        The memory of its outputs (`inferred`) is released, and its credit returned.
        """
        message = self._messages.popleft()
        self.request.release_outputs(inferred)
        self.request.credit(inferred)
        return is_last(message)

    def close(self) -> None:
        """Cancel the request, and discard the responses in the queue."""
        while self._messages:
            self.request.discard(self._messages.popleft())
        self.request.cancel()


# Encodes the first response in a queue. Returns the bytes for the client, or None, and the outputs.
Encode = Callable[[], Awaitable[tuple[bytes | None, Inferred | None]]]


def streaming_response(
    status: int, content_type: bytes, queue: ResponseQueue, encode: Encode
) -> HttpResponse:
    """Return the response that streams those of a model, a chunk for each that is not empty.

    A client that does not read receives no credit, so that the model waits. The request is
    cancelled when the client disconnects.
    """
    headers = b"Content-Type: %b\r\n" % content_type + queue.headers
    response = ChunkedResponse(status, _encoded(queue, encode), headers)
    response.on_sent = queue.close
    return response


async def _encoded(queue: ResponseQueue, encode: Encode) -> AsyncGenerator[list[bytes], None]:
    """Yield the encoded responses that are written together."""
    ended = False
    while not ended:
        await queue.wait()
        events: list[bytes] = []
        size = 0
        while queue and size < _MOST_BYTES_AT_ONCE and not ended:
            event, inferred = await encode()
            if event is not None:
                events.append(event)
                size += len(event)
            ended = queue.pop(inferred)
        if events:
            yield events
