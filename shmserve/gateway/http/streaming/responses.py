"""The response queue of one HTTP request, and a streaming response: chunked, with back-pressure."""

from __future__ import annotations

import asyncio
import http
from collections import deque
from collections.abc import Awaitable, Callable

from shmserve.gateway.context import Gateway
from shmserve.gateway.http.request import HttpRequest
from shmserve.gateway.http.response import HttpResponse, drain
from shmserve.gateway.inference.prepared import BuiltRequest
from shmserve.gateway.inference.streaming_request import Message, StreamingRequest, is_last
from shmserve.gateway.inference.submit import prepare_submit
from shmserve.gateway.model_table import GatewayModel
from shmserve.ipc.tensors.inference import Inferred

# Responses that are here are written together up to so many bytes.
_TOGETHER = 32 * 1024


class ResponseQueue:
    """An open request and the queue of responses that have come to it. Raises what keeps it from
    being submitted."""

    def __init__(
        self,
        gateway: Gateway,
        request: HttpRequest,
        model: GatewayModel,
        built: BuiltRequest,
        arrived_ns: int,
    ) -> None:
        self._here: deque[Message] = deque()
        self._news = asyncio.Event()
        submit = prepare_submit(gateway, built, request.connection.client, arrived_ns)
        try:
            model = gateway.models.current(model)
        except BaseException:
            built.release()
            raise
        self.request = StreamingRequest(gateway, model, built, submit, self._heard)

    def _heard(self, _: StreamingRequest, message: Message) -> None:
        self._here.append(message)
        self._news.set()

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

    def pop(self, inferred: Inferred | None) -> bool:
        """The first one, which had the outputs `inferred`, is encoded: their memory is free, and
        the model may send another. Returns whether it was the last."""
        message = self._here.popleft()
        self.request.release(inferred)
        self.request.grant(inferred)
        return is_last(message)

    def close(self) -> None:
        """Nobody waits for more."""
        while self._here:
            self.request.discard(self._here.popleft())
        self.request.abandon()


# Encodes the first response that is here: what the client is sent for it, None for nothing, and the
# outputs that it had.
Encode = Callable[[], Awaitable[tuple[bytes | None, Inferred | None]]]


class StreamingResponse(HttpResponse):
    """A response whose body is streamed in chunks, one or more for each response of the model.

    Back-pressure: for a client that does not read no more credit is granted, and the model waits.
    """

    __slots__ = ("_encode", "_responses")

    def __init__(
        self, status: int, content_type: bytes, responses: ResponseQueue, encode: Encode
    ) -> None:
        super().__init__(status, (), b"Content-Type: %b\r\n" % content_type)
        self._responses = responses
        self._encode = encode

    async def send(self, request: HttpRequest, stall_s: float) -> None:
        """As `HttpResponse.send`. The request is cancelled when the client is gone."""
        try:
            await self._send(request, stall_s)
        finally:
            self._responses.close()

    async def _send(self, request: HttpRequest, stall_s: float) -> None:
        transport = request.connection.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        chunked = not request.is_http10
        self.close = self.close or not chunked
        transport.write(self._stream_head(chunked=chunked))
        ended = False
        while not ended:
            await self._responses.wait()
            pieces, ended = await self._ready(chunked=chunked)
            if ended and chunked:
                pieces.append(b"0\r\n\r\n")
            if pieces:
                transport.write(b"".join(pieces))
            if request.connection.writing_paused:
                await drain(request, transport, stall_s)

    async def _ready(self, *, chunked: bool) -> tuple[list[bytes], bool]:
        """What is here, as much as is written at once, and whether it ends with the last one."""
        pieces: list[bytes] = []
        size, ended = 0, False
        while self._responses.here and size < _TOGETHER and not ended:
            event, inferred = await self._encode()
            if event is not None:
                size += len(event)
                pieces += (b"%x\r\n" % len(event), event, b"\r\n") if chunked else (event,)
            ended = self._responses.pop(inferred)
        return pieces, ended

    def _stream_head(self, *, chunked: bool) -> bytes:
        lines = [
            b"HTTP/1.1 %d %b\r\n" % (self.status, http.HTTPStatus(self.status).phrase.encode())
        ]
        if chunked:
            lines.append(b"Transfer-Encoding: chunked\r\n")
        if self.close:
            lines.append(b"Connection: close\r\n")
        return b"".join((*lines, self.headers, b"X-Content-Type-Options: nosniff\r\n\r\n"))
