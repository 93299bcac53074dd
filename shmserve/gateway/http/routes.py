"""The route tables of the listeners, and the OpenAPI description of the inference API.

pages/operations.json describes the operation of each route: its summary, and the schemas of its
body and reply by content type. GET /openapi.json returns the description as an OpenAPI document.
GET /docs returns a page that shows the document (pages/docs.html). The page also offers a request
to try for each model, from GET /docs/models. GET / has links to both and to the dashboard.
"""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import orjson

import shmserve
from shmserve.common.auth_tokens import METRICS, MODEL_METADATA
from shmserve.gateway.api.metrics import MetricsExporter
from shmserve.gateway.context import Gateway
from shmserve.gateway.http import generate, handlers, infer
from shmserve.gateway.http.dashboard import LiveFigures, show_dashboard
from shmserve.gateway.http.messages import (
    JSON_HEADER,
    HttpRequest,
    HttpResponse,
    encode_triton_error,
)
from shmserve.gateway.http.openai import generation, models, responses
from shmserve.gateway.http.openai.bodies import encode_openai_error
from shmserve.gateway.http.routing import ANY_PATH, Handler, Route, RouteTable, optional_parts

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
            entry = _describe_operation(route, operation, path)
            paths.setdefault(path, {})[route.method.lower()] = entry
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
    for part, is_optional in optional_parts(template):
        suffixes = ["", part] if is_optional else [part]
        paths = [path + suffix for path in paths for suffix in suffixes]
    return paths


def _describe_operation(route: Route, operation: dict[str, Any], path: str) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "operationId": "_".join(re.findall(r"\w+", f"{route.method.lower()} {path}")),
        "summary": operation["summary"],
        "tags": ["metadata" if route.scope == MODEL_METADATA else route.scope],
        "parameters": [_path_parameter(name) for name in re.findall(r"{(\w+)}", path)],
    }
    error_schema = "Error" if route.encode_error is encode_triton_error else "OpenAIError"
    error = _media_types({"application/json": {"$ref": f"#/components/schemas/{error_schema}"}})
    success_response: dict[str, Any] = {"description": "done"}
    if "reply" in operation:
        success_response["content"] = _media_types(operation["reply"])
    client_error = {"description": "invalid request", "content": error}
    server_error = {"description": "failure, or temporarily unavailable", "content": error}
    entry["responses"] = {"200": success_response, "4XX": client_error, "5XX": server_error}
    if "body" in operation:
        is_required = operation.get("required", False)
        entry["requestBody"] = {"required": is_required, "content": _media_types(operation["body"])}
    return entry


def _path_parameter(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "minLength": 1}
    if name == "version":
        schema = {"type": "string", "pattern": "^[1-9][0-9]{0,8}$"}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _media_types(schemas: dict[str, Any]) -> dict[str, Any]:
    return {media_type: {"schema": schema} for media_type, schema in schemas.items()}


@cache
def _encoded_document() -> bytes:
    return orjson.dumps(openapi_document(ROUTES))


