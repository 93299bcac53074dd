"""POST /v2/models/NAME/generate and generate_stream: flat JSON requests to any model.

    {"TEXT": "hi", "temperature": 0.5, "parameters": {...}}

Members with the name of an input are inputs, as a scalar or a list. Other members are parameters.
Requests to models with sequences also have sequence_id, sequence_start and sequence_end. A response
contains the outputs by name, one element as a scalar and several elements as a list. The responses
are one JSON text, or server-sent events.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from shmserve.errors import InvalidArgument, QueueFull, ShmserveError
from shmserve.gateway.context import Gateway, GatewayModel, resolve_model
from shmserve.gateway.http.body import read_json
from shmserve.gateway.http.json.codec import (
    move_sequence_parameters,
    parameter_value,
    request_id,
    tensor_bytes,
)
from shmserve.gateway.http.json.large_bodies import Packed
from shmserve.gateway.http.json.parser import DuplicateKey, JsonFault, check_unsigned
from shmserve.gateway.http.json.tensors import encode_in_pieces
from shmserve.gateway.http.messages import (
    CONTENT_ENCODING,
    JSON_HEADER,
    SERVER_SENT_EVENTS,
    HttpRequest,
    HttpResponse,
    encode_error_json,
)
from shmserve.gateway.http.openai.bodies import packed_tensor, parse_prompts
from shmserve.gateway.http.openai.model_names import generates_text
from shmserve.gateway.http.response_queue import ResponseQueue, streaming_response
from shmserve.gateway.inference.in_flight import find_error, output_bytes, reload_model
from shmserve.gateway.inference.infer_request import InferInput, InferRequest, check_member_count
from shmserve.gateway.inference.prepare import build_in_pieces
from shmserve.ipc.tensors.datatypes import element_count
from shmserve.ipc.tensors.descriptors import TensorRef
from shmserve.ipc.tensors.schemas import Inferred
from shmserve.ipc.tensors.signature import id_prefix

_ONE_RESPONSE_EXPECTED = (
    "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
)

_DUPLICATE_INPUT = "input '{name}' already exists in request"


async def generate(gateway: Gateway, request: HttpRequest, name: str, version: str) -> HttpResponse:
    """Handle POST .../generate: return the only response of a model."""
    generation = await _start_generation(gateway, request, name, version)
    queue = generation.queue
    try:
        status = await generation.await_status()
        texts: list[bytes] = []
        while len(texts) < 2:
            await queue.wait()
            text, inferred = await queue.encode_first(generation.encode)
            if text is not None:
                texts.append(text)
            if queue.remove_first(inferred):
                break
    finally:
        queue.close()
    body = texts[0] if len(texts) == 1 else encode_error_json(_ONE_RESPONSE_EXPECTED)
    return HttpResponse(status, (body,), JSON_HEADER)


async def generate_stream(
    gateway: Gateway, request: HttpRequest, name: str, version: str
) -> HttpResponse:
    """Handle POST .../generate_stream: return a model's responses as server-sent events."""
    generation = await _start_generation(gateway, request, name, version)
    status = await generation.await_status()
    return streaming_response(status, SERVER_SENT_EVENTS, generation.queue, generation.encode)


async def _start_generation(
    gateway: Gateway, request: HttpRequest, name: str, version: str
) -> _Generation:
    arrived_ns = time.monotonic_ns()
    model = await resolve_model(gateway, name, version)
    encodings = request.headers.getall(CONTENT_ENCODING, ())
    if any(encoding.strip().lower() != "identity" for encoding in encodings):
        raise InvalidArgument("Unsupported content-encoding, only 'identity' is supported.")
    tensors = model.metadata.get("inputs", ())
    inputs = {t["name"]: (t["datatype"], t["shape"]) for t in tensors}
    parse_large = partial(parse_prompts, gateway, _PROMPT_FIELDS, model=name)
    try:
        parse = parse_large if generates_text(model) else None
        body = await read_json(gateway, request, is_required=True, parse_large=parse)
        if generates_text(model):
            body = _without_nulls(body)
        infer_request = parse_generate(body, inputs, model.is_stateful)
    except DuplicateKey as fault:
        if fault.name in inputs:
            text = id_prefix("") + _DUPLICATE_INPUT.format(name=fault.name)
            raise InvalidArgument(text) from None
        raise
    built_request = await build_in_pieces(gateway, model, infer_request)
    await reload_model(gateway, built_request)
    return _Generation(gateway, model, ResponseQueue(gateway, request, built_request, arrived_ns))


@dataclass(slots=True, eq=False)
class _Generation:
    """A request in flight, and the encoder of its responses as flat JSON."""

    _gateway: Gateway
    _model: GatewayModel
    queue: ResponseQueue

    async def await_status(self) -> int:
        """Return the HTTP status, which the first response determines.

        Raises:
            QueueFull: The request was refused before it reached the model.
        """
        error = find_error(await self.queue.wait_for_first())
        if isinstance(error, QueueFull):
            self.queue.close()
            raise error
        return 200 if error is None else error.status

    async def encode(self, inferred: Inferred) -> bytes:
        """Return the JSON text of a response with these outputs."""
        outputs = []
        for tensor in inferred.outputs:
            data = output_bytes(self._gateway, tensor)
            fields = (data, tensor.datatype, tensor.shape, tensor.name)
            pieces = await encode_in_pieces(*fields, self._gateway.malloc_trim)
            outputs.append((tensor, b"".join(pieces)))
        model = self._model
        request = self.queue.inference.built_request.infer_request
        return encode_response(request, model.name, model.version, outputs, inferred.parameters)


