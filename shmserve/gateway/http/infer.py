"""POST /v2/models/NAME/infer: the hot path of a unary inference, to a scheduler and back; or,
for a client that accepts it, as a stream of events or lines: each response is a JSON text as the
unary one, without binary data, as it comes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from shmserve.errors import ShmserveError, Unsupported
from shmserve.gateway.compression import accepted_encoding, deflated
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.body import own_timeout_us, read_request
from shmserve.gateway.http.json.framing import Framing, accepted
from shmserve.gateway.http.json.infer_response import JsonResponseTemplate, joined, output_text
from shmserve.gateway.http.request import ACCEPT, ACCEPT_ENCODING, TRACEPARENT, HttpRequest
from shmserve.gateway.http.response import JSON, HttpResponse
from shmserve.gateway.http.streaming.responses import ResponseQueue, streaming_response
from shmserve.gateway.inference.builder import BuiltRequest
from shmserve.gateway.inference.request import InferRequest
from shmserve.gateway.inference.response import classified_as_requested, unpack
from shmserve.gateway.inference.submit import (
    Message,
    error_of,
    failure,
    is_last,
    log_failure,
    prepare_submit,
    still,
)
from shmserve.gateway.links import SchedulerHandle
from shmserve.gateway.model_table import GatewayModel
from shmserve.gateway.on_demand import awaits_load, loaded
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.descriptors import Place, described
from shmserve.ipc.tensors.inference import Inferred
from shmserve.ipc.tensors.template_cache import TemplateCache

logger = logging.getLogger(__name__)


_DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
_BINARY = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
_MOST_TEMPLATES = 8


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
        pending = gateway.dispatcher.submit(now.scheduler, submit, built.release)
        try:
            message = await pending.future
        except asyncio.CancelledError:
            gateway.dispatcher.cancel(pending)
            if built.trace is not None:
                built.trace.gone()
            raise
        if built.trace is not None:
            built.trace.answered(message)
        if isinstance(message, m.Failed):
            raise failure(message)
        body = message.body
        templates = built.templates if ACCEPT_ENCODING not in request.headers else None
        if templates is not None and (known := templates.find(body)) is not None:
            template, datas = known
            response = _assemble(*template.fill(built.infer_request.id, datas))
        else:
            response = await _respond(gateway, model, request, built, pending.scheduler, body)
    except ShmserveError as error:
        log_failure(model, built.infer_request.id, error, built.trace)
        if built.trace is not None:
            built.trace.finish(error.message)
        raise
    if built.trace is not None:
        built.trace.finish()
    if logger.isEnabledFor(logging.DEBUG):
        passed_us = (time.monotonic_ns() - arrived_ns) // 1000
        extra = {"request_id": built.infer_request.id}
        logger.debug("inference of model '%s' took %d us", model.name, passed_us, extra=extra)
    return response


async def _loaded(gateway: Gateway, request: HttpRequest, name: str, version: str) -> GatewayModel:
    limit_us = 0
    if awaits_load(gateway, name, version):
        limit_us = await own_timeout_us(gateway, request)
    return await loaded(gateway, name, version, limit_us)


async def _respond(
    gateway: Gateway,
    model: GatewayModel,
    request: HttpRequest,
    built: BuiltRequest,
    scheduler: SchedulerHandle,
    body: bytes,
) -> HttpResponse:
    """The response to a request, of a packed response that follows no template."""
    inferred, asked = unpack(body), built.infer_request
    if built.trace is not None:
        inferred = built.trace.explain(inferred)
    lent = not _needs_no_release(asked, inferred)
    if lent:
        scheduler.use()
    try:
        shown = classified_as_requested(gateway, model, asked, inferred)
        template = _template(model, built, shown)
        plain = template.whole and shown is inferred and ACCEPT_ENCODING not in request.headers
        if built.templates is not None and plain and not lent:
            built.templates.learn(body, inferred, template)
        response = await _encode(gateway, request, asked.id, template, template.datas(shown))
    except BaseException:
        if lent:
            _release(scheduler, inferred)
        raise
    if lent:
        response.on_sent = partial(_release, scheduler, inferred)
    return response


def _template(model: GatewayModel, built: BuiltRequest, response: Inferred) -> JsonResponseTemplate:
    """The template of a response: that of one to such a request before it, from which it differs in
    the bytes and the places of its tensors."""
    form = (str(response.parameters), *map(described, response.outputs))
    known = None if built.templates is None else built.templates.placed.find(form)
    if known is None:
        known = JsonResponseTemplate(built.infer_request, model.name, model.version, response)
        if built.templates is not None:
            built.templates.placed.remember(form, known)
    return known


def _release(scheduler: SchedulerHandle, inferred: Inferred) -> None:
    scheduler.release_outputs(inferred)
    scheduler.leave()


def _needs_no_release(infer_request: InferRequest, inferred: Inferred) -> bool:
    """Whether all outputs are inline or in clients' regions, none in a worker's memory."""
    placed = {output.name for output in infer_request.outputs if output.place is not None}
    return all(type(tensor.data) is bytes or tensor.name in placed for tensor in inferred.outputs)


async def _encode(
    gateway: Gateway,
    request: HttpRequest,
    request_id: str,
    template: JsonResponseTemplate,
    datas: Sequence[bytes | Place],
) -> HttpResponse:
    """The same for tensors of any size, zero-copy where they are binary, compressed if the client
    takes it."""
    views = [data if isinstance(data, bytes) else gateway.mappings.view(data) for data in datas]
    pairs = list(zip(template.outputs, views, strict=True))
    trim = gateway.malloc_trim
    arrays = [await output_text(output, data, trim) for output, data in pairs if not output.binary]
    binary = [data for output, data in pairs if output.binary]
    response = _assemble(template.json(request_id, arrays), binary)
    if ACCEPT_ENCODING in request.headers:
        encoding = accepted_encoding(request.headers[ACCEPT_ENCODING])
        if encoding != "identity":
            response.pieces = [await joined(deflated(response.pieces, encoding), trim)]
            response.headers += b"Content-Encoding: %b\r\n" % encoding.encode()
    return response


def _assemble(json: bytes, binary: Sequence[bytes | memoryview]) -> HttpResponse:
    headers = _BINARY % len(json) if binary and any(map(len, binary)) else JSON
    return HttpResponse(200, (json, *binary), headers)


async def infer_stream(
    gateway: Gateway, request: HttpRequest, model: GatewayModel, framing: Framing, arrived_ns: int
) -> HttpResponse:
    """Run one inference. Raises what is wrong before the first response, and what the first one
    fails with where none follows."""
    built = await read_request(gateway, model, request)
    if not model.published:
        await still(gateway, model, built)
    responses = ResponseQueue(gateway, request, model, built, arrived_ns)
    first = await responses.begun()
    error = error_of(first)
    if error is not None and is_last(first):
        responses.close()
        failed = responses.request
        log_failure(failed.model, failed.infer_request.id, error, failed.trace)
        raise error
    status = 200 if error is None else error.status
    events = _Events(gateway, model, responses, framing)
    return streaming_response(status, framing.content_type, responses, events.next)


class _Events:
    """Encodes the responses one by one, from templates where their form has come before."""

    def __init__(
        self, gateway: Gateway, model: GatewayModel, responses: ResponseQueue, framing: Framing
    ) -> None:
        self._gateway = gateway
        self._model = model
        self._responses = responses
        self._framing = framing
        self._infer_request = _without_binary(responses.request.infer_request)
        self._templates: TemplateCache[JsonResponseTemplate] = TemplateCache(_MOST_TEMPLATES)

    async def next(self) -> tuple[bytes | None, Inferred | None]:
        message = self._responses.first
        inferred: Inferred | None = None
        try:
            json = self._known(message)
            if json is None:
                inferred = self._responses.request.outputs(message)
                if inferred is None:
                    return None, None
                json = await self._json(inferred)
        except ShmserveError as error:
            return self._framing.error(error.message), inferred
        return self._framing.frame(json), inferred

    def _known(self, message: Message) -> bytes | None:
        """The text of a response whose template is known."""
        if not isinstance(message, m.Responded) or message.spans:
            return None
        found = self._templates.find(message.body)
        if found is None:
            return None
        template, datas = found
        return template.fill(self._infer_request.id, datas)[0]

    async def _json(self, inferred: Inferred) -> bytes:
        model, message = self._model, self._responses.first
        shown = classified_as_requested(self._gateway, model, self._infer_request, inferred)
        template = JsonResponseTemplate(self._infer_request, model.name, model.version, shown)
        if template.whole and shown is inferred and isinstance(message, m.Responded):
            self._templates.learn(message.body, inferred, template)
        arrays: list[bytes] = []
        for output, raw in zip(template.outputs, template.datas(shown), strict=True):
            data = raw if isinstance(raw, bytes) else self._gateway.mappings.view(raw)
            arrays.append(await output_text(output, data, self._gateway.malloc_trim))
        return template.json(self._infer_request.id, arrays)


def _without_binary(infer_request: InferRequest) -> InferRequest:
    outputs = [replace(output, binary=False) for output in infer_request.outputs]
    return replace(infer_request, outputs=outputs, binary=False)
