"""Models in OpenAI's API: their list, their embeddings of texts, and their tokenizers.

    GET /v1/models[/ID]               the models that generate or embed text
    POST /v1/embeddings               vectors of texts
    POST /tokenize, /detokenize       as in vLLM

A model embeds text if it has one input of texts and one output of floating-point vectors. An
example is an ensemble of a tokenizer and a sentence encoder.

The tokenizer of a model is in its worker, where a request with the parameter `task` only converts
text. A tokenizer in each gateway would take the same memory again, and could differ from it.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from shmserve.errors import InvalidArgument, NotFound, QueueFull, Unsupported, clip
from shmserve.gateway.context import Gateway, GatewayModel, needs_load, resolve_model
from shmserve.gateway.http.json.large_bodies import Packed, are_tokens, check_count
from shmserve.gateway.http.messages import JSON_HEADER, HttpRequest, HttpResponse, json_response
from shmserve.gateway.http.openai import bodies
from shmserve.gateway.http.openai.bodies import TooManyRequests
from shmserve.gateway.http.openai.fields import (
    CONVERSATION_FIELDS,
    DETOKENIZE_FIELDS,
    EMBEDDING_FIELDS,
    TOKENIZE_FIELDS,
)
from shmserve.gateway.http.openai.model_names import (
    TEXT_OUTPUT,
    find_adapter,
    generates_text,
    model_names,
    only_generative_model,
    resolve_alias,
    response_name,
    unloaded_aliases,
)
from shmserve.gateway.http.response_queue import ResponseQueue
from shmserve.gateway.inference.in_flight import find_error
from shmserve.gateway.inference.infer_request import InferInput, InferOutput, InferRequest
from shmserve.gateway.inference.prepare import build_in_pieces
from shmserve.ipc.engine_settings import prompt_too_long_text

_ENCODING_FORMATS = ("float", "base64")
_FLOAT_DATATYPES = ("FP32", "FP16", "FP64")


class Embedder(NamedTuple):
    """The names of the text input and the vector output of a model, and the shape of one text."""

    input_name: str
    output_name: str
    dims: tuple[int, ...]
    max_texts: int  # maximum number of texts in a request; 0: one text, without a batch dimension


def find_embedder(model: GatewayModel) -> Embedder | None:
    """Return the text input and the vector output of a model; None if it does not embed text."""
    signature = model.signature
    if len(signature.inputs) != 1 or len(signature.outputs) != 1 or model.decoupled:
        return None
    ((input_name, text),) = signature.inputs.items()
    ((output_name, vector),) = signature.outputs.items()
    dims = tuple(text.dims)
    is_one_text = all(size in (1, -1) for size in dims) and len(vector.dims) >= 1
    if text.datatype != "BYTES" or vector.datatype not in _FLOAT_DATATYPES or not is_one_text:
        return None
    return Embedder(input_name, output_name, tuple(1 for _ in dims), signature.max_batch_size)


async def embeddings(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle POST /v1/embeddings: respond with a vector for each text."""
    body = await bodies.read_fields(gateway, request, EMBEDDING_FIELDS, ["input"])
    model = await bodies.resolve_named_model(gateway, body)
    embedder = find_embedder(model)
    if embedder is None:
        raise NotFound(f"model '{model.name}' does not compute embeddings of text")
    texts = _check_texts(body.get("input"))
    encoding = bodies.check_member(body, "encoding_format", str, "float")
    if encoding not in _ENCODING_FORMATS:
        text = f"encoding_format: '{encoding}' is not one of {', '.join(_ENCODING_FORMATS)}"
        raise InvalidArgument(text)
    batch_size = max(embedder.max_texts, 1)
    tasks: list[asyncio.Task[list[np.ndarray[Any, Any]]]] = []
    try:
        for begin in range(0, len(texts), batch_size):
            batch = texts[begin : begin + batch_size]
            vectors_of_batch = _compute_vectors(gateway, request, model, embedder, batch)
            tasks.append(asyncio.create_task(vectors_of_batch))
            await asyncio.sleep(0)  # other requests are handled in between
        vectors = [vector for batch in await asyncio.gather(*tasks) for vector in batch]
    finally:
        for task in tasks:
            task.cancel()
    dimensions, size = bodies.check_member(body, "dimensions", int, None), len(vectors[0])
    if dimensions not in (None, size):
        raise InvalidArgument(f"dimensions: {dimensions} is not {size}, the size of the vectors")
    pieces = [b'{"object":"list","data":[']
    for index, vector in enumerate(vectors):
        embedding = _encode_vector(vector, encoding)
        entry = {"object": "embedding", "index": index, "embedding": embedding}
        pieces += (orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY), b",")
        await asyncio.sleep(0)
    # The numbers of tokens are unknown, since the worker does not report them.
    usage = {"prompt_tokens": 0, "total_tokens": 0}
    name = response_name(gateway, model.name)
    pieces[-1] = b"]," + orjson.dumps({"model": name, "usage": usage})[1:]
    return HttpResponse(200, pieces, JSON_HEADER)


