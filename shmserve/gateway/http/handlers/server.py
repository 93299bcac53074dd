"""Health, metadata, configuration, statistics, metrics, logging, tracing."""

from __future__ import annotations

from typing import Any

from shmserve.errors import InvalidArgument, Unavailable
from shmserve.gateway.api import metadata, statistics
from shmserve.gateway.api.metadata import FILE, FORMAT, LEVEL, SWITCHES
from shmserve.gateway.api.metrics import MetricsExporter
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.body.reader import read_json
from shmserve.gateway.http.json.parser import mistyped_value
from shmserve.gateway.http.request import HttpRequest
from shmserve.gateway.http.response import JSON, HttpResponse, json_response
from shmserve.logs import FORMATS, MOST_VERBOSE

_TEXT = b"Content-Type: text/plain; charset=utf-8\r\n"


async def live(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """GET /v2/health/live."""
    metadata.check_staying(gateway)
    return HttpResponse(200 if gateway.health.live else 400)


async def ready(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """GET /v2/health/ready."""
    metadata.check_staying(gateway)
    return HttpResponse(200 if gateway.health.ready else 400)


async def model_ready(
    gateway: Gateway, request: HttpRequest, name: str, version: str | None
) -> HttpResponse:
    """GET /v2/models/NAME/ready."""
    if await metadata.is_model_ready(gateway, name, version or ""):
        return HttpResponse()
    raise InvalidArgument("Model version not ready")


async def server(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """GET /v2."""
    return json_response(metadata.server(gateway))


async def model(
    gateway: Gateway, request: HttpRequest, name: str, version: str | None
) -> HttpResponse:
    """GET /v2/models/NAME; a version in the URL is the only one listed."""
    return json_response(await metadata.model(gateway, name, version or ""))


async def model_config(
    gateway: Gateway, request: HttpRequest, name: str, version: str | None
) -> HttpResponse:
    """GET /v2/models/NAME/config."""
    return HttpResponse(200, (await metadata.model_config(gateway, name, version or ""),), JSON)


async def all_statistics(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """GET /v2/models/stats."""
    return json_response({"model_stats": await statistics.reported(gateway, "", "")})


async def model_statistics(
    gateway: Gateway, request: HttpRequest, name: str, version: str | None
) -> HttpResponse:
    """GET /v2/models/NAME/stats."""
    return json_response({"model_stats": await statistics.reported(gateway, name, version or "")})


async def metrics(
    exporter: MetricsExporter, gateway: Gateway, request: HttpRequest
) -> HttpResponse:
    """GET /metrics, of a metrics listener."""
    return HttpResponse(200, (await exporter.page(),), _TEXT)


async def nothing(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """The empty response to whatever else a metrics listener is asked."""
    return HttpResponse()


async def show_trace(gateway: Gateway, request: HttpRequest, name: str | None) -> HttpResponse:
    """GET /v2/trace/setting and /v2/models/NAME/trace/setting."""
    return _trace_settings(await metadata.change_trace_settings(gateway, name or "", {}))


async def change_trace(gateway: Gateway, request: HttpRequest, name: str | None) -> HttpResponse:
    """POST to the same: all of the changes or none."""
    body = await read_json(gateway, request, required=True)
    members = body if type(body) is dict else {}
    given = {key: _texts(key, value) for key, value in members.items()}
    return _trace_settings(await metadata.change_trace_settings(gateway, name or "", given))


def _texts(key: str, value: Any) -> list[str] | None:
    """A trace setting's values; None where it is to be as before."""
    values = value if type(value) is list and key == "trace_level" else [value]
    if value is None or all(type(each) is str or type(each) is int for each in values):
        return None if value is None else list(map(str, values))
    raise InvalidArgument(
        f"'{key}' must be a text, a whole number or, of trace_level, a list of texts; got "
        f"{value!r:.80}"
    )


def _trace_settings(settings: dict[str, list[str]]) -> HttpResponse:
    shown = {key: values if key == "trace_level" else values[0] for key, values in settings.items()}
    return json_response(shown)


async def show_logging(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """GET /v2/logging."""
    return json_response(await metadata.change_log_settings(gateway, {}))


async def change_logging(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """POST /v2/logging: all of the changes or none; what the extension does not know is left
    alone, and so is what a null is given for."""
    body = await read_json(gateway, request, required=True)
    return json_response(await metadata.change_log_settings(gateway, _changes(body)))


def _changes(body: Any) -> dict[str, Any]:
    known = (*SWITCHES, LEVEL, FORMAT, FILE)
    members = body if type(body) is dict else {}
    changes = {key: members[key] for key in known if members.get(key) is not None}
    for key, value in changes.items():
        if key == FILE:
            raise metadata.refuse_file()
        if key in SWITCHES and type(value) is not bool:
            raise mistyped_value("boolean")
        if key == LEVEL and (type(value) is not int or not 0 <= value <= MOST_VERBOSE):
            raise mistyped_value("unsigned-integer")
        if key == FORMAT and type(value) is not str:
            raise mistyped_value("string")
        if key == FORMAT and value not in FORMATS:
            raise Unavailable(f"invalid argument for --log_format, got: {value}")
    return changes
