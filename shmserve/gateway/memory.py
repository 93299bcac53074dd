"""The shared memory extensions: register, status, unregister. There are no CUDA regions yet."""

from __future__ import annotations

from typing import Any

from shmserve.errors import InvalidArgument, NotFound
from shmserve.gateway.replies import Reply, json_reply
from shmserve.gateway.repository import read_json
from shmserve.gateway.requests import Request
from shmserve.gateway.state import Gateway
from shmserve.gateway.values import JsonFault
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
    body = await _register_body(gateway, request)
    key = _required(body, "key")
    byte_size = _required(body, "byte_size")
    if type(key) is not str:
        raise JsonFault("attempt to access JSON non-string as string")
    await register_region(gateway, name, key, body.get("offset", 0), byte_size)
    return Reply()


async def register_region(
    gateway: Gateway, name: str, key: str, offset: Any, byte_size: Any
) -> None:
    """Register a client's POSIX object; raises what it is refused with. The same for every door."""
    check_name(name)
    size = whole(byte_size, "byte_size")
    start = whole(offset, "offset")
    await gateway.supervisor.ask(lambda number: RegisterRegion(number, name, key, start, size))


async def _register_body(gateway: Gateway, request: Request) -> dict[str, Any]:
    body = await read_json(gateway, request)
    return body if type(body) is dict else {}


def _required(body: dict[str, Any], field: str) -> Any:
    if field not in body:
        raise InvalidArgument(f"Shared memory register request has no '{field}' field")
    return body[field]


async def status(gateway: Gateway, request: Request, name: str | None) -> Reply:
    """GET /v2/systemsharedmemory[/region/NAME]/status."""
    if not name:
        return json_reply([region.status() for region in gateway.regions.all()])
    region = gateway.regions.get(name)
    if region is None:
        raise NotFound(f"Unable to find system shared memory region: '{name}'")
    return json_reply([region.status()])


async def unregister(gateway: Gateway, request: Request, name: str | None) -> Reply:
    """POST /v2/systemsharedmemory[/region/NAME]/unregister; an unknown name is fine."""
    await unregister_region(gateway, name or "")
    return Reply()


async def unregister_region(gateway: Gateway, name: str) -> None:
    """Unregister a region, all of them for ""; an unknown name is fine."""
    await gateway.supervisor.ask(lambda number: UnregisterRegion(number, name))


async def register_cuda(gateway: Gateway, request: Request, name: str | None) -> Reply:
    """POST /v2/cudasharedmemory/region/NAME/register: there is none here."""
    if not name:
        raise InvalidArgument("'region name' is necessary to register cuda shared memory region")
    check_name(name)
    body = await _register_body(gateway, request)
    _required(body, "raw_handle")
    raise InvalidArgument(
        f"failed to register CUDA shared memory region: '{name}', GPUs not supported"
    )


async def status_cuda(gateway: Gateway, request: Request, name: str | None) -> Reply:
    """GET /v2/cudasharedmemory[/region/NAME]/status."""
    if not name:
        return json_reply([])
    if gateway.regions.get(name) is not None:
        raise NotFound(
            f"The region named '{name}' is registered as system shared memory, "
            "not CUDA shared memory"
        )
    raise NotFound(f"Unable to find cuda shared memory region: '{name}'")


async def unregister_cuda(gateway: Gateway, request: Request, name: str | None) -> Reply:
    """POST /v2/cudasharedmemory[/region/NAME]/unregister: nothing to do."""
    return Reply()
