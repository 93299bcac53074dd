"""The route tables of the listeners, and the OpenAPI description of the inference API.

pages/operations.json describes the operation of each route: its summary, and the schemas of its
body and reply by content type. GET /openapi.json returns the description as an OpenAPI document,
and GET /docs returns a page that shows the document (pages/docs.html) and, from GET /docs/models, a
request to try for each model. GET / links both and the dashboard.
"""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import orjson

import shmserve
from shmserve.common.auth_tokens import METRICS, SIGNATURE
from shmserve.gateway.api.metrics import MetricsExporter
from shmserve.gateway.context import Gateway
from shmserve.gateway.http import generate, handlers, infer
from shmserve.gateway.http.dashboard import LiveFigures, page
from shmserve.gateway.http.messages import JSON, HttpRequest, HttpResponse, triton_error
from shmserve.gateway.http.openai import generation, models, responses
from shmserve.gateway.http.openai.bodies import openai_error
from shmserve.gateway.http.routing import ANY, Handler, Route, RouteTable, optional_parts

_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")  # the host without its port
_PAGES = Path(__file__).with_name("pages")
# The page may load nothing from other sites, and other pages may not show it.
_PAGE_HEADERS = (
    b"Content-Type: text/html; charset=utf-8\r\n"
    b"Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; "
    b"script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'\r\n"
)


