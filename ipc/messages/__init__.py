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
    ReportTimes,
    Responded,
    SequenceRow,
    Settled,
    StatisticsReported,
    Submit,
    Timed,
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
    PoolFailed,
    ProcessExited,
    ReadyChecked,
    Refused,
    ResizeCache,
    RetireInstance,
    ReturnWorkspace,
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
    "ReportTimes",
    "ResizeCache",
    "Responded",
    "RetireInstance",
    "ReturnWorkspace",
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
    "SupervisorToEnsemble",
    "SupervisorToGateway",
    "SupervisorToLocalClient",
    "SupervisorToScheduler",
    "SupervisorToWorker",
    "TicketGranted",
    "TicketReturned",
    "Timed",
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

ClientToScheduler = Submit | Cancel | Credit | Release | ReportStatistics | ReportTimes
SchedulerToClient = Finished | Responded | Failed | Settled | StatisticsReported | Timed
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
    InstanceExpected
    | InstanceExited
    | RetireInstance
    | PoolFailed
    | ProcessExited
    | CountsInherited
    | KeepStatistics
    | ResizeCache
    | TicketGranted
    | SetLogging
    | Drain
    | Stop
)
SchedulerToSupervisor = (
    SchedulerReady
    | KillInstance
    | InstanceRetired
    | Drained
    | StatisticsKept
    | AskTicket
    | TicketReturned
)
SupervisorToEnsemble = SupervisorToScheduler | ModelPublished | SchedulerLost
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
