"""The unions of messages that list which process may send which message to which.

gateway       <-> scheduler     ClientToScheduler, SchedulerToClient
                                (a model that calls another model is a client, too)
local client  <-> scheduler     LocalClientToScheduler, SchedulerToClient
scheduler     <-> worker        SchedulerToWorker, WorkerToScheduler
supervisor    <-> host          SupervisorToHost, HostToSupervisor
supervisor    <-> gateway       SupervisorToGateway, GatewayToSupervisor
supervisor    <-> scheduler     SupervisorToScheduler, SchedulerToSupervisor
supervisor    <-> worker        SupervisorToWorker, WorkerToSupervisor
supervisor    <-> local client  SupervisorToLocalClient, LocalClientToSupervisor
supervisor     -> subscribers   ServerEvent
"""

from __future__ import annotations

from shmserve.ipc.messages.control_requests import (
    AdminRequest,
    Answer,
    AskReady,
    CallDeadlocked,
    FindModel,
    Hello,
    LoadRequest,
    RegionRequest,
    RegionUse,
    ResourcesHeld,
    SchedulerRequest,
    ShareDeviceMemory,
    ShareMemory,
    TicketGranted,
    WantModel,
    Welcome,
    WithdrawMemory,
    WorkspaceRequest,
)
from shmserve.ipc.messages.generation import (
    Choose,
    Ended,
    Prepare,
    Prepared,
    ResponseSent,
    Step,
    Stepped,
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
    InstanceReady,
    MetricsReported,
    ReaderExited,
    Release,
    ReleaseOutputs,
    ReportStatistics,
    Submit,
)
from shmserve.ipc.messages.publications import (
    Acknowledged,
    HealthChanged,
    Losses,
    MemoryDropped,
    ModelEvent,
    ModelNews,
    ModelPublished,
    ModelWithdrawn,
    OwnerExited,
    ProcessEvent,
    ProcessExited,
    ReadinessChanged,
    RegionEvent,
    RegionNews,
    SchedulerLost,
    ServerEnding,
)
from shmserve.ipc.messages.supervision import (
    Accept,
    BaseCounters,
    CheckMemory,
    CheckReady,
    Drained,
    Ending,
    GatewayReady,
    InstanceNews,
    Loaded,
    Loading,
    LoadsFailed,
    MemoryChecked,
    OpenScheduler,
    Ping,
    PoolNews,
    ReadyChecked,
    RequestTraced,
    ResizeCache,
    SchedulerClosed,
    SchedulerReady,
    SetLogging,
    SetTokens,
    SetTracing,
    SnapshotStatistics,
    Started,
    StatisticsSnapshot,
    Stop,
    WorkspaceAllocated,
)

ClientToScheduler = Submit | Cancel | Credit | Release | ReportStatistics
SchedulerToWorker = (Execute | EndSequences | Prepare | Step | Choose) | (
    CancelExecution | CreditExecution | ReleaseOutputs | ReaderExited
)
GenerationNews = Prepared | Stepped | ResponseSent | Ended
WorkerToScheduler = (
    InstanceReady | BatchFinished | ExecutionResponded | MetricsReported | GenerationNews
)
SupervisorToGateway = (ModelNews | ReadinessChanged | Losses | RegionNews) | (
    (HealthChanged | LoadsFailed | SetLogging | SetTokens | SetTracing | RequestTraced)
    | (Ping | Answer | Accept | Ending)
)
GatewayToSupervisor = (Started | GatewayReady | Acknowledged | Drained) | (
    RegionRequest | RegionUse | AdminRequest | AskReady | WantModel
)
SupervisorToScheduler = (Ending | ProcessExited | BaseCounters | SnapshotStatistics) | (
    ResizeCache | SetTracing
)
SupervisorToBatching = PoolNews | TicketGranted | ResourcesHeld | CallDeadlocked
SupervisorToEnsemble = ModelPublished | SchedulerLost
SupervisorToHost = OpenScheduler | SetLogging | Ping | Stop
HostToSupervisor = Started | SchedulerClosed | Acknowledged
SchedulerToSupervisor = (SchedulerReady | Drained | StatisticsSnapshot | RequestTraced) | (
    InstanceNews | SchedulerRequest
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
