"""The whole vocabulary between processes: commands down are imperative, events up are in the past
tense.

    gateway  <-> scheduler     ClientToScheduler, SchedulerToClient     (a model calling another
    model is a client too) scheduler <-> worker       SchedulerToWorker, WorkerToScheduler
    supervisor <-> gateway     SupervisorToGateway, GatewayToSupervisor
    supervisor <-> scheduler   SupervisorToScheduler, SchedulerToSupervisor
    supervisor <-> worker      SupervisorToWorker, WorkerToSupervisor
    supervisor <-> guest       SupervisorToGuest, GuestToSupervisor   (a program outside the server)

On the wire a frame is MessagePack: [VERSION, [tag, field, ...], [tag, field, ...], ...], several
messages a frame, fields in the order of the class. Field types are checked on arrival, so a
handler may rely on them; anything else in a frame raises MalformedMessage. Nothing here can
execute: no pickle, no method names.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform

import msgpack

from shmserve.ipc.records import record
from shmserve.ipc.tensors import MalformedMessage

VERSION = 1

T = TypeVar("T")

# tag -> class, the types of its fields, and closer checks of those (lists') that have any
_Checks = tuple[tuple[int, Callable[[Any], bool]], ...]
_BY_TAG: dict[str, tuple[type[Any], tuple[type[Any], ...], _Checks]] = {}
_GETTERS: dict[type[Any], Callable[[Any], Any]] = {}


def _plain(kind: Any) -> type[Any]:
    plain = typing.get_origin(kind) or kind
    if plain not in (int, str, bytes, bool, float, list, dict):
        raise TypeError(f"a message field cannot be {kind}")
    return plain  # type: ignore[no-any-return]


def _checker(kind: Any) -> Callable[[Any], bool]:
    """Whether the elements of a list are what they should be, at every depth."""
    if typing.get_origin(kind) is not list:
        return lambda value: type(value) is kind
    (of,) = typing.get_args(kind)
    if of is Any:
        return lambda value: type(value) is list
    inner = _checker(of)
    return lambda value: type(value) is list and all(map(inner, value))


@dataclass_transform(frozen_default=True)
def _message(cls: type[T]) -> type[T]:
    made = record(cls)
    hints = typing.get_type_hints(made)
    names = [f.name for f in fields(made)]  # type: ignore[arg-type]
    kinds = [hints[name] for name in names]
    closer = tuple(
        (index, _checker(kind))
        for index, kind in enumerate(kinds)
        if typing.get_origin(kind) is list
    )
    _BY_TAG[made.__name__] = (made, tuple(map(_plain, kinds)), closer)
    if len(names) > 1:
        _GETTERS[made] = attrgetter(*names)
    elif names:
        only = attrgetter(names[0])
        _GETTERS[made] = lambda message: (only(message),)
    else:
        _GETTERS[made] = lambda message: ()
    return made


# --- a client of a scheduler (gateway, a model that calls another model)
# -----------------------------------------


@_message
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


@_message
class Cancel:
    """Nobody waits for this request any more."""

    id: int


@_message
class Release:
    """The outputs at these offsets of a worker's arena have been read."""

    pid: int
    offsets: list[int]


@_message
class ReportStatistics:
    """Answer with `StatisticsReported`."""

    id: int


@_message
class Finished:
    """The request succeeded; `body` is a packed `Inferred`."""

    id: int
    body: bytes


@_message
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


@_message
class Settled:
    """No worker has the request any more, whose `Failed` came early."""

    id: int


@_message
class StatisticsReported:
    """A model version's counters: see shmserve/scheduler/statistics.py for the keys."""

    id: int
    statistics: dict[str, Any]


# --- scheduler and worker
# ----------------------------------------------------------------------------------------


@_message
class Execute:
    """Run a batch. `requests` holds [key, client pid, work] of each request, in order."""

    batch: int
    requests: list[list[Any]]


@_message
class CancelExecution:
    """Do not write this request's outputs: nobody waits."""

    key: int


@_message
class ReleaseOutputs:
    """These offsets of the worker's arena have been read by process `client_pid`."""

    client_pid: int
    offsets: list[int]


