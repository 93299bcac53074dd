"""Trace and log settings over gRPC: there is no tracing."""

from __future__ import annotations

from typing import Any

from shmserve.errors import InvalidArgument
from shmserve.gateway.api.absent import no_trace
from shmserve.gateway.api.log_settings import (
    FILE,
    FORMAT,
    LEVEL,
    SWITCHES,
    change_settings,
    refuse_file,
)
from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.context import Gateway
from shmserve.logs import FORMATS
from shmserve.proto import grpc_service_pb2 as pb

# The member of a setting's oneof, and what Triton calls it.
_KINDS = {
    **dict.fromkeys(SWITCHES, ("bool_param", "boolean")),
    LEVEL: ("uint32_param", "int32"),
    FORMAT: ("string_param", "string"),
}


async def trace_setting(
    gateway: Gateway, client: ClientIdentity, request: pb.TraceSettingRequest
) -> pb.TraceSettingResponse:
    """TraceSetting, which is refused."""
    raise no_trace()


async def log_settings(
    gateway: Gateway, client: ClientIdentity, request: pb.LogSettingsRequest
) -> pb.LogSettingsResponse:
    """LogSettings: all of the changes or none, then what the settings are."""
    settings = await change_settings(gateway, _changes(request))
    response = pb.LogSettingsResponse()
    response.settings[FILE].string_param = settings[FILE]
    for name, (kind, _) in _KINDS.items():
        setattr(response.settings[name], kind, settings[name])
    return response


def _changes(request: pb.LogSettingsRequest) -> dict[str, Any]:
    if FILE in request.settings:
        raise refuse_file()
    changes: dict[str, Any] = {}
    for name, (kind, word) in _KINDS.items():
        if name not in request.settings:
            continue
        wanted = request.settings[name]
        if wanted.WhichOneof("parameter_choice") != kind:
            raise InvalidArgument(f"expect {word} for '{name}'")
        changes[name] = getattr(wanted, kind)
    if changes.get(FORMAT, FORMATS[0]) not in FORMATS:
        raise InvalidArgument(f"invalid argument for log_format, got: {changes[FORMAT]}")
    return changes
