"""The route tables: which handler a method and a path have, and the API that they belong to."""

from __future__ import annotations

from functools import partial

from shmserve.common.access.auth_tokens import METRICS
from shmserve.gateway.api.metrics import MetricsExporter
from shmserve.gateway.http import infer
from shmserve.gateway.http.dashboard.live import LiveFigures
from shmserve.gateway.http.dashboard.page import page
from shmserve.gateway.http.handlers import repository, server, shared_memory
from shmserve.gateway.http.openai import embeddings, generation, models
from shmserve.gateway.http.openai.errors import openai_error
from shmserve.gateway.http.routing import Route, RouteTable
from shmserve.gateway.http.streaming import generate

_MODEL = r"/v2/models/([^/]+)(?:/versions/([0-9]+))?"
_TRACE = r"/v2(?:/models/([^/]+))?/trace/setting"
_REPOSITORY = r"/v2/repository(?:/([^/]+))?"
_REPOSITORY_MODEL = _REPOSITORY + r"/models/([^/]+)"
_MEMORY = "shared-memory"
_SYSTEM_REGION = r"/v2/systemsharedmemory(?:/region/([^/]+))?"
_CUDA_REGION = r"/v2/cudasharedmemory(?:/region/([^/]+))?"

ROUTES = RouteTable(
    Route("POST", _MODEL + "/infer", "inference", infer.infer),
    Route("GET", "/v2/health/live", "health", server.live),
    Route("GET", "/v2/health/ready", "health", server.ready),
    Route("GET", "/v2", "metadata", server.server),
    Route("GET", "/v2/models/stats", "statistics", server.all_statistics),
    Route("GET", _MODEL, "metadata", server.model),
    Route("GET", _MODEL + "/ready", "health", server.model_ready),
    Route("GET", _MODEL + "/config", "model-config", server.model_config),
    Route("GET", _MODEL + "/stats", "statistics", server.model_statistics),
    Route("POST", _MODEL + "/generate", "inference", generate.generate),
    Route("POST", _MODEL + "/generate_stream", "inference", generate.generate_stream),
    Route("GET", _TRACE, "trace", server.trace),
    Route("POST", _TRACE, "trace", server.trace),
    Route("GET", "/v2/logging", "logging", server.show_logging),
    Route("POST", "/v2/logging", "logging", server.change_logging),
    Route("POST", _REPOSITORY + "/index", "model-repository", repository.index),
    Route("POST", _REPOSITORY_MODEL + "/load", "model-repository", repository.load),
    Route("POST", _REPOSITORY_MODEL + "/unload", "model-repository", repository.unload),
    Route("POST", _SYSTEM_REGION + "/register", _MEMORY, shared_memory.register),
    Route("GET", _SYSTEM_REGION + "/status", _MEMORY, shared_memory.status),
    Route("POST", _SYSTEM_REGION + "/unregister", _MEMORY, shared_memory.unregister),
    Route("POST", _CUDA_REGION + "/register", _MEMORY, shared_memory.register_cuda),
    Route("GET", _CUDA_REGION + "/status", _MEMORY, partial(shared_memory.status, cuda=True)),
    Route(
        *("POST", _CUDA_REGION + "/unregister", _MEMORY),
        partial(shared_memory.unregister, cuda=True),
    ),
    Route("GET", "/v1/models", "metadata", models.all_models, openai_error),
    Route("GET", "/v1/models/([^/]+)", "metadata", models.one_model, openai_error),
    Route("POST", "/v1/completions", "inference", generation.completions, openai_error),
    Route("POST", "/v1/chat/completions", "inference", generation.chats, openai_error),
    Route("POST", "/v1/embeddings", "inference", embeddings.embeddings, openai_error),
)


def metrics_routes(exporter: MetricsExporter, live: LiveFigures) -> RouteTable:
    """The route table of a metrics listener: whatever is not in it is there, and empty."""
    return RouteTable(
        Route("GET", "/metrics/?", METRICS, partial(server.metrics, exporter)),
        Route("GET", "/live", METRICS, live.respond),
        # Who asks it without a token is asked for one by the page itself.
        Route("GET", "/", "health", page),
        Route("", "(?!(?:/metrics/?|/live|/)$).*", METRICS, server.nothing),
    )
