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
from shmserve.ipc.transport.frames import Message, from_map
from shmserve.logs import LogSettings

T = TypeVar("T")


# --- start records


@dataclass(frozen=True, slots=True)
class SchedulingLimits:
    """Server-wide scheduling settings.

    A value of 0 disables `execution_timeout_s`, `request_timeout_us` and `max_queue_size`. A
    batcher delays its first batch until `delay_scheduler` requests wait, and a sequence batcher
    until `backlog_delay_scheduler` requests wait without a slot. `quantiles` are the reported
    quantiles of the last minute's durations.
    """

    execution_timeout_s: float = 0.0
    request_timeout_us: int = 0
    request_timeout_is_deadline: bool = False
    max_queue_size: int = 0
    delay_scheduler: int = 0  # number of waiting requests
    backlog_delay_scheduler: int = 0  # number of waiting requests
    quantiles: tuple[float, ...] = ()  # of durations, for metrics
    rate_limited: bool = False  # whether instances execute only with a ticket


@dataclass(frozen=True, slots=True)
class CacheStart:
    """A model version's share of the response cache, in bytes (0: no cache).

    The cache does not read tensors in clients' memory, which the process `supervisor_pid` holds
    open.
    """

    byte_size: int = 0
    supervisor_pid: int = 0


@dataclass(frozen=True, slots=True)
class HostStart:
    """The start record of a process that hosts schedulers."""

    title: str  # shown by `ps`
    run_dir: Path
    log: LogSettings = field(default_factory=LogSettings)


@dataclass(frozen=True, slots=True)
class SchedulerStart:
    """The start record of a scheduler of a `kind`, "scheduler" or "ensemble".

    Its endpoints contain `number`. `snapshot` is the last `StatisticsSnapshot` of a predecessor
    that died, or empty. `worker_pids` are the pids of running workers. `capability_key`
    authenticates local clients. Members of the group `group` may also connect (-1: no group).
    """

    kind: str
    number: int  # of the scheduler
    version: str
    config: ModelSpec
    run_dir: Path
    capability_key: bytes
    group: int = -1  # gid that may connect; -1: none
    arena_byte_size: int = 0  # size of the output arena
    limits: SchedulingLimits = field(default_factory=SchedulingLimits)
    cache: CacheStart = field(default_factory=CacheStart)  # of responses
    snapshot: list[Any] = field(default_factory=list)
    worker_pids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The start record of a worker: instance `index` of a model version.

    `number` is the number of its scheduler. `device` is "cpu" or "gpu:N", `kind` is Triton's name
    of the device's kind, and `threads` is the number of threads that compute. `environment` is the
    configured path of the model's own Python environment, or "".
    """

    number: int  # of the scheduler
    index: int  # of the instance
    model_name: str
    version: str
    model_dir: Path
    run_dir: Path
    device: str  # "cpu" or "gpu:N"
    kind: str
    device_id: int
    instance_name: str
    backend_config: dict[str, str]
    arena_byte_size: int
    threads: int  # number of threads for computations
    log: LogSettings = field(default_factory=LogSettings)
    environment: str = ""  # path of the model's Python environment


@dataclass(frozen=True, slots=True)
class WorkspaceStart:
    """The start record of the process that holds a CUDA device's workspace pool."""

    device_id: int
    byte_size: int  # of the pool
    run_dir: Path
    log: LogSettings = field(default_factory=LogSettings)


def encode_start(start: Any) -> bytes:
    """Encode a start record as MessagePack. Paths need not be UTF-8."""
    data: bytes = msgpack.packb(start, default=_to_builtin, unicode_errors="surrogateescape")
    return data


def _to_builtin(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, ModelSpec):
        return value.source
    return {entry.name: getattr(value, entry.name) for entry in fields(value)}


def decode_start(cls: type[T], data: bytes) -> T:
    """Decode a start record of type `cls`, which is trusted, since the supervisor encoded it."""
    return from_map(cls, msgpack.unpackb(data, unicode_errors="surrogateescape"))


# --- every process


class Started(Message):
    """Sent by a gateway or a scheduler host to the supervisor when it can receive messages.

    A gateway then receives the current state, with `HealthChanged` last, and opens its ports.
    """


class Stop(Message):
    """Sent by the supervisor to a process, which exits after its running work."""


class Drain(Message):
    """Sent by the supervisor to a gateway or a scheduler before it stops.

    The receiver accepts no new requests, completes requests in flight, and then sends `Drained`.

    Attributes:
        awaits_sequences: Whether open sequences count as in flight until they end or their idle
            limit expires.
        has_successor: Whether another server accepts clients at the gateway's sockets.
    """

    awaits_sequences: bool = False  # whether open sequences count as in flight
    has_successor: bool = False  # whether another server accepts clients


