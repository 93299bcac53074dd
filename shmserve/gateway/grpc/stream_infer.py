"""ModelStreamInfer: a full-duplex call whose requests and responses are multiplexed.

The responses of ordinary models are sent in the order of the requests. Responses of decoupled
models are interleaved with them, in the order of arrival. A failed request does not end the
stream: its response contains the error. With the metadata `triton_grpc_error: true`, the first
error ends the stream with its status.

    ordinary models ──> the oldest request has its response ──┐
    decoupled models ──> a response has arrived ──────────────┴──> sent; credit is returned
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shmserve.errors import ShmserveError, Unavailable
from shmserve.gateway.grpc.call import StreamingCall
from shmserve.gateway.grpc.framing import MessageContent, release_message
from shmserve.gateway.grpc.infer import Inferences, RequestRefused
from shmserve.gateway.grpc.wire.response import (
    encode_stream_end,
    encode_stream_error,
    encode_streamed,
)
from shmserve.gateway.inference.in_flight import (
    StreamedResponse,
    StreamingInference,
    UnaryInference,
    is_last_response,
)
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.schemas import Inferred

# The limit of the bytes of a stream's requests in flight. Later requests are not read, since other
# clients of the model would wait behind them, and their responses need memory, too. A small request
# counts as `_MIN_REQUEST_BYTES` bytes, so that at most 1024 requests are in flight.
_WINDOW_BYTES = 32 * 1024 * 1024
_MIN_REQUEST_BYTES = _WINDOW_BYTES // 1024
_MAX_JOINED_BYTES = 32 * 1024  # bytes of responses that are written together

# A request to an ordinary model, whose response is sent in the order of the requests.
_OrderedEntry = UnaryInference | RequestRefused


class _Window:
    """Flow control of requests in flight, in bytes; the last request may exceed the limit."""

    def __init__(self, size: int) -> None:
        self._free_bytes = size
        self._enlarged_event = asyncio.Event()

    async def reserve(self, size: int) -> None:
        """Wait until the window is open, and reduce it. Only one task may wait."""
        while self._free_bytes <= 0:
            self._enlarged_event.clear()
            await self._enlarged_event.wait()
        self._free_bytes -= size

    def release(self, size: int) -> None:
        """Enlarge the window by the size of a request that has ended."""
        self._free_bytes += size
        self._enlarged_event.set()


async def stream_infer(inferences: Inferences, call: StreamingCall) -> None:
    """Handle a call until its last response is sent, or the client disconnects.

    Raises:
        ShmserveError: A request has failed, and the call ends on the first error.
        Unavailable: The client reads at less than `SLOWEST_RATE` for `body_timeout_s` seconds.
    """
    stream = _InferStream(inferences, call)
    # Until the call ends, it uses memory for an unread response and for incomplete requests.
    call.on_ended = lambda: stream.malloc_trim.schedule(stream.total_bytes)
    reader_task = asyncio.create_task(stream.read_requests())
    try:
        await stream.write_responses()
        await reader_task  # raises the error of the reader, which has ended
    except TimeoutError:
        raise Unavailable("the client does not read its responses") from None
    finally:
        # Cancel everything before waiting, since a second cancellation would interrupt the wait.
        reader_task.cancel()
        stream.cancel()
        await asyncio.wait((reader_task,))


@dataclass(eq=False)
class _InferStream:
    """The state of one call; `total_bytes` counts the bytes of its requests and responses."""

    _inferences: Inferences
    _call: StreamingCall

    def __post_init__(self) -> None:
        inferences = self._inferences
        self._headers = inferences.select_headers(self._call.head)
        self._ends_on_error = self._call.head.ends_on_error
        self._window = _Window(_WINDOW_BYTES)
        # Requests in order, each with the bytes that it occupies in the window.
        self._ordered_entries: deque[tuple[_OrderedEntry, int]] = deque()
        # The bytes that the request of each inference of a decoupled model occupies in the window.
        self._decoupled_sizes: dict[StreamingInference, int] = {}
        # The responses of decoupled models, in the order of arrival.
        self._outbox: deque[tuple[StreamingInference, StreamedResponse]] = deque()
        self._is_half_closed = False  # whether the client has half-closed the call
        self._progress = asyncio.Event()  # set when responses may be ready to be written
        self.total_bytes = 0  # bytes of all requests and responses
        self.malloc_trim = inferences.gateway.malloc_trim

    async def read_requests(self) -> None:
        """Submit requests while the window is open."""
        try:
            async for received_message in self._call.read_messages():
                size = max(len(received_message), _MIN_REQUEST_BYTES)
                try:
                    await self._window.reserve(size)
                except BaseException:
                    release_message(received_message)
                    raise
                await self._submit_entry(received_message, size)
                self.total_bytes += len(received_message)
                self.malloc_trim.schedule(len(received_message))
        finally:
            self._is_half_closed = True
            self._progress.set()

    async def _submit_entry(self, received_message: MessageContent, size: int) -> None:
        inferences, entry = self._inferences, self._submit(received_message)
        if isinstance(entry, RequestRefused) and inferences.needs_load(received_message):
            try:
                await inferences.load_model(received_message, self._call.remaining_us())
            except RequestRefused as refused:
                entry = refused.without_traceback()
            else:
                entry = self._submit(received_message)
        if not isinstance(entry, RequestRefused):
            inferences.active_count += 1
        if isinstance(entry, StreamingInference):
            self._decoupled_sizes[entry] = size
            return
        self._ordered_entries.append((entry, size))
        if _is_done(entry):
            self._progress.set()

    def _submit(
        self, received_message: MessageContent
    ) -> UnaryInference | StreamingInference | RequestRefused:
        submit_args = (self._headers, self._on_response, self._on_streamed)
        try:
            return self._inferences.submit_request(received_message, self._call, *submit_args)
        except RequestRefused as refused:
            return refused.without_traceback()

    def _on_response(self, _: UnaryInference) -> None:
        self._progress.set()

    def _on_streamed(self, inference: StreamingInference, message: StreamedResponse) -> None:
        self._outbox.append((inference, message))
        self._progress.set()

    async def write_responses(self) -> None:
        """Write responses until the client has half-closed the call and has all of them.

        Raises:
            TimeoutError: The client reads at less than `SLOWEST_RATE` for `body_timeout_s` seconds.
        """
        byte_limit = 1
        while True:
            self._progress.clear()
            is_idle = True
            if self._outbox:
                await self._write_outbox(byte_limit)
                is_idle = False
            if self._ordered_entries and _is_done(self._ordered_entries[0][0]):
                await self._write_ordered(byte_limit)
                is_idle = False
            byte_limit = _MAX_JOINED_BYTES
            if is_idle:
                if self._is_half_closed and not (self._ordered_entries or self._decoupled_sizes):
                    return
                await self._progress.wait()
                byte_limit = 1  # the first response is written before others are encoded

    async def _write_outbox(self, byte_limit: int) -> None:
        """Write responses of decoupled models, up to a total of `byte_limit` bytes."""
        responses: list[bytes] = []
        written_responses: list[tuple[StreamingInference, Inferred | None, bool]] = []
        size = 0
        while self._outbox and size < byte_limit:
            inference, message = self._outbox[0]
            try:
                response, inferred = self._encode_streamed(inference, message)
            except ShmserveError:
                if responses:
                    break  # the responses before the error are written first
                raise
            self._outbox.popleft()
            inference.release_outputs(inferred)
            if response is not None:
                responses.append(response)
                size += len(response)
            written_responses.append((inference, inferred, is_last_response(message)))
        await self._send(responses)
        for inference, inferred, is_last in written_responses:
            inference.credit(inferred)
            if is_last:
                self._inferences.decrement()
                self._window.release(self._decoupled_sizes.pop(inference))

    def _encode_streamed(
        self, inference: StreamingInference, message: StreamedResponse
    ) -> tuple[bytes | None, Inferred | None]:
        """Encode a response of a decoupled model.

        Returns:
            The message, or None to send nothing; and the outputs, which the caller releases.

        Raises:
            ShmserveError: The response is an error, and the call ends on the first error.
        """
        is_final = is_last_response(message)
        built_request = inference.built_request
        infer_request, model = built_request.infer_request, built_request.model
        if (encoded_response := inference.from_template(message)) is not None:
            return encode_streamed(encoded_response, is_final=False), None
        schema = b"" if isinstance(message, m.Failed) else message.schema
        inferred: Inferred | None = None
        try:
            inferred = inference.unpack_outputs(message)
            if inferred is None:
                end_message = encode_stream_end(model.name, infer_request.version, infer_request.id)
                return end_message if infer_request.has_empty_final else None, None
            trace = built_request.trace
            is_explained = trace is not None and trace.has_explanation
            templates = None if is_explained else inference.response_templates
            response = self._inferences.encode(built_request, templates, schema, inferred)
        except ShmserveError as error:
            if self._ends_on_error:
                raise
            ids = (infer_request.id, model.name)
            return encode_stream_error(error.message, *ids, is_final=is_final), inferred
        return encode_streamed(response, is_final=is_final), inferred

    async def _write_ordered(self, byte_limit: int) -> None:
        """Write the responses that are next in order, up to a total of `byte_limit` bytes."""
        responses: list[bytes] = []
        size = released_bytes = inference_count = 0  # `released_bytes` are bytes of the window
        try:
            while (
                self._ordered_entries
                and size < byte_limit
                and _is_done(self._ordered_entries[0][0])
            ):
                entry, window_bytes = self._ordered_entries[0]
                self._ordered_entries.popleft()
                inference_count += isinstance(entry, UnaryInference)
                released_bytes += window_bytes
                try:
                    response = self._encode_entry(entry)
                except ShmserveError:
                    await self._send(responses)
                    raise
                responses.append(response)
                size += len(response)
            await self._send(responses)
        finally:
            for _ in range(inference_count):
                self._inferences.decrement()
        self._window.release(released_bytes)

    def _encode_entry(self, entry: _OrderedEntry) -> bytes:
        try:
            if isinstance(entry, RequestRefused):
                raise entry.error
            return encode_streamed(self._inferences.encode_response(entry))
        except ShmserveError as error:
            if self._ends_on_error:
                raise
            if isinstance(entry, RequestRefused):
                return encode_stream_error(error.message, entry.request_id)
            model = entry.built_request.model.name
            return encode_stream_error(error.message, entry.submit.request_id, model)

    async def _send(self, responses: Sequence[bytes]) -> None:
        if not responses:
            return
        self.total_bytes += sum(map(len, responses))
        await self._call.write_all(responses, self._inferences.gateway.settings.body_timeout_s)

    def cancel(self) -> None:
        """Cancel all requests in flight, since the call ends early."""
        while self._ordered_entries:
            entry, _ = self._ordered_entries.popleft()
            if isinstance(entry, UnaryInference):
                entry.cancel()
                self._inferences.decrement()
        while self._outbox:
            inference, message = self._outbox.popleft()
            inference.discard(message)
        for inference in self._decoupled_sizes:
            inference.cancel()
            self._inferences.decrement()
        self._decoupled_sizes.clear()


def _is_done(entry: _OrderedEntry) -> bool:
    return isinstance(entry, RequestRefused) or entry.message is not None
