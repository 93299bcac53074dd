"""The model repository extension over HTTP."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from shmserve.errors import Internal, InvalidArgument, clip, suggestion
from shmserve.gateway.api import repository as api
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.body.reader import read_json
from shmserve.gateway.http.json.parser import JsonFault, mistyped_value
from shmserve.gateway.http.request import HttpRequest
from shmserve.gateway.http.response import HttpResponse, json_response


async def index(gateway: Gateway, request: HttpRequest, repository: str | None) -> HttpResponse:
    """POST /v2/repository/index; Triton takes any repository's name here."""
    wanted = await read_json(gateway, request)
    only_ready = wanted.get("ready", False) if type(wanted) is dict else False
    if type(only_ready) is not bool:
        raise InvalidArgument("Invalid value for 'ready': expected a boolean")
    return json_response(await api.index(gateway, only_ready=only_ready))


async def load(
    gateway: Gateway, request: HttpRequest, repository: str | None, name: str
) -> HttpResponse:
    """POST /v2/repository/models/NAME/load, optionally with a configuration and files."""
    api.check_names(repository, name)
    config, files = _load_parameters(_parameters(await read_json(gateway, request)))
    await api.load(gateway, request.connection.client, name, config, files)
    return HttpResponse()


async def unload(
    gateway: Gateway, request: HttpRequest, repository: str | None, name: str
) -> HttpResponse:
    """POST /v2/repository/models/NAME/unload."""
    api.check_names(repository, name)
    parameters = _parameters(await read_json(gateway, request))
    dependents = parameters.get("unload_dependents", False)
    if type(dependents) is not bool:
        raise JsonFault(
            "Unable to parse 'unload_dependents': attempt to access JSON non-boolean as boolean"
        )
    await api.unload(gateway, name, dependents=dependents)
    return HttpResponse()


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
            raise Internal(
                f"unexpected error on creating Triton parameter: '{clip(key)}' is neither 'config' "
                f"nor 'file:PATH'{suggestion(key, ('config',))}"
            )
        if type(value) is not str:
            raise mistyped_value("string")
        if key == "config":
            config = value
            continue
        try:
            files[key.removeprefix("file:")] = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidArgument(f"the contents of '{key}' are not valid base64") from None
    return config, files
