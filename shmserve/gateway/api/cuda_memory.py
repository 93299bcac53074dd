"""The CUDA shared memory extension: registering the IPC handle of an allocation.

The handle is 64 bytes that name an allocation of another process. A gateway passes it on and never
opens it. On a host without a CUDA device nothing can be registered.
"""

from __future__ import annotations

import base64
import binascii
import re

from shmserve.common.accelerators import CUDA_INVALID, cuda_not_supported
from shmserve.common.access.shm_access import Peer
from shmserve.errors import InvalidArgument
from shmserve.gateway.context import Gateway
from shmserve.ipc.memory.cuda_ipc import HANDLE_SIZE
from shmserve.ipc.messages import RegisterCudaRegion
from shmserve.ipc.tensors.ranges import LARGEST, whole

_NO_HANDLE = "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"
_UUID = re.compile(r"(?:GPU-)?([0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12})")


def require_cuda(gateway: Gateway, name: str) -> None:
    """Raise InvalidArgument where the server has no CUDA device."""
    if not gateway.settings.cuda_devices:
        raise cuda_not_supported(name)


def decode_handle(text: str) -> bytes:
    """A handle from its base64; raises InvalidArgument for what is not exactly 64 bytes."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgument(_NO_HANDLE) from None
    if len(raw) != HANDLE_SIZE:
        raise InvalidArgument(_NO_HANDLE)
    return raw


def decode_uuid(text: str) -> bytes:
    """The 16 bytes of a device's UUID, as nvidia-smi or torch writes it; raises InvalidArgument."""
    match = _UUID.fullmatch(text)
    if match is None:
        raise InvalidArgument(
            f"'device_uuid' must be a UUID such as GPU-00000000-0000-0000-0000-000000000000, got "
            f"'{text[:64]}'"
        )
    return bytes.fromhex(match[1].replace("-", ""))


async def register(
    gateway: Gateway,
    peer: Peer,
    name: str,
    handle: bytes,
    device_id: int,
    byte_size: int,
    *,
    offset: int = 0,
    device_uuid: bytes = b"",
    exporter_pid: int = 0,
) -> None:
    """Register [offset, offset + byte_size) of what `handle` opens on the server's `device_id`, for
    `peer`.

    Returns when every listener knows it. `exporter_pid`: the process at the other end of a local
    socket, 0 where that is not known; with it the region ends. Raises InvalidArgument,
    AlreadyExists, or Unavailable where the server lacks what opens handles.
    """
    require_cuda(gateway, name)
    if len(handle) != HANDLE_SIZE or not 0 <= device_id < gateway.settings.cuda_devices:
        raise InvalidArgument(CUDA_INVALID)
    if not 0 < whole(byte_size, "byte_size") <= LARGEST - whole(offset, "offset"):
        raise InvalidArgument(CUDA_INVALID)
    await gateway.supervisor.ask(
        lambda number: RegisterCudaRegion(
            *(number, name, handle, device_id, device_uuid, offset, byte_size),
            *(peer.uid, list(peer.groups), exporter_pid),
        )
    )
