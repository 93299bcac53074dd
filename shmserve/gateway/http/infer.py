"""Inference over HTTP: POST /v2/models/NAME/infer, and the queue of a model's responses.

    read_request ──> submit ──> HttpInference ──response──> `_encode`, or a template
             └── a client that accepts a stream: ResponseQueue ──response*──> `_Events`

The response of `infer` is a JSON text with binary data. `ResponseQueue` and `streaming_response`
also serve generate.py and OpenAI's API (openai/).

A request that equals an earlier one on its connection except for its tensors is begun by `_repeat`,
without a task, and its response is written in the callback. A task costs 15 of 50 us of CPU that a
small request takes with eight requests in flight.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from shmserve.common.tasks import settle
from shmserve.errors import ShmserveError, Unsupported
from shmserve.gateway.compression import compress_pieces, preferred_encoding
from shmserve.gateway.context import Gateway, needs_load, resolve_model
from shmserve.gateway.http.body import body_limit_us, header_size, read_request
from shmserve.gateway.http.json.fingerprint import Fingerprint, repeat
from shmserve.gateway.http.json.infer_response import JsonResponseTemplate
from shmserve.gateway.http.json.tensors import encode_in_turns, joined
from shmserve.gateway.http.messages import (
    ACCEPT,
    ACCEPT_ENCODING,
    CONTENT_ENCODING,
    HEADER_LENGTH,
    JSON_HEADER,
    REQUEST_TIMEOUT_MS,
    TRACEPARENT,
    ChunkedResponse,
    Framing,
    HttpRequest,
    HttpResponse,
    WriteResponse,
    find_accepted_framing,
    read_time_limit,
    traceparent_header,
)
from shmserve.gateway.inference.inference import (
    StreamedResponse,
    StreamingInference,
    UnaryInference,
    classify_outputs,
    find_error,
    is_last_response,
    log_failure,
    output_bytes,
    record_failure,
    reload_model,
    submit,
)
from shmserve.gateway.inference.prepare import BuiltRequest
from shmserve.gateway.inference.request import InferRequest
from shmserve.gateway.model_table import GatewayModel
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.inference import Inferred

logger = logging.getLogger(__name__)

_DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
_BINARY = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"


async def infer(
    gateway: Gateway, request: HttpRequest, name: str, version: str | None
) -> HttpResponse:
    """Run one inference."""
    arrived_ns = time.monotonic_ns()
    headers = request.headers
    limit = read_time_limit(headers)
    model = gateway.models.find(name, version or "")
    if model is None:
        model = await _loaded(gateway, request, name, version or "")
    framing = find_accepted_framing(headers[ACCEPT]) if ACCEPT in headers else None
    if framing is None and model.decoupled:
        raise Unsupported(_DECOUPLED)
    built_request = await read_request(gateway, model, request)
    if framing is not None:
        await reload_model(gateway, built_request)
        return await _stream(
            gateway, ResponseQueue(gateway, request, built_request, arrived_ns), framing
        )
    try:
        await reload_model(gateway, built_request)
        inference = submit(
            gateway,
            built_request,
            request.connection.client,
            arrived_ns,
            *(HttpInference, HttpInference.on_arrival, ACCEPT_ENCODING not in headers),
            *(gateway, request),
            call_limit=limit,
            traceparent=headers.get(TRACEPARENT, ""),
        )
    except ShmserveError as error:
        record_failure(built_request, error)
        raise
    request.repeat = None
    if built_request.responses is not None and _is_plain(request):
        head = (gateway.models.revision, headers.get(HEADER_LENGTH))
        request.repeat = partial(_repeat, gateway, request, model, *head)
    return await inference.response()


async def _loaded(gateway: Gateway, request: HttpRequest, name: str, version: str) -> GatewayModel:
    limit_us = read_time_limit(request.headers)[0]
    if not limit_us and needs_load(gateway, name, version):
        limit_us = await body_limit_us(gateway, request)
    return await resolve_model(gateway, name, version, limit_us)


def _is_plain(request: HttpRequest) -> bool:
    """Return whether a request is determined by its body, and no body is compressed."""
    headers = request.headers
    return not (
        request.is_http10
        or ACCEPT_ENCODING in headers
        or CONTENT_ENCODING in headers
        or TRACEPARENT in headers
        or REQUEST_TIMEOUT_MS in headers
    )


def _repeat(
    gateway: Gateway,
    request: HttpRequest,
    model: GatewayModel,
    revision: int,
    header_length: str | None,
    body: bytes,
    write_response: WriteResponse,
) -> HttpInference | None:
    """Begin an inference with the head of an earlier one, without a task.

    Returns:
        None if the fingerprint of the body is unknown, or the body is invalid. The handler of the
        request then reports the fault.
    """
    arrived_ns = time.monotonic_ns()
    if gateway.models.revision != revision or gateway.draining:
        return None
    try:
        whole_size = len(body)
        size = whole_size if header_length is None else header_size(header_length, whole_size)
        if size > gateway.settings.max_input_size:
            return None
        built_request = repeat(
            model.templates, Fingerprint(body[:size], whole_size - size), body, size
        )
        if built_request is None:
            return None
        return submit(
            *(gateway, built_request, request.connection.client, arrived_ns, HttpInference),
            *(HttpInference.on_arrival, True, gateway, request, write_response),
        )
    except Exception:
        return None


@dataclass(slots=True, eq=False)
class HttpInference(UnaryInference):
    """An in-flight inference of an HTTP client.

    Attributes:
        write_response: Writes the response in the callback; None if a task awaits `response`.
    """

    gateway: Gateway
    request: HttpRequest
    write_response: WriteResponse | None = None
    _waiter: asyncio.Future[None] | None = field(init=False, default=None)

    def on_arrival(self) -> None:
        """Handle the arrival of the response."""
        write_response, self.write_response = self.write_response, None
        if write_response is None:
            settle(self._waiter, None)
        elif (
            self.encoded is None
            or self.built_request.trace is not None
            or self.gateway.draining
            or logger.isEnabledFor(logging.DEBUG)  # only the task logs the duration
        ):
            write_response(None)
        else:
            json, binary = self.encoded
            if binary:
                write_response(b"".join((json, *binary)), _headers(json, binary))
            else:
                write_response(json)

    async def response(self) -> HttpResponse:
        """Return the response; raise the error of a failed inference."""
        built_request = self.built_request
        if self.message is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        try:
            response = await self._response(self.take())
        except ShmserveError as error:
            record_failure(built_request, error)
            raise
        if built_request.trace is not None:
            built_request.trace.finish()
        if logger.isEnabledFor(logging.DEBUG):
            passed_us = (time.monotonic_ns() - self.submit.arrived_ns) // 1000
            extra = {"request_id": built_request.infer_request.id}
            args = (built_request.model.name, passed_us)
            logger.debug("inference of model '%s' took %d us", *args, extra=extra)
        return response

    async def _response(self, message: m.Finished | m.Responded) -> HttpResponse:
        if self.encoded is not None:
            return _assemble(*self.encoded)
        built_request, gateway = self.built_request, self.gateway
        infer_request, model = built_request.infer_request, built_request.model
        inferred = self.outputs(message)
        uses_worker_memory = _has_worker_memory(infer_request, inferred)
        try:
            shown = classify_outputs(gateway, model, infer_request, inferred)
            template = None
            if built_request.responses is not None:
                template = built_request.responses.find(message.schema)
            if template is None:
                template = JsonResponseTemplate(infer_request, model.name, model.version, shown)
                if built_request.responses is not None and shown is inferred:
                    built_request.responses.store(message.schema, template)
            response = await _encode(gateway, self.request, infer_request.id, template, shown)
        except BaseException:
            if uses_worker_memory:
                self.release_outputs(inferred)
            raise
        if uses_worker_memory:
            response.on_sent = partial(self.release_outputs, inferred)
        return response


def _has_worker_memory(infer_request: InferRequest, inferred: Inferred) -> bool:
    """Return whether an output is in a worker's memory, not in the message or a client's region."""
    in_regions = infer_request.region_outputs
    return not all(type(each.data) is bytes or each.name in in_regions for each in inferred.outputs)


async def _encode(
    gateway: Gateway,
    request: HttpRequest,
    request_id: str,
    template: JsonResponseTemplate,
    inferred: Inferred,
) -> HttpResponse:
    """Return a response of any size, compressed if the client accepts it. Binary data are views."""
    trim = gateway.malloc_trim
    cuts: list[bytes] = []
    binary: list[bytes | memoryview] = []
    for output in template.outputs:
        data = output_bytes(gateway, inferred.outputs[output.position])
        if output.binary:
            binary.append(data)
            if output.byte_size < 0:
                cuts.append(b"%d" % len(data))
        else:
            described = (output.datatype, output.shape, output.name)
            cuts.append(await encode_in_turns(data, *described, trim))
    response = _assemble(template.json(request_id, cuts), binary)
    if ACCEPT_ENCODING in request.headers:
        encoding = preferred_encoding(request.headers[ACCEPT_ENCODING])
        if encoding != "identity":
            response.pieces = [await joined(compress_pieces(response.pieces, encoding), trim)]
            response.headers += b"Content-Encoding: %b\r\n" % encoding.encode()
    return response


def _assemble(json: bytes, binary: Sequence[bytes | memoryview]) -> HttpResponse:
    return HttpResponse(200, (json, *binary), _headers(json, binary))


def _headers(json: bytes, binary: Sequence[bytes | memoryview]) -> bytes:
    return _BINARY % len(json) if binary and any(map(len, binary)) else JSON_HEADER


# --- clients that accept a stream


async def _stream(gateway: Gateway, responses: ResponseQueue, framing: Framing) -> HttpResponse:
    """Return the stream of the responses: JSON texts without binary data, in events or lines.

    Raises:
        ShmserveError: The only response is an error.
    """
    first = await responses.begun()
    error = find_error(first)
    if error is not None and is_last_response(first):
        responses.close()
        log_failure(responses.request.built_request, error)
        raise error
    status = 200 if error is None else error.status
    events = _Events(gateway, responses, framing)
    return streaming_response(status, framing.content_type, responses, events.next)


class _Events:
    """The encoder of a stream's responses, with templates for schemas that have occurred."""

    def __init__(self, gateway: Gateway, responses: ResponseQueue, framing: Framing) -> None:
        self._gateway = gateway
        self._model = responses.request.built_request.model
        self._responses = responses
        self._framing = framing
        infer_request = responses.request.built_request.infer_request
        outputs = [replace(output, binary=False) for output in infer_request.outputs]
        self._infer_request = replace(infer_request, outputs=outputs, binary=False)

    async def next(self) -> tuple[bytes | None, Inferred | None]:
        """Encode the first response in the queue, for `streaming_response`."""
        request, message = self._responses.request, self._responses.first
        inferred: Inferred | None = None
        try:
            if (filled := request.from_template(message)) is not None:
                return self._framing.frame(filled[0]), None
            inferred = request.outputs(message)
            if inferred is None:
                return None, None
            json = await self._json(inferred, message)
        except ShmserveError as error:
            return self._framing.error(error.message), inferred
        return self._framing.frame(json), inferred

    async def _json(self, inferred: Inferred, message: StreamedResponse) -> bytes:
        gateway, model = self._gateway, self._model
        shown = classify_outputs(gateway, model, self._infer_request, inferred)
        template = JsonResponseTemplate(self._infer_request, model.name, model.version, shown)
        if shown is inferred and isinstance(message, m.Responded) and not message.final:
            self._responses.request.templates.store(message.schema, template)
        arrays: list[bytes] = []
        for output in template.outputs:
            data = output_bytes(gateway, shown.outputs[output.position])
            described = (output.datatype, output.shape, output.name)
            arrays.append(await encode_in_turns(data, *described, gateway.malloc_trim))
        return template.json(self._infer_request.id, arrays)


