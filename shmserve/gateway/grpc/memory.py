"""The shared memory extensions over gRPC. The regions are those of every other door."""

from __future__ import annotations

from shmserve.errors import InvalidArgument, NotFound
from shmserve.gateway.memory import check_name, register_region, unregister_region
from shmserve.gateway.state import Gateway
from shmserve.proto import grpc_service_pb2 as pb


async def system_status(
    gateway: Gateway, request: pb.SystemSharedMemoryStatusRequest
) -> pb.SystemSharedMemoryStatusResponse:
    """SystemSharedMemoryStatus, of all regions without a name."""
    regions = list(gateway.regions.all())
    if request.name:
        regions = [region for region in regions if region.name == request.name]
        if not regions:
            raise NotFound(f"Unable to find system shared memory region: '{request.name}'")
    response = pb.SystemSharedMemoryStatusResponse()
    for region in regions:
        entry = response.regions[region.name]
        entry.name, entry.key = region.name, region.key
        entry.offset, entry.byte_size = region.offset, region.byte_size
    return response


async def system_register(
    gateway: Gateway, request: pb.SystemSharedMemoryRegisterRequest
) -> pb.SystemSharedMemoryRegisterResponse:
    """SystemSharedMemoryRegister."""
    await register_region(gateway, request.name, request.key, request.offset, request.byte_size)
    return pb.SystemSharedMemoryRegisterResponse()


async def system_unregister(
    gateway: Gateway, request: pb.SystemSharedMemoryUnregisterRequest
) -> pb.SystemSharedMemoryUnregisterResponse:
    """SystemSharedMemoryUnregister, of all regions without a name; an unknown one is fine."""
    await unregister_region(gateway, request.name)
    return pb.SystemSharedMemoryUnregisterResponse()


async def cuda_status(
    gateway: Gateway, request: pb.CudaSharedMemoryStatusRequest
) -> pb.CudaSharedMemoryStatusResponse:
    """CudaSharedMemoryStatus."""
    if not request.name:
        return pb.CudaSharedMemoryStatusResponse()
    if gateway.regions.get(request.name) is not None:
        raise NotFound(
            f"The region named '{request.name}' is registered as system shared memory, "
            "not CUDA shared memory"
        )
    raise NotFound(f"Unable to find cuda shared memory region: '{request.name}'")


async def cuda_register(
    gateway: Gateway, request: pb.CudaSharedMemoryRegisterRequest
) -> pb.CudaSharedMemoryRegisterResponse:
    """CudaSharedMemoryRegister: there is none here."""
    check_name(request.name)
    raise InvalidArgument(
        f"failed to register CUDA shared memory region: '{request.name}', GPUs not supported"
    )


async def cuda_unregister(
    gateway: Gateway, request: pb.CudaSharedMemoryUnregisterRequest
) -> pb.CudaSharedMemoryUnregisterResponse:
    """CudaSharedMemoryUnregister: nothing to do."""
    return pb.CudaSharedMemoryUnregisterResponse()
