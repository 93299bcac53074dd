"""The HTTP handlers of the operations in gateway/api.

The handlers cover health, metadata, configuration, statistics, metrics, log and trace settings, the
model repository, and shared memory of the system and of CUDA.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import shmserve
from shmserve.common.peers import unix_pid
from shmserve.errors import Internal, InvalidArgument, Unavailable, clip, suggestion
from shmserve.gateway.api import management
from shmserve.gateway.api import shared_memory as memory_api
from shmserve.gateway.api.management import LOG_FILE, LOG_FORMAT, LOG_LEVEL, LOG_SWITCHES
from shmserve.gateway.api.metrics import MetricsExporter
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.body import read_json
from shmserve.gateway.http.json.parser import (
    JsonFault,
    is_unsigned,
    loads_members,
    mistyped_value_error,
)
from shmserve.gateway.http.messages import HttpRequest, HttpResponse, json_response
from shmserve.gateway.http.openai.models import find_embedder
from shmserve.ipc.tensors.descriptors import CudaHandle, require_integer
from shmserve.logs import FORMATS, MAX_LOG_LEVEL

_TEXT_HEADER = b"Content-Type: text/plain; charset=utf-8\r\n"


def _object_members(body: Any) -> dict[str, Any]:
    """Return the members of a JSON object; other values have none, as in Triton."""
    return body if type(body) is dict else {}


async def get_live(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle GET /v2/health/live."""
    management.check_not_exiting(gateway)
    return HttpResponse(200 if gateway.health.live else 400)


