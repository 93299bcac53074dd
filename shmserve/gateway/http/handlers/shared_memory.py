"""The shared memory extensions over HTTP: register, status, unregister; system and CUDA."""

from __future__ import annotations

from typing import Any

from shmserve.common.access.peer_credentials import unix_pid
from shmserve.errors import InvalidArgument
from shmserve.gateway.api import shared_memory as api
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.body.reader import read_json
from shmserve.gateway.http.json.parser import JsonFault, mistyped_value
from shmserve.gateway.http.request import HttpRequest
from shmserve.gateway.http.response import HttpResponse, json_response
from shmserve.ipc.tensors.descriptors import CudaHandle
from shmserve.ipc.tensors.ranges import LARGEST_UNSIGNED, whole


async def register(gateway: Gateway, request: HttpRequest, name: str | None) -> HttpResponse:
    """POST /v2/systemsharedmemory/region/NAME/register.

    With {"lifetime": "connection"} the region is unregistered when this connection ends; with
    {"pin": true} workers on CUDA devices lock its pages.
    """
    if not name:
        raise InvalidArgument("'region name' is necessary to register system shared memory region")
    client = request.connection.client
    peer = client.peer()
    api.check_name(name)
    key, offset, size, leased, pin = registration(await _register_body(gateway, request))
    asked = api.register(gateway, peer, name, key, offset, size, leased=leased, pin=pin)
    await (api.lease(gateway, client, asked) if leased else asked)
    return HttpResponse()


def registration(body: dict[str, Any]) -> tuple[str, int, int, bool, bool]:
    """The key, offset, size, and whether it is leased and pinned, of a registration's JSON (pure).

    Raises InvalidArgument or JsonFault.
    """
    key = _required(body, "key")
    byte_size = _required(body, "byte_size")
    if type(key) is not str:
        raise mistyped_value("string")
    size = whole(byte_size, "byte_size")
    offset = whole(body.get("offset", 0), "offset")
    lifetime = body.get("lifetime", "server")
    if lifetime not in ("server", "connection"):
        raise InvalidArgument("'lifetime' must be 'server' or 'connection'")
    pin = body.get("pin", False)
    if type(pin) is not bool:
        raise InvalidArgument("'pin' must be true or false")
    return key, offset, size, lifetime == "connection", pin


async def _register_body(gateway: Gateway, request: HttpRequest) -> dict[str, Any]:
    body = await read_json(gateway, request)
    return body if type(body) is dict else {}


def _required(body: dict[str, Any], field: str) -> Any:
    if field not in body:
        raise InvalidArgument(f"Shared memory register request has no '{field}' field")
    return body[field]


async def status(
    gateway: Gateway, request: HttpRequest, name: str | None, *, cuda: bool = False
) -> HttpResponse:
    """GET /v2/systemsharedmemory[/region/NAME]/status: those of the client's user; `cuda`: GET
    /v2/cudasharedmemory..."""
    regions = api.visible(gateway, request.connection.client, name or "", cuda=cuda)
    return json_response([region.status() for region in regions])


async def unregister(
    gateway: Gateway, request: HttpRequest, name: str | None, *, cuda: bool = False
) -> HttpResponse:
    """POST /v2/systemsharedmemory[/region/NAME]/unregister, or as `status`; an unknown name is
    fine."""
    await api.unregister(gateway, request.connection.client, name or "", cuda=cuda)
    return HttpResponse()


async def register_cuda(gateway: Gateway, request: HttpRequest, name: str | None) -> HttpResponse:
    """POST /v2/cudasharedmemory/region/NAME/register.

    `offset` and `device_uuid` are ours, and optional.
    """
    if not name:
        raise InvalidArgument("'region name' is necessary to register cuda shared memory region")
    peer = request.connection.client.peer()
    body = await _register_body(gateway, request)
    raw_handle = _required(body, "raw_handle")
    encoded = _member(raw_handle if type(raw_handle) is dict else {}, "b64", str)
    byte_size = _member(body, "byte_size", int)
    device_id = _member(body, "device_id", int)
    offset = _member(body, "offset", int) if "offset" in body else 0
    uuid = _member(body, "device_uuid", str) if "device_uuid" in body else ""
    raw = api.decode_handle(encoded)
    handle = CudaHandle(raw, device_id, api.decode_uuid(uuid) if uuid else b"")
    exporter_pid = unix_pid(request.connection.transport)
    await api.register_cuda(gateway, peer, name, handle, offset, byte_size, exporter_pid)
    return HttpResponse()


def _member(holder: dict[str, Any], field: str, kind: type[str] | type[int]) -> Any:
    if field not in holder:
        raise JsonFault(f"attempt to access non-existing object member '{field}'")
    value: Any = holder[field]
    if kind is str:
        word, fits = "string", type(value) is str
    else:
        word, fits = "unsigned-integer", type(value) is int and 0 <= value <= LARGEST_UNSIGNED
    if not fits:
        raise mistyped_value(word)
    return value