class Drained(Message):
    """Sent by a gateway or a scheduler to the supervisor when its last request has completed."""


class Ping(Message):
    """Sent by the supervisor to a gateway or a scheduler host to check that it is alive.

    The receiver sends `Acknowledged` with this number.
    """

    ack_number: int  # for `Acknowledged`


class LoadsFailed(Message):
    """Sent by the supervisor to gateways, for their metrics, when the failed loads have changed.

    `models` are pairs of name and version of the models that do not serve since their load failed
    ("": no version was found). `count` is the number of all failed loads so far.
    """

    models: list[list[str]]  # [name, version] pairs that do not serve
    count: int  # number of all failed loads so far


class SetLogging(Message):
    """Sent by the supervisor to all processes of the server, which apply the log settings.

    `settings` are the fields of shmserve.logs.LogSettings by name.
    """

    settings: dict[str, Any]


class SetTracing(Message):
    """Sent by the supervisor to gateways and schedulers, which apply the trace settings.

    `settings` are the fields of TraceSettings by model name ("" for all other models). A scheduler
    measures the requests of its local clients accordingly, and reports each that takes longer than
    `slow_request_ms` (0: none).
    """

    settings: dict[str, Any]
    slow_request_ms: int = 0


# --- gateways


class GatewayReady(Message):
    """Sent by a gateway to the supervisor when it listens."""


class Accept(Message):
    """Sent by the supervisor to a gateway that has a listener of an earlier server.

    The gateway accepts the clients that wait there.
    """


class SetTokens(Message):
    """Sent by the supervisor to gateways, which require one of these tokens of clients.

    The tokens are encoded as in common/auth_tokens.py.
    """

    tokens: dict[str, Any]  # bearer tokens of clients


class RequestTraced(Message):
    """Sent by a scheduler with the trace of a local client's request that was sampled or slow.

    The supervisor forwards it to a gateway: gateways write and export traces. `trace` and `spans`
    are encoded as in ipc/trace.py, times are monotonic ns, and `error` is empty for a successful
    request.
    """

    model: str
    version: str
    request_id: str
    trace: str  # the trace context
    is_sampled: bool
    arrived_ns: int
    ended_ns: int
    spans: bytes  # packed
    error: str


# --- schedulers and their hosts


class OpenScheduler(Message):
    """Sent by the supervisor to a scheduler host, which opens a scheduler.

    `start` is an encoded `SchedulerStart`. The scheduler sends its own `SchedulerReady`.
    """

    start: bytes  # an encoded `SchedulerStart`


class SchedulerClosed(Message):
    """Sent by a scheduler host to the supervisor when the scheduler `number` was closed.

    With a `reason`, the scheduler could not be opened.
    """

    number: int  # of the scheduler
    reason: str


class SchedulerReady(Message):
    """Sent by a scheduler to the supervisor when its sockets are bound."""

    pid: int


class ResizeCache(Message):
    """Sent by the supervisor to a scheduler to limit its response cache to `byte_size` bytes."""

    byte_size: int


class InstanceExpected(Message):
    """Sent by the supervisor to a scheduler when an instance loads or restarts.

    Requests wait for the instance. `process` is the pid of its process, or 0 before it has one.
    No other process is accepted.
    """

    index: int  # of the instance
    process: int  # pid; 0: none yet


class InstanceGone(Message):
    """Sent by the supervisor to a scheduler when an instance will not restart.

    If it was the last instance, the scheduler fails the waiting requests with `reason`.
    """

    index: int  # of the instance
    reason: str


class RetireInstance(Message):
    """Sent by the supervisor to a scheduler, which sends no new work to an instance.

    The instance finishes its batches and sequences, and the scheduler sends `InstanceRetired`.
    """

    index: int  # of the instance


class CountChange(Message):
    """Sent by the supervisor to a scheduler when the autoscaler changes the instances' number.

    The scheduler counts the change for its metrics.
    """

    is_increase: bool  # whether instances are added


class InstanceRetired(Message):
    """Sent by a scheduler to the supervisor when a retiring instance has finished.

    `process` is the pid of its process, or 0 if it is unknown.
    """

    process: int  # pid; 0: unknown


class InstanceServed(Message):
    """Sent by a scheduler to the supervisor when a process has completed its first execution.

    A later death of the process is then not counted as a crash loop.
    """

    process: int  # pid


class KillInstance(Message):
    """Sent by a scheduler to the supervisor when an instance has exceeded its execution limit.

    The supervisor logs where the instance hangs, and kills its process unless it was replaced.
    """

    process: int  # pid
    reason: str


