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

from shmserve.ipc.messages.inference import (
    BatchFinished,
    Cancel,
    CancelExecution,
    Execute,
    Failed,
    Finished,
    InstanceReady,
    MetricsReported,
    Release,
    ReleaseOutputs,
    ReportStatistics,
    Settled,
    StatisticsReported,
    Submit,
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
    Attach,
    ChangeLogging,
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
    KillInstance,
    LoadFailed,
    LoadInstance,
    LoadModel,
    ModelPublished,
    ModelWithdrawn,
    PoolFailed,
    ProcessExited,
    Refused,
    SchedulerLost,
    SchedulerReady,
    SetLogging,
    StatisticsKept,
    Stop,
    UnloadModel,
    WorkerStarted,
)

__all__ = [
    "Acknowledged",
    "Answered",
    "Attach",
    "BatchFinished",
    "Cancel",
    "CancelExecution",
    "ChangeLogging",
    "CheckMemory",
    "ClientToScheduler",
    "CompleteConfig",
    "ConfigCompleted",
    "CountsInherited",
    "Drain",
    "Drained",
    "Execute",
    "Failed",
    "FindModel",
    "Finished",
    "GatewayReady",
    "GatewayToSupervisor",
    "GuestToScheduler",
    "GuestToSupervisor",
    "HealthChanged",
    "Hello",
    "IndexRepository",
    "InstanceExited",
    "InstanceExpected",
    "InstanceLoaded",
    "InstanceReady",
    "KillInstance",
    "LoadFailed",
    "LoadInstance",
    "LoadModel",
    "MemoryChecked",
    "MemoryDropped",
    "MetricsReported",
    "ModelPublished",
    "ModelWithdrawn",
    "PoolFailed",
    "ProcessExited",
    "Refused",
    "RegionAbandoned",
    "RegionPublished",
    "RegionReleased",
    "RegionWithdrawn",
    "RegisterCudaRegion",
    "RegisterRegion",
    "Release",
    "ReleaseOutputs",
    "ReportStatistics",
    "SchedulerLost",
    "SchedulerReady",
    "SchedulerToClient",
    "SchedulerToSupervisor",
    "SchedulerToWorker",
    "SetLogging",
    "Settled",
    "ShareDeviceMemory",
    "ShareMemory",
    "StatisticsKept",
    "StatisticsReported",
    "Stop",
    "Submit",
    "SupervisorToGateway",
    "SupervisorToGuest",
    "SupervisorToScheduler",
    "SupervisorToWorker",
    "UnloadModel",
    "UnregisterRegion",
    "Welcome",
    "WithdrawMemory",
    "WorkerStarted",
    "WorkerToScheduler",
    "WorkerToSupervisor",
]

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
