"""GET /v1/models and /v1/models/NAME: the models that this interface can ask."""

from __future__ import annotations

import time
from typing import Any

from shmserve.errors import NotFound
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.messages import HttpRequest, HttpResponse, json_response
from shmserve.gateway.http.openai.bodies import generates
from shmserve.gateway.http.openai.embeddings import embeds
from shmserve.gateway.model_table import GatewayModel
from shmserve.gateway.on_demand import loaded

_STARTED = int(time.time())


async def all_models(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """All of them."""
    names = {model.name: model for model in gateway.models.all() if _serves(model)}
    return json_response({"object": "list", "data": list(map(_shown, names.values()))})


async def one_model(gateway: Gateway, request: HttpRequest, name: str) -> HttpResponse:
    """One of them."""
    model = await loaded(gateway, name, "")
    if not _serves(model):
        raise NotFound(f"model '{name}' neither generates text nor makes embeddings of it")
    return json_response(_shown(model))


def _serves(model: GatewayModel) -> bool:
    return generates(model) or embeds(model) is not None


def _shown(model: GatewayModel) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": _STARTED, "owned_by": "shmserve"}
