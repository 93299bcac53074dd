"""The supervisor's event loop: starts every process, reaps every exit, and shuts down in order.

zygotes -> gateways, models -> "ready" -> ... -> drain -> stop
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from shmserve.common.tasks import end_all
from shmserve.config.options import FLAGS
from shmserve.errors import ShmserveError
from shmserve.ipc import endpoints
from shmserve.ipc.messages.publications import ProcessEnded, ProcessExited
from shmserve.supervisor.context import LOCAL_CLIENT, SupervisorContext
from shmserve.supervisor.events.feed import EventFeed
from shmserve.supervisor.handover import Handover
from shmserve.supervisor.health import Health, Watchdog
from shmserve.supervisor.host.console import StartupReport, has_terminal, model_table
from shmserve.supervisor.host.listeners import Listeners
from shmserve.supervisor.host.service_manager import ServiceManager, progress_line
from shmserve.supervisor.kept import Gateways, WorkspaceHolders
from shmserve.supervisor.local_clients.memory import LocalMemory
from shmserve.supervisor.models.autoscaler import Autoscaler
from shmserve.supervisor.models.manager import ModelManager
from shmserve.supervisor.models.registry import ModelRegistry, ReadinessCheck
from shmserve.supervisor.models.repository_poller import RepositoryPoller
from shmserve.supervisor.processes.table import Child, ProcessTable
from shmserve.supervisor.regions.registry import RegionRegistry
from shmserve.supervisor.reload import Reload

logger = logging.getLogger(__name__)


_READERS = ("gateway", LOCAL_CLIENT)
# As many as models; of what has stopped, which nobody waits for, they hear a little later.
_OTHERS = ("scheduler", "ensemble", "worker")
_TOLD_AFTER_S = 0.5

ENDING = (signal.SIGTERM, signal.SIGINT)


def taken_signals() -> tuple[int, ...]:
    """The signals that the supervisor takes: under `nohup` not SIGHUP."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return ENDING if nohup else (*ENDING, signal.SIGHUP)


# What comes within so long is the same order to end: timeout(1), for one, signals the process, and
# then its group.
_SAME_SIGNAL_S = 1.0


