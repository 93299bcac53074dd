"""The shared memory extensions over gRPC. The regions are those of every other listener."""

from __future__ import annotations

from shmserve.gateway.api import cuda_memory
from shmserve.gateway.api import shared_memory as api
from shmserve.gateway.client_identity import ClientIdentity
from shmserve.gateway.context import Gateway
from shmserve.ipc.tensors.ranges import whole
from shmserve.proto import grpc_service_pb2 as pb


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
    await cuda_memory.register(
        gateway, peer, request.name, request.raw_handle, request.device_id, request.byte_size
    )
    return pb.CudaSharedMemoryRegisterResponse()


async def cuda_unregister(
    gateway: Gateway, client: ClientIdentity, request: pb.CudaSharedMemoryUnregisterRequest
) -> pb.CudaSharedMemoryUnregisterResponse:
    """CudaSharedMemoryUnregister, of all regions without a name; an unknown one is fine."""
    await api.unregister(gateway, client, request.name, cuda=True)
    return pb.CudaSharedMemoryUnregisterResponse()
