"""ModelStreamInfer: a full-duplex call with a window for its requests, its responses multiplexed.

The responses of ordinary models are sent in the order of the requests. Those of decoupled models
are interleaved with the rest: each is sent as it comes. A request that fails does not end the
stream: its response carries the error. With the metadata `triton_grpc_error: true` the first error
ends the stream with its status instead.

    requests ──> ordered: the first one is done ──┐
        └─────> open: a response has come ────────┴──> outbox ──> written, credit granted
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shmserve.errors import ShmserveError, Unavailable
from shmserve.gateway.grpc.calls.messages import release
from shmserve.gateway.grpc.calls.streaming_call import StreamingCall
from shmserve.gateway.grpc.infer import Inferences, RequestRefused, Submitted
from shmserve.gateway.grpc.placed_request import PlacedRequest
from shmserve.gateway.grpc.wire.response import (
    GrpcResponseTemplate,
    streamed,
    streamed_end,
    streamed_error,
)
from shmserve.gateway.inference.submit import Message, StreamingRequest, is_last
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.inference import Inferred
from shmserve.ipc.tensors.schemas import BoundedCache

# The requests of one stream that are in flight may have so many bytes; those that come when they
# have as many are not read yet. Others that call the same model wait behind them, too, and their
# responses occupy as much memory again or more. So small ones count as `_LEAST` bytes: no more than
# 1024 are in flight.
_WINDOW = 32 * 1024 * 1024
_LEAST = _WINDOW // 1024
_TOGETHER = 32 * 1024  # responses that are here are written at once, up to so many bytes

_Ordered = Submitted | RequestRefused


class _Window:
    """Flow control: how many more bytes of requests may be in flight; the last may exceed it."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._more = asyncio.Event()

    async def take(self, size: int) -> None:
        """Wait until some is left, and take this; one at a time."""
        while self._left <= 0:
            self._more.clear()
            await self._more.wait()
        self._left -= size

    def give(self, size: int) -> None:
        """Give it back."""
        self._left += size
        self._more.set()


_MOST_TEMPLATES = 8


class StreamEntry:
    """A decoupled model's request in a stream, and the encoder of its responses, from templates
    where their form has come before; `size` is its part of the stream's window.

    Every one must be left when its last response is sent, or nobody waits for it."""

    __slots__ = ("_inferences", "_left", "_plain", "_templates", "request", "size")

    def __init__(self, inferences: Inferences, request: StreamingRequest, size: int) -> None:
        self._inferences = inferences
        self._left = False
        inferences.active += 1
        self.request = request
        self.size = size
        self._templates: BoundedCache[bytes, GrpcResponseTemplate] = BoundedCache(_MOST_TEMPLATES)
        # Whether a response has all that a worker gave, as it gave it.
        outputs = request.infer_request.outputs
        self._plain = not any(output.place or output.classes for output in outputs)

    def encode(self, message: Message, *, strict: bool) -> tuple[bytes | None, Inferred | None]:
        """The message for a response, None where there is none for it; and the outputs that it was
        encoded from, whose memory is in use.

        Raises the error that the response is, if the stream is `strict`.
        """
        final = is_last(message)
        request, asked = self.request, self.request.infer_request
        schema = b"" if isinstance(message, m.Failed) else message.schema
        template = None if final else self._templates.find(schema)
        if template is not None and isinstance(message, m.Responded):
            filled = template.fill(asked.id, message.data)
            if filled is not None:
                return streamed(filled, final=False), None
        inferred: Inferred | None = None
        try:
            inferred = request.outputs(message)
            if inferred is None:
                end = streamed_end(request.model.name, asked.version, asked.id)
                return end if asked.empty_final else None, None
            response = self._inferences.encode(request.model, asked, schema, inferred)
        except ShmserveError as error:
            if strict:
                raise
            name = request.model.name
            return streamed_error(error.message, asked.id, name, final=final), inferred
        if not final and template is None and self._plain:
            template = self._inferences.encoder.template(request.model, schema, inferred, ())
            self._templates.remember(schema, template)
        return streamed(response, final=final), inferred

    def leave(self) -> None:
        """Nothing is left to be done for it."""
        if not self._left:
            self._left = True
            self._inferences.left()


async def stream_infer(inferences: Inferences, call: StreamingCall, stall_s: float) -> None:
    """Handle a call until the client has its last response, or is gone.

    Raises the first error in strict mode, and Unavailable when a response is not taken within
    `stall_s` seconds: others need the memory of those behind it.
    """
    stream = _Stream(inferences, call)
    # Until the call is over it holds the response that is not taken, and what has come of further
    # requests.
    call.on_over = lambda: stream.trim.soon(stream.total)
    reader = asyncio.create_task(stream.read())
    try:
        await stream.write(stall_s)
        await reader  # it has ended: what it failed with is what the call fails with
    except TimeoutError:
        raise Unavailable("the responses are not read") from None
    finally:
        # Nothing is awaited before all is given up: a call may be cancelled twice.
        reader.cancel()
        stream.cancel()
        await asyncio.wait((reader,))


