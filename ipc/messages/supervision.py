"""Messages between the supervisor and its processes: life, models, health, logging."""

from __future__ import annotations

from typing import Any, ClassVar

from shmserve.ipc.model_spec import ModelSpec
from shmserve.ipc.transport.frames import message


@message
class Stop:
    """End now, after what is running."""


@message
class Drain:
    """Take nothing new, finish what is in flight, then say `Drained`. With `sequences`, those that
    are open are in flight, too: until they end, or have been idle for too long. `followed`: whoever
    is told to go finds another server at a gateway's sockets."""

    sequences: bool = False
    followed: bool = False


@message
class Drained:
    """Nothing is in flight here any more."""


@message
class ProcessExited:
    """A process of the server has ended, whatever it was: forget its memory, cancel its requests,
    run elsewhere what it had, and expect the next where it was an instance.

    `process` is its number: its pid, which no other process is given for as long as anybody may
    remember this one, or a local client's own number. `reason`, for clients, may be empty.
    """

    TAG: ClassVar[str] = "Exited"  # local clients have another message of its name

    process: int
    reason: str


@message
class AskTicket:
    """Instance `index` of the sender's model would execute: respond with `TicketGranted` once its
    resources are free."""

    ticket: int
    index: int


@message
class TicketGranted:
    """The resources that were asked for are the sender's, until `TicketReturned`."""

    ticket: int


@message
class TicketReturned:
    """The return of a ticket that was granted, or only asked for; `executed`: it was used."""

    ticket: int
    executed: bool


@message
class ResizeCache:
    """The response cache of this model version may have so many bytes."""

    byte_size: int


@message
class SetLogging:
    """Log like this from now on; `settings` are shmserve.logs.LogSettings, by name."""

    settings: dict[str, Any]


@message
class SetTracing:
    """Trace like this from now on: by model, "" for all others, TraceSettings by name. A scheduler
    measures its local clients' requests by it, and each of them with `slow_request_ms`, which tells
    of those that take longer; 0: none."""

    settings: dict[str, Any]
    slow_request_ms: int = 0


@message
class RequestTraced:
    """A local client's request has ended, whose times are wanted: `sampled`, or since it was slow.
    `trace` and `spans` are as ipc/trace.py has them, times monotonic ns; `error` "": it succeeded.
    A gateway is told in turn, since those write traces and send them."""

    model: str
    version: str
    request_id: str
    trace: str
    sampled: bool
    arrived_ns: int
    ended_ns: int
    spans: bytes
    error: str


@message
class SetTokens:
    """Clients must send one of these tokens from now on, as common/access/auth_tokens.py has
    them."""

    tokens: dict[str, Any]


@message
class Ping:
    """Say `Acknowledged` with this number, as a sign of life."""

    acknowledge: int


@message
class Answered:
    """The response to the sender's numbered request."""

    id: int
    payload: dict[str, Any]


@message
class Refused:
    """The sender's numbered request failed; `message` is for the client."""

    id: int
    code: str
    message: str


@message
class Started:
    """The process, a gateway or a host of schedulers, runs and hears. A gateway is told what there
    is, last `HealthChanged`, and opens its ports then."""


@message
class GatewayReady:
    """The gateway has its listeners."""


@message
class Accept:
    """Let clients in, who wait at a listener that was here before the server."""


@message
class ModelPublished:
    """A model version may be called, or is another by now. `endpoint` is its scheduler's; `latest`:
    serves a request without version.

    `acknowledge` > 0: say `Acknowledged` with it once this holds.
    """

    name: str
    version: str
    config: ModelSpec
    metadata: dict[str, Any]
    endpoint: str
    ready: bool
    latest: bool
    load_seconds: float
    acknowledge: int


@message
class ReadinessChanged:
    """A model version that was published takes requests at once now, or not any more; nothing else
    of it has changed."""

    name: str
    version: str
    ready: bool


@message
class ModelWithdrawn:
    """A model version must not be called any more; requests in flight on it finish."""

    name: str
    version: str
    acknowledge: int


@message
class ModelOnDemand:
    """A model is loaded when it is asked for with `WantModel`, whether a version of it serves now
    or not. It is not any more once a `ModelWithdrawn` has its name and no version."""

    version: ClassVar[str] = ""  # no single one

    name: str
    acknowledge: int


@message
class SchedulerLost:
    """The scheduler at `endpoint` answers no more: it has died, its model has moved, or its version
    was replaced. Submit what it had again, to `successor` (a new ModelPublished follows).

    No successor: its version was retired, or no scheduler can be started now (said again then, and
    in the end with a successor). Gateways refuse what they have there; for workers, `FindModel`
    says what serves now.
    """

    endpoint: str
    successor: str


@message
class Acknowledged:
    """The acknowledgement that what carried this number holds in this process."""

    number: int


@message
class WantModel:
    """A request waits for a model on demand, for `patience_s` seconds, 0: any time: respond once it
    serves, and everybody knows it."""

    id: int
    name: str
    patience_s: float


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
    """Unload all versions of a model, and the ensembles that need it. `unload_dependents`: of an
    ensemble, the models that were loaded for it alone, too."""

    id: int
    name: str
    unload_dependents: bool