async def _compute_vectors(
    gateway: Gateway,
    request: HttpRequest,
    model: GatewayModel,
    embedder: Embedder,
    texts: list[Any],
) -> list[np.ndarray[Any, Any]]:
    """Return the vector of each text in FP32; the texts must fit into one batch of the model."""
    shape = (len(texts), *embedder.dims) if embedder.max_texts else embedder.dims
    if type(texts[0]) is Packed:
        text_input = bodies.packed_tensor(embedder.input_name, texts, shape or (1,))
    else:
        text_input = bodies.create_input(embedder.input_name, "BYTES", texts, shape or (1,))
    outputs = await infer_once(gateway, request, model, text_input, [embedder.output_name], {})
    return list(outputs[embedder.output_name].astype(np.float32).reshape(len(texts), -1))


def _check_texts(value: Any) -> list[Any]:
    texts = value if type(value) is list else [value]
    if not texts or not all(
        type(text) is str or (type(text) is Packed and text.kind == "text") for text in texts
    ):
        raise InvalidArgument(f"input: {clip(repr(value))} is not a string or a list of strings")
    check_count("input", texts)
    return texts


def _encode_vector(vector: np.ndarray[Any, Any], encoding: str) -> Any:
    if encoding == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    return vector.astype(np.float64)


_STARTED_AT_S = int(time.time())


