"""Requests of gateways, schedulers, workers and local clients to the supervisor, and replies.

`Answered` or `Refused` answers a request, with the same id.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from shmserve.errors import ShmserveError
from shmserve.ipc.transport.frames import Message, Record


class ControlRequest(Record):
    """The base class of requests; `id` is the request's number at the sender."""

    id: int  # number of the request at its sender


class Answered(Message):
    """Sent by the supervisor to the sender of request `id` when the request has succeeded.

    The documentation of each request describes the `payload`.
    """

    id: int  # number of the request
    payload: dict[str, Any]  # the result


class Refused(Message):
    """Sent by the supervisor to the sender of request `id` when the request has failed.

    `message` is meant for the client.
    """

    id: int  # number of the request
    code: str
    message: str

    @classmethod
    def of(cls, number: int, error: ShmserveError) -> Refused:
        """Return the reply for an error of request `number`."""
        return cls(number, error.code, error.message)


# --- models and settings


class LoadModel(ControlRequest, Message):
    """Sent by a gateway or a worker to the supervisor to load or reload a model.

    `config` is a JSON override or empty. `files` maps paths such as "1/model.py" to contents.
    """

    name: str
    config: str  # JSON override, or ""
    files: dict[str, Any]  # contents by path


class UnloadModel(ControlRequest, Message):
    """Sent by a gateway or a worker to the supervisor to unload all versions of a model.

    The ensembles that need the model are unloaded, too. If the model is an ensemble,
    `unload_dependents` also unloads the models that were loaded only for it.
    """

    name: str
    unload_dependents: bool  # also the models loaded only for this ensemble


class IndexRepository(ControlRequest, Message):
    """Sent by a gateway to the supervisor to request {"models": [...]}.

    The list is the response to POST /v2/repository/index. With `ready`, it has only ready models.
    """

    ready: bool  # whether only ready versions are listed


class NameModels(ControlRequest, Message):
    """Sent by a gateway to the supervisor to request {"names": {model: [aliases]}}.

    The reply contains the generative models that are not loaded, but are loaded on demand.
    """


class ChangeLogging(ControlRequest, Message):
    """Sent by a gateway to the supervisor to change the log settings of every process.

    The reply contains all settings, as in `SetLogging`.
    """

    changes: dict[str, Any]  # of the settings


class ChangeTracing(ControlRequest, Message):
    """Sent by a gateway to the supervisor to change the trace settings of a model.

    The model "" means all models without settings of their own. A value of None restores the value
    at start-up. The reply contains the model's settings, each as a list of strings.
    """

    model: str
    changes: dict[str, Any]  # of the settings


class WantModel(ControlRequest, Message):
    """Sent by a gateway or a local client to the supervisor to load a model on demand.

    The reply follows once the model serves and all peers have received its publication. The request
    expires after `timeout_s` seconds; 0 means never.
    """

    name: str
    timeout_s: float


class FindModel(ControlRequest, Message):
    """Sent by a worker to the supervisor to find a model that its own model calls.

    The reply is {"endpoint", "config", "version", "ready", "checks_ready"}. An empty version means
    the latest. A model that is loaded on demand is loaded first, as by `WantModel`.
    """

    name: str
    version: str
    timeout_s: float = 0.0


class AskReady(ControlRequest, Message):
    """Sent by a gateway or a worker to the supervisor to run a model's own readiness check.

    The reply is {"ready": bool}. Version "" means the latest.
    """

    name: str
    version: str


# --- regions


class RegisterRegion(ControlRequest, Message):
    """Sent by a gateway to the supervisor to register a POSIX shared memory object of a client.

    The region is [offset, offset + byte_size) of the object `key`, and belongs to the user `uid`, a
    member of `groups`. The reply is {"memory_id"}. With `is_leased`, the region is unregistered at
    `RegionAbandoned` or when the sender exits. With `pin`, workers on CUDA devices lock its pages.
    """

    name: str
    key: str  # name of the shared memory object
    offset: int
    byte_size: int
    uid: int  # user of the client
    groups: list[int]  # gids of the client
    is_leased: bool  # whether the region ends with the connection
    pin: bool  # whether workers pin it for their devices


class RegisterCudaRegion(ControlRequest, Message):
    """Sent by a gateway to the supervisor to register CUDA memory of a client for the user `uid`.

    The region is [offset, offset + byte_size) of the memory that `handle` opens. `device_uuid` (16
    bytes) may be empty. `exporter_pid` is 0 if it is unknown; otherwise the region ends with that
    process.
    """

    name: str
    handle: bytes  # of CUDA IPC
    device_id: int
    device_uuid: bytes
    offset: int
    byte_size: int
    uid: int
    groups: list[int]  # gids of the client
    exporter_pid: int  # process that owns the memory


class UnregisterRegion(ControlRequest, Message):
    """Sent by a gateway to the supervisor to unregister a region of system memory.

    With `is_cuda`, the region is one of CUDA memory. An empty name means all regions of that kind
    that belong to the user.
    """

    name: str
    uid: int
    groups: list[int]  # gids of the client
    is_cuda: bool = False


class RegionInUse(Message):
    """Sent by a gateway to the supervisor when its use of an unregistered region begins or ends.

    The region is one that `RegionRetired` announced. The supervisor withdraws it once no gateway
    uses it.
    """

    memory_id: int
    is_used: bool  # whether the use begins