_MOST_BYTES_AT_ONCE = 32 * 1024  # bytes of responses that are written together


class ResponseQueue:
    """A request in flight, and the queue of its responses.

    Args:
        gateway: The gateway.
        request: The client's request.
        built: The request for the model.
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
            limit = read_time_limit(headers)
        except BaseException:
            built_request.release()
            raise
        trace = headers.get(TRACEPARENT, "")
        self.request = submit(
            *(gateway, built_request, client, arrived_ns, StreamingInference, self._responded),
            call_limit=limit,
            traceparent=trace,
        )

    def _responded(self, _: StreamingInference, message: StreamedResponse) -> None:
        self._messages.append(message)
        self._response_event.set()

    @property
    def headers(self) -> bytes:
        """Return the headers of the response, which identify the trace also for later errors."""
        trace = self.request.built_request.trace
        return b"" if trace is None else traceparent_header(trace.context.traceparent)

    @property
    def first(self) -> StreamedResponse:
        """Return the first response in the queue."""
        return self._messages[0]

    def __bool__(self) -> bool:
        return bool(self._messages)

    async def wait(self) -> None:
        """Wait until the queue contains a response."""
        while not self._messages:
            self._response_event.clear()
            await self._response_event.wait()

    async def begun(self) -> StreamedResponse:
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
        return is_last_response(message)

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