async def list_models(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle GET /v1/models: list the models that embed or generate text, also those on demand."""
    models = {model.name: model for model in gateway.models.all_versions() if _is_listed(model)}
    unloaded_models = await unloaded_aliases(gateway)
    aliases = {**unloaded_models, **{name: model.aliases for name, model in models.items()}}
    entries = [
        _model_object(gateway, name, root, models.get(root))
        for root in sorted(aliases)
        for name in [*model_names(gateway, root, unloaded_models), *aliases[root]]
        if name == root or name not in gateway.models
    ]
    # If several models have the same alias, requests with it reach the first of them.
    entries_by_id = {entry["id"]: entry for entry in reversed(entries)}
    return json_response({"object": "list", "data": list(reversed(entries_by_id.values()))})


async def show_model(gateway: Gateway, request: HttpRequest, name: str) -> HttpResponse:
    """Handle GET /v1/models/ID: describe one model, without loading a model on demand."""
    model_name = await resolve_alias(gateway, name)
    if needs_load(gateway, model_name, "") and model_name in await unloaded_aliases(gateway):
        return json_response(_model_object(gateway, name, model_name, None))
    model = await resolve_model(gateway, model_name, "")
    if not _is_listed(model):
        raise NotFound(f"model '{name}' neither generates text nor computes embeddings")
    return json_response(_model_object(gateway, name, model_name, model))


async def _default_model(gateway: Gateway, body: dict[str, Any]) -> str:
    """Return the default model; "" if there is none, or if the body names a model."""
    if "model" in body:
        return ""
    return only_generative_model(gateway, await unloaded_aliases(gateway))


def _is_listed(model: GatewayModel) -> bool:
    return generates_text(model) or find_embedder(model) is not None


def _model_object(
    gateway: Gateway, name: str, base_model: str, model: GatewayModel | None
) -> dict[str, Any]:
    is_adapter = model is not None and find_adapter(gateway, model, name)
    return {
        "id": name,
        "object": "model",
        "created": _STARTED_AT_S,
        "owned_by": "shmserve",
        "root": base_model,
        "parent": base_model if is_adapter else None,
        "max_model_len": None if model is None else model.max_model_len,
    }


async def tokenize(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle POST /tokenize: respond with the tokens of a prompt or of a chat."""
    fields = await bodies.read_fields(gateway, request, TOKENIZE_FIELDS, ["prompt", "messages"])
    default_model = await _default_model(gateway, fields)
    model = await bodies.resolve_generative_model(gateway, fields, default_model=default_model)
    is_chat = "messages" in fields
    with_texts = bodies.check_member(fields, "return_token_strs", bool, False)
    add_special_tokens = bodies.check_member(fields, "add_special_tokens", bool, not is_chat)
    if is_chat and "prompt" in fields:
        raise InvalidArgument("prompt: exactly one of prompt and messages is required")
    if is_chat:
        variables = {name: fields[name] for name in CONVERSATION_FIELDS & fields.keys()}
        prompt = bodies.conversation_input(fields, variables)
    elif "prompt" in fields:
        prompt = bodies.prompt_input(bodies.check_member(fields, "prompt", str, ""))
    else:
        raise InvalidArgument("prompt: a prompt or messages are required")
    parameters = {"task": "tokenize", "add_special_tokens": add_special_tokens}
    outputs = ("token_ids", TEXT_OUTPUT) if with_texts else ("token_ids",)
    values = await infer_once(gateway, request, model, prompt, outputs, parameters)
    # A million tokens are encoded without a Python list.
    tokens = orjson.dumps(values["token_ids"], option=orjson.OPT_SERIALIZE_NUMPY)
    return json_response(
        {
            "count": len(values["token_ids"]),
            "max_model_len": model.max_model_len,
            "tokens": orjson.Fragment(tokens),
            "token_strs": orjson.Fragment(values[TEXT_OUTPUT][0]) if with_texts else None,
        }
    )


async def detokenize(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle POST /detokenize: respond with the text of tokens."""
    fields = await bodies.read_fields(gateway, request, DETOKENIZE_FIELDS, ["tokens"])
    default_model = await _default_model(gateway, fields)
    model = await bodies.resolve_generative_model(gateway, fields, default_model=default_model)
    tokens = bodies.check_member(fields, "tokens", list, None)
    if tokens == []:
        return json_response({"prompt": ""})
    if type(tokens) is not Packed and not are_tokens(tokens):
        raise InvalidArgument(f"tokens: {clip(repr(tokens))} is not a list of tokens (integers)")
    tokens_input, max_tokens = bodies.prompt_input(tokens, "tokens"), model.max_model_len
    if max_tokens and tokens_input.count > max_tokens:
        text = prompt_too_long_text(max_tokens, f"{tokens_input.count} tokens exceed this limit")
        raise InvalidArgument(f"tokens: {text}")
    parameters = {"task": "detokenize"}
    outputs = await infer_once(gateway, request, model, tokens_input, (TEXT_OUTPUT,), parameters)
    return json_response({"prompt": outputs[TEXT_OUTPUT][0].decode()})


async def infer_once(
    gateway: Gateway,
    request: HttpRequest,
    model: GatewayModel,
    infer_input: InferInput,
    outputs: Sequence[str],
    parameters: dict[str, Any],
) -> dict[str, np.ndarray[Any, Any]]:
    """Send one input to a model, and return the named `outputs` of its only response.

    With a `task` parameter, the worker, which has the model's tokenizer, only converts text.

    Raises:
        ShmserveError: The model's error; Unsupported if the worker converts no texts.
    """
    if "task" in parameters and not model.has_task_parameter:
        problem = "only the backends 'llm' and 'vllm' convert texts and tokens"
        raise Unsupported(f"model '{model.name}': {problem}")
    requested_outputs = [InferOutput(name, binary=True) for name in outputs]
    infer_request = InferRequest(
        "", [infer_input], requested_outputs, binary=True, parameters=parameters
    )
    built_request = await build_in_pieces(gateway, model, infer_request)
    queue = ResponseQueue(gateway, request, built_request, time.monotonic_ns())
    try:
        await queue.wait()
        error = find_error(queue.first_response)
        if isinstance(error, QueueFull):
            raise TooManyRequests(error.message, error.retry_after_s)
        inferred = queue.inference.unpack_outputs(queue.first_response)
        tensors = () if inferred is None else inferred.outputs
        values = {t.name: bodies.decode_output(gateway, t, model.name) for t in tensors}
        queue.remove_first(inferred)
        return values
    finally:
        queue.close()
