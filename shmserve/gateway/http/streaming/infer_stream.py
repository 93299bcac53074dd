"""POST /v2/models/NAME/infer for a client that accepts a stream of events or lines: each
response is a JSON text as the unary one, without binary data, as it comes."""

from __future__ import annotations

from dataclasses import replace

from shmserve.errors import ShmserveError
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.body import read_request
from shmserve.gateway.http.json.infer_response import JsonResponseTemplate, output_text
from shmserve.gateway.http.messages import Framing, HttpRequest, HttpResponse
from shmserve.gateway.http.streaming.responses import ResponseQueue, streaming_response
from shmserve.gateway.inference.request import InferRequest
from shmserve.gateway.inference.response import classified_as_requested, output_bytes
from shmserve.gateway.inference.submit import Message, error_of, is_last, log_failure, still
from shmserve.gateway.model_table import GatewayModel
from shmserve.ipc.messages import inference as m
from shmserve.ipc.tensors.inference import Inferred
from shmserve.ipc.tensors.schemas import BoundedCache

_MOST_TEMPLATES = 8


async def infer_stream(
    gateway: Gateway, request: HttpRequest, model: GatewayModel, framing: Framing, arrived_ns: int
) -> HttpResponse:
    """Run one inference for a client that accepts a stream. Raises what is wrong before the first
    response, and what the first one fails with where none follows."""
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
        self._templates: BoundedCache[bytes, JsonResponseTemplate] = BoundedCache(_MOST_TEMPLATES)

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
        """Return the text of a response whose schema is known, if all of it is in the message."""
        if not isinstance(message, m.Responded) or message.spans:
            return None
        template = self._templates.find(message.schema)
        filled = template and template.fill(self._infer_request.id, message.data)
        return filled[0] if filled else None

    async def _json(self, inferred: Inferred) -> bytes:
        model, message = self._model, self._responses.first
        shown = classified_as_requested(self._gateway, model, self._infer_request, inferred)
        template = JsonResponseTemplate(self._infer_request, model.name, model.version, shown)
        if shown is inferred and isinstance(message, m.Responded) and not message.spans:
            self._templates.remember(message.schema, template)
        arrays: list[bytes] = []
        for output in template.outputs:
            data = output_bytes(self._gateway, shown.outputs[output.position])
            arrays.append(await output_text(output, data, self._gateway.malloc_trim))
        return template.json(self._infer_request.id, arrays)


def _without_binary(infer_request: InferRequest) -> InferRequest:
    outputs = [replace(output, binary=False) for output in infer_request.outputs]
    return replace(infer_request, outputs=outputs, binary=False)
