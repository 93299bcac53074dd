"""The responses of a model to one request, queued for a client that reads them one after another.

    StreamingInference ──response*──> ResponseQueue ──encode, frame──> ChunkedResponse

The queue is used by streams of `infer` and `generate`, and by OpenAI's API. A response returns its
credit to the scheduler when it has been written.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial

from shmserve.errors import ShmserveError
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.messages import (
    TRACEPARENT,
    ChunkedResponse,
    Framing,
    HttpRequest,
    HttpResponse,
    encode_error_json,
    read_time_limit,
    traceparent_header,
)
from shmserve.gateway.inference.in_flight import (
    StreamedResponse,
    StreamingInference,
    is_last_response,
    submit_inference,
)
from shmserve.gateway.inference.prepare import BuiltRequest
from shmserve.ipc.tensors.schemas import Inferred

_MAX_JOINED_BYTES = 32 * 1024  # bytes of responses that are written together
# Returns the JSON text of a response with these outputs.
EncodeOutputs = Callable[[Inferred], Awaitable[bytes]]


class ResponseQueue:
    """The queue of the responses to an `inference` in flight.

    Args:
        gateway: The gateway.
        request: The client's request.
        built_request: The request for the model.
        arrived_ns: The time of arrival.
        response_event: The event that is set for each response; several queues may share it.

    Raises:
        ShmserveError: The request is refused.
    """

    def __init__(
        self,
        gateway: Gateway,
        request: HttpRequest,
        built_request: BuiltRequest,
        arrived_ns: int,
        response_event: asyncio.Event | None = None,
    ) -> None:
        self._messages: deque[StreamedResponse] = deque()
        self._response_event = response_event or asyncio.Event()
        client = request.connection.client
        headers = request.headers
        try:
            call_limit = read_time_limit(headers)
        except BaseException:
            built_request.release()
            raise
        create_inference = partial(StreamingInference, on_response=self._on_response)
        self.inference = submit_inference(
            *(gateway, built_request, client, arrived_ns, create_inference),
            call_limit,
            headers.get(TRACEPARENT, ""),
        )

    def _on_response(self, _: StreamingInference, message: StreamedResponse) -> None:
        self._messages.append(message)
        self._response_event.set()

    @property
    def headers(self) -> bytes:
        """Return the header of the response that identifies the trace, if there is one."""
        trace = self.inference.built_request.trace
        return b"" if trace is None else traceparent_header(trace.context.traceparent)

    @property
    def first_response(self) -> StreamedResponse:
        """Return the first response in the queue."""
        return self._messages[0]

    def __bool__(self) -> bool:
        return bool(self._messages)

    async def wait(self) -> None:
        """Wait until the queue contains a response."""
        while not self._messages:
            self._response_event.clear()
            await self._response_event.wait()

    async def wait_for_first(self) -> StreamedResponse:
        """Wait for the first response, and return it; a cancellation cancels the request."""
        try:
            await self.wait()
        except BaseException:
            self.close()
            raise
        return self._messages[0]

    async def encode_first(self, encode: EncodeOutputs) -> tuple[bytes | None, Inferred | None]:
        """Encode the first response, which may be an error.

        Returns:
            The JSON text, or None to send nothing; and the outputs, for `remove_first`.
        """
        inferred: Inferred | None = None
        try:
            if (encoded_response := self.inference.from_template(self._messages[0])) is not None:
                return encoded_response[0], None
            inferred = self.inference.unpack_outputs(self._messages[0])
            return None if inferred is None else await encode(inferred), inferred
        except ShmserveError as error:
            return encode_error_json(error.message), inferred

    def remove_first(self, inferred: Inferred | None) -> bool:
        """Remove the first response, which was encoded; return whether it was the last one.

        The memory of its outputs (`inferred`) is released, and its credit returned.
        """
        message = self._messages.popleft()
        self.inference.release_outputs(inferred)
        self.inference.credit(inferred)
        return is_last_response(message)

    def close(self) -> None:
        """Cancel the request, and discard the responses in the queue."""
        while self._messages:
            self.inference.discard(self._messages.popleft())
        self.inference.cancel()


def streaming_response(
    status: int, framing: Framing, queue: ResponseQueue, encode: EncodeOutputs
) -> HttpResponse:
    """Return an HTTP response that streams the JSON texts of a model's responses.

    While the client does not read, the model receives no credit for further responses and waits.
    The request is cancelled when the client disconnects.
    """
    headers = framing.headers + queue.headers
    response = ChunkedResponse(status, _encode_batches(framing, queue, encode), headers)
    response.on_sent = queue.close
    return response


async def _encode_batches(
    framing: Framing, queue: ResponseQueue, encode: EncodeOutputs
) -> AsyncGenerator[list[bytes], None]:
    """Yield lists of encoded responses; the responses of a list are written together."""
    is_ended = False
    while not is_ended:
        await queue.wait()
        events: list[bytes] = []
        size = 0
        while queue and size < _MAX_JOINED_BYTES and not is_ended:
            json_text, inferred = await queue.encode_first(encode)
            if json_text is not None:
                events.append(framing.frame(json_text))
                size += len(events[-1])
            is_ended = queue.remove_first(inferred)
        if events:
            yield events
