"""POST /v2/models/NAME/infer: the hot path of a unary inference, to a scheduler and back. Clients
that accept a stream get one: `streaming/infer_stream.py`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from shmserve.common.tasks import settle
from shmserve.errors import ShmserveError, Unsupported
from shmserve.gateway.compression import accepted_encoding, deflated
from shmserve.gateway.context import Gateway, awaits_load, loaded
from shmserve.gateway.http.body import own_timeout_us, read_request, repeated_request
from shmserve.gateway.http.json.infer_response import JsonResponseTemplate, joined, output_text
from shmserve.gateway.http.messages import (
    ACCEPT,
    ACCEPT_ENCODING,
    CONTENT_ENCODING,
    HEADER_LENGTH,
    JSON,
    TRACEPARENT,
    Answer,
    HttpRequest,
    HttpResponse,
    accepted,
    written,
)
from shmserve.gateway.http.streaming.infer_stream import infer_stream
from shmserve.gateway.inference.builder import BuiltRequest
from shmserve.gateway.inference.request import InferRequest
from shmserve.gateway.inference.response import classified_as_requested, output_bytes, unpack
from shmserve.gateway.inference.submit import failure, log_failure, prepare_submit, still
from shmserve.gateway.links import GatewayRequest
from shmserve.gateway.model_table import GatewayModel
from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.inference import Response
from shmserve.ipc.tensors.inference import Inferred

logger = logging.getLogger(__name__)


_DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
_BINARY = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"


async def infer(
    gateway: Gateway, request: HttpRequest, name: str, version: str | None
) -> HttpResponse:
    """Run one inference."""
    arrived_ns = time.monotonic_ns()
    model = gateway.models.find(name, version or "")
    if model is None:
        model = await _loaded(gateway, request, name, version or "")
    if ACCEPT in request.headers and (framing := accepted(request.headers[ACCEPT])) is not None:
        return await infer_stream(gateway, request, model, framing, arrived_ns)
    if model.decoupled:
        raise Unsupported(_DECOUPLED)
    built = await read_request(gateway, model, request)
    try:
        if not model.published:
            await still(gateway, model, built)
        client = request.connection.client
        traceparent = ""
        if TRACEPARENT in request.headers:
            traceparent = request.headers[TRACEPARENT]
        now, submit = prepare_submit(gateway, model, built, client, arrived_ns, 0, traceparent)
    except ShmserveError as error:
        _failed(model, built, error)
        raise
    inference = _submitted(gateway, request, model, built, now.endpoint, submit)
    request.repeat = None
    if built.responses is not None and _is_plain(request):
        request.repeat = RepeatedInference(gateway, request, model).begin
    return await inference.response()


def _submitted(
    gateway: Gateway,
    request: HttpRequest,
    model: GatewayModel,
    built: BuiltRequest,
    endpoint: str,
    submit: m.Submit,
    answer: Answer | None = None,
) -> HttpInference:
    how = (submit, gateway.schedulers, built.release)
    inference = HttpInference(*how, gateway, request, model, built, answer)
    gateway.schedulers.submit(inference, endpoint)
    return inference


def _failed(model: GatewayModel, built: BuiltRequest, error: ShmserveError) -> None:
    log_failure(model, built.infer_request.id, error, built.trace)
    if built.trace is not None:
        built.trace.finish(error.message)


async def _loaded(gateway: Gateway, request: HttpRequest, name: str, version: str) -> GatewayModel:
    limit_us = 0
    if awaits_load(gateway, name, version):
        limit_us = await own_timeout_us(gateway, request)
    return await loaded(gateway, name, version, limit_us)


def _is_plain(request: HttpRequest) -> bool:
    """Whether all that a request says is in its body, and both bodies are sent as they are."""
    headers = request.headers
    return not (
        request.is_http10
        or ACCEPT_ENCODING in headers
        or CONTENT_ENCODING in headers
        or TRACEPARENT in headers
    )


class RepeatedInference:
    """Begins inferences whose head is that of an earlier one without a task, if their bodies, too,
    are like earlier ones."""

    __slots__ = ("_gateway", "_header_size", "_model", "_request", "_revision")

    def __init__(self, gateway: Gateway, request: HttpRequest, model: GatewayModel) -> None:
        self._gateway = gateway
        self._request = request
        self._model = model
        self._revision = gateway.models.revision
        self._header_size = request.headers.get(HEADER_LENGTH)

    def begin(self, body: bytes, answer: Answer) -> HttpInference | None:
        """The inference with this body, in flight; None for one that is to be handled, which says
        what is wrong with it."""
        arrived_ns = time.monotonic_ns()
        gateway, model, request = self._gateway, self._model, self._request
        if gateway.models.revision != self._revision or gateway.draining:
            return None
        try:
            built = repeated_request(gateway, model, body, self._header_size)
            if built is None:
                return None
            client = request.connection.client
            _, submit = prepare_submit(gateway, model, built, client, arrived_ns)
        except Exception:
            return None  # what is wrong is said where it is read again
        return _submitted(gateway, request, model, built, model.endpoint, submit, answer)


@dataclass(slots=True, eq=False)
class HttpInference(GatewayRequest):
    """A request in flight for one response; to be awaited with `response`, or cancelled. One with
    an `answer` awaits by itself, until it has told that."""

    gateway: Gateway
    request: HttpRequest
    model: GatewayModel
    built: BuiltRequest
    answer: Answer | None = None
    _message: Response | None = field(init=False, default=None)  # that nobody has read
    _waiter: asyncio.Future[None] | None = field(init=False, default=None)

    def responded(self, message: Response) -> None:
        if not self.over:
            self.discard(message)  # its model gives one response
            return
        self._message = message
        answer, self.answer = self.answer, None
        if answer is not None:
            answer(self._filled(message))
        else:
            settle(self._waiter, None)

    def _filled(self, message: Response) -> bytes | None:
        """Return the response if its schema is known and all of it is in the message."""
        built = self.built
        responses = built.responses
        if (
            type(message) is not m.Finished
            or built.trace is not None
            or responses is None
            or self.gateway.draining
            or logger.isEnabledFor(logging.DEBUG)
            or (known := responses.find(message.schema)) is None
        ):
            return None
        try:
            filled = known.fill(built.infer_request.id, message.data)
        except Exception:
            return None  # the error is reported where the response is encoded again
        if filled is None:
            return None
        json, binary = filled
        self._message = None
        return written(_headers(json, binary), (json, *binary))

    async def response(self) -> HttpResponse:
        """The response, once it has come; raises what the inference failed with."""
        built = self.built
        try:
            message = await self._last_message()
            if built.trace is not None:
                built.trace.answered(message)
            if isinstance(message, m.Failed):
                raise failure(message)
            response = await _respond(self, message)
        except ShmserveError as error:
            _failed(self.model, built, error)
            raise
        if built.trace is not None:
            built.trace.finish()
        if logger.isEnabledFor(logging.DEBUG):
            passed_us = (time.monotonic_ns() - self.submit.arrived_ns) // 1000
            extra = {"request_id": built.infer_request.id}
            told = (self.model.name, passed_us)
            logger.debug("inference of model '%s' took %d us", *told, extra=extra)
        return response

    async def _last_message(self) -> Response:
        if self._message is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        message, self._message = self._message, None
        assert message is not None
        return message

    def cancel(self) -> None:
        """Cancel it: the client is gone."""
        message, self._message = self._message, None
        if message is not None:
            self.discard(message)
        self.give_up()
        if self.built.trace is not None:
            self.built.trace.gone()


async def _respond(inference: HttpInference, message: m.Finished | m.Responded) -> HttpResponse:
    """Return the response to a request. Raises what it cannot be encoded for."""
    gateway, model, request = inference.gateway, inference.model, inference.request
    built = inference.built
    asked, responses = built.infer_request, built.responses
    template = None if responses is None else responses.find(message.schema)
    if template is not None and ACCEPT_ENCODING not in request.headers:
        filled = template.fill(asked.id, message.data)
        if filled is not None:
            return _assemble(*filled)
    inferred = unpack(message.schema, message.data)
    if built.trace is not None:
        inferred = built.trace.explain(inferred)
    lent = not _needs_no_release(asked, inferred)
    try:
        shown = classified_as_requested(gateway, model, asked, inferred)
        if template is None:
            template = JsonResponseTemplate(asked, model.name, model.version, shown)
            if responses is not None and shown is inferred:
                responses.remember(message.schema, template)
        response = await _encode(gateway, request, asked.id, template, shown)
    except BaseException:
        if lent:
            inference.release_outputs(inferred)
        raise
    if lent:
        response.on_sent = partial(inference.release_outputs, inferred)
    return response


def _needs_no_release(infer_request: InferRequest, inferred: Inferred) -> bool:
    """Whether all outputs are inline or in clients' regions, none in a worker's memory."""
    placed = {output.name for output in infer_request.outputs if output.place is not None}
    return all(type(tensor.data) is bytes or tensor.name in placed for tensor in inferred.outputs)


async def _encode(
    gateway: Gateway,
    request: HttpRequest,
    request_id: str,
    template: JsonResponseTemplate,
    response: Inferred,
) -> HttpResponse:
    """Return a response of any size, compressed if the client takes it. Binary data are views."""
    trim = gateway.malloc_trim
    cuts: list[bytes] = []
    binary: list[bytes | memoryview] = []
    for output in template.outputs:
        data = output_bytes(gateway, response.outputs[output.position])
        if output.binary:
            binary.append(data)
            if output.byte_size < 0:
                cuts.append(b"%d" % len(data))
        else:
            cuts.append(await output_text(output, data, trim))
    made = _assemble(template.json(request_id, cuts), binary)
    if ACCEPT_ENCODING in request.headers:
        encoding = accepted_encoding(request.headers[ACCEPT_ENCODING])
        if encoding != "identity":
            made.pieces = [await joined(deflated(made.pieces, encoding), trim)]
            made.headers += b"Content-Encoding: %b\r\n" % encoding.encode()
    return made


def _assemble(json: bytes, binary: Sequence[bytes | memoryview]) -> HttpResponse:
    return HttpResponse(200, (json, *binary), _headers(json, binary))


def _headers(json: bytes, binary: Sequence[bytes | memoryview]) -> bytes:
    return _BINARY % len(json) if binary and any(map(len, binary)) else JSON
