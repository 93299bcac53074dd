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
    EventHeader,
    LoadRefused,
    ModelChanged,
    ModelCounted,
    ProcessEnded,
    ProcessStarted,
    RegionBlamed,
    RegionRegistered,
    RegionUnregistered,
)
from shmserve.ipc.messages.inference import (
    FIRST_CREDIT,
    MOST_UNREAD_BYTES,
    RESCHEDULED,
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
    Release,
    ReleaseOutputs,
    Reply,
    ReportStatistics,
    Responded,
    SequenceRow,
    Settled,
    StatisticsReported,
    Submit,
    Work,
)
from shmserve.ipc.messages.local_clients import (
    Hello,
    ShareDeviceMemory,
    ShareMemory,
    Welcome,
    WithdrawMemory,
)
from shmserve.ipc.messages.memory import (
    CheckMemory,
    MemoryChecked,
    MemoryDropped,
    RegionAbandoned,
    RegionDrained,
    RegionPublished,
    RegionReleased,
    RegionWithdrawn,
    RegisterCudaRegion,
    RegisterRegion,
    UnregisterRegion,
)
from shmserve.ipc.messages.supervision import (
    Acknowledged,
    Answered,
    AskReady,
    AskTicket,
    Attach,
    ChangeLogging,
    CheckReady,
    CompleteConfig,
    ConfigCompleted,
    CountsInherited,
    Drain,
    Drained,
    FindModel,
    GatewayReady,
    HealthChanged,
    HostReady,
    IndexRepository,
    InstanceExited,
    InstanceExpected,
    InstanceLoaded,
    InstanceRetired,
    KeepStatistics,
    KillInstance,
    LeaseWorkspace,
    LoadFailed,
    LoadInstance,
    LoadModel,
    ModelPublished,
    ModelWithdrawn,
    OpenScheduler,
    PoolFailed,
    ProcessExited,
    ReadyChecked,
    Refused,
    ResizeCache,
    RetireInstance,
    ReturnWorkspace,
    SchedulerClosed,
    SchedulerLost,
    SchedulerReady,
    SetLogging,
    StatisticsKept,
    Stop,
    TicketGranted,
    TicketReturned,
    UnloadModel,
    WorkerStarted,
    WorkspaceAllocated,
)

__all__ = [
    "FIRST_CREDIT",
    "MOST_UNREAD_BYTES",
    "RESCHEDULED",
    "Acknowledged",
    "Answered",
    "AskReady",
    "AskTicket",
    "Attach",
    "BatchFinished",
    "Cancel",
    "CancelExecution",
    "ChangeLogging",
    "CheckMemory",
    "CheckReady",
    "ClientToScheduler",
    "CompleteConfig",
    "ConfigCompleted",
    "CountsInherited",
    "Credit",
    "CreditExecution",
    "Drain",
    "Drained",
    "EndSequences",
    "EnsembleToSupervisor",
    "EventHeader",
    "Execute",
    "ExecutionResponded",
    "Failed",
    "FindModel",
    "Finished",
    "GatewayReady",
    "GatewayToSupervisor",
    "HealthChanged",
    "Hello",
    "HostReady",
    "HostToSupervisor",
    "IndexRepository",
    "InstanceExited",
    "InstanceExpected",
    "InstanceLoaded",
    "InstanceReady",
    "InstanceRetired",
    "KeepStatistics",
    "KillInstance",
    "LeaseWorkspace",
    "LoadFailed",
    "LoadInstance",
    "LoadModel",
    "LoadRefused",
    "LocalClientToScheduler",
    "LocalClientToSupervisor",
    "MemoryChecked",
    "MemoryDropped",
    "MetricsReported",
    "ModelChanged",
    "ModelCounted",
    "ModelPublished",
    "ModelWithdrawn",
    "OpenScheduler",
    "PoolFailed",
    "ProcessEnded",
    "ProcessExited",
    "ProcessStarted",
    "ReadyChecked",
    "Refused",
    "RegionAbandoned",
    "RegionBlamed",
    "RegionDrained",
    "RegionPublished",
    "RegionRegistered",
    "RegionReleased",
    "RegionUnregistered",
    "RegionWithdrawn",
    "RegisterCudaRegion",
    "RegisterRegion",
    "Release",
    "ReleaseOutputs",
    "Reply",
    "ReportStatistics",
    "ResizeCache",
    "Responded",
    "RetireInstance",
    "ReturnWorkspace",
    "SchedulerClosed",
    "SchedulerLost",
    "SchedulerReady",
    "SchedulerToClient",
    "SchedulerToSupervisor",
    "SchedulerToWorker",
    "SequenceRow",
    "ServerEvent",
    "SetLogging",
    "Settled",
    "ShareDeviceMemory",
    "ShareMemory",
    "StatisticsKept",
    "StatisticsReported",
    "Stop",
    "Submit",
    "SupervisorToBatching",
    "SupervisorToEnsemble",
    "SupervisorToGateway",
    "SupervisorToHost",
    "SupervisorToLocalClient",
    "SupervisorToScheduler",
    "SupervisorToWorker",
    "TicketGranted",
    "TicketReturned",
    "UnloadModel",
    "UnregisterRegion",
    "Welcome",
    "WithdrawMemory",
    "Work",
    "WorkerStarted",
    "WorkerToScheduler",
    "WorkerToSupervisor",
    "WorkspaceAllocated",
    "WorkspaceToSupervisor",
]

