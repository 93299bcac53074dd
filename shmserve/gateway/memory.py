"""The shared memory extensions over HTTP: register, status, unregister; system and CUDA."""

from __future__ import annotations

from typing import Any

from shmserve.errors import InvalidArgument
from shmserve.gateway import cuda_memory
from shmserve.gateway.replies import Reply, json_reply
from shmserve.gateway.repository import read_json
from shmserve.gateway.requests import Request
from shmserve.gateway.state import Gateway
from shmserve.gateway.values import LARGEST_UNSIGNED, JsonFault
from shmserve.ipc.messages import RegisterRegion, UnregisterRegion
from shmserve.ipc.ranges import whole

_LONGEST_NAME = 255


def check_name(name: str) -> None:
    """Raise InvalidArgument for what cannot be a region's name."""
    if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise InvalidArgument(
            f"a shared memory region's name must have 1 to {_LONGEST_NAME} printable characters"
        )


async def register(gateway: Gateway, request: Request, name: str | None) -> Reply:
    """POST /v2/systemsharedmemory/region/NAME/register."""
    if not name:
        raise InvalidArgument("'region name' is necessary to register system shared memory region")
    check_name(name)
    body = await _register_body(gateway, request)
    key = _required(body, "key")
    byte_size = _required(body, "byte_size")
    if type(key) is not str:
        raise JsonFault("attempt to access JSON non-string as string")
    size = whole(byte_size, "byte_size")
    offset = whole(body.get("offset", 0), "offset")
    await gateway.supervisor.ask(lambda number: RegisterRegion(number, name, key, offset, size))
    return Reply()


async def _register_body(gateway: Gateway, request: Request) -> dict[str, Any]:
    body = await read_json(gateway, request)
    return body if type(body) is dict else {}


def _required(body: dict[str, Any], field: str) -> Any:
    if field not in body:
        raise InvalidArgument(f"Shared memory register request has no '{field}' field")
    return body[field]


async def status(gateway: Gateway, request: Request, name: str | None) -> Reply:
    """GET /v2/systemsharedmemory[/region/NAME]/status."""
    return json_reply(gateway.regions.status(name or "", cuda=False))


async def unregister(gateway: Gateway, request: Request, name: str | None) -> Reply:
    """POST /v2/systemsharedmemory[/region/NAME]/unregister; an unknown name is fine."""
    await gateway.supervisor.ask(lambda number: UnregisterRegion(number, name or ""))
    return Reply()


async def register_cuda(gateway: Gateway, request: Request, name: str | None) -> Reply:
    """POST /v2/cudasharedmemory/region/NAME/register.

    `offset` and `device_uuid` are ours, and optional.
    """
    if not name:
        raise InvalidArgument("'region name' is necessary to register cuda shared memory region")
    check_name(name)
    cuda_memory.require_cuda(gateway, name)
    body = await _register_body(gateway, request)
    raw_handle = _required(body, "raw_handle")
    encoded = _member(raw_handle if type(raw_handle) is dict else {}, "b64", str)
    byte_size = _member(body, "byte_size", int)
    device_id = _member(body, "device_id", int)
    offset = _member(body, "offset", int) if "offset" in body else 0
    uuid = _member(body, "device_uuid", str) if "device_uuid" in body else ""
    await cuda_memory.register(
        gateway,
        name,
        cuda_memory.decode_handle(encoded),
        device_id,
        byte_size,
        offset=offset,
        device_uuid=cuda_memory.decode_uuid(uuid) if uuid else b"",
        exporter_pid=cuda_memory.peer_pid(request.connection.transport),
    )
    return Reply()


def _member(holder: dict[str, Any], field: str, kind: type[str] | type[int]) -> Any:
    if field not in holder:
        raise JsonFault(f"attempt to access non-existing object member '{field}'")
    value: Any = holder[field]
    if kind is str:
        word, fits = "string", type(value) is str
    else:
        word, fits = "unsigned-integer", type(value) is int and 0 <= value <= LARGEST_UNSIGNED
    if not fits:
        raise JsonFault(f"attempt to access JSON non-{word} as {word}")
    return value


async def status_cuda(gateway: Gateway, request: Request, name: str | None) -> Reply:
    """GET /v2/cudasharedmemory[/region/NAME]/status."""
    return json_reply(cuda_memory.status(gateway, name or ""))


async def unregister_cuda(gateway: Gateway, request: Request, name: str | None) -> Reply:
    """POST /v2/cudasharedmemory[/region/NAME]/unregister; an unknown name is fine."""
    await cuda_memory.unregister(gateway, name or "")
    return Reply()