@_message
class InstanceReady:
    """A loaded instance (index within its model) offers itself for batches."""

    index: int
    pid: int


@_message
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


@_message
class MetricsReported:
    """An instance's model has changed metrics of its own: all of them, since the process began.
    shmserve.model_metrics says what `families` are."""

    families: list[list[Any]]


# --- supervisor and every process
# --------------------------------------------------------------------------------


@_message
class Stop:
    """End now, after what is running."""


@_message
class Drain:
    """Take nothing new, finish what is in flight, then say `Drained`."""


@_message
class Drained:
    """Nothing is in flight here any more."""


@_message
class ProcessExited:
    """A process of the server is gone: forget its memory, cancel its requests."""

    pid: int


@_message
class MemoryDropped:
    """A region's generation has ended: unmap it."""

    memory_id: int


@_message
class SetLogging:
    """Log like this from now on; `settings` are shmserve.logs.LogSettings, by name."""

    settings: dict[str, Any]


@_message
class Answered:
    """The answer to the sender's numbered request."""

    id: int
    payload: dict[str, Any]


@_message
class Refused:
    """The sender's numbered request failed; `message` is for the client."""

    id: int
    code: str
    message: str


# --- supervisor and gateway
# --------------------------------------------------------------------------------------


@_message
class GatewayReady:
    """The gateway accepts connections."""

    pid: int


@_message
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


@_message
class ModelWithdrawn:
    """A model version must not be called any more; requests in flight on it finish."""

    name: str
    version: str
    acknowledge: int


@_message
class SchedulerLost:
    """The scheduler at `endpoint` is gone: submit what it had again, to `successor` (a new
    ModelPublished follows).

    No successor: its version was retired. Gateways refuse what they have there; for workers,
    `FindModel` says what serves now.
    """

    endpoint: str
    successor: str


@_message
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


@_message
class RegionWithdrawn:
    """The name is free; when the last request that uses this generation ends, say
    `RegionReleased`."""

    name: str
    memory_id: int
    acknowledge: int


@_message
class HealthChanged:
    """What health answers from now on. `exiting`: refuse new inferences."""

    live: bool
    ready: bool
    exiting: bool


@_message
class Acknowledged:
    """What carried this number holds in this process."""

    number: int


@_message
class RegionReleased:
    """No request of this gateway uses the generation any more."""

    memory_id: int


@_message
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


@_message
class RegionAbandoned:
    """The connection that this generation was leased for is gone."""

    memory_id: int


@_message
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


@_message
class UnregisterRegion:
    """Unregister a region of system memory, or one of CUDA memory; an empty name means all of that
    kind that are the user's."""

    id: int
    name: str
    uid: int
    groups: list[int]
    cuda: bool = False


@_message
class LoadModel:
    """Load or reload; `config` is a JSON override or empty, `files` maps "1/model.py" to
    contents."""

    id: int
    name: str
    config: str
    files: dict[str, Any]


@_message
class UnloadModel:
    """Unload all versions of a model."""

    id: int
    name: str
    unload_dependents: bool


@_message
class IndexRepository:
    """Answer with {"models": [...]}, as POST /v2/repository/index shows it."""

    id: int
    ready: bool


@_message
class ChangeLogging:
    """Change these log settings, in every process; answer with all of them, as `SetLogging` has
    them."""

    id: int
    changes: dict[str, Any]


# --- supervisor and scheduler
# ------------------------------------------------------------------------------------


@_message
class SchedulerReady:
    """The scheduler's sockets are bound."""

    pid: int


@_message
class InstanceExpected:
    """An instance is loading or restarting; requests wait for it. `pid` is its process, once there
    is one (0: not yet): nobody else is taken for it."""

    index: int
    pid: int


@_message
class InstanceExited:
    """An instance's process is gone (or was stopped); its batch must run elsewhere. `reason` is
    for the client."""

    index: int
    reason: str


@_message
class PoolFailed:
    """No instance will come back: refuse what waits. `reason` is for the client."""

    reason: str


@_message
class KillInstance:
    """An instance overran its execution limit: dump its stack to the log and kill it."""

    index: int
    reason: str