class RegionReleased(Message):
    """Sent by a gateway to the supervisor when none of its requests uses a withdrawn region.

    `RegionWithdrawn` has named the region. The supervisor sends `RegionDrained` once all gateways
    have released the region.
    """

    memory_id: int


class RegionAbandoned(Message):
    """Sent by a gateway to the supervisor when the connection that leased a region has closed.

    The supervisor unregisters the region.
    """

    memory_id: int


# --- devices and instances


class LeaseWorkspace(ControlRequest, Message):
    """Sent by a worker to the supervisor to lease memory of a device's workspace pool.

    The lease is for one execution, and `ReturnWorkspace` ends it. The reply {"place": the packed
    range} follows once `byte_size` bytes of the pool are free.
    """

    device: str
    byte_size: int


class ReturnWorkspace(Message):
    """Sent by a worker to the supervisor when the device no longer uses a leased workspace.

    The leased range begins at `offset` of the memory `memory_id`.
    """

    device: str
    memory_id: int
    offset: int  # of the leased range


class AskTicket(Message):
    """Sent by a scheduler to the supervisor to reserve the resources of an execution.

    The execution is on instance `index`, process `pid`. `TicketGranted` with the number `ticket`
    follows once the rate limiter has the resources.
    """

    ticket: int  # number of the ticket
    index: int  # of the instance
    pid: int = field(default=0, compare=False)  # of the instance


class CheckHolders(Message):
    """Sent by a scheduler to the supervisor when a call of a model could wait for its own callers.

    The processes `pids` wait for the call, which is request `key` of the scheduler. The supervisor
    responds with `ResourcesHeld` if every instance needs resources that these processes hold.
    """

    key: int  # of the call's request
    pids: list[int]  # processes that wait for the call


class ResourcesHeld(Message):
    """Sent by the supervisor to a scheduler when a call can never have its resources.

    The callers of the call, which is request `key`, hold these resources.
    """

    key: int  # of the call's request


class CallsWaiting(Message):
    """Sent by a scheduler to the supervisor at intervals while calls from other models wait long.

    Each element of `waits` is a pair of lists: the calls that wait, and the instances that may run
    them. A call is a pair of the request's key and its `Submit.callers`. An instance is a list of
    its pid and the keys of the requests that it runs. In the last report, `waits` is empty.
    """

    model: str
    waits: list[Any]  # the waiting calls with their callers


class CallDeadlocked(Message):
    """Sent by the supervisor to a scheduler when a call is part of a deadlock.

    The call is request `key` of the scheduler. `chain` has the names of the models that wait for
    each other. The scheduler fails the call, so that the other calls of the deadlock continue.
    """

    key: int  # of the call's request
    chain: str  # text of the calls in the cycle


class TicketGranted(Message):
    """Sent by the supervisor to a scheduler when the resources of a ticket are reserved.

    The scheduler holds the resources until it sends `TicketReturned`.
    """

    ticket: int  # number of the ticket


class TicketReturned(Message):
    """Sent by a scheduler to the supervisor when it no longer needs a granted or pending ticket.

    `was_used` is true if the ticket was used. The supervisor releases the ticket's resources.
    """

    ticket: int  # number of the ticket
    was_used: bool  # whether an execution has used the resources


# --- local clients: programs of users on this host


class Hello(Message):
    """Sent by a program to the supervisor to become a local client.

    `version` is the protocol's. The supervisor responds with `Welcome`.
    """

    version: int  # of the protocol


class Welcome(Message):
    """Sent by the supervisor to a program that becomes local client `number`.

    The identity of the client's links to schedulers is "NUMBER.TOKEN.LINK".
    """

    number: int  # of the local client
    token: str


class ShareMemory(ControlRequest, Message):
    """Sent by a local client to the supervisor to share the memory of the attached descriptor.

    The memory is the first `byte_size` bytes of a sealed memfd. The reply is {"memory":
    `Memory.packed`}, the MessagePack of [id, pid, byte_size, fd, inode, sealed, copied, pinned].
    With `pin`, workers on CUDA devices lock its pages.
    """

    byte_size: int
    pin: bool  # whether workers pin it for their devices


class ShareDeviceMemory(ControlRequest, Message):
    """Sent by a local client to the supervisor to share memory of the server's device `device_id`.

    The memory is the first `byte_size` bytes of the allocation of `handle`. The reply is {"memory":
    `Memory.packed`}, the MessagePack of [id, pid, byte_size, device_id, handle, device_uuid].
    """

    byte_size: int
    handle: bytes
    device_id: int
    device_uuid: bytes


class WithdrawMemory(Message):
    """Sent by a local client to the supervisor when none of its requests uses a shared memory.

    The supervisor then notifies all workers, which unmap the memory.
    """

    memory_id: int


Answer = Answered | Refused
LoadRequest = LoadModel | UnloadModel
AdminRequest = LoadRequest | IndexRepository | NameModels | ChangeLogging | ChangeTracing
RegionRequest = RegisterRegion | RegisterCudaRegion | UnregisterRegion
RegionUse = RegionInUse | RegionReleased | RegionAbandoned
WorkspaceRequest = LeaseWorkspace | ReturnWorkspace
TicketRequest = AskTicket | CheckHolders | TicketReturned
SchedulerRequest = TicketRequest | CallsWaiting
