"""Messages and start records by which the supervisor controls one of its processes.

A start record contains the arguments of a new process: the supervisor encodes it, and the process
decodes it once. The start record of a gateway is shmserve.gateway.settings.GatewayStart.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.transport.frames import message
from shmserve.ipc.transport.records import Document, from_map
from shmserve.logs import LogSettings

T = TypeVar("T")


# --- start records


@dataclass(frozen=True, slots=True)
class SchedulingLimits:
    """Server-wide scheduling settings.

    A value of 0 disables `execution_timeout_s`, `request_timeout_us` and `max_queue_size`. A
    batcher delays its first batch until `delay_scheduler` requests wait, and a sequence batcher
    until `backlog_delay_scheduler` requests wait without a slot. `quantiles` are those of the last
    minute's durations.
    """

    execution_timeout_s: float = 0.0
    request_timeout_us: int = 0
    request_timeout_is_deadline: bool = False
    max_queue_size: int = 0
    delay_scheduler: int = 0
    backlog_delay_scheduler: int = 0
    quantiles: tuple[float, ...] = ()
    rate_limited: bool = False  # instances execute only with a ticket


@dataclass(frozen=True, slots=True)
class CacheStart:
    """A model version's share of the response cache, in bytes (0: no cache).

    The process `supervisor_pid` holds the memory that clients have shared.
    """

    byte_size: int = 0
    supervisor_pid: int = 0


@dataclass(frozen=True, slots=True)
class HostStart:
    """The start record of a process that hosts schedulers."""

    title: str
    run_dir: Path
    log: LogSettings = field(default_factory=LogSettings)


@dataclass(frozen=True, slots=True)
class SchedulerStart:
    """The start record of a scheduler of a `kind`, "scheduler" or "ensemble".

    Its endpoints contain `number`. `snapshot` is the last `StatisticsSnapshot` of a predecessor
    that died, or empty. `alive` are the pids of running workers. `capability_key` authenticates
    local clients; members of `group` are admitted, too (-1: none).
    """

    kind: str
    number: int
    version: str
    config: ModelSpec
    run_dir: Path
    capability_key: bytes
    group: int = -1
    arena_byte_size: int = 0  # of the output arena
    limits: SchedulingLimits = field(default_factory=SchedulingLimits)
    cache: CacheStart = field(default_factory=CacheStart)
    snapshot: list[Any] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The start record of a worker: instance `index` of a model version.

    `number` is that of its scheduler. `device` is "cpu" or "gpu:N", `kind` Triton's name for it,
    and `threads` the number of threads that compute. `environment` is the path of the model's own
    Python environment as its configuration has it, or "".
    """

    number: int
    index: int
    model_name: str
    version: str
    model_dir: Path
    repository: Path
    run_dir: Path
    device: str
    kind: str
    device_id: int
    instance_name: str
    backend_config: dict[str, str]
    arena_byte_size: int
    threads: int
    log: LogSettings = field(default_factory=LogSettings)
    environment: str = ""


@dataclass(frozen=True, slots=True)
class WorkspaceStart:
    """The start record of the process that holds a CUDA device's workspace pool."""

    device_id: int
    byte_size: int
    run_dir: Path
    log: LogSettings = field(default_factory=LogSettings)


def encode_start(start: Any) -> bytes:
    """Encode a start record as MessagePack. Paths need not be UTF-8."""
    data: bytes = msgpack.packb(start, default=_plain, unicode_errors="surrogateescape")
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Document):
        return value.source
    return {each.name: getattr(value, each.name) for each in fields(value)}


def decode_start(cls: type[T], data: bytes) -> T:
    """Decode a start record of type `cls`. The data is trusted, since our supervisor encoded it."""
    return from_map(cls, msgpack.unpackb(data, unicode_errors="surrogateescape"))


# --- every process


@message
class Started:
    """Sent by a gateway or scheduler host when it runs and receives.

    A gateway then receives the current state, with `HealthChanged` last, and opens its ports.
    """


@message
class Stop:
    """Exit after the running work."""


@message
class Drain:
    """Accept no new work, complete requests in flight, then send `Drained`.

    Attributes:
        sequences: Whether open sequences count as in flight until they end or their idle limit
            expires.
        followed: Whether another server accepts clients at the gateway's sockets.
    """

    sequences: bool = False
    followed: bool = False


@message
class Drained:
    """Sent when nothing is in flight in this process any more."""


@message
class Ping:
    """Send `Acknowledged` with this number, as a sign of life."""

    acknowledge: int


@message
class LoadsFailed:
    """Sent to gateways for their metrics: the models that do not serve since their load failed.

    `models` are pairs of name and version ("": none was found); `count` is that of all failed
    loads so far.
    """

    models: list[list[str]]
    count: int


@message
class SetLogging:
    """Apply log settings: the fields of shmserve.logs.LogSettings by name."""

    settings: dict[str, Any]


@message
class SetTracing:
    """Apply trace settings: the fields of TraceSettings by model name ("" for all other models).

    A scheduler measures the requests of its local clients accordingly, and reports each that takes
    longer than `slow_request_ms` (0: none).
    """

    settings: dict[str, Any]
    slow_request_ms: int = 0


# --- gateways


@message
class GatewayReady:
    """Sent when the gateway listens."""


