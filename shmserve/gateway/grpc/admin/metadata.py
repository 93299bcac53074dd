"""Health, metadata, configuration, statistics and the model repository over gRPC.

Each handler takes the gateway, who calls and a request message, and gives a response message; what
it raises becomes the call's status.
"""

from __future__ import annotations

from typing import Any

import orjson
from google.protobuf.json_format import ParseDict

import shmserve
from shmserve.common.model_names import check_model_name
from shmserve.errors import InvalidArgument, Unavailable
from shmserve.gateway.api.metadata import EXTENSIONS, is_ready, reported
from shmserve.gateway.api.repository import check_may_send, check_repository
from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.context import Gateway
from shmserve.gateway.model_table import checked_version, describe
from shmserve.ipc.messages import IndexRepository, LoadModel, UnloadModel
from shmserve.proto import grpc_service_pb2 as pb
from shmserve.proto.health_pb2 import HealthCheckRequest, HealthCheckResponse


def _check_alive(gateway: Gateway) -> None:
    if gateway.health.exiting or gateway.draining:
        raise Unavailable("Server exiting")


async def server_live(
    gateway: Gateway, caller: ClientIdentity, request: pb.ServerLiveRequest
) -> pb.ServerLiveResponse:
    """ServerLive."""
    _check_alive(gateway)
    return pb.ServerLiveResponse(live=gateway.health.live)


async def server_ready(
    gateway: Gateway, caller: ClientIdentity, request: pb.ServerReadyRequest
) -> pb.ServerReadyResponse:
    """ServerReady."""
    _check_alive(gateway)
    return pb.ServerReadyResponse(ready=gateway.health.ready)


async def model_ready(
    gateway: Gateway, caller: ClientIdentity, request: pb.ModelReadyRequest
) -> pb.ModelReadyResponse:
    """ModelReady."""
    ready = is_ready(gateway, request.name, checked_version(request.version))
    return pb.ModelReadyResponse(ready=ready)


def serving(gateway: Gateway) -> HealthCheckResponse:
    """What grpc.health.v1 says, whatever the service's name: the server is ready or not."""
    exiting = gateway.health.exiting or gateway.draining
    ready = gateway.health.ready and not exiting
    return HealthCheckResponse(
        status=HealthCheckResponse.SERVING if ready else HealthCheckResponse.NOT_SERVING
    )


async def check(
    gateway: Gateway, caller: ClientIdentity, request: HealthCheckRequest
) -> HealthCheckResponse:
    """grpc.health.v1.Health/Check."""
    return serving(gateway)


async def server_metadata(
    gateway: Gateway, caller: ClientIdentity, request: pb.ServerMetadataRequest
) -> pb.ServerMetadataResponse:
    """ServerMetadata."""
    return pb.ServerMetadataResponse(
        name=gateway.settings.id, version=shmserve.__version__, extensions=EXTENSIONS
    )


async def model_metadata(
    gateway: Gateway, caller: ClientIdentity, request: pb.ModelMetadataRequest
) -> pb.ModelMetadataResponse:
    """ModelMetadata; a version in the request is the only one listed."""
    found = gateway.models.resolve(request.name, checked_version(request.version))
    versions = [found.version] if request.version else gateway.models.versions(request.name)
    return ParseDict(describe(found, versions), pb.ModelMetadataResponse())


async def model_config(
    gateway: Gateway, caller: ClientIdentity, request: pb.ModelConfigRequest
) -> pb.ModelConfigResponse:
    """ModelConfig."""
    found = gateway.models.resolve(request.name, checked_version(request.version))
    return ParseDict({"config": orjson.loads(found.config)}, pb.ModelConfigResponse())


async def model_statistics(
    gateway: Gateway, caller: ClientIdentity, request: pb.ModelStatisticsRequest
) -> pb.ModelStatisticsResponse:
    """ModelStatistics, of all models without a name."""
    reports = await reported(gateway, request.name, checked_version(request.version))
    return ParseDict({"model_stats": reports}, pb.ModelStatisticsResponse())


async def repository_index(
    gateway: Gateway, caller: ClientIdentity, request: pb.RepositoryIndexRequest
) -> pb.RepositoryIndexResponse:
    """RepositoryIndex."""
    check_repository(request.repository_name)
    payload = await gateway.supervisor.ask(lambda number: IndexRepository(number, request.ready))
    return ParseDict({"models": payload.get("models", [])}, pb.RepositoryIndexResponse())


async def repository_model_load(
    gateway: Gateway, caller: ClientIdentity, request: pb.RepositoryModelLoadRequest
) -> pb.RepositoryModelLoadResponse:
    """RepositoryModelLoad, optionally with a configuration and files."""
    check_repository(request.repository_name)
    check_model_name(request.model_name)
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
    if config or files:
        check_may_send(caller)
    await gateway.supervisor.ask(
        lambda number: LoadModel(number, request.model_name, config, files)
    )
    return pb.RepositoryModelLoadResponse()


async def repository_model_unload(
    gateway: Gateway, caller: ClientIdentity, request: pb.RepositoryModelUnloadRequest
) -> pb.RepositoryModelUnloadResponse:
    """RepositoryModelUnload."""
    check_repository(request.repository_name)
    check_model_name(request.model_name)
    dependents = False
    for key, parameter in request.parameters.items():
        if key == "unload_dependents":
            _expect(parameter.WhichOneof("parameter_choice"), "bool_param", "", key)
            dependents = parameter.bool_param
    await gateway.supervisor.ask(lambda number: UnloadModel(number, request.model_name, dependents))
    return pb.RepositoryModelUnloadResponse()


def _expect(kind: str | None, wanted: str, of: str, key: str) -> None:
    if kind != wanted:
        what = f"{of} parameter '{key}'" if of else f"'{key}' parameter"
        raise InvalidArgument(f"invalid value type for {what}, expected {wanted}.")