class SnapshotStatistics(Message):
    """Sent by the supervisor to a scheduler to request `StatisticsSnapshot`.

    The snapshot omits the statistics of each response index of a decoupled model.
    """


class StatisticsSnapshot(Message):
    """Sent by a scheduler to the supervisor with its counters, before they are published.

    The successor of the scheduler restores them. `statistics` are those of scheduler/statistics.py,
    and `metrics` the model's own, encoded as in common/model_metrics.py. An entry that is missing
    in `statistics` has not changed.
    """

    statistics: dict[str, Any]
    metrics: list[list[Any]]  # metric families of the model


class BaseCounters(Message):
    """Sent by the supervisor to a scheduler with the counters of the versions that it replaces.

    `statistics` has the counters that `sum_counters` in common/model_metrics.py returns. The latest
    message replaces earlier ones. Once the scheduler of a moved version has drained, its successor
    receives that scheduler's last statistics (`moved_statistics`), and continues the counts.
    """

    statistics: dict[str, Any]
    moved_statistics: dict[str, Any] = field(default_factory=dict)


# --- workers


class WorkerStarted(Message):
    """Sent by a worker to the supervisor when it waits for `LoadInstance` or `CompleteConfig`.

    On SIGUSR2 the worker appends the stacks of its threads to its open file `stacks_fd`.
    """

    pid: int
    stacks_fd: int = -1  # file to which SIGUSR2 writes stacks


class CompleteConfig(Message):
    """Sent by the supervisor to a worker to derive the missing parts of a configuration.

    The worker responds with `ConfigCompleted`.
    """

    config: ModelSpec


class ConfigCompleted(Message):
    """Sent by a worker to the supervisor with the model's own configuration.

    The supervisor merges and validates it.
    """

    config: dict[str, Any]


class LoadInstance(Message):
    """Sent by the supervisor to a worker to load its model with the final configuration.

    The worker then connects to the endpoint of its scheduler.
    """

    config: ModelSpec
    endpoint: str  # of the scheduler


class InstanceLoaded(Message):
    """Sent by a worker to the supervisor when its model is loaded.

    The instance connects to its scheduler afterwards. `checks_ready`: the model itself responds to
    `CheckReady`. `device_byte_size`: its accelerator memory, as far as torch reports it.
    """

    checks_ready: bool = False  # whether the model has a readiness check
    device_byte_size: int = 0  # accelerator memory in use


class LoadFailed(Message):
    """Sent by a worker to the supervisor when its model could not be loaded.

    `frames` is the traceback of the model's own code.
    """

    code: str
    message: str
    frames: str = ""  # traceback in the model's files


class ModelWarned(Message):
    """Sent by a worker to the supervisor with a warning about its model.

    The supervisor logs the first `text` of each `topic`, so that a version's instances warn once.
    """

    topic: str  # a topic is logged once per version
    text: str


class Attach(Message):
    """Sent by the supervisor to a worker whose scheduler has died or whose model has moved.

    The worker connects to the scheduler at this endpoint, instead of its previous scheduler.
    """

    endpoint: str  # of the new scheduler


class CheckReady(Message):
    """Sent by the supervisor to a worker to call the model's readiness check.

    The worker responds with `ReadyChecked`.
    """

    id: int  # number of the check


class ReadyChecked(Message):
    """Sent by a worker to the supervisor with the result of a `CheckReady`."""

    id: int  # number of the check
    ready: bool


class CheckMemory(Message):
    """Sent by the supervisor to a worker to check CUDA memory that a client registers.

    The worker opens the memory, checks that it has `byte_size` bytes, closes it, and responds with
    `MemoryChecked`.
    """

    id: int  # number of the check
    handle: bytes
    device_id: int
    device_uuid: bytes
    byte_size: int


class MemoryChecked(Message):
    """Sent by a worker to the supervisor with the result of a `CheckMemory`.

    An empty code is success; `message` is for the client.
    """

    id: int  # number of the check
    code: str  # of an error; "": none
    message: str


class WorkspaceAllocated(Message):
    """Sent by a workspace holder to the supervisor when a device's pool is allocated.

    `handle` opens the pool.
    """

    handle: bytes  # of CUDA IPC
    device_uuid: bytes


StopCommand = Drain | Stop
PoolChange = InstanceExpected | InstanceGone | RetireInstance | CountChange
InstanceReport = InstanceServed | KillInstance | InstanceRetired
LoadCommand = CompleteConfig | LoadInstance | Attach
LoadReport = WorkerStarted | ConfigCompleted | InstanceLoaded | LoadFailed | ModelWarned