@message
class Accept:
    """Accept the clients that wait at a listener which is older than the server."""


@message
class SetTokens:
    """Require one of these tokens of clients, encoded as in common/auth_tokens.py."""

    tokens: dict[str, Any]


@message
class RequestTraced:
    """The trace of a local client's request that was sampled or slow.

    Schedulers send it to the supervisor, which sends it to a gateway: gateways write and export
    traces. `trace` and `spans` are encoded as in ipc/trace.py, times are monotonic ns, and `error`
    is empty for a successful request.
    """

    model: str
    version: str
    request_id: str
    trace: str
    sampled: bool
    arrived_ns: int
    ended_ns: int
    spans: bytes
    error: str


# --- schedulers and their hosts


@message
class OpenScheduler:
    """Host a scheduler. `start` is an encoded `SchedulerStart`.

    The scheduler sends its own `SchedulerReady`.
    """

    start: bytes


@message
class SchedulerClosed:
    """Sent when the scheduler `number` was closed, or could not be opened for a `reason`."""

    number: int
    reason: str


@message
class SchedulerReady:
    """Sent when the scheduler's sockets are bound."""

    pid: int


@message
class ResizeCache:
    """Limit the response cache of this model version to `byte_size` bytes."""

    byte_size: int


@message
class InstanceExpected:
    """An instance is loading or restarting; requests wait for it.

    `process` is the number of its process, or 0 before it has one. No other process is accepted.
    """

    index: int
    process: int


@message
class InstanceGone:
    """An instance will not restart. Waiting requests fail for `reason` if it was the last one."""

    index: int
    reason: str


@message
class RetireInstance:
    """Send no new batch or sequence to an instance, and let it finish what it has."""

    index: int


@message
class CountChange:
    """Count one instance more or less, because a load requests that."""

    more: bool


@message
class InstanceRetired:
    """Sent when a retiring instance has finished. `process`: its process, 0 if unknown."""

    process: int


@message
class InstanceServed:
    """Sent when the process with this number has completed its first execution.

    If it dies later, that is no crash loop.
    """

    process: int


@message
class KillInstance:
    """Sent when an instance exceeded its execution limit.

    The supervisor logs where it hangs and kills its process, if that is still the same.
    """

    process: int
    reason: str


@message
class SnapshotStatistics:
    """Request `StatisticsSnapshot`, without the long lists of responses: sent every second."""


@message
class StatisticsSnapshot:
    """The counters of a scheduler, which its successor restores; sent before they are published.

    `statistics` are those of scheduler/statistics.py, and `metrics` the model's own, encoded as in
    common/model_metrics.py. An entry that is missing in `statistics` has not changed.
    """

    statistics: dict[str, Any]
    metrics: list[list[Any]]


@message
class BaseCounters:
    """The counters of the replaced versions, as returned by `total` in common/model_metrics.py.

    The latest message replaces earlier ones.
    """

    statistics: dict[str, Any]


# --- workers


@message
class WorkerStarted:
    """Sent when the worker runs and waits for `LoadInstance` or `CompleteConfig`.

    On SIGUSR2 the worker appends the stacks of its threads to its open file `stacks_fd`.
    """

    pid: int
    stacks_fd: int = -1


@message
class CompleteConfig:
    """Derive the missing parts of the configuration, then send `ConfigCompleted`."""

    config: ModelSpec


@message
class ConfigCompleted:
    """The model's own configuration, to be merged and validated."""

    config: dict[str, Any]


@message
class LoadInstance:
    """Load the model with this final configuration, and connect to the worker endpoint."""

    config: ModelSpec
    endpoint: str


@message
class InstanceLoaded:
    """Sent when the model is loaded, before the instance connects to its scheduler.

    `checks_ready`: the model itself responds to `CheckReady`. `device_byte_size`: its accelerator
    memory, as far as torch reports it.
    """

    seconds: float
    checks_ready: bool = False
    device_byte_size: int = 0


@message
class LoadFailed:
    """Sent when the model could not be loaded. `frames`: the traceback of the model's own code."""

    code: str
    message: str
    frames: str = ""


@message
class Attach:
    """Connect to the scheduler at this endpoint only: the last one died, or the model moved."""

    endpoint: str


@message
class CheckReady:
    """Call the model's readiness check, then send `ReadyChecked`."""

    id: int


@message
class ReadyChecked:
    """The result of a `CheckReady`."""

    id: int
    ready: bool


@message
class CheckMemory:
    """Open this CUDA memory, check that it has `byte_size` bytes, and close it."""

    id: int
    handle: bytes
    device_id: int
    device_uuid: bytes
    byte_size: int


@message
class MemoryChecked:
    """The result of a `CheckMemory`. An empty code is success; `message` is for the client."""

    id: int
    code: str
    message: str


@message
class WorkspaceAllocated:
    """Sent when a device's workspace pool is allocated. `handle` opens it."""

    handle: bytes
    device_uuid: bytes


Ending = Drain | Stop
PoolNews = InstanceExpected | InstanceGone | RetireInstance | CountChange
InstanceNews = InstanceServed | KillInstance | InstanceRetired
Loading = CompleteConfig | LoadInstance | Attach
Loaded = WorkerStarted | ConfigCompleted | InstanceLoaded | LoadFailed