def _without_nulls(body: Any) -> Any:
    """Return a body without the parameters whose value is null, as in OpenAI's API."""
    if type(body) is not dict:
        return body
    return {
        key: _without_nulls(value) if key == _NESTED_MEMBER else value
        for key, value in body.items()
        if value is not None
    }


_NESTED_MEMBER = "parameters"
_PROMPT_FIELDS = ("text_input", "input_ids", "messages")


def parse_generate(
    body: Any, inputs: Mapping[str, tuple[str, Sequence[int]]], is_stateful: bool = False
) -> InferRequest:
    """Return the request in a parsed body.

    Args:
        body: The parsed body.
        inputs: The datatype and the shape of each input of the model; -1 for any size.
        is_stateful: Whether the model has sequences.

    Raises:
        JsonFault: A value has the wrong type.
        InvalidArgument: The request is invalid.
    """
    if type(body) is not dict:
        raise JsonFault("attempt to get members for non-object")
    request = InferRequest(request_id(body), [], [])
    _read_members(request, body, inputs, is_nested=False)
    if is_stateful:
        move_sequence_parameters(request, request.parameters)
    request.deadline_us = check_unsigned(request.parameters.pop("deadline_us", 0), "deadline_us")
    return request


def _read_members(
    request: InferRequest,
    members: dict[str, Any],
    inputs: Mapping[str, tuple[str, Sequence[int]]],
    *,
    is_nested: bool,
) -> None:
    check_member_count(members, "parameters")
    for key, value in members.items():
        if key == _NESTED_MEMBER and not is_nested:
            if key in inputs:
                text = f"Keyword '{key}' for nested schema also given as input tensor name"
                raise InvalidArgument(text)
            _read_nested_members(request, value, inputs)
        elif key in inputs:
            if any(item.name == key for item in request.inputs):
                raise InvalidArgument(id_prefix(request.id) + _DUPLICATE_INPUT.format(name=key))
            request.inputs.append(_create_input(key, value, *inputs[key]))
        else:
            if type(value) is Packed and not value.is_json:
                value = value.value()
            request.parameters[key] = parameter_value(key, value)


def _read_nested_members(
    request: InferRequest, value: Any, inputs: Mapping[str, tuple[str, Sequence[int]]]
) -> None:
    if type(value) is not dict:
        raise JsonFault(
            f"Expected JSON object for keyword: '{_NESTED_MEMBER}': "
            "attempt to access JSON non-object as object"
        )
    try:
        _read_members(request, value, inputs, is_nested=True)
    except ShmserveError as error:
        raise type(error)(f"Converting keyword: '{_NESTED_MEMBER}': {error.message}") from None


def _create_input(name: str, value: Any, datatype: str, dims: Sequence[int]) -> InferInput:
    values: Any = value if type(value) is list else [value]
    is_packed = type(value) is Packed
    shape = _fit_shape(value.count if is_packed else len(values), dims)
    if shape is None:
        text = f"The schema can not convert input '{name}' to tensor with proper shape"
        raise InvalidArgument(text)
    if is_packed:
        if value.datatype == datatype and value.kind in ("text", "tokens"):
            return packed_tensor(name, [value], shape)
        return _create_input(name, value.value(), datatype, dims)
    tensor = InferInput(name, datatype, shape, len(values), values)
    tensor.data = tensor_bytes(tensor)
    return tensor


def _fit_shape(count: int, dims: Sequence[int]) -> tuple[int, ...] | None:
    """Return the shape of `count` elements.

    The last variable dimension takes all elements that the fixed dimensions leave. The other
    variable dimensions are 1.

    Returns:
        None if the fixed dimensions do not divide the number of elements.
    """
    fixed_elements = element_count([dim for dim in dims if dim >= 0])
    remaining_count, remainder = divmod(count, fixed_elements) if fixed_elements else (0, count)
    shape = list(dims)
    for index in reversed(range(len(shape))):
        if shape[index] < 0:
            shape[index], remaining_count = remaining_count, 1
    return None if remainder or element_count(shape) != count else tuple(shape)


def encode_response(
    request: InferRequest,
    name: str,
    version: str,
    outputs: Sequence[tuple[TensorRef, bytes]],
    parameters: dict[str, Any],
) -> bytes:
    """Return a response; `outputs` are tensors with the JSON arrays of their elements."""
    texts = {
        tensor.name: array[1:-1] if element_count(tensor.shape) == 1 else array
        for tensor, array in outputs
    }
    body: dict[str, Any] = {name: orjson.Fragment(texts[name]) for name in sorted(texts)}
    if request.id:
        body["id"] = request.id
    body["model_name"] = name
    body["model_version"] = version
    return orjson.dumps({**body, **parameters})
