"""The models of OpenAI's API: GET /v1/models, and POST /tokenize and /detokenize as in vLLM.

The tokenizer of a model is in its worker. A request with the parameter `task` is converted there,
beside the steps of the engine, and generates nothing. A tokenizer in each gateway would need the
memory again, and could differ from that of the worker.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import orjson

from shmserve.errors import InvalidArgument, NotFound, Unsupported, clip
from shmserve.gateway.context import Gateway, awaits_load, loaded
from shmserve.gateway.http.messages import HttpRequest, HttpResponse, json_response
from shmserve.gateway.http.openai import bodies
from shmserve.gateway.http.openai.embeddings import embeds
from shmserve.gateway.http.openai.fields import CONVERSATION, DETOKENIZE, TOKENIZE, carried
from shmserve.gateway.http.openai.names import (
    TEXT,
    generates,
    names_asleep,
    names_of,
    only_one,
    own_name,
)
from shmserve.gateway.inference.request import InferInput
from shmserve.gateway.model_table import GatewayModel
from shmserve.ipc.engine_settings import PROMPT_TOO_LONG

_STARTED_S = int(time.time())
_MOST_TOKEN = (1 << 31) - 1


async def all_models(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Respond with all models that embed or generate text, and those on demand."""
    models = {model.name: model for model in gateway.models.all() if _serves(model)}
    asleep = await names_asleep(gateway)
    aliases = {**asleep, **{name: model.aliases for name, model in models.items()}}
    found = [
        _shown(name, root, models.get(root))
        for root in sorted(aliases)
        for name in [*names_of(gateway, root, asleep), *aliases[root]]
    ]
    # A name in several places belongs to the first.
    unique = {each["id"]: each for each in reversed(found)}
    return json_response({"object": "list", "data": list(reversed(unique.values()))})


async def one_model(gateway: Gateway, request: HttpRequest, name: str) -> HttpResponse:
    """Respond with one model that embeds or generates text; a model on demand is not loaded."""
    own = await own_name(gateway, name)
    if awaits_load(gateway, own, "") and own in await names_asleep(gateway):
        return json_response(_shown(name, own, None))
    model = await loaded(gateway, own, "")
    if not _serves(model):
        raise NotFound(f"model '{name}' neither generates text nor makes embeddings of it")
    return json_response(_shown(name, own, model))


async def _default(gateway: Gateway, body: dict[str, Any]) -> str:
    """Return the model of a body that names none."""
    return "" if "model" in body else only_one(gateway, await names_asleep(gateway))


def _serves(model: GatewayModel) -> bool:
    return generates(model) or embeds(model) is not None


def _shown(name: str, root: str, model: GatewayModel | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED_S,
        "owned_by": "shmserve",
        "root": root,
        "parent": None,
        "max_model_len": None if model is None else model.max_model_len,
    }


async def tokenize(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Respond with the tokens of a prompt or of a chat."""
    body = await bodies.read(gateway, request)
    given = carried(body, TOKENIZE, gateway.settings.refuse_unknown_fields)
    model = await bodies.generating(gateway, given, default=await _default(gateway, given))
    chat, named = "messages" in given, bodies.checked(given, "return_token_strs", bool, False)
    special = bodies.checked(given, "add_special_tokens", bool, not chat)
    if chat and "prompt" in given:
        raise InvalidArgument("prompt: either a prompt or messages are needed, and not both")
    if chat:
        variables = {name: given[name] for name in CONVERSATION & given.keys()}
        prompt = bodies.conversation(given, variables)
    elif "prompt" in given:
        prompt = bodies.tensor("text_input", "BYTES", [bodies.checked(given, "prompt", str, "")])
    else:
        raise InvalidArgument("prompt: it is missing; a prompt or messages are needed")
    parameters = {"task": "tokenize", "add_special_tokens": special}
    outputs = ("token_ids", TEXT) if named else ("token_ids",)
    found = await _converted(gateway, request, model, prompt, parameters, outputs)
    # No list of Python's is made of up to a million tokens.
    tokens = orjson.dumps(found["token_ids"], option=orjson.OPT_SERIALIZE_NUMPY)
    return json_response(
        {
            "count": len(found["token_ids"]),
            "max_model_len": model.max_model_len,
            "tokens": orjson.Fragment(tokens),
            "token_strs": orjson.Fragment(found[TEXT].ravel()[0]) if named else None,
        }
    )


async def detokenize(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Respond with the text of tokens."""
    body = await bodies.read(gateway, request)
    given = carried(body, DETOKENIZE, gateway.settings.refuse_unknown_fields)
    model = await bodies.generating(gateway, given, default=await _default(gateway, given))
    tokens = given.get("tokens")
    if type(tokens) is not list or not {*map(type, tokens)} <= {int}:
        raise InvalidArgument(f"tokens: {clip(repr(tokens))} is not a list of tokens")
    if not tokens:
        return json_response({"prompt": ""})
    count, most = len(tokens), model.max_model_len
    if most and count > most:
        raise InvalidArgument(f"tokens: {PROMPT_TOO_LONG}: {count} tokens are above {most}")
    if min(tokens) < 0 or max(tokens) > _MOST_TOKEN:
        raise InvalidArgument(f"tokens: {clip(repr(tokens))} is not a list of tokens")
    ids = bodies.tensor("input_ids", "INT32", tokens)
    found = await _converted(gateway, request, model, ids, {"task": "detokenize"}, (TEXT,))
    return json_response({"prompt": found[TEXT].ravel()[0].decode()})


async def _converted(
    gateway: Gateway,
    request: HttpRequest,
    model: GatewayModel,
    given: InferInput,
    parameters: dict[str, Any],
    outputs: tuple[str, ...],
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the outputs of the model's worker, which has the tokenizer.

    Raises:
        ShmserveError: The model's error, or its backend converts no texts.
    """
    if not model.converts:
        problem = "only the backends 'llm' and 'vllm' convert texts and tokens"
        raise Unsupported(f"model '{model.name}': {problem}")
    return await bodies.infer(gateway, request, model, given, outputs, parameters)