@dataclass(eq=False)
class _Stream:
    """The state of one call: requests in flight, and responses to be written. `total` is how many
    bytes have gone either way."""

    _inferences: Inferences
    _call: StreamingCall

    def __post_init__(self) -> None:
        inferences, head = self._inferences, self._call.head
        self._headers = inferences.headers(head)
        self._strict = ("triton_grpc_error", "true") in head.metadata
        self._window = _Window(_WINDOW)
        self._ordered: deque[tuple[_Ordered, int]] = deque()  # each with its size
        self._open: dict[StreamingRequest, StreamEntry] = {}
        # Responses of decoupled models' requests, in the order in which they came.
        self._outbox: deque[tuple[StreamingRequest, Message]] = deque()
        self._ended = False  # the client sends no more
        self._news = asyncio.Event()
        self.total = 0
        self.trim = inferences.gateway.malloc_trim

    async def read(self) -> None:
        """Take requests, as far as the window allows."""
        try:
            async for raw in self._call.requests():
                size = max(len(raw), _LEAST)
                try:
                    await self._window.take(size)
                except BaseException:
                    release(raw)
                    raise
                await self._take(raw, size)
                self.total += len(raw)
                self.trim.soon(len(raw))
        finally:
            self._ended = True
            self._news.set()

    async def _take(self, raw: bytes | PlacedRequest, size: int) -> None:
        inferences, item = self._inferences, self._submitted(raw)
        if isinstance(item, RequestRefused) and inferences.awaits_load(raw):
            try:
                await inferences.load(raw, self._call.time_remaining())
            except RequestRefused as refused:
                item = refused.bare()
            else:
                item = self._submitted(raw)
        if isinstance(item, StreamingRequest):
            self._open[item] = StreamEntry(inferences, item, size)
            return
        self._ordered.append((item, size))
        if isinstance(item, Submitted):
            item.when_done(self._news.set)
        else:
            self._news.set()

    def _submitted(
        self, raw: bytes | PlacedRequest
    ) -> Submitted | StreamingRequest | RequestRefused:
        try:
            return self._inferences.stream(raw, self._call, self._headers, self._responded)
        except RequestRefused as refused:
            return refused.bare()

    def _responded(self, request: StreamingRequest, message: Message) -> None:
        self._outbox.append((request, message))
        self._news.set()

    async def write(self, stall_s: float) -> None:
        """Write what is there to be written, until nothing is in flight and no request comes.

        Raises TimeoutError when a response is not taken within `stall_s` seconds.
        """
        together = 1
        while True:
            self._news.clear()
            idle = True
            if self._outbox:
                await self._write_outbox(together, stall_s)
                idle = False
            if self._ordered and _is_done(self._ordered[0][0]):
                await self._write_ordered(together, stall_s)
                idle = False
            together = _TOGETHER
            if idle:
                if self._ended and not (self._ordered or self._open):
                    return
                await self._news.wait()
                together = 1  # a first response is not delayed by a batch

    async def _write_outbox(self, together: int, stall_s: float) -> None:
        """Write what has come of decoupled models, as much as has `together` bytes."""
        responses: list[bytes] = []
        written: list[tuple[StreamEntry, Inferred | None, bool]] = []
        size = 0
        while self._outbox and size < together:
            request, message = self._outbox[0]
            streamed_request = self._open[request]
            try:
                response, inferred = streamed_request.encode(message, strict=self._strict)
            except ShmserveError:
                if responses:
                    break  # those before it are written first
                raise
            self._outbox.popleft()
            request.release_outputs(inferred)
            if response is not None:
                responses.append(response)
                size += len(response)
            written.append((streamed_request, inferred, is_last(message)))
        await self._send(responses, stall_s)
        for streamed_request, inferred, last in written:
            streamed_request.request.credit(inferred)
            if last:
                del self._open[streamed_request.request]
                streamed_request.leave()
                self._window.give(streamed_request.size)

    async def _write_ordered(self, together: int, stall_s: float) -> None:
        """Write the responses whose turn it is, as much as has `together` bytes."""
        responses: list[bytes] = []
        leaving: list[Submitted] = []
        size = window = 0
        try:
            while self._ordered and size < together and _is_done(self._ordered[0][0]):
                item, occupied = self._ordered[0]
                self._ordered.popleft()
                if isinstance(item, Submitted):
                    leaving.append(item)
                window += occupied
                try:
                    response = _response(item, strict=self._strict)
                except ShmserveError:
                    await self._send(responses, stall_s)
                    raise
                responses.append(response)
                size += len(response)
            await self._send(responses, stall_s)
        finally:
            for submitted in leaving:
                submitted.leave()
        self._window.give(window)

    async def _send(self, responses: Sequence[bytes], stall_s: float) -> None:
        if not responses:
            return
        self.total += sum(map(len, responses))
        await self._call.write_all(responses, stall_s)

    def cancel(self) -> None:
        """Cancel all that is in flight: the client is gone, or the call ends with an error."""
        while self._ordered:
            item, _ = self._ordered.popleft()
            if isinstance(item, Submitted):
                item.cancel()
        while self._outbox:
            request, message = self._outbox.popleft()
            request.discard(message)
        for streamed_request in self._open.values():
            streamed_request.request.cancel()
            streamed_request.leave()
        self._open.clear()


def _is_done(item: _Ordered) -> bool:
    return isinstance(item, RequestRefused) or item.done


def _response(item: _Ordered, *, strict: bool) -> bytes:
    if isinstance(item, RequestRefused):
        if strict:
            raise item.error
        return streamed_error(item.error.message, item.request_id)
    try:
        return streamed(item.response())
    except ShmserveError as error:
        if strict:
            raise
        return streamed_error(error.message, item.submit.request_id, item.model.name)
