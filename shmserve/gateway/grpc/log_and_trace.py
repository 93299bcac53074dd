"""Trace and log settings: there is no tracing, and what is logged is set by flags alone."""

from __future__ import annotations

from shmserve.errors import InvalidArgument, Unavailable, Unsupported
from shmserve.gateway.callers import Caller
from shmserve.gateway.state import Gateway
from shmserve.proto import grpc_service_pb2 as pb

_KINDS = {
    "log_file": ("string_param", "string"),
    "log_info": ("bool_param", "boolean"),
    "log_warning": ("bool_param", "boolean"),
    "log_error": ("bool_param", "boolean"),
    "log_verbose_level": ("uint32_param", "unsigned integer"),
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
    response = pb.LogSettingsResponse()
    response.settings["log_file"].string_param = ""
    for name in ("log_info", "log_warning", "log_error"):
        response.settings[name].bool_param = True
    response.settings["log_verbose_level"].uint32_param = gateway.settings.verbose
    response.settings["log_format"].string_param = "default"
    for name, wanted in request.settings.items():
        if name not in _KINDS:
            raise InvalidArgument(f"Unknown log setting '{name}'")
        kind, word = _KINDS[name]
        if wanted.WhichOneof("parameter_choice") != kind:
            raise InvalidArgument(f"expect {word} for '{name}'")
        if wanted != response.settings[name]:
            if name == "log_file":
                raise Unsupported("log file location can not be updated through network protocol")
            raise Unsupported(f"'{name}' can not be updated through network protocol")
    return response
