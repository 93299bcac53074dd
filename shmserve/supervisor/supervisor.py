"""The lifecycle of a server: start of its processes, handling of exits, and orderly shutdown.

zygotes -> gateways, models -> "ready" -> ... -> drain -> stop
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from shmserve.common.tasks import cancel_all, wait_any
from shmserve.config.flags import FLAGS
from shmserve.config.server import unread_backend_settings
from shmserve.errors import ShmserveError
from shmserve.ipc import endpoints
from shmserve.ipc.messages.publications import ProcessEnded, ProcessExited
from shmserve.ipc.processes import trim_heap
from shmserve.supervisor.context import LOCAL_CLIENT, SupervisorContext
from shmserve.supervisor.control_api import ReadinessCheck
from shmserve.supervisor.events import EventFeed
from shmserve.supervisor.handover import Handover
from shmserve.supervisor.health import Health, Watchdog, announce
from shmserve.supervisor.host.console import (
    StartupReport,
    example_command,
    has_terminal,
    model_table,
)
from shmserve.supervisor.host.listeners import Listeners
from shmserve.supervisor.host.service_manager import ServiceManager, progress_line
from shmserve.supervisor.kept import GRPC, Gateways, WorkspaceHolders
from shmserve.supervisor.local_clients.server import LocalMemory
from shmserve.supervisor.models.autoscaler import Autoscaler
from shmserve.supervisor.models.manager import ModelManager
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.processes.children import Child, ProcessTable
from shmserve.supervisor.regions.registry import RegionRegistry
from shmserve.supervisor.reload import Reload, RepositoryPoller

logger = logging.getLogger(__name__)


_CLIENT_ROLES = ("gateway", LOCAL_CLIENT)
# The number of processes with these roles grows with the models, so exits after `Stop` are reported
# together.
_MODEL_ROLES = ("scheduler", "ensemble", "worker")
_EXIT_REPORT_DELAY_S = 0.5

END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def handled_signals() -> tuple[int, ...]:
    """Return the signals that the supervisor handles; under `nohup`, SIGHUP is not one of them."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return END_SIGNALS if ignores_hangup else (*END_SIGNALS, signal.SIGHUP)


# Signals within this time are one request to end: timeout(1), for example, signals the process, and
# then its group.
_SAME_SIGNAL_S = 1.0


