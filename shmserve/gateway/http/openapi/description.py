"""The description of a table of routes, and its handlers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

import shmserve
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.openapi.operations import COMPONENTS, JSON, Operation, Schema
from shmserve.gateway.http.request import HttpRequest
from shmserve.gateway.http.response import JSON as JSON_HEADER
from shmserve.gateway.http.response import HttpResponse, triton_error
from shmserve.gateway.http.routing import Route, RouteTable, parts

# Nothing of the page may come from elsewhere, nor be shown in another one.
_PAGE_HEADERS = (
    b"Content-Type: text/html; charset=utf-8\r\n"
    b"Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; "
    b"script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'\r\n"
)
_PAGE = Path(__file__).with_name("page.html")


class OpenApiHandlers:
    """The handlers of the description of a table of routes, which has routes to them itself."""

    def __init__(self, table: Callable[[], RouteTable]) -> None:
        self._table = table

    @functools.cached_property
    def _json(self) -> bytes:
        return orjson.dumps(described(self._table()))

    async def document(self, gateway: Gateway, request: HttpRequest) -> HttpResponse:
        """GET /openapi.json."""
        return HttpResponse(200, (self._json,), JSON_HEADER)

    async def page(self, gateway: Gateway, request: HttpRequest) -> HttpResponse:
        """GET /docs."""
        return HttpResponse(200, (_page(),), _PAGE_HEADERS)


@functools.cache
def _page() -> bytes:
    return _PAGE.read_bytes()


def described(table: RouteTable) -> dict[str, Any]:
    """The OpenAPI document of all routes that have an operation (pure)."""
    paths: dict[str, dict[str, Any]] = {}
    for route in table.routes:
        if route.operation is not None:
            for path in _paths(route.path):
                made = _operation(route, route.operation, path)
                paths.setdefault(path, {})[route.method.lower()] = made
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "shmserve",
            "version": shmserve.__version__,
            "description": "The Open Inference Protocol (v2) with Triton's extensions, and "
            "OpenAI's routes for models that generate text.",
        },
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": COMPONENTS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths(template: str) -> Iterator[str]:
    """The paths of a route's template: without what is optional in it, and with it."""
    found = [""]
    for part, optional in parts(template):
        found = [path + more for path in found for more in (["", part] if optional else [part])]
    yield from found


def _operation(route: Route, operation: Operation, path: str) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", path)
    made: dict[str, Any] = {
        "operationId": "_".join(re.findall(r"\w+", f"{route.method.lower()} {path}")),
        "summary": operation.about,
        "tags": [route.scope],
        "parameters": [_parameter(name) for name in names],
        "responses": _responses(route, operation),
    }
    if operation.body is not None:
        content = _content(operation.body)
        made["requestBody"] = {"required": operation.needs_body, "content": content}
    return made


def _parameter(name: str) -> dict[str, Any]:
    schema: Schema = {"type": "string", "minLength": 1}
    if name == "version":
        schema = {"type": "string", "pattern": "^[1-9][0-9]{0,8}$"}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _responses(route: Route, operation: Operation) -> dict[str, Any]:
    kind = "Error" if route.error_form is triton_error else "OpenAIError"
    error = {JSON: {"$ref": f"#/components/schemas/{kind}"}}
    done: dict[str, Any] = {"description": "done"}
    if operation.reply is not None:
        done["content"] = _content(operation.reply)
    refused = {"description": "refused: the request is wrong", "content": _content(error)}
    failed = {"description": "failed, or not now", "content": _content(error)}
    return {"200": done, "4XX": refused, "5XX": failed}


def _content(schemas: Any) -> dict[str, Any]:
    return {kind: {"schema": schema} for kind, schema in schemas.items()}
