"""The logging extension over HTTP: what is logged by the server's processes, shown and changed.

Gateways keep no settings: the supervisor has them, and tells every process of a change.
"""

from __future__ import annotations

from typing import Any

from shmserve.errors import Unavailable, Unsupported
from shmserve.gateway.api.repository import read_json
from shmserve.gateway.context import Gateway
from shmserve.gateway.http.json.parser import JsonFault
from shmserve.gateway.http.request import Request
from shmserve.gateway.http.response import Reply, json_reply
from shmserve.ipc.messages import ChangeLogging
from shmserve.logs import FORMATS, MOST_VERBOSE

SWITCHES = ("log_info", "log_warning", "log_error")
LEVEL, FORMAT, FILE = "log_verbose_level", "log_format", "log_file"


async def show(gateway: Gateway, request: Request) -> Reply:
    """GET /v2/logging."""
    return json_reply(await change_settings(gateway, {}))


async def change(gateway: Gateway, request: Request) -> Reply:
    """POST /v2/logging: all of the changes or none; what the extension does not know is left
    alone, and so is what a null is given for."""
    body = await read_json(gateway, request, required=True)
    return json_reply(await change_settings(gateway, _changes(body)))


async def change_settings(gateway: Gateway, changes: dict[str, Any]) -> dict[str, Any]:
    """Have the supervisor change settings; all of them, in Triton's order."""
    return await gateway.supervisor.ask(lambda number: ChangeLogging(number, changes))


def refuse_file() -> Unsupported:
    """The refusal of another log file."""
    return Unsupported("log file location can not be updated through network protocol")


def _changes(body: Any) -> dict[str, Any]:
    known = (*SWITCHES, LEVEL, FORMAT, FILE)
    members = body if type(body) is dict else {}
    changes = {key: members[key] for key in known if members.get(key) is not None}
    for key, value in changes.items():
        if key == FILE:
            raise refuse_file()
        if key in SWITCHES and type(value) is not bool:
            raise _mistyped("boolean")
        if key == LEVEL and (type(value) is not int or not 0 <= value <= MOST_VERBOSE):
            raise _mistyped("unsigned-integer")
        if key == FORMAT and type(value) is not str:
            raise _mistyped("string")
        if key == FORMAT and value not in FORMATS:
            raise Unavailable(f"invalid argument for --log_format, got: {value}")
    return changes


def _mistyped(kind: str) -> JsonFault:
    return JsonFault(f"attempt to access JSON non-{kind} as {kind}")