@dataclass(slots=True, eq=False)
class Supervisor:
    """The owner of the process tree.

    `early_signals` are the signals that were received before `run`. `end_signals` queues the
    numbers of signals that end the server.
    """

    listeners: Listeners
    early_signals: list[int]
    end_signals: asyncio.Queue[int]
    context: SupervisorContext
    processes: ProcessTable
    regions: RegionRegistry
    local_memory: LocalMemory
    gateways: Gateways
    workspace_holders: WorkspaceHolders
    models: ModelManager
    registry: ModelRegistry
    readiness: ReadinessCheck
    poller: RepositoryPoller
    autoscaler: Autoscaler
    health: Health
    feed: EventFeed
    progress: StartupReport
    service_manager: ServiceManager
    handover: Handover
    watchdog: Watchdog
    reload: Reload | None
    _lost_run_dir: bool = field(init=False, default=False)  # it was removed
    _had_terminal: bool = field(init=False, default_factory=has_terminal)
    _signalled_at: float = field(init=False, default=-math.inf)
    _exits_after_stop: list[ProcessExited] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.processes.on_exit = self._process_exited

    async def run(self) -> int:
        """Start, serve, drain and stop; return the exit status."""
        started_at = time.monotonic()
        self.open()
        start_task = asyncio.ensure_future(self._start(started_at))
        end_signal = asyncio.ensure_future(self.end_signals.get())
        await asyncio.wait({start_task, end_signal}, return_when=asyncio.FIRST_COMPLETED)
        status = 0
        if start_task.done():
            status = self._exit_status(start_task)
            if status == 0:
                await end_signal
        else:
            await cancel_all(start_task)
        end_signal.cancel()
        await self.end(status)
        return status or int(self._lost_run_dir)

    def _signal(self, number: int) -> None:
        # A closed terminal sends SIGHUP, too, which then ends the server.
        is_terminal_closed = self._had_terminal and not has_terminal()
        if number == signal.SIGHUP and self.reload is not None and not is_terminal_closed:
            self.reload.request()
            return
        now = time.monotonic()
        if now - self._signalled_at >= _SAME_SIGNAL_S:
            self._signalled_at = now
            self.end_signals.put_nowait(number)

    @staticmethod
    def _exit_status(start: asyncio.Future[int]) -> int:
        error = start.exception()
        if error is None:
            return start.result()
        if isinstance(error, ShmserveError):
            logger.error("the server cannot start: %s", error.message)
        else:
            logger.error("the server cannot start: internal error", exc_info=error)
        return 1

    # --- the server's start

    def open(self) -> None:
        """Handle signals, start the zygotes and publish events; no model is loaded yet."""
        context = self.context
        loop = asyncio.get_running_loop()
        for number in handled_signals():
            loop.add_signal_handler(number, self._signal, number)
        for number in self.early_signals:
            self._signal(number)
        # The parent may have blocked signals. Without SIGCHLD, no exit would be detected.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for name in context.config.without_effect:
            logger.warning("--%s has no effect: %s", name, FLAGS[name].help)
        for setting in unread_backend_settings(context.config.backend_config):
            logger.warning("--backend-config=%s has no effect", setting)
        if context.config.trace.problem:
            logger.warning("requests are not traced: %s", context.config.trace.problem)
        # The worker zygote starts first, because its import of torch takes longest.
        context.worker_zygote.start()
        context.front_zygote.start()
        context.events.open(endpoints.events(context.run_dir), self.feed.on_subscription)
        grpc = context.config.grpc
        tls = grpc is not None and grpc.settings.tls is not None
        self.handover.open()
        self.listeners.publish(endpoints.addresses(context.run_dir), tls=tls)

    async def _start(self, started_at: float) -> int:
        gateway_start = asyncio.ensure_future(self.gateways.start())
        with self.progress:
            load_task = asyncio.ensure_future(self._load())
            timeout_extension = asyncio.ensure_future(self.service_manager.extend_timeout())
            try:
                startup = asyncio.gather(load_task, gateway_start)
                has_loaded, _ = await self.handover.run_beside_predecessor(startup)
            except BaseException:
                await cancel_all(*(task for task in (load_task, gateway_start) if not task.done()))
                raise
            finally:
                await cancel_all(timeout_extension)
        if not self.health.has_failed:
            for line in model_table(await self.models.index(ready_only=False)):
                logger.info("%s", line)
        if not has_loaded and self.context.config.exit_on_error:
            logger.error(
                "a model could not be loaded; the server exits (--exit-on-error=false keeps it "
                "running)"
            )
            return 1
        await self.handover.take_over()
        self.health.has_started = True
        announce(self.context, self.health)
        self.gateways.accept()
        self.context.local_clients.connections.accept()
        for line in self.listeners.addresses():
            logger.info("%s", line)
        logger.info("shmserve.client service at %s", self.handover.run_dir.shared_path)
        state = "is ready" if self.health.current().ready else "serves requests, but is not ready,"
        logger.info("the server %s after %.2f s", state, time.monotonic() - started_at)
        self._log_first_steps()
        self.service_manager.notify_ready(progress_line(self.registry.progress()))
        trim_heap()
        self.context.background(self.watchdog.run())
        self.context.background(self.autoscaler.run())
        if self.context.config.load_on_demand:
            self.context.background(self.models.on_demand.run())
        if self.context.config.model_control_mode == "poll" and not self.health.has_failed:
            self.context.background(self.poller.run())
        if self.reload is not None:
            self.context.background(self.reload.run())
        return 0

    def _log_first_steps(self) -> None:
        """Log the addresses of the pages for browsers, and a command to try."""
        http, metrics = self.listeners.urls()
        if metrics.startswith("http"):
            logger.info("dashboard: %s/", metrics)
        if http.startswith("http"):
            logger.info("API documentation: %s/docs", http)
        ready_models = [
            version.config for version in self.registry.live_versions if version.has_loaded
        ]
        needs_token = bool(self.context.config.tokens)
        if http and (command := example_command(ready_models, http, needs_token=needs_token)):
            logger.info("example request: %s", command)

    async def _load(self) -> bool:
        # The holders start first, because models may lease workspaces in their warm-up.
        await self.workspace_holders.start()
        try:
            return await self.models.start()
        except ShmserveError as error:  # for example, the repository does not exist
            if self.context.config.exit_on_error:
                raise
            logger.error("no model is served, and the server is not live: %s", error.message)
            self.health.has_failed = True
            return False

    # --- exits of processes

    def _process_exited(self, child: Child) -> None:
        """Release the resources of a process that has exited, and broadcast its exit.

        The resources depend on the role. The waiters of `child.exit_future` are called afterwards.
        """
        context, pid, reason = self.context, child.pid, child.reason_for_clients
        match context.control.remove_process(pid):
            case "gateway":
                self.regions.draining.gateway_exited(pid)
                context.background(self.regions.withdraw_leased(pid))
            case "host":
                context.tickets.process_exited(pid)
            case "worker":
                self.readiness.process_exited(pid)
                context.workspaces.process_exited(pid)
        context.events.publish(ProcessEnded(pid, child.title, child.reason))
        if reason == f"signal {signal.SIGBUS.value}":
            context.background(self.regions.unregister_shrunk())
            self.local_memory.release_shrunk()
        message = ProcessExited(pid, reason)
        context.broadcast(message, *_CLIENT_ROLES, *(() if child.is_stopping else _MODEL_ROLES))
        if child.is_stopping:
            self._exits_after_stop.append(message)
            if len(self._exits_after_stop) == 1:
                asyncio.get_running_loop().call_later(_EXIT_REPORT_DELAY_S, self._report_stopped)
        elif not (self._lost_run_dir or self.handover.has_successor):
            self._check_run_dir()

    def _check_run_dir(self) -> None:
        """Stop the server if its run directory was removed, because no process can be replaced."""
        run_dir = self.context.run_dir
        self._lost_run_dir = not Path(endpoints.control(run_dir).removeprefix("ipc://")).exists()
        if self._lost_run_dir:
            logger.error(
                "the server stops, because the sockets in its run directory '%s' were removed: "
                "start it again, and exclude the folder from programs that clean up",
                run_dir,
            )
            self.end_signals.put_nowait(signal.SIGTERM)

    def _report_stopped(self) -> None:
        """Broadcast the exits of all processes that were sent `Stop` since the last call.

        Waking all processes for each exit would dominate the time of unloading many models.
        """
        for exit_message in self._exits_after_stop:
            self.context.broadcast(exit_message, *_MODEL_ROLES)
        self._exits_after_stop.clear()

    # --- the server's end

    async def end(self, status: int) -> None:
        """Drain for at most `exit_timeout_s`, or until a second signal, then stop everything.

        A signal within a second of the first one does not count.
        """
        context = self.context
        self.service_manager.report_stopping("finishing requests in flight")
        timeout_extension = asyncio.ensure_future(self.service_manager.extend_timeout())
        if not self.handover.has_successor:  # clients may continue to use a successor
            self.health.is_exiting = True
        self.gateways.retire()
        self.workspace_holders.retire()
        limit_s = context.config.exit_timeout_s
        logger.info("stopping: requests in flight have at most %d s to finish", limit_s)
        announce(context, self.health)
        if status == 0:
            await self._finish()
        await cancel_all(*context.tasks, *context.control.request_tasks)
        await self.models.kill()
        await self._kill_remaining()
        context.local_clients.connections.close()
        self.regions.close()
        self.local_memory.close()
        context.workspaces.close()
        context.events.close()
        context.control.close()
        # A successor may use the run directory once this link is closed.
        self.handover.close()
        self.processes.close()
        await cancel_all(timeout_extension)
        self.service_manager.close()
        logger.info("the server has stopped")

    async def _finish(self) -> None:
        limit_s = self.context.config.exit_timeout_s
        rejection_s = min(1.0, limit_s / 10)  # time for the rejection of unfinished requests
        drain_task = asyncio.ensure_future(self._drain(limit_s - 2 * rejection_s))
        second_signal = asyncio.ensure_future(self.end_signals.get())
        await wait_any(drain_task, second_signal, timeout_s=limit_s - rejection_s)
        is_unfinished = not drain_task.done()
        await cancel_all(drain_task, second_signal)
        if is_unfinished:
            logger.warning("requests did not finish within %g s, and are rejected", limit_s)
            rejection_task = asyncio.ensure_future(self._reject_unfinished())
            await asyncio.wait({rejection_task}, timeout=rejection_s)
            await cancel_all(rejection_task)

    async def _reject_unfinished(self) -> None:
        await self.models.kill()
        await self._drain_gateways()
        await self.gateways.stop()

    async def _drain(self, max_sequences_s: float) -> None:
        """Wait at most `max_sequences_s` seconds for open sequences, then drain everything else."""
        if not self._has_successor:
            # As in Triton, gRPC clients receive GOAWAY at once.
            self.gateways.begin_drain(has_successor=False, names=GRPC)
        try:
            async with asyncio.timeout(max_sequences_s):
                await self.models.finish_sequences()
        except TimeoutError:
            logger.warning("open sequences have not ended within %g s", max_sequences_s)
        await asyncio.gather(
            self.handover.let_successor_accept(),
            self._drain_gateways(),
            self.context.local_clients.redirect(),
        )
        await self.models.stop()
        await self.gateways.stop()

    @property
    def _has_successor(self) -> bool:
        return self.handover.has_successor or bool(self.listeners.shared_sockets)

    async def _drain_gateways(self) -> None:
        await self.gateways.drain(has_successor=self._has_successor)

    async def _kill_remaining(self) -> None:
        self.listeners.close()
        self.context.front_zygote.stop()
        self.context.worker_zygote.stop()
        children = self.processes.all()
        for child in children:
            if not child.title.endswith("zygote"):
                child.kill()
        await asyncio.gather(*(child.end(1.0) for child in children))
        await self.processes.wait_for_trackers(1.0)
