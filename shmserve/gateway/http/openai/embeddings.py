"""POST /v1/embeddings: vectors of texts.

A model embeds text if it has one input of texts and one output of floating-point vectors. An
example is an ensemble of a tokenizer and a sentence encoder.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Any, NamedTuple

import numpy as np

from shmserve.errors import InvalidArgument, NotFound, clip
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.messages import HttpRequest, HttpResponse, json_response
from shmserve.gateway.http.openai import bodies
from shmserve.gateway.http.openai.fields import EMBEDDING, carried
from shmserve.gateway.http.openai.names import shown_name
from shmserve.gateway.model_table import GatewayModel

_FORMATS = ("float", "base64")
_FLOATS = ("FP32", "FP16", "FP64")
_MOST_TEXTS = 2048


class Embedder(NamedTuple):
    """A model that embeds text: its input, its output, and the dimensions of one text."""

    text: str
    vector: str
    dims: tuple[int, ...]
    most: int  # texts in a request; 0: one text, without a batch dimension


def embeds(model: GatewayModel) -> Embedder | None:
    """Return the input and output by which a model embeds text; None if it does not."""
    signature = model.signature
    if len(signature.inputs) != 1 or len(signature.outputs) != 1 or model.decoupled:
        return None
    ((text, source),) = signature.inputs.items()
    ((vector, target),) = signature.outputs.items()
    dims = tuple(source.dims)
    plain = all(size in (1, -1) for size in dims) and len(target.dims) >= 1
    if source.datatype != "BYTES" or target.datatype not in _FLOATS or not plain:
        return None
    return Embedder(text, vector, tuple(1 for _ in dims), signature.max_batch_size)


async def embeddings(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Respond with a vector for each text."""
    body = carried(
        await bodies.read(gateway, request), EMBEDDING, gateway.settings.refuse_unknown_fields
    )
    model = await bodies.model_of(gateway, body)
    embedder = embeds(model)
    if embedder is None:
        raise NotFound(f"model '{model.name}' makes no embeddings of texts")
    texts = _texts(body.get("input"))
    encoding = bodies.checked(body, "encoding_format", str, "float")
    if encoding not in _FORMATS:
        raise InvalidArgument(f"encoding_format: '{encoding}' is not one of {', '.join(_FORMATS)}")
    step = max(embedder.most, 1)
    parts = [texts[at : at + step] for at in range(0, len(texts), step)]
    calls = [_vectors(gateway, request, model, embedder, part) for part in parts]
    tasks = list(map(asyncio.ensure_future, calls))
    try:
        vectors = [vector for found in await asyncio.gather(*tasks) for vector in found]
    finally:
        for task in tasks:
            task.cancel()
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, encoding)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": 0, "total_tokens": 0}  # unknown
    name = shown_name(gateway, model.name)
    return json_response({"object": "list", "data": data, "model": name, "usage": usage})


async def _vectors(
    gateway: Gateway,
    request: HttpRequest,
    model: GatewayModel,
    embedder: Embedder,
    texts: list[str],
) -> list[np.ndarray[Any, Any]]:
    """Return the vector of each text in FP32, for as many texts as fit a batch of the model."""
    shape = (len(texts), *embedder.dims) if embedder.most else embedder.dims
    given = bodies.tensor(embedder.text, "BYTES", texts, shape or (1,))
    found = await bodies.infer(gateway, request, model, given, [embedder.vector], {})
    vectors = found[embedder.vector].astype(np.float32)
    return list(vectors.reshape(len(texts), -1))


def _texts(given: Any) -> list[str]:
    texts = [given] if type(given) is str else given
    if type(texts) is not list or not texts or any(type(each) is not str for each in texts):
        raise InvalidArgument(f"input: {clip(repr(given))} is neither a text nor a list of texts")
    if len(texts) > _MOST_TEXTS:
        raise InvalidArgument(f"input: {len(texts)} texts are more than {_MOST_TEXTS}")
    return texts


def _encoded(vector: np.ndarray[Any, Any], encoding: str) -> Any:
    if encoding == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    return vector.tolist()
