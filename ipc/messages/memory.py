"""Messages about shared memory: regions registered, published, withdrawn and checked; and
devices' workspaces."""

from __future__ import annotations

from typing import Any

from shmserve.ipc.transport.frames import message


@message
class MemoryDropped:
    """A region's generation has ended, or a process that is gone had it: unmap it."""

    memory_id: int


@message
class RegionPublished:
    """A region may be used under `name`: its extent in the object that it is a part of, as
    `pack_place` of descriptors.py has it. CUDA memory has no `key`.

    `uid` and `group` say whose it is.
    `draining`: its name is free already, and requests in flight use it still, or it is a local
    client's: it is listed, and nothing else, until `RegionDrained`.
    """

    name: str
    key: str
    place: list[Any]
    uid: int
    group: int
    acknowledge: int
    draining: bool = False


@message
class RegionDrained:
    """The last request that used a withdrawn generation has ended, in whichever gateway, or a local
    client needs it no more: it is listed no more."""

    memory_id: int
    acknowledge: int


@message
class RegionWithdrawn:
    """The name is free; when the last request that uses this generation ends, say
    `RegionReleased`."""

    name: str
    memory_id: int
    acknowledge: int


@message
class RegionReleased:
    """No request of this gateway uses the generation any more."""

    memory_id: int


@message
class RegisterRegion:
    """Register a client's POSIX shared memory object, for the user `uid`, who is in `groups`.

    The response is {"memory_id"}. `leased`: until `RegionAbandoned`, or until the sender ends.
    `pin`: have workers on CUDA devices lock its pages.
    """

    id: int
    name: str
    key: str
    offset: int
    byte_size: int
    uid: int
    groups: list[int]
    leased: bool
    pin: bool


@message
class RegionAbandoned:
    """The connection that this generation was leased for is gone."""

    memory_id: int


@message
class RegisterCudaRegion:
    """Register CUDA memory that a client exported, for the user `uid`, who is in `groups`: [offset,
    offset + byte_size) of what `handle` opens.

    `device_uuid` (16 bytes) is empty, `exporter_pid` 0 where it is not known. With the exporter the
    region ends.
    """

    id: int
    name: str
    handle: bytes
    device_id: int
    device_uuid: bytes
    offset: int
    byte_size: int
    uid: int
    groups: list[int]
    exporter_pid: int


@message
class UnregisterRegion:
    """Unregister a region of system memory, or one of CUDA memory; an empty name means all of that
    kind that are the user's."""

    id: int
    name: str
    uid: int
    groups: list[int]
    cuda: bool = False


@message
class CheckMemory:
    """Open this CUDA memory, see whether it has `byte_size` bytes, and let it go."""

    id: int
    handle: bytes
    device_id: int
    device_uuid: bytes
    byte_size: int


@message
class MemoryChecked:
    """The result of a `CheckMemory`; code "" is success, `message` is for the client."""

    id: int
    code: str
    message: str


@message
class LeaseWorkspace:
    """An execution needs so much of its device's workspace: respond with {"place": where it begins,
    packed} once that is there. `ReturnWorkspace` ends it."""

    id: int
    device: str
    byte_size: int


@message
class ReturnWorkspace:
    """The execution has ended that leased the workspace at `offset` of a memory, which nothing on
    the device uses any more."""

    device: str
    memory_id: int
    offset: int


@message
class WorkspaceAllocated:
    """The memory of a CUDA device's workspace pool is there, and opened by this handle."""

    handle: bytes
    device_uuid: bytes


RegionNews = RegionPublished | RegionWithdrawn | RegionDrained
RegionRequest = RegisterRegion | RegisterCudaRegion | UnregisterRegion
RegionUse = RegionReleased | RegionAbandoned
WorkspaceRequest = LeaseWorkspace | ReturnWorkspace
