"""Requests of gateways, schedulers, workers and local clients to the supervisor, and replies.

A request with an `id` is answered by `Answered` or `Refused` with the same id.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from shmserve.errors import ShmserveError
from shmserve.ipc.transport.frames import message


@message
class Answered:
    """The successful reply to the sender's request `id`."""

    id: int
    payload: dict[str, Any]


@message
class Refused:
    """The error reply to the sender's request `id`. `message` is meant for the client."""

    id: int
    code: str
    message: str

    @classmethod
    def of(cls, number: int, error: ShmserveError) -> Refused:
        """Return the reply for an error of request `number`."""
        return cls(number, error.code, error.message)


# --- models and settings


@message
class LoadModel:
    """Load or reload a model.

    `config` is a JSON override or empty. `files` maps paths such as "1/model.py" to contents.
    """

    id: int
    name: str
    config: str
    files: dict[str, Any]


@message
class UnloadModel:
    """Unload all versions of a model, and the ensembles that need it.

    `unload_dependents`: also unload the models that were loaded only for this ensemble.
    """

    id: int
    name: str
    unload_dependents: bool


@message
class IndexRepository:
    """Request {"models": [...]}, as POST /v2/repository/index returns it."""

    id: int
    ready: bool


@message
class NameModels:
    """Request {"names": {model: [aliases]}} of models that generate text and are not loaded.

    They are loaded on demand.
    """

    id: int


@message
class ChangeLogging:
    """Change log settings in every process. The reply contains all settings, as in `SetLogging`."""

    id: int
    changes: dict[str, Any]


@message
class ChangeTracing:
    """Change trace settings of a model, or those of all models without settings of their own ("").

    A value of None restores the value at start-up. The reply contains the model's settings, each as
    a list of strings.
    """

    id: int
    model: str
    changes: dict[str, Any]


@message
class WantModel:
    """Load a model on demand. The reply follows once the model serves and all peers have it.

    The request expires after `patience_s` seconds; 0 means never.
    """

    id: int
    name: str
    patience_s: float


@message
class FindModel:
    """Request {"endpoint", "config", "version"} of a model that another model calls.

    An empty version means the latest. A model on demand is loaded, as by `WantModel`.
    """

    id: int
    name: str
    version: str
    patience_s: float = 0.0


@message
class AskReady:
    """Request {"ready"} of a model that reports its own readiness; version "" means the latest."""

    id: int
    name: str
    version: str


# --- regions


@message
class RegisterRegion:
    """Register a client's POSIX shared memory object for the user `uid`, a member of `groups`.

    The reply is {"memory_id"}. `leased`: unregister the region at `RegionAbandoned` or when the
    sender exits. `pin`: workers on CUDA devices lock its pages.
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
class RegisterCudaRegion:
    """Register [offset, offset + byte_size) of the CUDA memory that `handle` opens, for `uid`.

    `device_uuid` (16 bytes) may be empty. `exporter_pid` is 0 if it is not known; otherwise the
    region ends with that process.
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
    """Unregister a region of system memory, or of CUDA memory with `cuda`.

    An empty name means all regions of that kind that belong to the user.
    """

    id: int
    name: str
    uid: int
    groups: list[int]
    cuda: bool = False


@message
class RegionInUse:
    """Sent when requests of this gateway begin (`used`) or end to use a retired region."""

    memory_id: int
    used: bool


@message
class RegionReleased:
    """Sent when no request of this gateway uses the region's generation any more."""

    memory_id: int


@message
class RegionAbandoned:
    """Sent when the connection has closed that this region's generation was leased for."""

    memory_id: int


# --- devices and instances


@message
class LeaseWorkspace:
    """Request memory of a device's workspace pool for one execution.

    The reply {"place": the packed range} follows once that much is free. `ReturnWorkspace` releases
    it.
    """

    id: int
    device: str
    byte_size: int


@message
class ReturnWorkspace:
    """Sent when the device no longer uses the leased workspace at `offset` of the memory."""

    device: str
    memory_id: int
    offset: int


@message
class AskTicket:
    """Request the rate limiter's resources for an execution on instance `index`, process `pid`.

    `TicketGranted` follows once the resources are free.
    """

    ticket: int
    index: int
    pid: int = field(default=0, compare=False)


@message
class CheckHolders:
    """Respond with `ResourcesHeld` if every instance needs resources that these processes hold.

    The processes wait for a call of the sender's model, its request `key`.
    """

    key: int
    pids: list[int]


@message
class ResourcesHeld:
    """Sent when a request can never have its resources, because its callers hold them."""

    key: int


@message
class TicketGranted:
    """Grants the resources of a ticket to the sender until `TicketReturned`."""

    ticket: int


@message
class TicketReturned:
    """Returns a granted or pending ticket. `executed`: it was used."""

    ticket: int
    executed: bool


# --- local clients: programs on this host that are no process of the server


@message
class Hello:
    """Connect a program as a local client; `version` is that of the protocol."""

    version: int


@message
class Welcome:
    """Accepts a program as local client `number`.

    Its links to schedulers have the identity "NUMBER.TOKEN.LINK".
    """

    number: int
    token: str


@message
class ShareMemory:
    """Share the first `byte_size` bytes of the attached descriptor, a sealed memfd.

    The reply is {"memory": [id, pid, fd, inode, byte_size, sealed, copied, pinned]}, the memory of
    a packed range. `pin`: workers on CUDA devices lock its pages.
    """

    id: int
    byte_size: int
    pin: bool


@message
class ShareDeviceMemory:
    """Share the first `byte_size` bytes of what `handle` opens on the server's device `device_id`.

    The reply is {"memory": [id, byte_size, device_id, handle, device_uuid]}, the memory of a packed
    range.
    """

    id: int
    byte_size: int
    handle: bytes
    device_id: int
    device_uuid: bytes


@message
class WithdrawMemory:
    """Sent when no request of this local client uses the shared memory any more."""

    memory_id: int


Answer = Answered | Refused
LoadRequest = LoadModel | UnloadModel
AdminRequest = LoadRequest | IndexRepository | NameModels | ChangeLogging | ChangeTracing
RegionRequest = RegisterRegion | RegisterCudaRegion | UnregisterRegion
RegionUse = RegionInUse | RegionReleased | RegionAbandoned
WorkspaceRequest = LeaseWorkspace | ReturnWorkspace
TicketRequest = AskTicket | CheckHolders | TicketReturned