def openapi_document(table: RouteTable) -> dict[str, Any]:
    """Return the OpenAPI document of all routes in the table."""
    description = orjson.loads((_PAGES / "operations.json").read_bytes())
    paths: dict[str, dict[str, Any]] = {}
    for route in table.routes:
        operation = description["operations"][f"{route.method} {route.path}"]
        for path in _paths(route.path):
            paths.setdefault(path, {})[route.method.lower()] = _described(route, operation, path)
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
            "schemas": description["schemas"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths(template: str) -> list[str]:
    """Return the paths of a route's template, without and with each optional part."""
    paths = [""]
    for part, optional in optional_parts(template):
        paths = [path + suffix for path in paths for suffix in (["", part] if optional else [part])]
    return paths


def _described(route: Route, operation: dict[str, Any], path: str) -> dict[str, Any]:
    description: dict[str, Any] = {
        "operationId": "_".join(re.findall(r"\w+", f"{route.method.lower()} {path}")),
        "summary": operation["summary"],
        "tags": ["metadata" if route.scope == SIGNATURE else route.scope],
        "parameters": [_parameter(name) for name in re.findall(r"{(\w+)}", path)],
    }
    kind = "Error" if route.error_form is triton_error else "OpenAIError"
    error = _content({"application/json": {"$ref": f"#/components/schemas/{kind}"}})
    success_response: dict[str, Any] = {"description": "done"}
    if "reply" in operation:
        success_response["content"] = _content(operation["reply"])
    client_error = {"description": "invalid request", "content": error}
    server_error = {"description": "failure, or temporarily unavailable", "content": error}
    description["responses"] = {"200": success_response, "4XX": client_error, "5XX": server_error}
    if "body" in operation:
        required = operation.get("required", False)
        description["requestBody"] = {"required": required, "content": _content(operation["body"])}
    return description


def _parameter(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "minLength": 1}
    if name == "version":
        schema = {"type": "string", "pattern": "^[1-9][0-9]{0,8}$"}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _content(schemas: dict[str, Any]) -> dict[str, Any]:
    return {kind: {"schema": schema} for kind, schema in schemas.items()}


@cache
def _document() -> bytes:
    return orjson.dumps(openapi_document(ROUTES))


async def _show_document(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    return HttpResponse(200, (_document(),), JSON)


@cache
def _page() -> bytes:
    return (_PAGES / "docs.html").read_bytes()


async def _show_page(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    return HttpResponse(200, (_page(),), _PAGE_HEADERS)


async def _show_start(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle GET /: a page with links to the other pages."""
    host = _HOST.match(request.headers.get("Host", ""))
    address = f"http://{host[0] if host else '127.0.0.1'}:{gateway.settings.metrics_port}/"
    links = [("/docs", "the HTTP API"), ("/openapi.json", "its description"), ("/v2", "the server")]
    if gateway.settings.metrics_port:
        links += [(address, "the dashboard"), (f"{address}metrics", "metrics for Prometheus")]
    items = "".join(f'<li><a href="{url}">{url}</a>: {text}\n' for url, text in links)
    body = f"<!DOCTYPE html>\n<title>shmserve</title>\n<h1>shmserve</h1>\n<ul>\n{items}</ul>\n"
    return HttpResponse(200, (body.encode(),), _PAGE_HEADERS)


_MODEL = "/v2/models/{model}[/versions/{version}]"
_TRACE = "/v2[/models/{model}]/trace/setting"
_REPOSITORY = "/v2/repository[/{repository}]"
_REPOSITORY_MODEL = _REPOSITORY + "/models/{model}"
_MEMORY = "shared-memory"
_SYSTEM = "/v2/systemsharedmemory[/region/{region}]"
_CUDA = "/v2/cudasharedmemory[/region/{region}]"
_CUDA_STATUS = partial(handlers.status, cuda=True)
_CUDA_UNREGISTER = partial(handlers.unregister, cuda=True)


def _route(method: str, path: str, scope: str, handler: Handler) -> Route:
    is_openai = path.startswith(("/v1/", "/tokenize", "/detokenize"))
    form = openai_error if is_openai else triton_error
    form = responses.response_error if path == "/v1/responses" else form
    return Route(method, path, scope, handler, form, is_openai)


ROUTES = RouteTable(
    _route("POST", _MODEL + "/infer", "inference", infer.infer),
    _route("GET", "/v2/health/live", "health", handlers.live),
    _route("GET", "/v2/health/ready", "health", handlers.ready),
    _route("GET", "/v2", "metadata", handlers.server),
    _route("GET", "/v2/models/stats", "statistics", handlers.statistics),
    _route("GET", _MODEL, SIGNATURE, handlers.model),
    _route("GET", _MODEL + "/ready", "health", handlers.model_ready),
    _route("GET", _MODEL + "/config", "model-config", handlers.model_config),
    _route("GET", _MODEL + "/stats", "statistics", handlers.statistics),
    _route("POST", _MODEL + "/generate", "inference", generate.generate),
    _route("POST", _MODEL + "/generate_stream", "inference", generate.generate_stream),
    _route("GET", _TRACE, "trace", handlers.trace_settings),
    _route("POST", _TRACE, "trace", handlers.trace_settings),
    _route("GET", "/v2/logging", "logging", handlers.log_settings),
    _route("POST", "/v2/logging", "logging", handlers.log_settings),
    _route("POST", _REPOSITORY + "/index", "model-repository", handlers.index),
    _route("POST", _REPOSITORY_MODEL + "/load", "model-repository", handlers.load),
    _route("POST", _REPOSITORY_MODEL + "/unload", "model-repository", handlers.unload),
    _route("POST", _SYSTEM + "/register", _MEMORY, handlers.register),
    _route("GET", _SYSTEM + "/status", _MEMORY, handlers.status),
    _route("POST", _SYSTEM + "/unregister", _MEMORY, handlers.unregister),
    _route("POST", _CUDA + "/register", _MEMORY, handlers.register_cuda),
    _route("GET", _CUDA + "/status", _MEMORY, _CUDA_STATUS),
    _route("POST", _CUDA + "/unregister", _MEMORY, _CUDA_UNREGISTER),
    _route("GET", "/v1/models", "metadata", models.all_models),
    _route("GET", "/v1/models/{id}", "metadata", models.one_model),
    _route("POST", "/v1/completions", "inference", generation.completions),
    _route("POST", "/v1/chat/completions", "inference", generation.chats),
    _route("POST", "/v1/responses", "inference", responses.responses),
    _route("POST", "/v1/embeddings", "inference", models.embeddings),
    _route("POST", "/tokenize", "inference", models.tokenize),
    _route("POST", "/detokenize", "inference", models.detokenize),
    _route("GET", "/health", "health", handlers.health),
    _route("GET", "/ping", "health", handlers.health),
    _route("POST", "/ping", "health", handlers.health),
    _route("GET", "/version", "metadata", handlers.version),
    # These have no data of the server. /docs asks for a token if the server needs one.
    _route("GET", "/", "health", _show_start),
    _route("GET", "/openapi.json", "health", _show_document),
    _route("GET", "/docs", "health", _show_page),
    _route("GET", "/docs/models", SIGNATURE, handlers.examples),
)


def metrics_routes(exporter: MetricsExporter, live: LiveFigures) -> RouteTable:
    """Return the route table of a metrics listener. All other paths return an empty response."""
    return RouteTable(
        Route("GET", "/metrics[/]", METRICS, partial(handlers.metrics, exporter)),
        Route("GET", "/live", METRICS, live.respond),
        # The page itself asks for a token if the request has none.
        Route("GET", "/", "health", page),
        Route("", ANY, METRICS, handlers.nothing),
    )