ClientToScheduler = Submit | Cancel | Credit | Release | ReportStatistics
SchedulerToClient = Finished | Responded | Failed | Settled | StatisticsReported
SchedulerToWorker = Execute | EndSequences | CancelExecution | CreditExecution | ReleaseOutputs
WorkerToScheduler = InstanceReady | BatchFinished | ExecutionResponded | MetricsReported
SupervisorToGateway = (
    ModelPublished
    | ModelWithdrawn
    | SchedulerLost
    | RegionPublished
    | RegionWithdrawn
    | RegionDrained
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
    | AskReady
    | Drained
)
SupervisorToScheduler = (
    ProcessExited | CountsInherited | KeepStatistics | ResizeCache | Drain | Stop
)
SupervisorToBatching = (
    InstanceExpected | InstanceExited | RetireInstance | PoolFailed | TicketGranted
)
SupervisorToEnsemble = ModelPublished | SchedulerLost
SupervisorToHost = OpenScheduler | SetLogging | Stop
HostToSupervisor = HostReady | SchedulerClosed
SchedulerToSupervisor = (
    SchedulerReady
    | KillInstance
    | InstanceRetired
    | Drained
    | StatisticsKept
    | AskTicket
    | TicketReturned
)
EnsembleToSupervisor = SchedulerToSupervisor | Acknowledged | MemoryDropped
SupervisorToWorker = (
    CompleteConfig
    | LoadInstance
    | Attach
    | CheckMemory
    | CheckReady
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
    | ReadyChecked
    | AskReady
    | FindModel
    | LoadModel
    | UnloadModel
    | LeaseWorkspace
    | ReturnWorkspace
)
WorkspaceToSupervisor = WorkspaceAllocated
SupervisorToLocalClient = (
    Welcome
    | ModelPublished
    | ModelWithdrawn
    | SchedulerLost
    | HealthChanged
    | ProcessExited
    | Answered
    | Refused
)
LocalClientToSupervisor = Hello | Acknowledged | ShareMemory | ShareDeviceMemory | WithdrawMemory
LocalClientToScheduler = Submit | Cancel | Credit | Release
ServerEvent = (
    ModelChanged
    | LoadRefused
    | ProcessStarted
    | ProcessEnded
    | RegionRegistered
    | RegionUnregistered
    | RegionBlamed
    | HealthChanged
    | ModelCounted
)
