"""`shmserve serve`: the composition root, which creates the objects of a server and connects them.

listening sockets -> run directory -> compose -> Supervisor.run -> the run directory is removed
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shmserve import logs
from shmserve.common import fd_limits, host
from shmserve.common.tasks import DaemonThreadPool
from shmserve.config.server import ServerConfig
from shmserve.ipc import endpoints
from shmserve.ipc.endpoints import KEY_SIZE, Capabilities
from shmserve.ipc.messages.control_requests import (
    AskTicket,
    CallsWaiting,
    CheckHolders,
    TicketReturned,
)
from shmserve.ipc.messages.publications import ProcessExited
from shmserve.ipc.processes import set_process_title, with_mark, with_uncached_copies
from shmserve.supervisor.checks import table
from shmserve.supervisor.checks.access import configured_run_directory, tcp_listeners
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.control_api import ControlApi, ReadinessCheck
from shmserve.supervisor.events import EventFeed, EventPublisher
from shmserve.supervisor.handover import Handover
from shmserve.supervisor.health import Health, Snapshot, Watchdog, announce
from shmserve.supervisor.host.console import StartupReport, redirect_stderr
from shmserve.supervisor.host.handover_link import Offer
from shmserve.supervisor.host.listeners import Listeners, adopt, listen, listen_unix
from shmserve.supervisor.host.run_directory import RunDirectory
from shmserve.supervisor.host.service_manager import ServiceManager, progress_line, take_inherited
from shmserve.supervisor.kept import Gateways, WorkspaceHolders
from shmserve.supervisor.local_clients.server import LocalClientServer, LocalMemory
from shmserve.supervisor.models.autoscaler import Autoscaler
from shmserve.supervisor.models.load_planner import LoadPlanner
from shmserve.supervisor.models.manager import LifecycleExecutor, ModelManager, ModelPublisher
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.processes.children import ProcessTable
from shmserve.supervisor.processes.control_socket import (
    Address,
    ControlSocket,
    LogControl,
    TraceControl,
)
from shmserve.supervisor.processes.preloads import worker_preloads
from shmserve.supervisor.processes.zygote import Zygote
from shmserve.supervisor.regions.opener import HandleCheck, RegionOpener
from shmserve.supervisor.regions.region import KeptRegions
from shmserve.supervisor.regions.registry import RegionRegistry
from shmserve.supervisor.reload import Reload, RepositoryPoller
from shmserve.supervisor.resources.call_waits import CallWaits
from shmserve.supervisor.resources.rate_limiter import CacheShares, Tickets
from shmserve.supervisor.resources.workspaces import Workspaces
from shmserve.supervisor.supervisor import Supervisor, handled_signals

# The threads that read the files of models. Each file system call that hangs blocks one of them.
_MAX_THREADS = 64
_FRONT_PRELOADS = (
    *("shmserve.gateway.http.main", "shmserve.gateway.grpc.main"),
    "shmserve.scheduler.hosting.host",
)


def serve(config: ServerConfig, read_config: Callable[[], ServerConfig] | None = None) -> int:
    """Run a server until SIGTERM or SIGINT.

    Args:
        config: The settings.
        read_config: Reads the settings again, for SIGHUP.

    Returns:
        The exit status: 0 after a drain, 1 if the server could not start.

    Raises:
        InvalidArgument: An address or the run directory cannot be used.
    """
    with redirect_stderr(config.log.log_file):
        logs.configure("supervisor", config.log)
        set_process_title("supervisor")
        fd_limits.raise_limit()
        table.check_at_start(config)
        faulthandler.enable()  # prints the stacks at a crash or at a service manager's SIGABRT
        offer = Offer.of(configured_run_directory(config)) if config.take_over else None
        with contextlib.closing(Listeners(offer)) as listeners:
            _open_listeners(config, listeners)
            signals = defer_signals()
            run_dir = _open_run_directory(config)
            return run_composed(config, run_dir, listeners, signals, Supervisor.run, read_config)


def _open_run_directory(config: ServerConfig) -> RunDirectory:
    path, group = config.run_dir, config.shm.group
    if config.take_over:
        return RunDirectory.for_successor(configured_run_directory(config), group)
    return RunDirectory(path, group) if path else RunDirectory.default(group)


def run_composed(
    config: ServerConfig,
    run_dir: RunDirectory,
    listeners: Listeners,
    early_signals: list[int],
    main: Callable[[Supervisor], Coroutine[Any, Any, int]],
    read_config: Callable[[], ServerConfig] | None = None,
) -> int:
    """Compose a server in a new event loop, run `main(supervisor)`, and remove the run directory.

    Returns:
        The exit status of `main`.
    """

    async def run() -> int:
        asyncio.get_running_loop().set_default_executor(DaemonThreadPool(_MAX_THREADS))
        return await main(compose(config, run_dir, listeners, early_signals, read_config))

    with asyncio.Runner() as runner:  # the runner handles signals until the folder is removed
        try:
            return runner.run(run())
        finally:
            run_dir.remove()


def defer_signals() -> list[int]:
    """Defer the signals that end the server until `Supervisor.open`.

    A signal must not end the process from now on, since it has files to remove.

    Returns:
        A list to which the numbers of received signals are appended.
    """
    pending_signals: list[int] = []

    def defer_signal(number: int, _: object) -> None:
        pending_signals.append(number)

    # Signals cannot be blocked instead: another thread, whose mask differs, would receive them.
    for number in handled_signals():
        signal.signal(number, defer_signal)
    return pending_signals


def _open_listeners(config: ServerConfig, listeners: Listeners) -> None:
    """Open the listeners. Inherited sockets of a protocol replace the configured ones."""
    allows_remote = config.allows_remote
    inherited_sockets, listeners.stored_fds = take_inherited(os.environ)
    source = "LISTEN_FDS"
    if listeners.offer is not None:
        inherited_sockets, source = listeners.offer.select(config.protocols), "--take-over"
    for name, sockets in inherited_sockets.items():
        listeners.shared_sockets += sockets
        getattr(listeners, name).extend(adopt(sock, allows_remote, source) for sock in sockets)
    for name, address, port, flag in tcp_listeners(config):
        if name not in inherited_sockets:
            getattr(listeners, name).extend(listen(address, port, flag, allows_remote))
    for name, protocol in (("http", config.http), ("grpc", config.grpc)):
        path = None if protocol is None else protocol.unix_socket
        if path is not None and not listeners.has_path(path):
            unix_listener = listen_unix(path, config.shm.group, f"--{name}-unix-socket")
            getattr(listeners, name).append(unix_listener)


def compose(
    config: ServerConfig,
    run_dir: RunDirectory,
    listeners: Listeners,
    early_signals: list[int],
    read_config: Callable[[], ServerConfig] | None,
) -> Supervisor:
    """Compose the parts of a server in the running event loop. No process is started yet.

    `early_signals` is the list that `defer_signals` has returned.

    Raises:
        ShmserveError: InvalidArgument or Unavailable, with a message for the operator.
    """
    # First, because it removes variables from the environment, which child processes inherit.
    service_manager = ServiceManager.from_environment(os.environ)
    accelerators = host.accelerators(visible_devices=config.visible_devices)
    planner = LoadPlanner(config, run_dir.path, accelerators)
    registry = ModelRegistry()
    health = Health(registry, requires_models=config.strict_readiness)
    events = EventPublisher()
    processes = ProcessTable(events.process_started)
    control = ControlSocket(endpoints.control(run_dir.path))
    handle_check = HandleCheck(accelerators.count, registry.workers_on, control.send)
    opener = RegionOpener(config.shm, handle_check if accelerators.kind == "cuda" else None)
    kept_regions = KeptRegions(service_manager)
    regions = RegionRegistry(control, opener, events.publish, kept_regions)
    regions.restore(listeners.stored_fds)
    capabilities = Capabilities(secrets.token_bytes(KEY_SIZE))
    local_memory = LocalMemory(capabilities, opener, control, events.publish)
    publisher = ModelPublisher()
    snapshot = Snapshot(publisher, regions, local_memory, health)

    async def load_on_demand(name: str, timeout_s: float) -> None:
        await models.on_demand.load(name, timeout_s)

    context = _compose_context(
        *(config, run_dir, control, processes, events, capabilities, local_memory, snapshot),
        load_on_demand=load_on_demand,
        listeners=listeners,
    )
    state_sources = (registry.states, processes.all, snapshot.regions, health.current)
    feed = EventFeed(events, *state_sources, registry.publish_counters)

    def status() -> str:
        return progress_line(registry.progress())

    observers: list[Callable[[], None]] = [feed.models_changed, partial(announce, context, health)]
    if service_manager.is_present:
        observers.append(lambda: service_manager.notify_status(status()))
    models = ModelManager(LifecycleExecutor(context, planner, registry, publisher, observers))
    readiness = ReadinessCheck(control.send)
    poller = RepositoryPoller(context, planner, registry, models)
    autoscaler = Autoscaler(context, registry)
    ControlApi(context, regions, kept_regions, handle_check, registry, readiness)

    def refusal_reason() -> str:
        if service_manager.is_present:
            return "a service manager started the server and must restart it (systemctl restart)"
        if health.is_exiting or not health.has_started:
            return "the server is starting or stopping"
        return ""

    end_signals: asyncio.Queue[int] = asyncio.Queue()
    stop = partial(end_signals.put_nowait, signal.SIGTERM)
    handover = Handover(
        run_dir, listeners, regions, kept_regions, context.local_clients, refusal_reason, stop
    )

    return Supervisor(
        listeners=listeners,
        early_signals=early_signals,
        end_signals=end_signals,
        context=context,
        processes=processes,
        regions=regions,
        local_memory=local_memory,
        gateways=Gateways(context, listeners, snapshot.for_gateway),
        workspace_holders=WorkspaceHolders(context),
        models=models,
        registry=registry,
        readiness=readiness,
        poller=poller,
        autoscaler=autoscaler,
        health=health,
        feed=feed,
        progress=StartupReport(registry.progress, observers),
        service_manager=service_manager,
        handover=handover,
        watchdog=Watchdog(control, processes, service_manager),
        reload=read_config
        and Reload(context, opener, poller, service_manager, read_config, status),
    )


def _compose_context(
    config: ServerConfig,
    run_dir: RunDirectory,
    control: ControlSocket,
    processes: ProcessTable,
    events: EventPublisher,
    capabilities: Capabilities,
    memory: LocalMemory,
    snapshot: Snapshot,
    load_on_demand: Callable[[str, float], Awaitable[None]],
    listeners: Listeners,
) -> SupervisorContext:
    # numpy's BLAS starts threads on import, which these processes do not need.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    log_control = LogControl(control, config.log)
    trace_control = TraceControl(control, config.trace, config.gateway.slow_request_ms)
    control.on_started += [log_control.on_started, trace_control.on_started]
    return SupervisorContext(
        config=config,
        run_dir=run_dir.path,
        control=control,
        front_zygote=Zygote(processes, run_dir, "front zygote", _FRONT_PRELOADS, environment),
        worker_zygote=_create_worker_zygote(processes, run_dir, config),
        capabilities=capabilities,
        logging=log_control,
        tracing=trace_control,
        local_clients=LocalClientServer(
            *(run_dir.path, config.shm.group, capabilities, memory, snapshot.for_local_client),
            control.acknowledgements,
            partial(_on_local_client_disconnected, control, memory),
            *(load_on_demand, listeners.local, listeners.predecessor_listener),
        ),
        events=events,
        cache_shares=CacheShares(config.cache_byte_size),
        tickets=_create_tickets(config, control),
        workspaces=Workspaces(config.workspace_byte_sizes, control.send),
    )


def _on_local_client_disconnected(control: ControlSocket, memory: LocalMemory, number: int) -> None:
    # Schedulers are notified first, so that no worker starts a request whose memory is released.
    exit_message = ProcessExited(number, "")
    control.broadcast(exit_message, "scheduler", "ensemble")
    memory.release(number)
    control.broadcast(exit_message, "worker")


def _create_worker_zygote(
    processes: ProcessTable, run_dir: RunDirectory, config: ServerConfig
) -> Zygote:
    # Processes that models start inherit a mark, an environment variable by which the zygotes find
    # and kill the remaining processes after the server's end.
    environment = with_uncached_copies(_worker_environment(os.environ, run_dir.path))
    environment = with_mark(environment, os.getpid(), run_dir.path)
    has_devices = host.accelerators(visible_devices=config.visible_devices).count > 0
    model_files = [Path(file.rpartition(":")[0] or file) for file in config.model_files]
    may_add_models = config.model_control_mode != "none"
    preloads = worker_preloads(config.model_repositories, model_files, has_devices, may_add_models)
    return Zygote(processes, run_dir, "worker zygote", preloads, environment)


def _worker_environment(environment: Mapping[str, str], run_dir: Path) -> dict[str, str]:
    defaults = {
        # torch's compiler would otherwise leave its caches in $TMPDIR after the server's end.
        "TORCHINDUCTOR_CACHE_DIR": str(run_dir / "torchinductor"),
        # onnxruntime would otherwise create a telemetry session in $TMPDIR on import.
        "ORT_DISABLE_TELEMETRY": "1",
    }
    if "OMP_WAIT_POLICY" not in environment:
        # torch uses GNU OpenMP, whose idle threads spin 300,000 times by default. For some
        # milliseconds they would occupy processors that schedulers, gateways and clients need.
        defaults["GOMP_SPINCOUNT"] = "1000"
    return {**defaults, **environment}


def _create_tickets(config: ServerConfig, control: ControlSocket) -> Tickets:
    resources = {(name, device): count for name, device, count in config.rate_limit_resources}
    tickets = Tickets(config.rate_limit == "execution_count", resources, control.send)
    control.serve((AskTicket, CheckHolders, TicketReturned), tickets.handle)
    call_waits = CallWaits(tickets.find_holders)

    def on_calls_waiting(scheduler: Address, message: CallsWaiting) -> None:
        deadlock = call_waits.report(scheduler, message, time.monotonic_ns())
        if deadlock is not None:
            control.send(scheduler, deadlock)

    control.serve([CallsWaiting], on_calls_waiting)
    return tickets