@_message
class StatisticsKept:
    """What the scheduler has counted and just told somebody; its successor goes on from there.
    `metrics` are its model's own, as shmserve.model_metrics keeps them."""

    statistics: dict[str, Any]
    metrics: list[list[Any]]


# --- supervisor and worker
# ---------------------------------------------------------------------------------------


@_message
class WorkerStarted:
    """The worker runs and waits for `LoadInstance` (or for `CompleteConfig`)."""

    pid: int


@_message
class CompleteConfig:
    """Derive what the configuration leaves open, then say `ConfigCompleted`."""

    config: dict[str, Any]


@_message
class ConfigCompleted:
    """The model's own view of its configuration, to be merged and validated."""

    config: dict[str, Any]


@_message
class LoadInstance:
    """Load the model with this final configuration, connect to the scheduler's worker endpoint."""

    config: dict[str, Any]
    endpoint: str


@_message
class InstanceLoaded:
    """The model is loaded; the instance is about to offer itself to its scheduler."""

    seconds: float


@_message
class LoadFailed:
    """The model could not be loaded."""

    code: str
    message: str


@_message
class Attach:
    """The scheduler died: offer yourself at this endpoint instead."""

    endpoint: str


@_message
class FindModel:
    """A model wants to call another one: answer with {"endpoint", "config", "version"}; version ""
    means the latest."""

    id: int
    name: str
    version: str


@_message
class CheckMemory:
    """Open this CUDA memory, see whether it has `byte_size` bytes, and let it go."""

    id: int
    handle: bytes
    device_id: int
    device_uuid: bytes
    byte_size: int


@_message
class MemoryChecked:
    """How a `CheckMemory` went; code "" is success, `message` is for the client."""

    id: int
    code: str
    message: str


# --- supervisor and guest (a program with shmserve.client), over a unix socket
# ---------------------------------------------------------------------------------------


@_message
class Hello:
    """A program asks to be a guest; `version` is the protocol's."""

    version: int


@_message
class Welcome:
    """The program is guest `number`. A link to a scheduler has the identity "NUMBER.TOKEN.LINK"."""

    number: int
    token: str


@_message
class ShareMemory:
    """Let requests of this guest use the first `byte_size` bytes of the attached descriptor: a
    sealed memfd. `pin`: have workers on CUDA devices lock its pages.

    Answered with {"memory": [id, pid, fd, inode, byte_size, sealed, copied, pinned]}, as places
    have it.
    """

    id: int
    byte_size: int
    pin: bool


@_message
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


@_message
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
    InstanceExpected | InstanceExited | PoolFailed | ProcessExited | SetLogging | Drain | Stop
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
    | IndexRepository
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


def pack(messages: Iterable[Any]) -> bytes:
    """One frame of `messages`, in order."""
    items: list[Any] = [VERSION]
    for each in messages:
        kind = type(each)
        items.append((kind.__name__, *_GETTERS[kind](each)))
    frame: bytes = msgpack.packb(items)
    return frame


def unpack(frame: bytes) -> list[Any]:
    """The messages of a frame, typed; raises MalformedMessage for anything else, and takes none of
    it."""
    try:
        raw = msgpack.unpackb(frame)
    except Exception as error:  # msgpack raises a dozen kinds; all mean the same
        raise MalformedMessage(f"not MessagePack: {error}") from error
    if type(raw) is not list or not raw or raw[0] != VERSION:
        raise MalformedMessage("not a frame of this protocol version")
    del raw[0]
    return [_typed(item) for item in raw]


def _typed(item: Any) -> Any:
    if type(item) is not list or not item or type(tag := item.pop(0)) is not str:
        raise MalformedMessage("not a message")
    known = _BY_TAG.get(tag)
    if known is None:
        raise MalformedMessage("unknown message")
    cls, kinds, closer = known
    if tuple(map(type, item)) != kinds:
        raise MalformedMessage(f"{tag} has fields of the wrong number or types")
    for index, check in closer:
        if not check(item[index]):
            raise MalformedMessage(f"{tag} has a list with elements of the wrong type")
    return cls(*item)