async def get_ready(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle GET /v2/health/ready."""
    management.check_not_exiting(gateway)
    return HttpResponse(200 if gateway.health.ready else 400)


async def get_health(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle GET /health and /ping, by which load balancers and vLLM's clients check readiness."""
    management.check_not_exiting(gateway)
    return HttpResponse(200 if gateway.health.ready else 503)


async def get_version(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle GET /version."""
    return json_response({"version": shmserve.__version__})


async def get_model_ready(
    gateway: Gateway, request: HttpRequest, name: str, version: str
) -> HttpResponse:
    """Handle GET /v2/models/NAME/ready."""
    if await management.is_model_ready(gateway, name, version):
        return HttpResponse()
    raise InvalidArgument("Model version not ready")


async def get_server(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle GET /v2."""
    return json_response(management.server_metadata(gateway))


async def get_model(
    gateway: Gateway, request: HttpRequest, name: str, version: str
) -> HttpResponse:
    """Handle GET /v2/models/NAME. With a version in the URL, only this version is listed."""
    return json_response(await management.model_metadata(gateway, name, version))


async def get_model_config(
    gateway: Gateway, request: HttpRequest, name: str, version: str
) -> HttpResponse:
    """Handle GET /v2/models/NAME/config."""
    return json_response(await management.model_config(gateway, name, version))


async def get_examples(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle GET /docs/models: return the example requests that the page /docs offers."""
    examples: list[dict[str, Any]] = []
    for example in management.request_examples(gateway):
        name = example["model"]
        examples.append(example)
        model = gateway.models.find(name, "")
        if model is not None and find_embedder(model) is not None:
            examples.append(management.text_example(name, "/v1/embeddings", input=["A text"]))
    return json_response(examples)


async def get_statistics(
    gateway: Gateway, request: HttpRequest, name: str = "", version: str = ""
) -> HttpResponse:
    """Handle GET /v2/models/stats and /v2/models/NAME/stats."""
    statistics = await management.model_statistics(gateway, name, version)
    return json_response({"model_stats": statistics})


async def get_metrics(
    exporter: MetricsExporter, gateway: Gateway, request: HttpRequest
) -> HttpResponse:
    """Handle GET /metrics of a metrics listener."""
    return HttpResponse(200, (await exporter.render_page(),), _TEXT_HEADER)


async def get_empty(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle all paths of a metrics listener that have no other route: return nothing."""
    return HttpResponse()


async def handle_trace_settings(gateway: Gateway, request: HttpRequest, name: str) -> HttpResponse:
    """Handle GET and POST /v2/trace/setting and /v2/models/NAME/trace/setting.

    A POST applies all changes or none.
    """
    body = await read_json(gateway, request, is_required=True) if request.method == "POST" else {}
    changes = {key: _trace_values(key, value) for key, value in _object_members(body).items()}
    settings = await management.change_trace_settings(gateway, name, changes)
    response = {key: v if key == "trace_level" else v[0] for key, v in settings.items()}
    return json_response(response)


def _trace_values(key: str, value: Any) -> list[str] | None:
    """Return the values of a trace setting; None resets the setting."""
    values = value if type(value) is list and key == "trace_level" else [value]
    if value is None or all(type(item) is str or type(item) is int for item in values):
        return None if value is None else list(map(str, values))
    raise InvalidArgument(
        f"'{key}' must be a string, an integer or, for trace_level, a list of strings; got "
        f"{value!r:.80}"
    )


async def handle_log_settings(gateway: Gateway, request: HttpRequest) -> HttpResponse:
    """Handle GET and POST /v2/logging.

    A POST applies all changes or none. Unknown settings, and settings whose value is null, are
    ignored.
    """
    body = await read_json(gateway, request, is_required=True) if request.method == "POST" else {}
    return json_response(await management.change_log_settings(gateway, _read_log_changes(body)))


def _read_log_changes(body: Any) -> dict[str, Any]:
    setting_names, members = (*LOG_SWITCHES, LOG_LEVEL, LOG_FORMAT, LOG_FILE), _object_members(body)
    changes = {key: members[key] for key in setting_names if members.get(key) is not None}
    for key, value in changes.items():
        if key == LOG_FILE:
            raise management.log_file_error()
        if key in LOG_SWITCHES and type(value) is not bool:
            raise mistyped_value_error("boolean")
        if key == LOG_LEVEL and (type(value) is not int or not 0 <= value <= MAX_LOG_LEVEL):
            raise mistyped_value_error("unsigned-integer")
        if key == LOG_FORMAT and type(value) is not str:
            raise mistyped_value_error("string")
        if key == LOG_FORMAT and value not in FORMATS:
            raise Unavailable(f"invalid argument for --log_format, got: {value}")
    return changes


async def post_index(gateway: Gateway, request: HttpRequest, repository: str) -> HttpResponse:
    """Handle POST /v2/repository/index. Triton accepts the name of any repository here."""
    body = await read_json(gateway, request, parse=loads_members)
    only_ready = _object_members(body).get("ready", False)
    if type(only_ready) is not bool:
        raise InvalidArgument("Invalid value for 'ready': expected a boolean")
    return json_response(await management.repository_index(gateway, only_ready=only_ready))


async def post_load(
    gateway: Gateway, request: HttpRequest, repository: str, name: str
) -> HttpResponse:
    """Handle POST /v2/repository/models/NAME/load, optionally with a configuration and files."""
    management.check_names(repository, name)
    config, files = _decode_load_parameters(_read_parameters(await read_json(gateway, request)))
    await management.load_model(gateway, request.connection.client, name, config, files)
    return HttpResponse()


async def post_unload(
    gateway: Gateway, request: HttpRequest, repository: str, name: str
) -> HttpResponse:
    """Handle POST /v2/repository/models/NAME/unload, whose body Triton does not check."""
    management.check_names(repository, name, for_unload=True)
    try:
        parameters = _read_parameters(await read_json(gateway, request))
    except JsonFault as fault:
        raise InvalidArgument(fault.message) from None
    with_dependents = parameters.get("unload_dependents", False)
    if type(with_dependents) is not bool:
        text = "Unable to parse 'unload_dependents': attempt to access JSON non-boolean as boolean"
        raise InvalidArgument(text)
    await management.unload_model(gateway, name, with_dependents=with_dependents)
    return HttpResponse()


def _read_parameters(body: Any) -> dict[str, Any]:
    parameters = _object_members(body).get("parameters", {})
    if type(parameters) is not dict:
        raise JsonFault("attempt to get members for non-object")
    return parameters


def _decode_load_parameters(parameters: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    config = ""
    files: dict[str, Any] = {}
    for key, value in parameters.items():
        if key != "config" and not key.startswith("file:"):
            raise Internal(
                f"unexpected error on creating Triton parameter: '{clip(key)}' is neither 'config' "
                f"nor 'file:PATH'{suggestion(key, ('config',))}"
            )
        if type(value) is not str:
            raise mistyped_value_error("string")
        if key == "config":
            config = value
            continue
        value = "".join(value.split())  # encoders may break lines, and omit the padding
        try:
            contents = base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise InvalidArgument(f"the contents of '{key}' are not valid base64") from None
        files[key.removeprefix("file:")] = contents
    return config, files


async def post_register(gateway: Gateway, request: HttpRequest, name: str) -> HttpResponse:
    """Handle POST /v2/systemsharedmemory/region/NAME/register.

    With {"lifetime": "connection"} the region is unregistered when this connection ends; with
    {"pin": true} workers on CUDA devices lock its pages.
    """
    if not name:
        raise InvalidArgument("'region name' is necessary to register system shared memory region")
    client = request.connection.client
    client.peer()  # raises an error if the client may not use shared memory
    memory_api.check_region_name(name)
    members = _object_members(await read_json(gateway, request))
    key, offset, size, is_leased, pin_pages = decode_registration(members)
    region_fields = (name, key, offset, size)
    await memory_api.register_system(
        gateway, client, *region_fields, is_leased=is_leased, pin_pages=pin_pages
    )
    return HttpResponse()


def decode_registration(body: dict[str, Any]) -> tuple[str, int, int, bool, bool]:
    """Return the members of the body that registers a system shared memory region.

    Returns:
        The key, the offset, the size, whether the region is unregistered when the connection ends,
        and whether its pages are pinned.

    Raises:
        InvalidArgument: A value is not allowed.
        JsonFault: A value has the wrong type.
    """
    key = _require_member(body, "key")
    byte_size = _require_member(body, "byte_size")
    if type(key) is not str:
        raise mistyped_value_error("string")
    size = require_integer(byte_size, "byte_size")
    offset = require_integer(body.get("offset", 0), "offset")
    lifetime = body.get("lifetime", "server")
    if lifetime not in ("server", "connection"):
        raise InvalidArgument(
            f"'lifetime' must be 'server' or 'connection', got {clip(repr(lifetime))}"
        )
    pin_pages = body.get("pin", False)
    if type(pin_pages) is not bool:
        raise InvalidArgument(f"'pin' must be true or false, got {clip(repr(pin_pages))}")
    return key, offset, size, lifetime == "connection", pin_pages


def _require_member(body: dict[str, Any], field: str) -> Any:
    if field not in body:
        raise InvalidArgument(f"Shared memory register request has no '{field}' field")
    return body[field]


async def get_region_status(
    gateway: Gateway, request: HttpRequest, name: str, *, is_cuda: bool = False
) -> HttpResponse:
    """Handle GET /v2/systemsharedmemory[/region/NAME]/status, for regions of the client's user.

    With `is_cuda`, handle GET /v2/cudasharedmemory[/region/NAME]/status.
    """
    regions = memory_api.visible_regions(gateway, request.connection.client, name, is_cuda=is_cuda)
    return json_response([region.status() for region in regions])


async def post_unregister(
    gateway: Gateway, request: HttpRequest, name: str, *, is_cuda: bool = False
) -> HttpResponse:
    """Handle POST /v2/systemsharedmemory[/region/NAME]/unregister; ignore an unknown name.

    With `is_cuda`, handle POST /v2/cudasharedmemory[/region/NAME]/unregister.
    """
    await memory_api.unregister_regions(gateway, request.connection.client, name, is_cuda=is_cuda)
    return HttpResponse()


async def post_register_cuda(gateway: Gateway, request: HttpRequest, name: str) -> HttpResponse:
    """Handle POST /v2/cudasharedmemory/region/NAME/register.

    The optional members `offset` and `device_uuid` are extensions of Triton's API.
    """
    if not name:
        raise InvalidArgument("'region name' is necessary to register cuda shared memory region")
    peer = request.connection.client.peer()
    body = _object_members(await read_json(gateway, request))
    raw_handle = _require_member(body, "raw_handle")
    encoded_handle = _typed_member(raw_handle if type(raw_handle) is dict else {}, "b64", str)
    byte_size = _typed_member(body, "byte_size", int)
    device_id = _typed_member(body, "device_id", int)
    offset = _typed_member(body, "offset", int) if "offset" in body else 0
    uuid = _typed_member(body, "device_uuid", str) if "device_uuid" in body else ""
    handle_bytes = memory_api.decode_handle(encoded_handle)
    handle = CudaHandle(handle_bytes, device_id, memory_api.decode_uuid(uuid) if uuid else b"")
    exporter_pid = unix_pid(request.connection.transport)
    await memory_api.register_cuda(gateway, peer, name, handle, offset, byte_size, exporter_pid)
    return HttpResponse()


def _typed_member(members: dict[str, Any], field: str, expected_type: type[str] | type[int]) -> Any:
    if field not in members:
        raise JsonFault(f"attempt to access non-existing object member '{field}'")
    value: Any = members[field]
    if expected_type is str and type(value) is not str:
        raise mistyped_value_error("string")
    if expected_type is int and not is_unsigned(value):
        raise mistyped_value_error("unsigned-integer")
    return value
