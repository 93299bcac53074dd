"""The whole vocabulary between processes: commands down are imperative, events up are in the past
tense.

    gateway    <-> scheduler   ClientToScheduler, SchedulerToClient
                               (a model calling another model is a client too)
    guest      <-> scheduler   GuestToScheduler, SchedulerToClient   (a program outside the server)
    scheduler  <-> worker      SchedulerToWorker, WorkerToScheduler
    supervisor <-> gateway     SupervisorToGateway, GatewayToSupervisor
    supervisor <-> scheduler   SupervisorToScheduler, SchedulerToSupervisor
    supervisor <-> worker      SupervisorToWorker, WorkerToSupervisor
    supervisor <-> guest       SupervisorToGuest, GuestToSupervisor

frames.py packs them.
"""

from __future__ import annotations

from typing import Any

from shmserve.ipc.frames import message

# --- a client of a scheduler (gateway, a model that calls another model)


@message
class Submit:
    """Run this request. `batch_size` 0: the model does not batch. `deadline_ns` 0: none (monotonic
    clock).

    `request_id` is the client's own, for error texts and logs; it may be empty.
    """

    id: int
    batch_size: int
    shape_key: bytes
    arrived_ns: int
    deadline_ns: int
    timeout_us: int
    priority: int
    work: bytes
    request_id: str = ""


@message
class Cancel:
    """Nobody waits for this request any more."""

    id: int


@message
class Release:
    """The outputs at these offsets of a worker's arena have been read."""

    pid: int
    offsets: list[int]


@message
class ReportStatistics:
    """Answer with `StatisticsReported`."""

    id: int


@message
class Finished:
    """The request succeeded; `body` is a packed `Inferred`."""

    id: int
    body: bytes


@message
class Failed:
    """The request failed; `message` is for the client. `retry_after_s` 0: no hint.

    `early`: a worker still has the request (its deadline passed there), so its memory stays in use
    until `Settled`.
    """

    id: int
    code: str
    message: str
    retry_after_s: int
    early: bool


@message
class Settled:
    """No worker has the request any more, whose `Failed` came early."""

    id: int


@message
class StatisticsReported:
    """A model version's counters: see shmserve/scheduler/statistics.py for the keys."""

    id: int
    statistics: dict[str, Any]


# --- scheduler and worker


@message
class Execute:
    """Run a batch. `requests` holds [key, client pid, work] of each request, in order; `live`: how
    many the scheduler has under way, these among them."""

    batch: int
    requests: list[list[Any]]
    live: int = 1


@message
class CancelExecution:
    """Do not write this request's outputs: nobody waits."""

    key: int


@message
class ReleaseOutputs:
    """These offsets of the worker's arena have been read by process `client_pid`."""

    client_pid: int
    offsets: list[int]


@message
class InstanceReady:
    """A loaded instance (index within its model) offers itself for batches."""

    index: int
    pid: int


@message
class BatchFinished:
    """A batch ended. Times are monotonic ns. `replies` holds [key, code, message, body] of each
    request; code "" is success. `copied_in`, `copied_out`: bytes of tensors that were copied.
    `executed`: whether the model was asked at all."""

    batch: int
    compute_start_ns: int
    input_end_ns: int
    output_start_ns: int
    compute_end_ns: int
    replies: list[list[Any]]
    copied_in: int = 0
    copied_out: int = 0
    executed: bool = True


@message
class MetricsReported:
    """An instance's model has changed metrics of its own: all of them, since the process began.
    shmserve.model_metrics says what `families` are."""

    families: list[list[Any]]


# --- supervisor and every process


@message
class Stop:
    """End now, after what is running."""


@message
class Drain:
    """Take nothing new, finish what is in flight, then say `Drained`."""


@message
class Drained:
    """Nothing is in flight here any more."""


@message
class ProcessExited:
    """A process of the server is gone: forget its memory, cancel its requests."""

    pid: int


@message
class MemoryDropped:
    """A region's generation has ended: unmap it."""

    memory_id: int


@message
class SetLogging:
    """Log like this from now on; `settings` are shmserve.logs.LogSettings, by name."""

    settings: dict[str, Any]


@message
class Answered:
    """The answer to the sender's numbered request."""

    id: int
    payload: dict[str, Any]


@message
class Refused:
    """The sender's numbered request failed; `message` is for the client."""

    id: int
    code: str
    message: str


# --- supervisor and gateway


