"""The RPCs of the operations in gateway/api, and grpc.reflection.

Each handler receives a request message and returns a response message, or None for an empty one.
Its exception becomes the status of the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from shmserve.errors import InvalidArgument, clip, suggestion
from shmserve.gateway.api import management
from shmserve.gateway.api import shared_memory as memory_api
from shmserve.gateway.api.management import LOG_FILE, LOG_FORMAT, LOG_LEVEL, LOG_SWITCHES
from shmserve.gateway.context import Gateway, checked_version
from shmserve.gateway.grpc.call import StreamingCall
from shmserve.gateway.grpc.framing import Status, StatusCode
from shmserve.gateway.listener import ClientIdentity
from shmserve.ipc.tensors.descriptors import CudaHandle, require_integer
from shmserve.logs import FORMATS
from shmserve.proto import grpc_service_pb2, health_pb2, reflection_pb2
from shmserve.proto import grpc_service_pb2 as pb
from shmserve.proto.health_pb2 import HealthCheckRequest, HealthCheckResponse
from shmserve.proto.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

_PROTO_FILES = (grpc_service_pb2, health_pb2, reflection_pb2)
_DESCRIPTOR_POOL = grpc_service_pb2.DESCRIPTOR.pool
_MALFORMED = Status(StatusCode.INVALID_ARGUMENT, "malformed ServerReflectionRequest")


def serving_status(gateway: Gateway) -> HealthCheckResponse:
    """Return the server's status for grpc.health.v1; all services have the same status."""
    is_ready = gateway.health.ready and not gateway.health.exiting
    status = HealthCheckResponse.SERVING if is_ready else HealthCheckResponse.NOT_SERVING
    return HealthCheckResponse(status=status)


# For each log setting: the protobuf field of its value, and the type's name in Triton's errors.
_LOG_SETTING_KINDS = {
    **dict.fromkeys(LOG_SWITCHES, ("bool_param", "boolean")),
    LOG_LEVEL: ("uint32_param", "int32"),
    LOG_FORMAT: ("string_param", "string"),
}


