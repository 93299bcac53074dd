"""The RPCs beside inference: health, metadata, configurations, statistics, the model repository,
logging, and shared memory, whose regions are those of every other listener.

Each handler takes the gateway, the client and a request message, and gives a response message; what
it raises becomes the call's status.
"""

from __future__ import annotations

from typing import Any

import orjson
from google.protobuf.json_format import ParseDict

from shmserve.errors import InvalidArgument
from shmserve.gateway.api import metadata, repository, statistics
from shmserve.gateway.api import shared_memory as api
from shmserve.gateway.api.log_settings import (
    FILE,
    FORMAT,
    LEVEL,
    SWITCHES,
    change_settings,
    no_trace,
    refuse_file,
)
from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.context import Gateway
from shmserve.gateway.model_table import checked_version
from shmserve.ipc.tensors.ranges import whole
from shmserve.logs import FORMATS
from shmserve.proto import grpc_service_pb2 as pb
from shmserve.proto.health_pb2 import HealthCheckRequest, HealthCheckResponse


async def server_live(
    gateway: Gateway, client: ClientIdentity, request: pb.ServerLiveRequest
) -> pb.ServerLiveResponse:
    """ServerLive."""
    metadata.check_staying(gateway)
    return pb.ServerLiveResponse(live=gateway.health.live)


async def server_ready(
    gateway: Gateway, client: ClientIdentity, request: pb.ServerReadyRequest
) -> pb.ServerReadyResponse:
    """ServerReady."""
    metadata.check_staying(gateway)
    return pb.ServerReadyResponse(ready=gateway.health.ready)


async def model_ready(
    gateway: Gateway, client: ClientIdentity, request: pb.ModelReadyRequest
) -> pb.ModelReadyResponse:
    """ModelReady."""
    version = checked_version(request.version)
    ready = await metadata.is_model_ready(gateway, request.name, version)
    return pb.ModelReadyResponse(ready=ready)


def serving(gateway: Gateway) -> HealthCheckResponse:
    """The status for grpc.health.v1, whatever the service's name: that of the server."""
    ready = gateway.health.ready and not metadata.is_leaving(gateway)
    return HealthCheckResponse(
        status=HealthCheckResponse.SERVING if ready else HealthCheckResponse.NOT_SERVING
    )


async def check(
    gateway: Gateway, client: ClientIdentity, request: HealthCheckRequest
) -> HealthCheckResponse:
    """grpc.health.v1.Health/Check."""
    return serving(gateway)


async def server_metadata(
    gateway: Gateway, client: ClientIdentity, request: pb.ServerMetadataRequest
) -> pb.ServerMetadataResponse:
    """ServerMetadata."""
    return pb.ServerMetadataResponse(**metadata.server(gateway))


async def model_metadata(
    gateway: Gateway, client: ClientIdentity, request: pb.ModelMetadataRequest
) -> pb.ModelMetadataResponse:
    """ModelMetadata; a version in the request is the only one listed."""
    described = metadata.model(gateway, request.name, checked_version(request.version))
    return ParseDict(described, pb.ModelMetadataResponse())


async def model_config(
    gateway: Gateway, client: ClientIdentity, request: pb.ModelConfigRequest
) -> pb.ModelConfigResponse:
    """ModelConfig."""
    config = metadata.model_config(gateway, request.name, checked_version(request.version))
    return ParseDict({"config": orjson.loads(config)}, pb.ModelConfigResponse())


async def model_statistics(
    gateway: Gateway, client: ClientIdentity, request: pb.ModelStatisticsRequest
) -> pb.ModelStatisticsResponse:
    """ModelStatistics, of all models without a name."""
    reports = await statistics.reported(gateway, request.name, checked_version(request.version))
    return ParseDict({"model_stats": reports}, pb.ModelStatisticsResponse())


async def repository_index(
    gateway: Gateway, client: ClientIdentity, request: pb.RepositoryIndexRequest
) -> pb.RepositoryIndexResponse:
    """RepositoryIndex."""
    repository.check_repository(request.repository_name)
    models = await repository.index(gateway, only_ready=request.ready)
    return ParseDict({"models": models}, pb.RepositoryIndexResponse())


