"""Trace and log settings: there is no tracing, and what is logged is set by flags alone."""

from __future__ import annotations

from shmserve.errors import InvalidArgument, Unavailable, Unsupported
from shmserve.gateway.callers import Caller
from shmserve.gateway.state import Gateway
from shmserve.proto import grpc_service_pb2 as pb

_NO_FILE = "log file location can not be updated through network protocol"
_KINDS = {
    "log_info": ("bool_param", "boolean"),
    "log_warning": ("bool_param", "boolean"),
    "log_error": ("bool_param", "boolean"),
    "log_verbose_level": ("uint32_param", "int32"),
    "log_format": ("string_param", "string"),
}


async def trace_setting(
    gateway: Gateway, caller: Caller, request: pb.TraceSettingRequest
) -> pb.TraceSettingResponse:
    """TraceSetting, as Triton answers when it was built without tracing."""
    raise Unavailable("the server does not support trace")


async def log_settings(
    gateway: Gateway, caller: Caller, request: pb.LogSettingsRequest
) -> pb.LogSettingsResponse:
    """LogSettings: what they are; a request that would change one is refused."""
    values = {
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": gateway.settings.verbose,
        "log_format": "default",
    }
    if "log_file" in request.settings:
        raise Unsupported(_NO_FILE)
    for name, value in values.items():
        if name not in request.settings:
            continue
        wanted = request.settings[name]
        kind, word = _KINDS[name]
        if wanted.WhichOneof("parameter_choice") != kind:
            raise InvalidArgument(f"expect {word} for '{name}'")
        if name == "log_format" and wanted.string_param not in ("default", "ISO8601"):
            raise InvalidArgument(f"invalid argument for log_format, got: {wanted.string_param}")
        if getattr(wanted, kind) != value:
            raise Unsupported(f"'{name}' can not be updated through network protocol")
    response = pb.LogSettingsResponse()
    response.settings["log_file"].string_param = ""
    for name, value in values.items():
        setattr(response.settings[name], _KINDS[name][0], value)
    return response
