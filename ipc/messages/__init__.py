"""The whole vocabulary between processes: commands down are imperative, events up are in the past
tense.

    gateway       <-> scheduler     ClientToScheduler, SchedulerToClient
                                    (a model calling another model is a client too)
    local client  <-> scheduler     LocalClientToScheduler, SchedulerToClient
    scheduler     <-> worker        SchedulerToWorker, WorkerToScheduler
    supervisor    <-> gateway       SupervisorToGateway, GatewayToSupervisor
    supervisor    <-> scheduler     SupervisorToScheduler, SchedulerToSupervisor
    supervisor    <-> worker        SupervisorToWorker, WorkerToSupervisor
    supervisor    <-> local client  SupervisorToLocalClient, LocalClientToSupervisor
    supervisor     -> who listens   ServerEvent

transport/frames.py packs them.
"""

from __future__ import annotations

from shmserve.ipc.messages.events import (
    HealthChanged,
    ModelEvent,
    ProcessEvent,
    RegionEvent,
)
from shmserve.ipc.messages.generation import (
    Choose,
    Ended,
    Prepare,
    Prepared,
    Step,
    Stepped,
    Told,
)
from shmserve.ipc.messages.inference import (
    BatchFinished,
    Cancel,
    CancelExecution,
    Credit,
    CreditExecution,
    EndSequences,
    Execute,
    ExecutionResponded,
    Failed,
    Finished,
    InstanceReady,
    MetricsReported,
    ReaderExited,
    Release,
    ReleaseOutputs,
    ReportStatistics,
    Responded,
    Settled,
    StatisticsReported,
    Submit,
)
from shmserve.ipc.messages.local_clients import (
    Hello,
    OwnerExited,
    ServerEnding,
    ShareDeviceMemory,
    ShareMemory,
    Welcome,
    WithdrawMemory,
)
from shmserve.ipc.messages.memory import (
    CheckMemory,
    MemoryChecked,
    MemoryDropped,
    RegionNews,
    RegionRequest,
    RegionUse,
    WorkspaceAllocated,
    WorkspaceRequest,
)
from shmserve.ipc.messages.supervision import (
    Accept,
    Acknowledged,
    AdminRequest,
    Answer,
    AskReady,
    BaseCounters,
    CheckReady,
    Drained,
    Ending,
    FindModel,
    GatewayReady,
    Loaded,
    Loading,
    LoadRequest,
    Losses,
    ModelNews,
    ModelPublished,
    ModelWithdrawn,
    OpenScheduler,
    Ping,
    PoolNews,
    PoolRequest,
    ProcessExited,
    ReadinessChanged,
    ReadyChecked,
    RequestTraced,
    ResizeCache,
    SchedulerClosed,
    SchedulerLost,
    SchedulerReady,
    SetLogging,
    SetTokens,
    SetTracing,
    SnapshotStatistics,
    Started,
    StatisticsSnapshot,
    Stop,
    TicketGranted,
    WantModel,
)

ClientToScheduler = Submit | Cancel | Credit | Release | ReportStatistics
SchedulerToClient = Finished | Responded | Failed | Settled | StatisticsReported
SchedulerToWorker = (Execute | EndSequences | Prepare | Step | Choose) | (
    CancelExecution | CreditExecution | ReleaseOutputs | ReaderExited
)
GenerationNews = Prepared | Stepped | Told | Ended
WorkerToScheduler = (
    InstanceReady | BatchFinished | ExecutionResponded | MetricsReported | GenerationNews
)
SupervisorToGateway = (ModelNews | ReadinessChanged | Losses | RegionNews) | (
    (HealthChanged | SetLogging | SetTokens | SetTracing | RequestTraced)
    | (Ping | Answer | Accept | Ending)
)
GatewayToSupervisor = (Started | GatewayReady | Acknowledged | Drained) | (
    RegionRequest | RegionUse | AdminRequest | AskReady | WantModel
)
SupervisorToScheduler = (Ending | ProcessExited | BaseCounters | SnapshotStatistics) | (
    ResizeCache | SetTracing
)
SupervisorToBatching = PoolNews | TicketGranted
SupervisorToEnsemble = ModelPublished | SchedulerLost
SupervisorToHost = OpenScheduler | SetLogging | Ping | Stop
HostToSupervisor = Started | SchedulerClosed | Acknowledged
SchedulerToSupervisor = (SchedulerReady | Drained | StatisticsSnapshot | PoolRequest) | (
    RequestTraced
)
EnsembleToSupervisor = SchedulerToSupervisor | Acknowledged | MemoryDropped
SupervisorToWorker = (
    Loading | CheckMemory | CheckReady | MemoryDropped | Losses | SetLogging | Answer | Stop
)
WorkerToSupervisor = (
    Loaded | MemoryChecked | ReadyChecked | AskReady | FindModel | LoadRequest | WorkspaceRequest
)
WorkspaceToSupervisor = WorkspaceAllocated
SupervisorToLocalClient = (Welcome | ModelNews | ModelWithdrawn | SchedulerLost) | (
    OwnerExited | HealthChanged | ServerEnding | Answer
)
LocalClientToSupervisor = (
    Hello | Acknowledged | ShareMemory | ShareDeviceMemory | WithdrawMemory | WantModel
)
LocalClientToScheduler = Submit | Cancel | Credit | Release
ServerEvent = ModelEvent | ProcessEvent | RegionEvent | HealthChanged
