"""The model repository extension: index, load, unload, asked of the supervisor.

A client that leaves in the middle changes nothing: the supervisor finishes what it was asked for.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from shmserve.common.model_names import check_model_name
from shmserve.errors import Internal, InvalidArgument, PermissionDenied, Unsupported
from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.body import JSON_TOO_LARGE, Body
from shmserve.gateway.http.json.parser import JsonFault, loads
from shmserve.gateway.http.request import Request
from shmserve.gateway.http.response import Reply, json_reply
from shmserve.ipc.messages import IndexRepository, LoadModel, UnloadModel


async def read_json(gateway: Gateway, request: Request, *, required: bool = False) -> Any:
    """The body as JSON; an empty body is an empty object, unless one is `required`.

    Raises JsonFault for what is not JSON.
    """
    body = Body(request, gateway.settings)
    if body.compressed():
        raw = await body.inflate()
    else:
        raw = await body.read(gateway.settings.max_input_size, JSON_TOO_LARGE)
    return loads(raw) if raw or required else {}


async def index(gateway: Gateway, request: Request, repository: str | None) -> Reply:
    """POST /v2/repository/index; Triton takes any repository's name here."""
    wanted = await read_json(gateway, request)
    only_ready = wanted.get("ready", False) if type(wanted) is dict else False
    if type(only_ready) is not bool:
        raise InvalidArgument("Invalid value for 'ready': expected a boolean")
    payload = await gateway.supervisor.ask(lambda number: IndexRepository(number, only_ready))
    return json_reply(payload.get("models", []))


async def load(gateway: Gateway, request: Request, repository: str | None, name: str) -> Reply:
    """POST /v2/repository/models/NAME/load, optionally with a configuration and files."""
    check_repository(repository)
    check_model_name(name)
    config, files = _load_parameters(_parameters(await read_json(gateway, request)))
    if config or files:
        check_may_send(request.connection.caller)
    await gateway.supervisor.ask(lambda number: LoadModel(number, name, config, files))
    return Reply()


def check_may_send(caller: ClientIdentity) -> None:
    """Raise PermissionDenied unless the server may run what this client sends as model files.

    It runs as the server's user, so it is that user's to send, or whoever's has a token for it.
    """
    if not (caller.listener.authorisation.asks_for_tokens or caller.runs_the_server()):
        raise PermissionDenied(
            "a configuration or files for a model may come only from the user who runs the server, "
            "or with a token"
        )


async def unload(gateway: Gateway, request: Request, repository: str | None, name: str) -> Reply:
    """POST /v2/repository/models/NAME/unload."""
    check_repository(repository)
    check_model_name(name)
    parameters = _parameters(await read_json(gateway, request))
    dependents = parameters.get("unload_dependents", False)
    if type(dependents) is not bool:
        raise JsonFault(
            "Unable to parse 'unload_dependents': attempt to access JSON non-boolean as boolean"
        )
    await gateway.supervisor.ask(lambda number: UnloadModel(number, name, dependents))
    return Reply()


def check_repository(repository: str | None) -> None:
    """Raise Unsupported for a name: as in Triton, no repository can be chosen."""
    if repository:
        raise Unsupported("'repository_name' specification is not supported")


def _parameters(body: Any) -> dict[str, Any]:
    parameters = body.get("parameters", {}) if type(body) is dict else {}
    if type(parameters) is not dict:
        raise JsonFault("attempt to get members for non-object")
    return parameters


def _load_parameters(parameters: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    config = ""
    files: dict[str, Any] = {}
    for key, value in parameters.items():
        if key != "config" and not key.startswith("file:"):
            raise Internal("unexpected error on creating Triton parameter")
        if type(value) is not str:
            raise JsonFault("attempt to access JSON non-string as string")
        if key == "config":
            config = value
            continue
        try:
            files[key.removeprefix("file:")] = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidArgument(f"the contents of '{key}' are not valid base64") from None
    return config, files