@message
class GatewayReady:
    """The gateway accepts connections."""

    pid: int


@message
class ModelPublished:
    """A model version may be called (or `ready` changed). `endpoint` is its scheduler's; `latest`:
    serves a request without version.

    `acknowledge` > 0: say `Acknowledged` with it once this holds.
    """

    name: str
    version: str
    config: dict[str, Any]
    metadata: dict[str, Any]
    endpoint: str
    ready: bool
    latest: bool
    load_seconds: float
    acknowledge: int


@message
class ModelWithdrawn:
    """A model version must not be called any more; requests in flight on it finish."""

    name: str
    version: str
    acknowledge: int


@message
class SchedulerLost:
    """The scheduler at `endpoint` is gone: submit what it had again, to `successor` (a new
    ModelPublished follows).

    No successor: its version was retired, or no scheduler can be started now (said again then, and
    in the end with a successor). Gateways refuse what they have there; for workers, `FindModel`
    says what serves now.
    """

    endpoint: str
    successor: str


@message
class RegionPublished:
    """A region may be used under `name`; the extent is [offset, offset + byte_size) of the object.

    `uid` and `group` say whose it is; `copied`: it is not to be mapped (see shmserve/trust.py);
    `pinned`: workers on CUDA devices lock its pages.
    With a `handle` (64 bytes) it is CUDA memory on `device_id`, and `key`, `pid`, `fd` and `inode`
    mean nothing; `device_uuid` is empty where the client gave none.
    """

    name: str
    key: str
    memory_id: int
    pid: int
    fd: int
    inode: int
    object_size: int
    offset: int
    byte_size: int
    uid: int
    group: int
    copied: bool
    acknowledge: int
    handle: bytes = b""
    device_id: int = 0
    device_uuid: bytes = b""
    pinned: bool = False


@message
class RegionWithdrawn:
    """The name is free; when the last request that uses this generation ends, say
    `RegionReleased`."""

    name: str
    memory_id: int
    acknowledge: int


@message
class HealthChanged:
    """What health answers from now on. `exiting`: refuse new inferences."""

    live: bool
    ready: bool
    exiting: bool


@message
class Acknowledged:
    """What carried this number holds in this process."""

    number: int


@message
class RegionReleased:
    """No request of this gateway uses the generation any more."""

    memory_id: int


@message
class RegisterRegion:
    """Register a client's POSIX shared memory object, for the user `uid`, who is in `groups`.

    The answer is {"memory_id"}. `leased`: until `RegionAbandoned`, or until the sender ends. `pin`:
    have workers on CUDA devices lock its pages.
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
class LoadModel:
    """Load or reload; `config` is a JSON override or empty, `files` maps "1/model.py" to
    contents."""

    id: int
    name: str
    config: str
    files: dict[str, Any]


@message
class UnloadModel:
    """Unload all versions of a model; there are no ensembles, so none has dependents."""

    id: int
    name: str
    unload_dependents: bool


@message
class IndexRepository:
    """Answer with {"models": [...]}, as POST /v2/repository/index shows it."""

    id: int
    ready: bool


@message
class ChangeLogging:
    """Change these log settings, in every process; answer with all of them, as `SetLogging` has
    them."""

    id: int
    changes: dict[str, Any]


# --- supervisor and scheduler


@message
class SchedulerReady:
    """The scheduler's sockets are bound."""

    pid: int


@message
class InstanceExpected:
    """An instance is loading or restarting; requests wait for it. `pid` is its process, once there
    is one (0: not yet): nobody else is taken for it."""

    index: int
    pid: int


@message
class InstanceExited:
    """An instance's process is gone (or was stopped); its batch must run elsewhere. `reason` is
    for the client."""

    index: int
    reason: str


@message
class PoolFailed:
    """No instance will come back: refuse what waits. `reason` is for the client."""

    reason: str


@message
class KillInstance:
    """An instance overran its execution limit: dump its stack to the log and kill it, if it is
    process `pid` still."""

    index: int
    reason: str
    pid: int


@message
class StatisticsKept:
    """What the scheduler has counted, before it tells anybody else; its successor goes on from
    there. `metrics` are its model's own, as shmserve.model_metrics keeps them."""

    statistics: dict[str, Any]
    metrics: list[list[Any]]


@message
class CountsInherited:
    """What was counted by the one that this version replaces, of its StatisticsKept: the latest
    holds. See shmserve/counters.py."""

    statistics: dict[str, Any]


