"""The route tables: which handler a method and a path have, and the API that they belong to."""

from __future__ import annotations

from functools import partial

from shmserve.common.auth_tokens import METRICS
from shmserve.gateway.api.metrics import MetricsExporter
from shmserve.gateway.http import handlers, infer
from shmserve.gateway.http.dashboard.live import LiveFigures
from shmserve.gateway.http.dashboard.page import page
from shmserve.gateway.http.openai import embeddings, generation, models
from shmserve.gateway.http.openai.answers import openai_error
from shmserve.gateway.http.openapi import operations as op
from shmserve.gateway.http.openapi.description import OpenApiHandlers
from shmserve.gateway.http.openapi.operations import Operation
from shmserve.gateway.http.response import triton_error
from shmserve.gateway.http.routing import ANY, Handler, Route, RouteTable
from shmserve.gateway.http.streaming import generate

_MODEL = "/v2/models/{model}[/versions/{version}]"
_TRACE = "/v2[/models/{model}]/trace/setting"
_REPOSITORY = "/v2/repository[/{repository}]"
_REPOSITORY_MODEL = _REPOSITORY + "/models/{model}"
_MEMORY = "shared-memory"
_SYSTEM = "/v2/systemsharedmemory[/region/{region}]"
_CUDA = "/v2/cudasharedmemory[/region/{region}]"
_CUDA_STATUS = partial(handlers.status, cuda=True)
_CUDA_UNREGISTER = partial(handlers.unregister, cuda=True)


def _route(method: str, path: str, scope: str, handler: Handler, operation: Operation) -> Route:
    form = openai_error if path.startswith("/v1/") else triton_error
    return Route(method, path, scope, handler, form, operation)


_DESCRIPTION = OpenApiHandlers(lambda: ROUTES)
ROUTES: RouteTable = RouteTable(
    _route("POST", _MODEL + "/infer", "inference", infer.infer, op.INFER),
    _route("GET", "/v2/health/live", "health", handlers.live, op.LIVE),
    _route("GET", "/v2/health/ready", "health", handlers.ready, op.READY),
    _route("GET", "/v2", "metadata", handlers.server, op.SERVER),
    _route("GET", "/v2/models/stats", "statistics", handlers.all_statistics, op.STATISTICS),
    _route("GET", _MODEL, "metadata", handlers.model, op.MODEL),
    _route("GET", _MODEL + "/ready", "health", handlers.model_ready, op.MODEL_READY),
    _route("GET", _MODEL + "/config", "model-config", handlers.model_config, op.CONFIG),
    _route("GET", _MODEL + "/stats", "statistics", handlers.model_statistics, op.STATISTICS),
    _route("POST", _MODEL + "/generate", "inference", generate.generate, op.GENERATE),
    _route(
        *("POST", _MODEL + "/generate_stream", "inference"),
        *(generate.generate_stream, op.GENERATE_STREAM),
    ),
    _route("GET", _TRACE, "trace", handlers.show_trace, op.SHOW_TRACE),
    _route("POST", _TRACE, "trace", handlers.change_trace, op.CHANGE_TRACE),
    _route("GET", "/v2/logging", "logging", handlers.show_logging, op.LOGGING),
    _route("POST", "/v2/logging", "logging", handlers.change_logging, op.LOG),
    _route("POST", _REPOSITORY + "/index", "model-repository", handlers.index, op.INDEX),
    _route("POST", _REPOSITORY_MODEL + "/load", "model-repository", handlers.load, op.LOAD),
    _route("POST", _REPOSITORY_MODEL + "/unload", "model-repository", handlers.unload, op.UNLOAD),
    _route("POST", _SYSTEM + "/register", _MEMORY, handlers.register, op.REGISTER),
    _route("GET", _SYSTEM + "/status", _MEMORY, handlers.status, op.REGIONS),
    _route("POST", _SYSTEM + "/unregister", _MEMORY, handlers.unregister, op.UNREGISTER),
    _route("POST", _CUDA + "/register", _MEMORY, handlers.register_cuda, op.REGISTER_CUDA),
    _route("GET", _CUDA + "/status", _MEMORY, _CUDA_STATUS, op.REGIONS),
    _route("POST", _CUDA + "/unregister", _MEMORY, _CUDA_UNREGISTER, op.UNREGISTER),
    _route("GET", "/v1/models", "metadata", models.all_models, op.MODELS),
    _route("GET", "/v1/models/{model}", "metadata", models.one_model, op.ONE_MODEL),
    _route("POST", "/v1/completions", "inference", generation.completions, op.COMPLETIONS),
    _route("POST", "/v1/chat/completions", "inference", generation.chats, op.CHATS),
    _route("POST", "/v1/embeddings", "inference", embeddings.embeddings, op.EMBEDDINGS),
    _route("GET", "/openapi.json", "metadata", _DESCRIPTION.document, op.DESCRIPTION),
    _route("GET", "/docs", "metadata", _DESCRIPTION.page, op.PAGE),
)


def metrics_routes(exporter: MetricsExporter, live: LiveFigures) -> RouteTable:
    """The route table of a metrics listener: whatever is not in it is there, and empty."""
    return RouteTable(
        Route("GET", "/metrics[/]", METRICS, partial(handlers.metrics, exporter)),
        Route("GET", "/live", METRICS, live.respond),
        # Who asks it without a token is asked for one by the page itself.
        Route("GET", "/", "health", page),
        Route("", ANY, METRICS, handlers.nothing),
    )
