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

from shmserve.ipc.messages import events, local_clients, memory, supervision
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

ClientToScheduler = Submit | Cancel | Credit | Release | ReportStatistics
SchedulerToClient = Finished | Responded | Failed | Settled | StatisticsReported
SchedulerToWorker = (
    Execute | EndSequences | CancelExecution | CreditExecution | ReleaseOutputs | ReaderExited
)
WorkerToScheduler = InstanceReady | BatchFinished | ExecutionResponded | MetricsReported
SupervisorToGateway = (
    supervision.ModelPublished
    | supervision.ModelWithdrawn
    | supervision.SchedulerLost
    | memory.RegionPublished
    | memory.RegionWithdrawn
    | memory.RegionDrained
    | supervision.HealthChanged
    | supervision.ProcessExited
    | supervision.SetLogging
    | supervision.Answered
    | supervision.Refused
    | supervision.Drain
    | supervision.Stop
)
GatewayToSupervisor = (
    supervision.GatewayReady
    | supervision.Acknowledged
    | memory.RegionReleased
    | memory.RegisterRegion
    | memory.RegionAbandoned
    | memory.RegisterCudaRegion
    | memory.UnregisterRegion
    | supervision.LoadModel
    | supervision.UnloadModel
    | supervision.IndexRepository
    | supervision.ChangeLogging
    | supervision.AskReady
    | supervision.Drained
)
SupervisorToScheduler = (
    supervision.ProcessExited
    | supervision.BaseCounters
    | supervision.SnapshotStatistics
    | supervision.ResizeCache
    | supervision.Drain
    | supervision.Stop
)
SupervisorToBatching = (
    supervision.InstanceExpected
    | supervision.InstanceExited
    | supervision.RetireInstance
    | supervision.PoolFailed
    | supervision.TicketGranted
)
SupervisorToEnsemble = supervision.ModelPublished | supervision.SchedulerLost
SupervisorToHost = supervision.OpenScheduler | supervision.SetLogging | supervision.Stop
HostToSupervisor = supervision.HostReady | supervision.SchedulerClosed
SchedulerToSupervisor = (
    supervision.SchedulerReady
    | supervision.KillInstance
    | supervision.InstanceRetired
    | supervision.Drained
    | supervision.StatisticsSnapshot
    | supervision.AskTicket
    | supervision.TicketReturned
)
EnsembleToSupervisor = SchedulerToSupervisor | supervision.Acknowledged | memory.MemoryDropped
SupervisorToWorker = (
    supervision.CompleteConfig
    | supervision.LoadInstance
    | supervision.Attach
    | memory.CheckMemory
    | supervision.CheckReady
    | memory.MemoryDropped
    | supervision.ProcessExited
    | supervision.ModelWithdrawn
    | supervision.SchedulerLost
    | supervision.SetLogging
    | supervision.Answered
    | supervision.Refused
    | supervision.Stop
)
WorkerToSupervisor = (
    supervision.WorkerStarted
    | supervision.ConfigCompleted
    | supervision.InstanceLoaded
    | supervision.LoadFailed
    | memory.MemoryChecked
    | supervision.ReadyChecked
    | supervision.AskReady
    | supervision.FindModel
    | supervision.LoadModel
    | supervision.UnloadModel
    | supervision.LeaseWorkspace
    | supervision.ReturnWorkspace
)
WorkspaceToSupervisor = supervision.WorkspaceAllocated
SupervisorToLocalClient = (
    local_clients.Welcome
    | supervision.ModelPublished
    | supervision.ModelWithdrawn
    | supervision.SchedulerLost
    | supervision.HealthChanged
    | supervision.ProcessExited
    | supervision.Answered
    | supervision.Refused
)
LocalClientToSupervisor = (
    local_clients.Hello
    | supervision.Acknowledged
    | local_clients.ShareMemory
    | local_clients.ShareDeviceMemory
    | local_clients.WithdrawMemory
)
LocalClientToScheduler = Submit | Cancel | Credit | Release
ServerEvent = (
    events.ModelChanged
    | events.LoadRefused
    | events.ProcessStarted
    | events.ProcessEnded
    | events.RegionRegistered
    | events.RegionUnregistered
    | events.RegionBlamed
    | supervision.HealthChanged
    | events.ModelCounted
)