# --- supervisor and worker


@message
class WorkerStarted:
    """The worker runs and waits for `LoadInstance` (or for `CompleteConfig`)."""

    pid: int


@message
class CompleteConfig:
    """Derive what the configuration leaves open, then say `ConfigCompleted`."""

    config: dict[str, Any]


@message
class ConfigCompleted:
    """The model's own view of its configuration, to be merged and validated."""

    config: dict[str, Any]


@message
class LoadInstance:
    """Load the model with this final configuration, connect to the scheduler's worker endpoint."""

    config: dict[str, Any]
    endpoint: str


@message
class InstanceLoaded:
    """The model is loaded; the instance is about to offer itself to its scheduler."""

    seconds: float


@message
class LoadFailed:
    """The model could not be loaded."""

    code: str
    message: str


@message
class Attach:
    """The scheduler died: offer yourself at this endpoint instead."""

    endpoint: str


@message
class FindModel:
    """A model wants to call another one: answer with {"endpoint", "config", "version"}; version ""
    means the latest."""

    id: int
    name: str
    version: str


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
    """How a `CheckMemory` went; code "" is success, `message` is for the client."""

    id: int
    code: str
    message: str


# --- supervisor and guest (a program with shmserve.client), over a unix socket


@message
class Hello:
    """A program asks to be a guest; `version` is the protocol's."""

    version: int


@message
class Welcome:
    """The program is guest `number`. A link to a scheduler has the identity "NUMBER.TOKEN.LINK"."""

    number: int
    token: str


@message
class ShareMemory:
    """Let requests of this guest use the first `byte_size` bytes of the attached descriptor: a
    sealed memfd. `pin`: have workers on CUDA devices lock its pages.

    Answered with {"memory": [id, pid, fd, inode, byte_size, sealed, copied, pinned]}, as places
    have it.
    """

    id: int
    byte_size: int
    pin: bool


@message
class ShareDeviceMemory:
    """Let requests of this guest use the first `byte_size` bytes of what `handle` opens on the
    server's device `device_id`.

    Answered with {"memory": [id, byte_size, device_id, handle, device_uuid]}, as places have it.
    """

    id: int
    byte_size: int
    handle: bytes
    device_id: int
    device_uuid: bytes


@message
class WithdrawMemory:
    """No request of this guest uses the memory any more."""

    memory_id: int


ClientToScheduler = Submit | Cancel | Release | ReportStatistics
SchedulerToClient = Finished | Failed | Settled | StatisticsReported
SchedulerToWorker = Execute | CancelExecution | ReleaseOutputs
WorkerToScheduler = InstanceReady | BatchFinished | MetricsReported
SupervisorToGateway = (
    ModelPublished
    | ModelWithdrawn
    | SchedulerLost
    | RegionPublished
    | RegionWithdrawn
    | HealthChanged
    | ProcessExited
    | SetLogging
    | Answered
    | Refused
    | Drain
    | Stop
)
GatewayToSupervisor = (
    GatewayReady
    | Acknowledged
    | RegionReleased
    | RegisterRegion
    | RegionAbandoned
    | RegisterCudaRegion
    | UnregisterRegion
    | LoadModel
    | UnloadModel
    | IndexRepository
    | ChangeLogging
    | Drained
)
SupervisorToScheduler = (
    InstanceExpected
    | InstanceExited
    | PoolFailed
    | ProcessExited
    | CountsInherited
    | SetLogging
    | Drain
    | Stop
)
SchedulerToSupervisor = SchedulerReady | KillInstance | Drained | StatisticsKept
SupervisorToWorker = (
    CompleteConfig
    | LoadInstance
    | Attach
    | CheckMemory
    | MemoryDropped
    | ProcessExited
    | ModelWithdrawn
    | SchedulerLost
    | SetLogging
    | Answered
    | Refused
    | Stop
)
WorkerToSupervisor = (
    WorkerStarted
    | ConfigCompleted
    | InstanceLoaded
    | LoadFailed
    | MemoryChecked
    | FindModel
    | LoadModel
    | UnloadModel
)

SupervisorToGuest = (
    Welcome
    | ModelPublished
    | ModelWithdrawn
    | SchedulerLost
    | HealthChanged
    | ProcessExited
    | Answered
    | Refused
)
GuestToSupervisor = Hello | Acknowledged | ShareMemory | ShareDeviceMemory | WithdrawMemory
GuestToScheduler = Submit | Cancel | Release
