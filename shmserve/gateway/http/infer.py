"""Inference over HTTP: POST /v2/models/NAME/infer.

    read_request ──> HttpInference ──response──> filled template, or `_encode_response`
             └── a client that accepts a stream: ResponseQueue ──response*──> `_StreamEncoder`

The response of `infer` is a JSON text with binary data. The scheduler's message reaches the
`HttpInference` through `SchedulerClient.handle`, `GatewayRequest.handle`,
`UnaryInference.handle_response` and `HttpInference.deliver`.

A repeated request equals an earlier request on its connection except for its tensors. It is begun
by `_infer_repeated` without a task, and its response is written in the callback. A task costs 15 of
the 50 us of CPU that a small request takes with eight requests in flight.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from shmserve.common.tasks import resolve_future
from shmserve.errors import ShmserveError, Unsupported
from shmserve.gateway.compression import compress_pieces, preferred_encoding
from shmserve.gateway.context import Gateway, GatewayModel, needs_load, resolve_model
from shmserve.gateway.http.body import header_size, read_request, timeout_in_body_us
from shmserve.gateway.http.json.codec import JsonResponseTemplate
from shmserve.gateway.http.json.fingerprint import Fingerprint, fill_known_template
from shmserve.gateway.http.json.tensors import encode_in_pieces, list_in_turns
from shmserve.gateway.http.messages import (
    ACCEPT,
    ACCEPT_ENCODING,
    CONTENT_ENCODING,
    HEADER_LENGTH,
    JSON_HEADER,
    REQUEST_TIMEOUT_MS,
    TRACEPARENT,
    Framing,
    HttpRequest,
    HttpResponse,
    WriteResponse,
    find_accepted_framing,
    read_time_limit,
)
from shmserve.gateway.http.response_queue import ResponseQueue, streaming_response
from shmserve.gateway.inference.classification import classify_outputs
from shmserve.gateway.inference.in_flight import (
    UnaryInference,
    find_error,
    is_last_response,
    log_failure,
    output_bytes,
    record_failure,
    reload_model,
    submit_inference,
)
from shmserve.gateway.inference.infer_request import InferRequest
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.schemas import Inferred

logger = logging.getLogger(__name__)

_DECOUPLED_UNSUPPORTED = "HTTP end point doesn't support models with decoupled transaction policy"
_BINARY_HEAD = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"


async def infer(gateway: Gateway, request: HttpRequest, name: str, version: str) -> HttpResponse:
    """Handle POST /v2/models/NAME/infer: run one inference."""
    arrived_ns = time.monotonic_ns()
    headers = request.headers
    call_limit = read_time_limit(headers)
    model = gateway.models.find(name, version)
    if model is None:
        model = await _load_on_demand(gateway, request, name, version)
    stream_framing = find_accepted_framing(headers[ACCEPT]) if ACCEPT in headers else None
    if stream_framing is None and model.decoupled:
        raise Unsupported(_DECOUPLED_UNSUPPORTED)
    built_request = await read_request(gateway, model, request)
    if stream_framing is not None:
        await reload_model(gateway, built_request)
        # The templates encode each output in the form that the request asks for, JSON or binary. A
        # stream has all outputs as JSON.
        built_request.response_templates = None
        queue = ResponseQueue(gateway, request, built_request, arrived_ns)
        return await _stream_responses(gateway, queue, stream_framing)
    try:
        await reload_model(gateway, built_request)
        inference = submit_inference(
            gateway,
            built_request,
            request.connection.client,
            arrived_ns,
            partial(
                HttpInference,
                on_response=HttpInference.deliver,
                allows_template=ACCEPT_ENCODING not in headers,
                gateway=gateway,
                http_request=request,
            ),
            call_limit,
            headers.get(TRACEPARENT, ""),
        )
    except ShmserveError as error:
        record_failure(built_request, error)
        raise
    request.begin_repeated = None
    if built_request.response_templates is not None and _depends_only_on_body(request):
        arguments = (gateway, request, model, gateway.models.revision, headers.get(HEADER_LENGTH))
        request.begin_repeated = partial(_infer_repeated, *arguments)
    return await inference.response()


async def _load_on_demand(
    gateway: Gateway, request: HttpRequest, name: str, version: str
) -> GatewayModel:
    limit_us = read_time_limit(request.headers)[0]
    if not limit_us and needs_load(gateway, name, version):
        limit_us = await timeout_in_body_us(gateway, request)
    return await resolve_model(gateway, name, version, limit_us)


def _depends_only_on_body(request: HttpRequest) -> bool:
    """Return whether no header affects the response, and neither body is compressed."""
    headers = request.headers
    return not (
        request.is_http10
        or ACCEPT_ENCODING in headers
        or CONTENT_ENCODING in headers
        or TRACEPARENT in headers
        or REQUEST_TIMEOUT_MS in headers
    )


def _infer_repeated(
    gateway: Gateway,
    request: HttpRequest,
    model: GatewayModel,
    revision: int,  # of the model table when the earlier request was handled
    header_length: str | None,
    body: bytes,
    write_response: WriteResponse,
) -> HttpInference | None:
    """Begin a request with the head of an earlier request on its connection, without a task.

    Returns:
        None if the fingerprint of the body is unknown, or the body is invalid. The handler of the
        request then reports the fault.
    """
    arrived_ns = time.monotonic_ns()
    if gateway.models.revision != revision or gateway.is_draining:
        return None
    try:
        body_size = len(body)
        size = body_size if header_length is None else header_size(header_length, body_size)
        if size > gateway.settings.max_input_size:
            return None
        fingerprint = Fingerprint(body[:size], body_size - size)
        built_request = fill_known_template(model.templates, fingerprint, body, size)
        if built_request is None:
            return None
        create_inference = partial(
            HttpInference,
            on_response=HttpInference.deliver,
            gateway=gateway,
            http_request=request,
            write_response=write_response,
        )
        client = request.connection.client
        return submit_inference(gateway, built_request, client, arrived_ns, create_inference)
    except Exception:
        return None


@dataclass(slots=True, eq=False)
class HttpInference(UnaryInference):
    """An in-flight inference of an HTTP client.

    Attributes:
        write_response: Writes the response when it arrives; None if a task awaits `response`.
    """

    gateway: Gateway
    http_request: HttpRequest
    write_response: WriteResponse | None = None
    _waiter: asyncio.Future[None] | None = field(init=False, default=None)

    def deliver(self) -> None:
        """Write the response, or resume the task that awaits it."""
        write_response, self.write_response = self.write_response, None
        if write_response is None:
            resolve_future(self._waiter, None)
        elif self.encoded is None or self.gateway.is_draining or logger.isEnabledFor(logging.DEBUG):
            write_response(None)  # only the task logs the duration, at the level DEBUG
        else:
            json, binary = self.encoded
            if binary:
                write_response(b"".join((json, *binary)), _response_headers([json], binary))
            else:
                write_response(json)
            if self.built_request.trace is not None:
                self.built_request.trace.finish()

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
            response = await self._create_response(self.take())
        except ShmserveError as error:
            record_failure(built_request, error)
            raise
        if built_request.trace is not None:
            built_request.trace.finish()
        if logger.isEnabledFor(logging.DEBUG):
            duration_us = (time.monotonic_ns() - self.submit.arrived_ns) // 1000
            log_fields = {"request_id": built_request.infer_request.id}
            log_args = (built_request.model.name, duration_us)
            logger.debug("inference of model '%s' took %d us", *log_args, extra=log_fields)
        return response

    async def _create_response(self, message: m.Finished | m.Responded) -> HttpResponse:
        if self.encoded is not None:
            json, binary = self.encoded
            return _assemble_response([json], binary)
        built_request, gateway = self.built_request, self.gateway
        infer_request, model = built_request.infer_request, built_request.model
        inferred = self.unpack_outputs(message)
        uses_worker_memory = _has_worker_memory(infer_request, inferred)
        try:
            classified_response = classify_outputs(gateway, model, infer_request, inferred)
            template = None
            if built_request.response_templates is not None:
                template = built_request.response_templates.find(message.schema)
            if template is None:
                template = JsonResponseTemplate(
                    infer_request, model.name, model.version, classified_response
                )
                if built_request.response_templates is not None and classified_response is inferred:
                    built_request.response_templates.store(message.schema, template)
            response = await _encode_response(
                gateway, self.http_request, infer_request.id, template, classified_response
            )
        except BaseException:
            if uses_worker_memory:
                self.release_outputs(inferred)
            raise
        if uses_worker_memory:
            response.on_sent = partial(self.release_outputs, inferred)
        return response


def _has_worker_memory(infer_request: InferRequest, inferred: Inferred) -> bool:
    """Return whether an output is in a worker's memory, not in the message or a client's region."""
    region_outputs = infer_request.region_outputs
    return not all(type(o.data) is bytes or o.name in region_outputs for o in inferred.outputs)


async def _encode_response(
    gateway: Gateway,
    request: HttpRequest,
    request_id: str,
    template: JsonResponseTemplate,
    inferred: Inferred,
) -> HttpResponse:
    """Return a response of any size, compressed if the client accepts that.

    The binary data of an uncompressed response are views of the outputs.
    """
    text_values, binary_parts = await _encode_outputs(gateway, template, inferred)
    json_pieces = template.encode_pieces(request_id, text_values)
    response = _assemble_response(json_pieces, binary_parts)
    if ACCEPT_ENCODING in request.headers:
        encoding = preferred_encoding(",".join(request.headers.getall(ACCEPT_ENCODING)))
        if encoding != "identity":
            compressed_pieces = compress_pieces(response.pieces, encoding)
            response.pieces = await list_in_turns(compressed_pieces, gateway.malloc_trim)
            response.headers += b"Content-Encoding: %b\r\n" % encoding.encode()
    return response


async def _encode_outputs(
    gateway: Gateway, template: JsonResponseTemplate, inferred: Inferred
) -> tuple[list[list[bytes]], list[bytes | memoryview]]:
    """Return the texts for `template.encode_pieces`, and views of the binary outputs."""
    json_arrays: list[list[bytes]] = []
    binary_data: list[bytes | memoryview] = []
    for output in template.outputs:
        data = output_bytes(gateway, inferred.outputs[output.position])
        if output.binary:
            binary_data.append(data)
            if output.byte_size < 0:
                json_arrays.append([b"%d" % len(data)])
        else:
            tensor_fields = (output.datatype, output.shape, output.name)
            json_arrays.append(await encode_in_pieces(data, *tensor_fields, gateway.malloc_trim))
    return json_arrays, binary_data


def _assemble_response(json: list[bytes], binary: Sequence[bytes | memoryview]) -> HttpResponse:
    return HttpResponse(200, (*json, *binary), _response_headers(json, binary))


def _response_headers(json: list[bytes], binary: Sequence[bytes | memoryview]) -> bytes:
    if binary and any(map(len, binary)):
        return _BINARY_HEAD % sum(map(len, json))
    return JSON_HEADER


# --- clients that accept a stream


async def _stream_responses(
    gateway: Gateway, queue: ResponseQueue, framing: Framing
) -> HttpResponse:
    """Return the stream of the responses: JSON texts without binary data, in events or lines.

    Raises:
        ShmserveError: The only response is an error.
    """
    first_response = await queue.wait_for_first()
    error = find_error(first_response)
    if error is not None and is_last_response(first_response):
        queue.close()
        log_failure(queue.inference.built_request, error)
        raise error
    status = 200 if error is None else error.status
    return streaming_response(status, framing, queue, _StreamEncoder(gateway, queue).encode)


class _StreamEncoder:
    """The encoder of a stream's responses, with templates for schemas that have occurred."""

    def __init__(self, gateway: Gateway, queue: ResponseQueue) -> None:
        self._gateway = gateway
        self._model = queue.inference.built_request.model
        self._queue = queue
        infer_request = queue.inference.built_request.infer_request
        outputs = [replace(output, binary=False) for output in infer_request.outputs]
        self._infer_request = replace(infer_request, outputs=outputs, binary=False)

    async def encode(self, inferred: Inferred) -> bytes:
        """Return the JSON text of the first response in the queue, which has these outputs."""
        gateway, model = self._gateway, self._model
        response = classify_outputs(gateway, model, self._infer_request, inferred)
        template = JsonResponseTemplate(self._infer_request, model.name, model.version, response)
        message = self._queue.first_response
        if response is inferred and isinstance(message, m.Responded) and not message.final:
            self._queue.inference.response_templates.store(message.schema, template)
        json_arrays, _ = await _encode_outputs(gateway, template, response)
        return b"".join(template.encode_pieces(self._infer_request.id, json_arrays))
