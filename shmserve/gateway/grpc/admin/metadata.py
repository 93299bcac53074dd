"""Health, metadata, configuration, statistics and the model repository over gRPC.

Each handler takes the gateway, the client and a request message, and gives a response message; what
it raises becomes the call's status.
"""

from __future__ import annotations

from typing import Any

import orjson
from google.protobuf.json_format import ParseDict

from shmserve.errors import InvalidArgument
from shmserve.gateway.api import health, metadata, repository, statistics
from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.context import Gateway
from shmserve.gateway.model_table import checked_version
from shmserve.proto import grpc_service_pb2 as pb
from shmserve.proto.health_pb2 import HealthCheckRequest, HealthCheckResponse


async def server_live(
    gateway: Gateway, client: ClientIdentity, request: pb.ServerLiveRequest
) -> pb.ServerLiveResponse:
    """ServerLive."""
    health.check_staying(gateway)
    return pb.ServerLiveResponse(live=gateway.health.live)


async def server_ready(
    gateway: Gateway, client: ClientIdentity, request: pb.ServerReadyRequest
) -> pb.ServerReadyResponse:
    """ServerReady."""
    health.check_staying(gateway)
    return pb.ServerReadyResponse(ready=gateway.health.ready)


async def model_ready(
    gateway: Gateway, client: ClientIdentity, request: pb.ModelReadyRequest
) -> pb.ModelReadyResponse:
    """ModelReady."""
    version = checked_version(request.version)
    ready = await health.is_model_ready(gateway, request.name, version)
    return pb.ModelReadyResponse(ready=ready)


def serving(gateway: Gateway) -> HealthCheckResponse:
    """What grpc.health.v1 says, whatever the service's name: the server is ready or not."""
    ready = gateway.health.ready and not health.is_leaving(gateway)
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
