"""POST /v2/models/NAME/infer: the hot path from a request's bytes to a scheduler and back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from shmserve.errors import ShmserveError, Unsupported
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.compression import accepted_encoding, deflated
from shmserve.gateway.http.infer_body import read_request
from shmserve.gateway.http.json import tensors
from shmserve.gateway.http.json.infer_response import ResponseTemplate
from shmserve.gateway.http.json.output_text import joined, output_text
from shmserve.gateway.http.request import ACCEPT_ENCODING, Request
from shmserve.gateway.http.response import JSON, Reply
from shmserve.gateway.http.streaming.infer import accepted_stream, infer_stream
from shmserve.gateway.inference.classification import as_asked
from shmserve.gateway.inference.pipeline import admit, failure, log_failure
from shmserve.gateway.inference.prepared import BuiltRequest
from shmserve.gateway.inference.request import WireRequest
from shmserve.gateway.inference.response import unpack
from shmserve.gateway.model_table import Model
from shmserve.ipc import messages as m
from shmserve.ipc.tensors.descriptors import Place
from shmserve.ipc.tensors.inference import Inferred

logger = logging.getLogger(__name__)

_DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
_BINARY = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"


async def infer(gateway: Gateway, request: Request, name: str, version: str | None) -> Reply:
    """Run one inference."""
    arrived_ns = time.monotonic_ns()
    model = gateway.models.resolve(name, version or "")
    if (framing := accepted_stream(request)) is not None:
        return await infer_stream(gateway, request, model, framing, arrived_ns)
    if model.decoupled:
        raise Unsupported(_DECOUPLED)
    built = await read_request(gateway, model, request)
    try:
        reply = await _run(gateway, model, request, built, arrived_ns)
    except ShmserveError as error:
        log_failure(model, built.wire.id, error)
        raise
    if logger.isEnabledFor(logging.DEBUG):
        passed_us = (time.monotonic_ns() - arrived_ns) // 1000
        extra = {"request_id": built.wire.id}
        logger.debug("inference of model '%s' took %d us", model.name, passed_us, extra=extra)
    return reply


async def _run(
    gateway: Gateway, model: Model, request: Request, built: BuiltRequest, arrived_ns: int
) -> Reply:
    order = admit(gateway, built, request.connection.client, arrived_ns)
    try:
        scheduler = gateway.models.current(model).scheduler
    except BaseException:
        built.release()
        raise
    pending = gateway.dispatcher.submit(scheduler, order, built.release)
    try:
        message = await pending.future
    except asyncio.CancelledError:
        gateway.dispatcher.cancel(pending)
        raise
    if isinstance(message, m.Failed):
        raise failure(message)
    body = message.body
    templates = built.templates if ACCEPT_ENCODING not in request.headers else None
    if templates is not None and (known := templates.find(body)) is not None:
        return _small_reply(*known)
    response = unpack(body)
    if _at_hand(built.wire, response):
        shown = as_asked(gateway, model, built.wire, response)
        template = ResponseTemplate(built.wire, model.name, model.version, shown)
        if templates is not None and template.whole and shown is response:
            templates.learn(body, response, template)
        return await _reply(request, template, _views(gateway, template.datas(shown)))
    scheduler = pending.scheduler
    scheduler.use()

    def sent() -> None:
        scheduler.release_outputs(response)
        scheduler.leave()

    try:
        shown = as_asked(gateway, model, built.wire, response)
        template = ResponseTemplate(built.wire, model.name, model.version, shown)
        reply = await _reply(request, template, _views(gateway, template.datas(shown)))
    except BaseException:
        sent()
        raise
    reply.on_sent = sent
    return reply


def _at_hand(wire: WireRequest, response: Inferred) -> bool:
    """Whether all outputs are in the response or in clients' regions, none in a worker's memory."""
    placed = {output.name for output in wire.outputs if output.place is not None}
    return all(type(tensor.data) is bytes or tensor.name in placed for tensor in response.outputs)


def _views(gateway: Gateway, datas: list[bytes | Place]) -> list[bytes | memoryview]:
    return [data if isinstance(data, bytes) else gateway.mappings.view(data) for data in datas]


def _small_reply(template: ResponseTemplate, datas: Sequence[bytes]) -> Reply:
    """The response of a template with these tensors, those that are sent."""
    pairs = list(zip(template.outputs, datas, strict=True))
    arrays = [tensors.encode(d, o.datatype, o.shape, o.name) for o, d in pairs if not o.binary]
    return _response(template, arrays, [data for output, data in pairs if output.binary])


async def _reply(
    request: Request, template: ResponseTemplate, datas: Sequence[bytes | memoryview]
) -> Reply:
    """The same for tensors of any size, compressed if the client takes it."""
    pairs = list(zip(template.outputs, datas, strict=True))
    arrays = [await output_text(output, data) for output, data in pairs if not output.binary]
    reply = _response(template, arrays, [data for output, data in pairs if output.binary])
    if ACCEPT_ENCODING in request.headers:
        encoding = accepted_encoding(request.headers[ACCEPT_ENCODING])
        if encoding != "identity":
            reply.pieces = [await joined(deflated(reply.pieces, encoding))]
            reply.headers += b"Content-Encoding: %b\r\n" % encoding.encode()
    return reply


def _response(
    template: ResponseTemplate, arrays: Sequence[bytes], binary: Sequence[bytes | memoryview]
) -> Reply:
    json = template.json(arrays)
    return Reply(200, (json, *binary), _BINARY % len(json) if any(map(len, binary)) else JSON)