async def repository_model_load(
    gateway: Gateway, client: ClientIdentity, request: pb.RepositoryModelLoadRequest
) -> pb.RepositoryModelLoadResponse:
    """RepositoryModelLoad, optionally with a configuration and files."""
    repository.check_names(request.repository_name, request.model_name)
    config = ""
    files: dict[str, Any] = {}
    for key, parameter in request.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if key == "config":
            _expect(kind, "string_param", "load", key)
            config = parameter.string_param
        elif key.startswith("file:"):
            _expect(kind, "bytes_param", "load", key)
            files[key.removeprefix("file:")] = parameter.bytes_param
        else:
            raise InvalidArgument(f"unrecognized load parameter '{key}'.")
    await repository.load(gateway, client, request.model_name, config, files)
    return pb.RepositoryModelLoadResponse()


async def repository_model_unload(
    gateway: Gateway, client: ClientIdentity, request: pb.RepositoryModelUnloadRequest
) -> pb.RepositoryModelUnloadResponse:
    """RepositoryModelUnload."""
    repository.check_names(request.repository_name, request.model_name)
    dependents = False
    for key, parameter in request.parameters.items():
        if key == "unload_dependents":
            _expect(parameter.WhichOneof("parameter_choice"), "bool_param", "", key)
            dependents = parameter.bool_param
    await repository.unload(gateway, request.model_name, dependents=dependents)
    return pb.RepositoryModelUnloadResponse()


def _expect(kind: str | None, wanted: str, of: str, key: str) -> None:
    if kind != wanted:
        what = f"{of} parameter '{key}'" if of else f"'{key}' parameter"
        raise InvalidArgument(f"invalid value type for {what}, expected {wanted}.")


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


async def system_status(
    gateway: Gateway, client: ClientIdentity, request: pb.SystemSharedMemoryStatusRequest
) -> pb.SystemSharedMemoryStatusResponse:
    """SystemSharedMemoryStatus, of all regions of the client's user without a name."""
    response = pb.SystemSharedMemoryStatusResponse()
    for region in api.visible(gateway, client, request.name):
        entry = response.regions[region.name]
        entry.name, entry.key = region.name, region.key
        entry.offset, entry.byte_size = region.offset, region.byte_size
    return response


async def system_register(
    gateway: Gateway, client: ClientIdentity, request: pb.SystemSharedMemoryRegisterRequest
) -> pb.SystemSharedMemoryRegisterResponse:
    """SystemSharedMemoryRegister."""
    peer = client.peer()
    api.check_name(request.name)
    size = whole(request.byte_size, "byte_size")
    offset = whole(request.offset, "offset")
    await api.register(gateway, peer, request.name, request.key, offset, size)
    return pb.SystemSharedMemoryRegisterResponse()


async def system_unregister(
    gateway: Gateway, client: ClientIdentity, request: pb.SystemSharedMemoryUnregisterRequest
) -> pb.SystemSharedMemoryUnregisterResponse:
    """SystemSharedMemoryUnregister, of all regions without a name; an unknown one is fine."""
    await api.unregister(gateway, client, request.name)
    return pb.SystemSharedMemoryUnregisterResponse()


async def cuda_status(
    gateway: Gateway, client: ClientIdentity, request: pb.CudaSharedMemoryStatusRequest
) -> pb.CudaSharedMemoryStatusResponse:
    """CudaSharedMemoryStatus, of all regions of the client's user without a name."""
    response = pb.CudaSharedMemoryStatusResponse()
    for region in api.visible(gateway, client, request.name, cuda=True):
        assert region.memory.cuda is not None
        entry = response.regions[region.name]
        entry.name, entry.device_id = region.name, region.memory.cuda.device
        entry.byte_size = region.byte_size
    return response


async def cuda_register(
    gateway: Gateway, client: ClientIdentity, request: pb.CudaSharedMemoryRegisterRequest
) -> pb.CudaSharedMemoryRegisterResponse:
    """CudaSharedMemoryRegister."""
    peer = client.peer()
    api.check_name(request.name)
    await api.register_cuda(
        gateway, peer, request.name, request.raw_handle, request.device_id, request.byte_size
    )
    return pb.CudaSharedMemoryRegisterResponse()


async def cuda_unregister(
    gateway: Gateway, client: ClientIdentity, request: pb.CudaSharedMemoryUnregisterRequest
) -> pb.CudaSharedMemoryUnregisterResponse:
    """CudaSharedMemoryUnregister, of all regions without a name; an unknown one is fine."""
    await api.unregister(gateway, client, request.name, cuda=True)
    return pb.CudaSharedMemoryUnregisterResponse()
