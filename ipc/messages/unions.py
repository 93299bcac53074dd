"""The unions of messages that list which process may send which message to which.

gateway       <-> scheduler     ClientToScheduler, SchedulerToClient
                                (a model that calls another model is a client, too)
local client  <-> scheduler     LocalClientToScheduler, SchedulerToClient
scheduler     <-> worker        SchedulerToWorker, WorkerToScheduler
supervisor    <-> host          SupervisorToHost, HostToSupervisor
supervisor    <-> gateway       SupervisorToGateway, GatewayToSupervisor
supervisor    <-> scheduler     SupervisorToScheduler, SchedulerToSupervisor; a model's scheduler
                                also receives SupervisorToBatching, an ensemble's also
                                SupervisorToEnsemble, and sends EnsembleToSupervisor
supervisor    <-> worker        SupervisorToWorker, WorkerToSupervisor
workspace      -> supervisor    WorkspaceToSupervisor
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
    Prepare,
    Prepared,
    ResponseSent,
    Step,
    Stepped,
    StopStringFound,
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
    Loss,
    MemoryDropped,
    ModelEvent,
    ModelPublication,
    ModelPublished,
    ModelWithdrawn,
    OwnerExited,
    ProcessEvent,
    ProcessExited,
    ReadinessChanged,
    RegionChange,
    RegionEvent,
    SchedulerLost,
    ServerEnding,
)
from shmserve.ipc.messages.supervision import (
    Accept,
    BaseCounters,
    CheckMemory,
    CheckReady,
    Drained,
    GatewayReady,
    InstanceReport,
    LoadCommand,
    LoadReport,
    LoadsFailed,
    MemoryChecked,
    OpenScheduler,
    Ping,
    PoolChange,
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
    StopCommand,
    WorkspaceAllocated,
)

ClientToScheduler = Submit | Cancel | Credit | Release | ReportStatistics
SchedulerToWorker = (Execute | EndSequences | Prepare | Step | Choose) | (
    CancelExecution | CreditExecution | ReleaseOutputs | ReaderExited
)
GenerationReport = Prepared | Stepped | ResponseSent | StopStringFound
WorkerToScheduler = (
    InstanceReady | BatchFinished | ExecutionResponded | MetricsReported | GenerationReport
)
SupervisorToGateway = (ModelPublication | ReadinessChanged | Loss | RegionChange) | (
    (HealthChanged | LoadsFailed | SetLogging | SetTokens | SetTracing | RequestTraced)
    | (Ping | Answer | Accept | StopCommand)
)
GatewayToSupervisor = (Started | GatewayReady | Acknowledged | Drained) | (
    RegionRequest | RegionUse | AdminRequest | AskReady | WantModel
)
SupervisorToScheduler = (StopCommand | ProcessExited | BaseCounters | SnapshotStatistics) | (
    ResizeCache | SetTracing
)
SupervisorToBatching = PoolChange | TicketGranted | ResourcesHeld | CallDeadlocked
SupervisorToEnsemble = ModelPublished | SchedulerLost
SupervisorToHost = OpenScheduler | SetLogging | Ping | Stop
HostToSupervisor = Started | SchedulerClosed | Acknowledged
SchedulerToSupervisor = (SchedulerReady | Drained | StatisticsSnapshot | RequestTraced) | (
    InstanceReport | SchedulerRequest
)
EnsembleToSupervisor = SchedulerToSupervisor | Acknowledged | MemoryDropped
SupervisorToWorker = (
    LoadCommand | CheckMemory | CheckReady | MemoryDropped | Loss | SetLogging | Answer | Stop
)
WorkerToSupervisor = (LoadReport | MemoryChecked | ReadyChecked) | (
    AskReady | FindModel | LoadRequest | WorkspaceRequest
)
WorkspaceToSupervisor = WorkspaceAllocated
SupervisorToLocalClient = (Welcome | ModelPublication | ModelWithdrawn | SchedulerLost) | (
    OwnerExited | HealthChanged | ServerEnding | Answer
)
LocalClientToSupervisor = (
    Hello | Acknowledged | ShareMemory | ShareDeviceMemory | WithdrawMemory | WantModel
)
LocalClientToScheduler = Submit | Cancel | Credit | Release
ServerEvent = ModelEvent | ProcessEvent | RegionEvent | HealthChanged