@dataclass(frozen=True, slots=True)
class AdminCall:
    """A call by `client`; each method handles the RPC of its name."""

    gateway: Gateway
    client: ClientIdentity

    async def server_live(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        """Handle ServerLive."""
        management.check_not_exiting(self.gateway)
        return pb.ServerLiveResponse(live=self.gateway.health.live)

    async def server_ready(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        """Handle ServerReady."""
        management.check_not_exiting(self.gateway)
        return pb.ServerReadyResponse(ready=self.gateway.health.ready)

    async def model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        """Handle ModelReady."""
        version = checked_version(request.version)
        is_ready = await management.is_model_ready(self.gateway, request.name, version)
        return pb.ModelReadyResponse(ready=is_ready)

    async def check(self, request: HealthCheckRequest) -> HealthCheckResponse:
        """Handle grpc.health.v1.Health/Check."""
        return serving_status(self.gateway)

    async def server_metadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        """Handle ServerMetadata."""
        return pb.ServerMetadataResponse(**management.server_metadata(self.gateway))

    async def model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        """Handle ModelMetadata. With a version in the request, only this version is listed."""
        version = checked_version(request.version)
        metadata = await management.model_metadata(self.gateway, request.name, version)
        return ParseDict(metadata, pb.ModelMetadataResponse())

    async def model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        """Handle ModelConfig."""
        version = checked_version(request.version)
        config = await management.model_config(self.gateway, request.name, version)
        return ParseDict({"config": config}, pb.ModelConfigResponse())

    async def model_statistics(
        self, request: pb.ModelStatisticsRequest
    ) -> pb.ModelStatisticsResponse:
        """Handle ModelStatistics. Without a name, the response covers all models."""
        version = checked_version(request.version)
        reports = await management.model_statistics(self.gateway, request.name, version)
        return ParseDict({"model_stats": reports}, pb.ModelStatisticsResponse())

    async def repository_index(
        self, request: pb.RepositoryIndexRequest
    ) -> pb.RepositoryIndexResponse:
        """Handle RepositoryIndex."""
        management.check_repository(request.repository_name)
        models = await management.repository_index(self.gateway, only_ready=request.ready)
        return ParseDict({"models": models}, pb.RepositoryIndexResponse())

    async def repository_model_load(self, request: pb.RepositoryModelLoadRequest) -> None:
        """Handle RepositoryModelLoad, optionally with a configuration and files."""
        management.check_names(request.repository_name, request.model_name)
        config = ""
        files: dict[str, Any] = {}
        for key, parameter in request.parameters.items():
            kind = parameter.WhichOneof("parameter_choice")
            if key == "config":
                _check_kind(kind, "string_param", "load", key)
                config = parameter.string_param
            elif key.startswith("file:"):
                _check_kind(kind, "bytes_param", "load", key)
                files[key.removeprefix("file:")] = parameter.bytes_param
            else:
                raise InvalidArgument(
                    f"unrecognized load parameter '{clip(key)}'. Allowed are 'config' and "
                    f"'file:PATH'{suggestion(key, ('config',))}"
                )
        await management.load_model(self.gateway, self.client, request.model_name, config, files)

    async def repository_model_unload(self, request: pb.RepositoryModelUnloadRequest) -> None:
        """Handle RepositoryModelUnload."""
        management.check_names(request.repository_name, request.model_name, for_unload=True)
        with_dependents = False
        for key, parameter in request.parameters.items():
            if key == "unload_dependents":
                _check_kind(parameter.WhichOneof("parameter_choice"), "bool_param", "", key)
                with_dependents = parameter.bool_param
        name = request.model_name
        await management.unload_model(self.gateway, name, with_dependents=with_dependents)

    async def trace_setting(self, request: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        """Handle TraceSetting: apply all changes or none, and return all settings."""
        changes = {key: list(setting.value) for key, setting in request.settings.items()}
        settings = await management.change_trace_settings(self.gateway, request.model_name, changes)
        values = {key: {"value": texts} for key, texts in settings.items()}
        return ParseDict({"settings": values}, pb.TraceSettingResponse())

    async def log_settings(self, request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        """Handle LogSettings: apply all changes or none, and return all settings."""
        settings = await management.change_log_settings(self.gateway, _read_changes(request))
        response = pb.LogSettingsResponse()
        response.settings[LOG_FILE].string_param = settings[LOG_FILE]
        for name, (kind, _) in _LOG_SETTING_KINDS.items():
            setattr(response.settings[name], kind, settings[name])
        return response

    async def system_status(
        self, request: pb.SystemSharedMemoryStatusRequest
    ) -> pb.SystemSharedMemoryStatusResponse:
        """Handle SystemSharedMemoryStatus. Without a name, list all regions of the user."""
        regions = memory_api.visible_regions(self.gateway, self.client, request.name)
        states = {region.name: region.status() for region in regions}
        return ParseDict({"regions": states}, pb.SystemSharedMemoryStatusResponse())

    async def system_register(self, request: pb.SystemSharedMemoryRegisterRequest) -> None:
        """Handle SystemSharedMemoryRegister."""
        self.client.peer()  # raises an error if the client may not use shared memory
        memory_api.check_region_name(request.name)
        size = require_integer(request.byte_size, "byte_size")
        offset = require_integer(request.offset, "offset")
        await memory_api.register_system(
            self.gateway, self.client, request.name, request.key, offset, size
        )

    async def system_unregister(self, request: pb.SystemSharedMemoryUnregisterRequest) -> None:
        """Handle SystemSharedMemoryUnregister. Without a name, unregister all regions."""
        await memory_api.unregister_regions(self.gateway, self.client, request.name)

    async def cuda_status(
        self, request: pb.CudaSharedMemoryStatusRequest
    ) -> pb.CudaSharedMemoryStatusResponse:
        """Handle CudaSharedMemoryStatus. Without a name, list all regions of the user."""
        regions = memory_api.visible_regions(self.gateway, self.client, request.name, is_cuda=True)
        states = {region.name: region.status() for region in regions}
        return ParseDict({"regions": states}, pb.CudaSharedMemoryStatusResponse())

    async def cuda_register(self, request: pb.CudaSharedMemoryRegisterRequest) -> None:
        """Handle CudaSharedMemoryRegister."""
        peer = self.client.peer()
        handle = CudaHandle(request.raw_handle, request.device_id)
        size = request.byte_size
        await memory_api.register_cuda(self.gateway, peer, request.name, handle, 0, size)

    async def cuda_unregister(self, request: pb.CudaSharedMemoryUnregisterRequest) -> None:
        """Handle CudaSharedMemoryUnregister. Without a name, unregister all regions."""
        await memory_api.unregister_regions(self.gateway, self.client, request.name, is_cuda=True)


def _check_kind(found_type: str | None, expected_type: str, operation: str, key: str) -> None:
    if found_type != expected_type:
        parameter_name = f"{operation} parameter '{key}'" if operation else f"'{key}' parameter"
        raise InvalidArgument(f"invalid value type for {parameter_name}, expected {expected_type}.")


def _read_changes(request: pb.LogSettingsRequest) -> dict[str, Any]:
    if LOG_FILE in request.settings:
        raise management.log_file_error()
    changes: dict[str, Any] = {}
    for name, (kind, kind_name) in _LOG_SETTING_KINDS.items():
        if name not in request.settings:
            continue
        setting = request.settings[name]
        if setting.WhichOneof("parameter_choice") != kind:
            raise InvalidArgument(f"expect {kind_name} for '{name}'")
        changes[name] = getattr(setting, kind)
    if changes.get(LOG_FORMAT, FORMATS[0]) not in FORMATS:
        raise InvalidArgument(f"invalid argument for log_format, got: {changes[LOG_FORMAT]}")
    return changes


async def reflect(call: StreamingCall) -> Status | None:
    """Handle a call of ServerReflectionInfo: send a response to each message."""
    async for encoded_request in call.read_messages():
        try:
            request = ServerReflectionRequest.FromString(encoded_request)
        except DecodeError:
            return _MALFORMED
        await call.write_all([answer_reflection(request).SerializeToString()])
    return None


def answer_reflection(request: ServerReflectionRequest) -> ServerReflectionResponse:
    """Return the response to a request of grpc.reflection."""
    response = ServerReflectionResponse(valid_host=request.host, original_request=request)
    try:
        match request.WhichOneof("message_request"):
            case "list_services":
                for name in sorted(SERVICES):
                    response.list_services_response.service.add(name=name)
            case "file_by_filename":
                _add_files(response, _DESCRIPTOR_POOL.FindFileByName(request.file_by_filename))
            case "file_containing_symbol":
                _add_files(response, _find_file(request.file_containing_symbol))
            case "all_extension_numbers_of_type":
                symbol = request.all_extension_numbers_of_type
                _DESCRIPTOR_POOL.FindMessageTypeByName(symbol)
                response.all_extension_numbers_response.base_type_name = symbol
            case "file_containing_extension":
                number = request.file_containing_extension.extension_number
                raise KeyError(f"no protobuf extension has the number {number}")
            case _:
                _set_error(response, StatusCode.INVALID_ARGUMENT, "message_request is not set")
    except KeyError as error:
        _set_error(response, StatusCode.NOT_FOUND, str(error.args[0]))
    return response


SERVICES = frozenset(
    service.full_name
    for module in _PROTO_FILES
    for service in module.DESCRIPTOR.services_by_name.values()
)


def _find_file(symbol: str) -> Any:
    """Return the file that defines a symbol; for a method, the file that defines its service.

    Raises:
        KeyError: There is no such symbol.
    """
    try:
        return _DESCRIPTOR_POOL.FindFileContainingSymbol(symbol)
    except KeyError:
        return _DESCRIPTOR_POOL.FindMethodByName(symbol).containing_service.file


def _add_files(response: ServerReflectionResponse, file: Any) -> None:
    """Write a file and the files that it imports to a response."""
    pending_files, sent_names = [file], set()
    while pending_files:
        file = pending_files.pop(0)
        if file.name not in sent_names:
            sent_names.add(file.name)
            response.file_descriptor_response.file_descriptor_proto.append(file.serialized_pb)
            pending_files += file.dependencies


def _set_error(response: ServerReflectionResponse, code: StatusCode, message: str) -> None:
    response.error_response.error_code = code.value
    response.error_response.error_message = message
