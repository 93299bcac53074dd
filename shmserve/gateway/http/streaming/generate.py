"""POST /v2/models/NAME/generate and generate_stream: flat JSON to any model, its responses as one
JSON text or as server-sent events."""

from __future__ import annotations

import time

from shmserve.errors import InvalidArgument, QueueFull, ShmserveError
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.body.reader import JSON_TOO_LARGE, Body
from shmserve.gateway.http.json.events import SERVER_SENT_EVENTS, error_json
from shmserve.gateway.http.json.generate import parse_generate, response_json
from shmserve.gateway.http.json.infer_response import SentOutput
from shmserve.gateway.http.json.output_text import output_text
from shmserve.gateway.http.json.parser import loads
from shmserve.gateway.http.request import CONTENT_ENCODING, HttpRequest
from shmserve.gateway.http.response import JSON, HttpResponse
from shmserve.gateway.http.streaming.responses import ResponseQueue, streaming_response
from shmserve.gateway.inference.builder import build
from shmserve.gateway.inference.response import check_size
from shmserve.gateway.inference.streaming_request import error_of
from shmserve.gateway.model_table import GatewayModel
from shmserve.ipc.tensors.inference import Inferred

_NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
)


async def generate(
    gateway: Gateway, request: HttpRequest, name: str, version: str | None
) -> HttpResponse:
    """The one response of a model."""
    generation = await _begin(gateway, request, name, version)
    responses = generation.responses
    try:
        status = await generation.first_status()
        texts: list[bytes] = []
        while len(texts) < 2:
            await responses.wait()
            text, inferred = await generation.encode()
            if text is not None:
                texts.append(text)
            if responses.pop(inferred):
                break
    finally:
        responses.close()
    return HttpResponse(status, (texts[0] if len(texts) == 1 else error_json(_NOT_ONE),), JSON)


async def generate_stream(
    gateway: Gateway, request: HttpRequest, name: str, version: str | None
) -> HttpResponse:
    """All responses of a model, as server-sent events."""
    generation = await _begin(gateway, request, name, version)
    framing = SERVER_SENT_EVENTS

    async def event() -> tuple[bytes | None, Inferred | None]:
        text, inferred = await generation.encode()
        return None if text is None else framing.frame(text), inferred

    status = await generation.first_status()
    return streaming_response(status, framing.content_type, generation.responses, event)


async def _begin(
    gateway: Gateway, request: HttpRequest, name: str, version: str | None
) -> _Generation:
    arrived_ns = time.monotonic_ns()
    model = gateway.models.resolve(name, version or "")
    encodings = request.headers.getall(CONTENT_ENCODING, ())
    if any(encoding != "identity" for encoding in encodings):
        raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
    content = Body(request, gateway.settings, gateway.body_budget)
    body = await content.read(gateway.settings.max_input_size, JSON_TOO_LARGE)
    inputs = {
        tensor["name"]: (tensor["datatype"], tensor["shape"])
        for tensor in model.metadata.get("inputs", ())
    }
    infer_request = parse_generate(loads(body), inputs, model.stateful)
    built, _ = build(gateway, model, infer_request, b"", 0)
    return _Generation(gateway, model, ResponseQueue(gateway, request, model, built, arrived_ns))


class _Generation:
    """A request under way, and its responses as flat JSON."""

    def __init__(self, gateway: Gateway, model: GatewayModel, responses: ResponseQueue) -> None:
        self._gateway = gateway
        self._model = model
        self.responses = responses

    async def first_status(self) -> int:
        """The HTTP status, which the first response decides, once it is here.

        Raises QueueFull: then the request never reached the model.
        """
        responses = self.responses
        try:
            await responses.wait()
            error = error_of(responses.first)
            if isinstance(error, QueueFull):
                raise error
        except BaseException:
            responses.close()
            raise
        return 200 if error is None else 400  # Triton's for any error of a model here

    async def encode(self) -> tuple[bytes | None, Inferred | None]:
        """The next response, an error that it is too, and what it was made of; None for nothing but
        the end."""
        inferred: Inferred | None = None
        try:
            inferred = self.responses.request.outputs(self.responses.first)
            if inferred is None:
                return None, None
            return await self._text(inferred), inferred
        except ShmserveError as error:
            return error_json(error.message), inferred

    async def _text(self, inferred: Inferred) -> bytes:
        outputs = []
        for tensor in inferred.outputs:
            raw = tensor.data
            data = raw if isinstance(raw, bytes) else self._gateway.mappings.view(raw)
            check_size(tensor, len(data))
            output = SentOutput(tensor.name, tensor.datatype, tensor.shape, binary=False)
            outputs.append((tensor, await output_text(output, data, self._gateway.malloc_trim)))
        model = self._model
        infer_request = self.responses.request.infer_request
        return response_json(infer_request, model.name, model.version, outputs, inferred.parameters)
