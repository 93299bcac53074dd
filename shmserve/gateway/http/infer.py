"""POST /v2/models/NAME/infer: the hot path from a request's bytes to a scheduler and back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence

from shmserve.errors import (
    Internal,
    QueueFull,
    ShmserveError,
    Unavailable,
    Unsupported,
    from_code,
)
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.compression import accepted_encoding, deflated
from shmserve.gateway.http.intake import take
from shmserve.gateway.http.json import tensors
from shmserve.gateway.http.json.infer_request import WireRequest
from shmserve.gateway.http.json.parser import JsonFault
from shmserve.gateway.http.request import ACCEPT_ENCODING, Request
from shmserve.gateway.http.response import JSON, Reply
from shmserve.gateway.inference import malloc_trim
from shmserve.gateway.inference.builder import BuiltRequest
from shmserve.gateway.inference.response import Form, Output
from shmserve.gateway.model_table import Model
from shmserve.gateway.region_table import admit
from shmserve.ipc import messages as m
from shmserve.ipc.inflight import make_submit
from shmserve.ipc.tensors.descriptors import Place
from shmserve.ipc.tensors.inference import Inferred, unpack_inferred
from shmserve.ipc.transport.records import MalformedMessage

logger = logging.getLogger(__name__)

_STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"
_DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"
_BINARY = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
# A JSON tensor of more bytes than this is written in steps, with turns of the loop between.
_LONG_TEXT = 64 * 1024


async def infer(gateway: Gateway, request: Request, name: str, version: str | None) -> Reply:
    """Run one inference."""
    arrived_ns = time.monotonic_ns()
    if gateway.draining or gateway.health.exiting:
        raise Unavailable(_STOPPING)
    model = gateway.models.resolve(name, version or "")
    if model.decoupled:
        raise Unsupported(_DECOUPLED)
    taken = await take(gateway, model, request)
    try:
        reply = await _run(gateway, model, request, taken, arrived_ns)
    except ShmserveError as error:
        log_failure(model, taken.wire.id, error)
        raise
    if logger.isEnabledFor(logging.DEBUG):
        passed_us = (time.monotonic_ns() - arrived_ns) // 1000
        extra = {"request_id": taken.wire.id}
        logger.debug("inference of model '%s' took %d us", model.name, passed_us, extra=extra)
    return reply


async def _run(
    gateway: Gateway, model: Model, request: Request, taken: BuiltRequest, arrived_ns: int
) -> Reply:
    wire = taken.wire
    dispatcher = gateway.dispatcher
    try:
        if taken.regions:
            admit(taken.regions, request.connection.caller.peer())
        submit = submission(gateway, taken, dispatcher.next_number(), arrived_ns)
        scheduler = gateway.models.current(model).scheduler
    except BaseException:
        taken.release()
        raise
    pending = dispatcher.submit(scheduler, submit, taken.release)
    try:
        message = await pending.future
    except asyncio.CancelledError:
        dispatcher.cancel(pending)
        raise
    if isinstance(message, m.Failed):
        raise failure(message)
    body = message.body
    templates = taken.templates if ACCEPT_ENCODING not in request.headers else None
    if templates is not None and (known := templates.find(body)) is not None:
        return _small_reply(*known)
    try:
        answer = unpack_inferred(body)
    except MalformedMessage as error:
        logger.error("a worker's answer is malformed: %s", error)
        raise Internal("internal error") from None
    if _at_hand(wire, answer):
        form = Form(wire, model.name, model.version, answer)
        if templates is not None and form.whole:
            templates.learn(body, answer, form)
        return await _reply(request, form, _views(gateway, form.datas(answer)))
    scheduler = pending.scheduler
    scheduler.use()

    def sent() -> None:
        scheduler.release_outputs(answer)
        scheduler.leave()

    try:
        form = Form(wire, model.name, model.version, answer)
        reply = await _reply(request, form, _views(gateway, form.datas(answer)))
    except BaseException:
        sent()
        raise
    reply.on_sent = sent
    return reply


def _at_hand(wire: WireRequest, answer: Inferred) -> bool:
    """Whether all outputs are in the answer or in clients' regions, none in a worker's memory."""
    placed = {output.name for output in wire.outputs if output.place is not None}
    return all(type(tensor.data) is bytes or tensor.name in placed for tensor in answer.outputs)


def _views(gateway: Gateway, datas: list[bytes | Place]) -> list[bytes | memoryview]:
    return [data if isinstance(data, bytes) else gateway.mappings.view(data) for data in datas]


def submission(
    gateway: Gateway, taken: BuiltRequest, number: int, arrived_ns: int, call_limit_us: int = 0
) -> m.Submit:
    """What the scheduler is told; `call_limit_us` is how long the client's own call lasts, 0: any.

    The shortest of the limits that there are makes the deadline.
    """
    wire = taken.wire
    return make_submit(
        number,
        taken.admission,
        arrived_ns,
        taken.pack,
        request_id=wire.id,
        priority=wire.priority,
        timeout_us=wire.timeout_us,
        limit_us=gateway.settings.request_timeout_us,
        call_limit_us=call_limit_us,
    )


def failure(message: m.Failed) -> ShmserveError:
    """The exception for a scheduler's refusal."""
    if message.retry_after_s > 0:
        return QueueFull(message.message, message.retry_after_s)
    return from_code(message.code, message.message)


def log_failure(model: Model, request_id: str, error: ShmserveError) -> None:
    """Log what is our fault, and at debug level what is the client's."""
    if error.status == 500 and not isinstance(error, JsonFault):
        logger.error(
            "inference of model '%s' failed: %s",
            model.name,
            error.message,
            extra={"request_id": request_id},
        )
    elif logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "inference of model '%s' was refused: %s",
            model.name,
            error.message,
            extra={"request_id": request_id},
        )


def _small_reply(form: Form, datas: Sequence[bytes]) -> Reply:
    """The response of a form with these tensors, those that are sent."""
    pairs = list(zip(form.outputs, datas, strict=True))
    arrays = [tensors.encode(d, o.datatype, o.shape, o.name) for o, d in pairs if not o.binary]
    return _response(form, arrays, [data for output, data in pairs if output.binary])


async def _reply(request: Request, form: Form, datas: Sequence[bytes | memoryview]) -> Reply:
    """The same for tensors of any size, compressed if the client takes it."""
    pairs = list(zip(form.outputs, datas, strict=True))
    arrays = [await _json_text(output, data) for output, data in pairs if not output.binary]
    reply = _response(form, arrays, [data for output, data in pairs if output.binary])
    if ACCEPT_ENCODING in request.headers:
        encoding = accepted_encoding(request.headers[ACCEPT_ENCODING])
        if encoding != "identity":
            reply.pieces = [await _patiently(deflated(reply.pieces, encoding))]
            reply.headers += b"Content-Encoding: %b\r\n" % encoding.encode()
    return reply


def _response(form: Form, arrays: Sequence[bytes], binary: Sequence[bytes | memoryview]) -> Reply:
    json = form.json(arrays)
    return Reply(200, (json, *binary), _BINARY % len(json) if any(map(len, binary)) else JSON)


async def _json_text(output: Output, data: bytes | memoryview) -> bytes:
    arguments = (data, output.datatype, output.shape, output.name)
    if len(data) <= _LONG_TEXT:
        return tensors.encode(*arguments)
    return await _patiently(tensors.encode_parts(*arguments))


async def _patiently(parts: Iterator[bytes]) -> bytes:
    done: list[bytes] = []
    for part in parts:
        done.append(part)
        await asyncio.sleep(0)
    whole = b"".join(done)
    malloc_trim.soon(len(whole))
    return whole