@dataclass(slots=True, eq=False)
class Supervisor:
    """Owns the process tree. `run` is the whole life; `signals` are those that have come
    before it."""

    listeners: Listeners
    signals: list[int]
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
    announce_health: Callable[[], None]
    feed: EventFeed
    progress: StartupReport
    manager: ServiceManager
    handover: Handover
    watchdog: Watchdog
    reload: Reload | None
    _terminal: bool = field(init=False, default_factory=has_terminal)
    _signals: asyncio.Queue[int] = field(init=False, default_factory=asyncio.Queue)
    _signalled_at: float = field(init=False, default=-math.inf)
    _stopped: list[ProcessExited] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.processes.watch(self._process_exited)
        self.handover.followed = partial(self._signals.put_nowait, signal.SIGTERM)

    async def run(self) -> int:
        """Start, serve, drain, stop; the exit status."""
        began = time.monotonic()
        self.open()
        work = asyncio.ensure_future(self._start(began))
        stop = asyncio.ensure_future(self.signalled())
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        status = 0
        if work.done():
            status = self._outcome(work)
            if status == 0:
                await stop
        else:
            await end_all(work)
        stop.cancel()
        await self.end(status)
        return status

    def _signal(self, number: int) -> None:
        # A terminal that is closed hangs up, too.
        closed = self._terminal and not has_terminal()
        if number == signal.SIGHUP and self.reload is not None and not closed:
            self.reload.ask()
            return
        now = time.monotonic()
        if now - self._signalled_at >= _SAME_SIGNAL_S:
            self._signalled_at = now
            self._signals.put_nowait(number)

    async def signalled(self) -> int:
        """Wait for a signal that ends the server; its number. Those within a second are one."""
        return await self._signals.get()

    @staticmethod
    def _outcome(work: asyncio.Future[int]) -> int:
        error = work.exception()
        if error is None:
            return work.result()
        if isinstance(error, ShmserveError):
            logger.error("the server cannot start: %s", error.message)
        else:
            logger.error("the server cannot start: internal error", exc_info=error)
        return 1

    # --- start

    def open(self) -> None:
        """Take signals, start the zygotes and publish events; nothing is loaded yet."""
        context = self.context
        loop = asyncio.get_running_loop()
        for number in taken_signals():
            loop.add_signal_handler(number, self._signal, number)
        for came in self.signals:
            self._signal(came)
        # Who starts the server may have some blocked, of which deaths and the end would be unheard.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for name in context.config.without_effect:
            logger.warning("--%s is without effect here: %s", name, FLAGS[name].help)
        context.worker_zygote.start()  # first: torch takes longest
        context.front_zygote.start()
        context.events.open(endpoints.events(context.run_dir), self.feed.subscribed)
        grpc = context.config.grpc
        tls = grpc is not None and grpc.settings.tls is not None
        self.handover.open()
        self.listeners.publish(endpoints.addresses(context.run_dir), tls=tls)

    async def _start(self, began: float) -> int:
        gateways = asyncio.ensure_future(self.gateways.start())
        with self.progress:
            loading = asyncio.ensure_future(self._load())
            waited_for = asyncio.ensure_future(self.manager.keep_waiting())
            try:
                loaded, _ = await asyncio.gather(loading, gateways)
            except BaseException:
                await end_all(*(task for task in (loading, gateways) if not task.done()))
                raise
            finally:
                await end_all(waited_for)
        if not self.health.failed:
            for line in model_table(await self.models.index(ready=False)):
                logger.info("%s", line)
        if not loaded and self.context.config.exit_on_error:
            logger.error(
                "a model could not be loaded; the server ends (--exit-on-error=false keeps it up)"
            )
            return 1
        await self.handover.take()
        self.health.started = True
        self.announce_health()
        self.gateways.accept()
        self.context.local_clients.connections.accept()
        for line in self.listeners.addresses():
            logger.info("%s", line)
        logger.info("shmserve.client service at %s", self.handover.run_dir.shared)
        ready = "is ready" if self.health.current().ready else "serves, and is not ready,"
        logger.info("the server %s after %.2f s", ready, time.monotonic() - began)
        self.manager.ready(progress_line(self.registry.progress()))
        _give_memory_back()
        self.context.background(self.watchdog.run())
        self.context.background(self.autoscaler.run())
        if self.context.config.load_on_demand:
            self.context.background(self.models.on_demand.run())
        if self.context.config.model_control_mode == "poll" and not self.health.failed:
            self.context.background(self.poller.run())
        if self.reload is not None:
            self.context.background(self.reload.run())
        return 0

    async def _load(self) -> bool:
        await self.workspace_holders.start()  # models may want some when they warm up
        try:
            return await self.models.start()
        except ShmserveError as error:  # there is no such repository
            if self.context.config.exit_on_error:
                raise
            logger.error("no model is served, and the server is not live: %s", error.message)
            self.health.failed = True
            return False

    # --- deaths

    def _process_exited(self, child: Child) -> None:
        """Take back, by its role, what a process had, and tell everybody; whoever started it
        watches its `exited`, and is called next."""
        context, pid, reason = self.context, child.pid, child.exited.result()
        match context.control.dismiss(pid):
            case "gateway":
                self.regions.draining.gateway_exited(pid)
                context.background(self.regions.abandoned(pid))
            case "host":
                context.tickets.exited(pid)
            case "worker":
                self.readiness.exited(pid)
                context.workspaces.process_exited(pid)
        context.events.publish(ProcessEnded(pid, child.title, child.reason))
        if reason == f"signal {signal.SIGBUS.value}":
            context.background(self.regions.drop_shrunk())
        exited = ProcessExited(pid, reason)
        context.broadcast(exited, *_READERS, *(() if child.stops else _OTHERS))
        if child.stops:
            self._stopped.append(exited)
            if len(self._stopped) == 1:
                asyncio.get_running_loop().call_later(_TOLD_AFTER_S, self._tell_stopped)

    def _tell_stopped(self) -> None:
        """Have everybody forget the memory of what has stopped lately: to wake all processes for
        each takes most of the time in which many models are unloaded."""
        for exited in self._stopped:
            self.context.broadcast(exited, *_OTHERS)
        self._stopped.clear()

    # --- end

    async def end(self, status: int) -> None:
        """Drain for at most `exit_timeout_s`, or until a second signal, which is one that comes a
        second later or more; then stop everything."""
        context = self.context
        self.manager.stopping("finishing what is in flight")
        waited_for = asyncio.ensure_future(self.manager.keep_waiting())
        self.health.exiting = not self.handover.is_followed  # whose clients go on
        self.gateways.retire()
        self.workspace_holders.retire()
        logger.info(
            "stopping: finishing what is in flight, for at most %d s", context.config.exit_timeout_s
        )
        self.announce_health()
        if status == 0:
            await self._finish()
        await end_all(*context.tasks)
        await self.models.kill()
        await self._kill_rest()
        context.local_clients.connections.close()
        self.regions.close()
        self.local_memory.close()
        context.workspaces.close()
        context.events.close()
        context.control.close()
        self.handover.close()  # all of it that others may find is gone
        self.processes.close()
        await end_all(waited_for)
        self.manager.close()
        logger.info("the server has ended")

    async def _finish(self) -> None:
        limit_s = self.context.config.exit_timeout_s
        last_s = min(1.0, limit_s / 10)  # for what is not finished by then
        drained = asyncio.ensure_future(self._drain(limit_s - 2 * last_s))
        again = asyncio.ensure_future(self.signalled())
        await asyncio.wait(
            {drained, again}, timeout=limit_s - last_s, return_when=asyncio.FIRST_COMPLETED
        )
        cut_short = not drained.done()
        await end_all(drained, again)
        if cut_short:
            logger.warning("not everything in flight was finished")
            refused = asyncio.ensure_future(self._refuse())
            await asyncio.wait({refused}, timeout=last_s)
            await end_all(refused)

    async def _refuse(self) -> None:
        await self.models.kill()
        await self._leave_clients()
        await self.gateways.stop()

    async def _drain(self, sequences_s: float) -> None:
        """Open sequences have `sequences_s` to end, while all is served as before."""
        try:
            async with asyncio.timeout(sequences_s):
                await self.models.finish_sequences()
        except TimeoutError:
            logger.warning("not every open sequence has ended")
        self.handover.leave()
        await asyncio.gather(self._leave_clients(), self.context.local_clients.leave())
        await self.models.stop()
        await self.gateways.stop()

    async def _leave_clients(self) -> None:
        await self.gateways.drain(self.handover.is_followed or bool(self.listeners.lent))

    async def _kill_rest(self) -> None:
        self.listeners.close()
        self.context.front_zygote.stop()
        self.context.worker_zygote.stop()
        rest = self.processes.all()
        for child in rest:
            if not child.title.endswith("zygote"):
                child.kill()
        await asyncio.gather(*(self.context.end(child, 1.0) for child in rest))


def _give_memory_back() -> None:
    """Return what starting up took and freed: an idle server should be small."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
