"""The shared memory extensions: register, status, unregister; for all listeners.

A CUDA region is registered by the IPC handle of an allocation, which consists of 64 bytes and
belongs to another process. A gateway forwards handles and never opens them. A host without a CUDA
device rejects CUDA regions.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from functools import partial
from typing import Any

from shmserve.common.host import CUDA_REJECTION, cuda_not_supported
from shmserve.common.peers import NOBODY, Peer
from shmserve.errors import InvalidArgument
from shmserve.gateway.context import Gateway
from shmserve.gateway.listener import ClientIdentity
from shmserve.gateway.region_table import GatewayRegion
from shmserve.ipc.memory.cuda_ipc import HANDLE_SIZE
from shmserve.ipc.messages.control_requests import (
    RegionAbandoned,
    RegisterCudaRegion,
    RegisterRegion,
    UnregisterRegion,
)
from shmserve.ipc.tensors.descriptors import MAX_INT64, CudaHandle, require_integer

_MAX_NAME_LENGTH = 255
_INVALID_NAME = (
    f"a shared memory region's name must have 1 to {_MAX_NAME_LENGTH} printable characters"
)


def check_region_name(name: str) -> None:
    """Raise InvalidArgument if a region cannot have this name."""
    if not _is_valid_name(name):
        raise InvalidArgument(_INVALID_NAME)


def _is_valid_name(name: str) -> bool:
    return 0 < len(name) <= _MAX_NAME_LENGTH and name.isprintable()


async def register_system(
    gateway: Gateway,
    client: ClientIdentity,
    name: str,
    key: str,
    offset: int,
    byte_size: int,
    *,
    is_leased: bool = False,
    pin_pages: bool = False,
) -> None:
    """Register a POSIX shared memory object of the client's user.

    Args:
        gateway: The gateway.
        client: The client.
        name: The region's name.
        key: The object's name.
        offset: The region's offset in the object, in bytes.
        byte_size: The region's size.
        is_leased: Whether the region is unregistered when the client disconnects. If the client
            disconnects before the registration has completed, this happens right after it.
        pin_pages: Whether workers on CUDA devices pin the pages.

    Raises:
        ShmserveError: The object is rejected.
    """

    def on_registered(task: asyncio.Future[dict[str, Any]]) -> None:
        if not task.cancelled() and task.exception() is None:
            abandonment = RegionAbandoned(task.result()["memory_id"])
            client.call_on_disconnect(partial(gateway.supervisor.post, abandonment))

    peer = client.peer()
    registration = gateway.supervisor.send_request(
        *(RegisterRegion, name, key, offset, byte_size, peer.uid, list(peer.groups)),
        *(is_leased, pin_pages),
    )
    if not is_leased:
        await registration
        return
    task = asyncio.ensure_future(registration)
    task.add_done_callback(on_registered)
    await asyncio.shield(task)


def visible_regions(
    gateway: Gateway, client: ClientIdentity, name: str, *, is_cuda: bool = False
) -> list[GatewayRegion]:
    """Return the regions of system or CUDA memory that the client's user may see.

    Args:
        gateway: The gateway.
        client: The client.
        name: The name of the only region to return; "" for all regions.
        is_cuda: Whether the regions are those of CUDA memory.

    Raises:
        NotFound: No such region is visible to the user.
    """
    peer = client.administrator_peer() if client.listener.allows_shm else NOBODY
    return gateway.regions.visible_regions(name, peer, is_cuda=is_cuda)


async def unregister_regions(
    gateway: Gateway, client: ClientIdentity, name: str, *, is_cuda: bool = False
) -> None:
    """Unregister the region `name` of system or CUDA memory, or all regions of the client's user.

    Args:
        gateway: The gateway.
        client: The client.
        name: The name, which may be unknown; "" for all regions of this kind of memory.
        is_cuda: Whether the regions are those of CUDA memory.
    """
    peer = client.administrator_peer()
    fields = (name, peer.uid, list(peer.groups), is_cuda)
    await gateway.supervisor.send_request(UnregisterRegion, *fields)


_INVALID_HANDLE = "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"
_UUID = re.compile(r"(?:GPU-)?([0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12})")


def decode_handle(encoded_handle: str) -> bytes:
    """Decode a handle from base64; raise InvalidArgument unless it has exactly 64 bytes."""
    try:
        handle = base64.b64decode(encoded_handle, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgument(_INVALID_HANDLE) from None
    if len(handle) != HANDLE_SIZE:
        raise InvalidArgument(_INVALID_HANDLE)
    return handle


def decode_uuid(uuid: str) -> bytes:
    """Return the 16 bytes of a device's UUID in nvidia-smi's or torch's notation.

    Raises:
        InvalidArgument: The text is not a UUID.
    """
    match = _UUID.fullmatch(uuid)
    if match is None:
        raise InvalidArgument(
            f"'device_uuid' must be a UUID such as GPU-00000000-0000-0000-0000-000000000000, got "
            f"'{uuid[:64]}'"
        )
    return bytes.fromhex(match[1].replace("-", ""))


async def register_cuda(
    gateway: Gateway,
    peer: Peer,
    name: str,
    handle: CudaHandle,
    offset: int,
    byte_size: int,
    exporter_pid: int = 0,
) -> None:
    """Register [offset, offset + byte_size) of the allocation of `handle` for `peer`.

    The call returns when every HTTP and gRPC process has received the region.

    Args:
        gateway: The gateway.
        peer: The client's user.
        name: The region's name.
        handle: The IPC handle, opened on the server's device.
        offset: The region's offset in the allocation.
        byte_size: The region's size.
        exporter_pid: The process at the other end of a local socket, whose exit ends the region; 0
            if unknown.

    Raises:
        InvalidArgument: An argument is invalid.
        AlreadyExists: The name is in use.
        Unavailable: The server cannot open handles.
    """
    if not _is_valid_name(name):
        raise InvalidArgument(f"{CUDA_REJECTION} ({_INVALID_NAME})")
    devices = gateway.settings.cuda_devices  # the number of CUDA devices
    if not devices:
        raise cuda_not_supported(name)
    if len(handle.raw) != HANDLE_SIZE:
        text = f"{CUDA_REJECTION} (a handle has {HANDLE_SIZE} bytes, got {len(handle.raw)})"
        raise InvalidArgument(text)
    if not 0 <= handle.device < devices:
        text = f"(device_id {handle.device}; the server has {devices} CUDA devices)"
        raise InvalidArgument(f"{CUDA_REJECTION} {text}")
    size = require_integer(byte_size, "byte_size")
    if not 0 < size <= MAX_INT64 - require_integer(offset, "offset"):
        text = f"(byte_size must be from 1 to 2^63-1 - offset, got {byte_size} at offset {offset})"
        raise InvalidArgument(f"{CUDA_REJECTION} {text}")
    await gateway.supervisor.send_request(
        *(RegisterCudaRegion, name, handle.raw, handle.device, handle.uuid, offset, byte_size),
        *(peer.uid, list(peer.groups), exporter_pid),
    )