@message
class IndexRepository:
    """Respond with {"models": [...]}, as POST /v2/repository/index shows it."""

    id: int
    ready: bool


@message
class ChangeLogging:
    """Change these log settings, in every process; respond with all of them, as `SetLogging` has
    them."""

    id: int
    changes: dict[str, Any]


@message
class ChangeTracing:
    """Change these trace settings of a model, "": of all that have none of their own; None: as at
    the start. Respond with its settings, each a list of texts."""

    id: int
    model: str
    changes: dict[str, Any]


@message
class OpenScheduler:
    """Host a scheduler; `start` is an encoded `SchedulerStart`. It says `SchedulerReady` itself."""

    start: bytes


@message
class SchedulerClosed:
    """The scheduler of this number is hosted no more, or, for a `reason`, has never been."""

    number: int
    reason: str


@message
class SchedulerReady:
    """The scheduler's sockets are bound."""

    pid: int


@message
class InstanceExpected:
    """An instance is loading or restarting; requests wait for it. `process` is its number, once
    there is one (0: not yet): nobody else is taken for it."""

    index: int
    process: int


@message
class InstanceGone:
    """An instance will not come back after the end of its process. Where that holds of all, what
    waits is refused, for this `reason`."""

    index: int
    reason: str


@message
class RetireInstance:
    """An instance leaves the pool: it gets no new batch or sequence, and finishes what it has."""

    index: int


@message
class CountChange:
    """The version has an instance `more`, or one less, since its load asks for that: count it."""

    more: bool


@message
class InstanceRetired:
    """An instance that was to retire has nothing left to do, and gets nothing more. `process`: the
    number of the process it was, 0: none is known."""

    process: int


@message
class InstanceServed:
    """An instance has executed something to its end, for the first time in its process: if that
    dies, it is no crash loop. `process`: the number of the process."""

    process: int


@message
class KillInstance:
    """An instance overran its execution limit: kill its process, if it is that one still, and have
    the log say where it hangs."""

    process: int
    reason: str


@message
class StatisticsSnapshot:
    """A snapshot of what the scheduler has counted, before it tells anybody else; its successor
    restores it. `statistics` are those of scheduler/statistics.py, `metrics` its model's own, as
    common/model_metrics.py has them. What is left out of `statistics` is as it was in the last."""

    statistics: dict[str, Any]
    metrics: list[list[Any]]


@message
class SnapshotStatistics:
    """Send `StatisticsSnapshot` now, without the long rows of responses: it is asked every
    second."""


@message
class BaseCounters:
    """The counts of the versions that this one replaces, as `total` of shmserve/common/counters.py
    gives it: the latest holds."""

    statistics: dict[str, Any]


@message
class WorkerStarted:
    """The worker runs and waits for `LoadInstance` (or for `CompleteConfig`). On SIGUSR2 it appends
    the stacks of its threads to what it has open as `stacks_fd`."""

    pid: int
    stacks_fd: int = -1


@message
class CompleteConfig:
    """Derive what the configuration leaves open, then say `ConfigCompleted`."""

    config: ModelSpec


@message
class ConfigCompleted:
    """The model's own view of its configuration, to be merged and validated."""

    config: dict[str, Any]


@message
class LoadInstance:
    """Load the model with this final configuration, connect to the scheduler's worker endpoint."""

    config: ModelSpec
    endpoint: str


@message
class InstanceLoaded:
    """The model is loaded; the instance is about to offer itself to its scheduler. `checks_ready`:
    its response to `CheckReady` is its model's. `device_byte_size`: what it has of the memory of
    accelerators, as far as torch knows."""

    seconds: float
    checks_ready: bool = False
    device_byte_size: int = 0


@message
class LoadFailed:
    """The model could not be loaded."""

    code: str
    message: str


@message
class Attach:
    """Another scheduler has the model, because the last one died or the model has moved: offer
    yourself at this endpoint, and to no other any more."""

    endpoint: str


@message
class FindModel:
    """A model wants to call another one: respond with {"endpoint", "config", "version"}; version ""
    means the latest. One on demand is waited for as `WantModel` has it."""

    id: int
    name: str
    version: str
    patience_s: float = 0.0


@message
class AskReady:
    """Respond with {"ready": whether a model that says so itself is ready}; version "" means the
    latest."""

    id: int
    name: str
    version: str


@message
class CheckReady:
    """Ask the model whether it is ready, then say `ReadyChecked`."""

    id: int


@message
class ReadyChecked:
    """The model's answer to a `CheckReady`."""

    id: int
    ready: bool


# By who says them to whom, where that is several.
Answer = Answered | Refused  # to a numbered request
Losses = ModelWithdrawn | SchedulerLost | ProcessExited  # what nobody is to count on any more
Ending = Drain | Stop
ModelNews = ModelPublished | ModelOnDemand
LoadRequest = LoadModel | UnloadModel
AdminRequest = LoadRequest | IndexRepository | ChangeLogging | ChangeTracing
PoolNews = InstanceExpected | InstanceGone | RetireInstance | CountChange
PoolRequest = InstanceServed | KillInstance | InstanceRetired | AskTicket | TicketReturned
Loading = CompleteConfig | LoadInstance | Attach  # a worker's
Loaded = WorkerStarted | ConfigCompleted | InstanceLoaded | LoadFailed