async def _show_document(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    return HttpResponse(200, (_encoded_document(),), JSON_HEADER)


async def _show_docs(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    return HttpResponse(200, ((_PAGES / "docs.html").read_bytes(),), _PAGE_HEADERS)


async def _show_start_page(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle GET /: a page with links to the other pages."""
    host = _HOST.match(request.headers.get("Host", ""))
    address = f"http://{host[0] if host else '127.0.0.1'}:{gateway.settings.metrics_port}/"
    links = [("/docs", "the HTTP API"), ("/openapi.json", "its description"), ("/v2", "the server")]
    if gateway.settings.metrics_port:
        links += [(address, "the dashboard"), (f"{address}metrics", "metrics for Prometheus")]
    # The links are relative, so that they also work behind a proxy that adds a prefix.
    items = "".join(
        f'<li><a href="{url.removeprefix("/")}">{url}</a>: {title}\n' for url, title in links
    )
    body = f"<!DOCTYPE html>\n<title>shmserve</title>\n<h1>shmserve</h1>\n<ul>\n{items}</ul>\n"
    return HttpResponse(200, (body.encode(),), _PAGE_HEADERS)


_MODEL_PATH = "/v2/models/{model}[/versions/{version}]"
_TRACE_PATH = "/v2[/models/{model}]/trace/setting"
_REPOSITORY_PATH = "/v2/repository[/{repository}]"
_REPOSITORY_MODEL_PATH = _REPOSITORY_PATH + "/models/{model}"
_MEMORY_SCOPE = "shared-memory"
_SYSTEM_PATH = "/v2/systemsharedmemory[/region/{region}]"
_CUDA_PATH = "/v2/cudasharedmemory[/region/{region}]"
_get_cuda_status = partial(handlers.get_region_status, is_cuda=True)
_post_cuda_unregister = partial(handlers.post_unregister, is_cuda=True)


def _create_route(method: str, path: str, scope: str, handler: Handler) -> Route:
    is_openai = path.startswith(("/v1/", "/tokenize", "/detokenize"))
    encode_error = encode_openai_error if is_openai else encode_triton_error
    encode_error = responses.response_error if path.startswith("/v1/responses") else encode_error
    return Route(method, path, scope, handler, encode_error, is_openai)


ROUTES = RouteTable(
    _create_route("POST", _MODEL_PATH + "/infer", "inference", infer.infer),
    _create_route("GET", "/v2/health/live", "health", handlers.get_live),
    _create_route("GET", "/v2/health/ready", "health", handlers.get_ready),
    _create_route("GET", "/v2", "metadata", handlers.get_server),
    _create_route("GET", "/v2/models/stats", "statistics", handlers.get_statistics),
    _create_route("GET", _MODEL_PATH, MODEL_METADATA, handlers.get_model),
    _create_route("GET", _MODEL_PATH + "/ready", "health", handlers.get_model_ready),
    _create_route("GET", _MODEL_PATH + "/config", "model-config", handlers.get_model_config),
    _create_route("GET", _MODEL_PATH + "/stats", "statistics", handlers.get_statistics),
    _create_route("POST", _MODEL_PATH + "/generate", "inference", generate.generate),
    _create_route("POST", _MODEL_PATH + "/generate_stream", "inference", generate.generate_stream),
    _create_route("GET", _TRACE_PATH, "trace", handlers.handle_trace_settings),
    _create_route("POST", _TRACE_PATH, "trace", handlers.handle_trace_settings),
    _create_route("GET", "/v2/logging", "logging", handlers.handle_log_settings),
    _create_route("POST", "/v2/logging", "logging", handlers.handle_log_settings),
    _create_route("POST", _REPOSITORY_PATH + "/index", "model-repository", handlers.post_index),
    _create_route("POST", _REPOSITORY_MODEL_PATH + "/load", "model-repository", handlers.post_load),
    _create_route(
        "POST", _REPOSITORY_MODEL_PATH + "/unload", "model-repository", handlers.post_unload
    ),
    _create_route("POST", _SYSTEM_PATH + "/register", _MEMORY_SCOPE, handlers.post_register),
    _create_route("GET", _SYSTEM_PATH + "/status", _MEMORY_SCOPE, handlers.get_region_status),
    _create_route("POST", _SYSTEM_PATH + "/unregister", _MEMORY_SCOPE, handlers.post_unregister),
    _create_route("POST", _CUDA_PATH + "/register", _MEMORY_SCOPE, handlers.post_register_cuda),
    _create_route("GET", _CUDA_PATH + "/status", _MEMORY_SCOPE, _get_cuda_status),
    _create_route("POST", _CUDA_PATH + "/unregister", _MEMORY_SCOPE, _post_cuda_unregister),
    _create_route("GET", "/v1/models", "metadata", models.list_models),
    _create_route("GET", "/v1/models/{id}", "metadata", models.show_model),
    _create_route("POST", "/v1/completions", "inference", generation.create_completion),
    _create_route("POST", "/v1/chat/completions", "inference", generation.create_chat),
    _create_route("POST", "/v1/responses", "inference", responses.create_response),
    _create_route("POST", "/v1/responses/input_tokens", "inference", responses.count_input_tokens),
    _create_route("POST", "/v1/embeddings", "inference", models.embeddings),
    _create_route("POST", "/tokenize", "inference", models.tokenize),
    _create_route("POST", "/detokenize", "inference", models.detokenize),
    _create_route("GET", "/health", "health", handlers.get_health),
    _create_route("GET", "/ping", "health", handlers.get_health),
    _create_route("POST", "/ping", "health", handlers.get_health),
    _create_route("GET", "/version", "metadata", handlers.get_version),
    # No token is needed, since these pages contain no data of the server. The script of /docs asks
    # for a token if the server requires one.
    _create_route("GET", "/", "health", _show_start_page),
    _create_route("GET", "/openapi.json", "health", _show_document),
    _create_route("GET", "/docs", "health", _show_docs),
    _create_route("GET", "/docs/models", MODEL_METADATA, handlers.get_examples),
)


def metrics_routes(exporter: MetricsExporter, figures: LiveFigures) -> RouteTable:
    """Return the route table of a metrics listener. All other paths return an empty response."""
    return RouteTable(
        Route("GET", "/metrics[/]", METRICS, partial(handlers.get_metrics, exporter)),
        Route("GET", "/live", METRICS, figures.respond),
        # The page needs no token: its script asks the user for the token of the data.
        Route("GET", "/", "health", show_dashboard),
        Route("", ANY_PATH, METRICS, handlers.get_empty),
    )
