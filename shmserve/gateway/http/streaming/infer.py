"""POST /v2/models/NAME/infer for clients that accept a stream: each response is a JSON text as
`infer` gives it, without binary data, as it comes."""

from __future__ import annotations

from dataclasses import replace

from shmserve.errors import ShmserveError
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.infer_body import read_request
from shmserve.gateway.http.json.events import Framing, accepted
from shmserve.gateway.http.json.infer_response import ResponseTemplate
from shmserve.gateway.http.json.output_text import output_text
from shmserve.gateway.http.json.tensors import encode
from shmserve.gateway.http.request import ACCEPT, Request
from shmserve.gateway.http.response import Reply
from shmserve.gateway.http.streaming.responses import Responses, StreamReply
from shmserve.gateway.inference.classification import as_asked
from shmserve.gateway.inference.open_request import Message, error_of, is_last
from shmserve.gateway.inference.pipeline import log_failure
from shmserve.gateway.inference.request import WireRequest
from shmserve.gateway.model_table import Model
from shmserve.ipc import messages as m
from shmserve.ipc.tensors.inference import Inferred
from shmserve.ipc.tensors.template_cache import TemplateCache

_MOST_TEMPLATES = 8


def accepted_stream(request: Request) -> Framing | None:
    """The stream that a client asks for, if it does."""
    return accepted(request.headers[ACCEPT]) if ACCEPT in request.headers else None


async def infer_stream(
    gateway: Gateway, request: Request, model: Model, framing: Framing, arrived_ns: int
) -> Reply:
    """Run one inference. Raises what is wrong before the first response, and what the first one
    fails with where none follows."""
    built = await read_request(gateway, model, request)
    responses = Responses(gateway, request, model, built, arrived_ns)
    try:
        await responses.wait()
        status = _status(responses)
    except BaseException:
        responses.close()
        raise
    events = _Events(gateway, model, responses, framing)
    return StreamReply(status, framing.content_type, responses, events.next)


def _status(responses: Responses) -> int:
    error = error_of(responses.first)
    if error is None:
        return 200
    if is_last(responses.first):
        log_failure(responses.request.model, responses.request.wire.id, error)
        raise error
    return error.status


class _Events:
    def __init__(
        self, gateway: Gateway, model: Model, responses: Responses, framing: Framing
    ) -> None:
        self._gateway = gateway
        self._model = model
        self._responses = responses
        self._framing = framing
        self._wire = _without_binary(responses.request.wire)
        self._templates: TemplateCache[ResponseTemplate] = TemplateCache(_MOST_TEMPLATES)

    async def next(self) -> tuple[bytes | None, Inferred | None]:
        message = self._responses.first
        answer: Inferred | None = None
        try:
            json = self._known(message)
            if json is None:
                answer = self._responses.request.outputs(message)
                if answer is None:
                    return None, None
                json = await self._json(answer)
        except ShmserveError as error:
            return self._framing.error(error.message), answer
        return self._framing.frame(json), answer

    def _known(self, message: Message) -> bytes | None:
        """The text of a response of a form that came before."""
        found = self._templates.find(message.body) if isinstance(message, m.Responded) else None
        if found is None:
            return None
        template, datas = found
        pairs = zip(template.outputs, datas, strict=True)
        return template.json([encode(data, o.datatype, o.shape, o.name) for o, data in pairs])

    async def _json(self, answer: Inferred) -> bytes:
        model, message = self._model, self._responses.first
        shown = as_asked(self._gateway, model, self._wire, answer)
        template = ResponseTemplate(self._wire, model.name, model.version, shown)
        if template.whole and shown is answer and isinstance(message, m.Responded):
            self._templates.learn(message.body, answer, template)
        arrays: list[bytes] = []
        for output, raw in zip(template.outputs, template.datas(shown), strict=True):
            data = raw if isinstance(raw, bytes) else self._gateway.mappings.view(raw)
            arrays.append(await output_text(output, data))
        return template.json(arrays)


def _without_binary(wire: WireRequest) -> WireRequest:
    outputs = [replace(output, binary=False) for output in wire.outputs]
    return replace(wire, outputs=outputs, binary=False)
