"""The supervisor: one event loop that starts every process, hears of every death, and ends in
order.

run directory, listening sockets -> zygotes -> gateways, models -> "ready" -> ... -> drain -> stop
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shmserve import logs
from shmserve.common import accelerators, fd_limits
from shmserve.common.shm_access import Peer
from shmserve.common.tasks import end_all
from shmserve.config import grpc
from shmserve.config.server import ServerConfig
from shmserve.errors import Internal, ShmserveError
from shmserve.ipc import endpoints
from shmserve.ipc import messages as m
from shmserve.ipc.capabilities import KEY_SIZE, Capabilities
from shmserve.ipc.memory.large_copies import past_the_caches
from shmserve.ipc.processes import marked, name_process
from shmserve.ipc.tensors.descriptors import CudaHandle
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.events.feed import EventFeed
from shmserve.supervisor.events.publisher import EventPublisher
from shmserve.supervisor.gateways import Gateways
from shmserve.supervisor.host.listeners import close, hold, listen, listen_unix
from shmserve.supervisor.host.log_file import written_to
from shmserve.supervisor.host.run_directory import RunDirectory
from shmserve.supervisor.local_clients.server import LocalClientServer
from shmserve.supervisor.models.load_planner import LoadPlanner
from shmserve.supervisor.models.manager import Models
from shmserve.supervisor.models.poller import Poller
from shmserve.supervisor.models.readiness import ReadinessCheck
from shmserve.supervisor.models.status import ModelRegistry
from shmserve.supervisor.processes.control_socket import Control
from shmserve.supervisor.processes.table import Child, ProcessTable
from shmserve.supervisor.processes.zygote_client import Zygote
from shmserve.supervisor.regions.cuda_handles import HandleCheck
from shmserve.supervisor.regions.registry import RegionRegistry
from shmserve.supervisor.startup_report import StartupReport, model_table

logger = logging.getLogger(__name__)

_FRONT_PRELOADS = ("shmserve.gateway.http.main", "shmserve.scheduler.main")
_WORKER_PRELOADS = ("torch", "shmserve.workers.main", "shmserve.workers.preload_operations")
_SCRIPTED = "shmserve.workers.preload_scripted"
_EXPORTED = "shmserve.workers.preload_exported"
_ENDING = (signal.SIGTERM, signal.SIGINT)


def serve(config: ServerConfig) -> int:
    """Run a server until SIGTERM or SIGINT; returns the exit status: 0 after a drain, 1 when it
    could not start.

    Raises InvalidArgument for an address or a run directory that cannot be used.
    """
    with written_to(config.log.log_file):
        return _serve(config)


def _serve(config: ServerConfig) -> int:
    logs.configure("supervisor", config.log)
    name_process("supervisor")
    fd_limits.raise_limit()
    http, metrics = _listen(config)
    group = config.shm.group
    try:
        grpc = _grpc_sockets(config)
        signals = hold_signals()
        chosen = config.run_dir
        run_dir = RunDirectory(chosen, group) if chosen else RunDirectory.usual(group)
        with asyncio.Runner() as runner:  # its loop takes signals until the folder is gone
            try:
                return runner.run(Supervisor(config, run_dir, http, metrics, grpc, signals).run())
            finally:
                run_dir.remove()
    finally:
        for sock in http:
            close(sock)


def hold_signals() -> list[int]:
    """Have what ends the server wait for the supervisor: soon there is something to clear away.
    Those that come until `Supervisor.open` are in the list."""
    held: list[int] = []
    for number in _ENDING:  # blocked, they would end the server in another thread
        signal.signal(number, lambda number, _: held.append(number))
    return held


def _listen(config: ServerConfig) -> tuple[list[socket.socket], list[socket.socket]]:
    """The sockets for HTTP and for metrics."""
    http: list[socket.socket] = []
    metrics: list[socket.socket] = []
    if config.allow_http:
        http += listen(config.http_address, config.http_port, "--http-address", config.guarded)
    if config.allow_metrics:
        metrics += listen(
            config.metrics_address, config.metrics_port, "--metrics-address", config.guarded
        )
    if config.http_unix_socket is not None:
        http.append(listen_unix(config.http_unix_socket, config.shm.group, "--http-unix-socket"))
    return http, metrics


def _grpc_sockets(config: ServerConfig) -> list[socket.socket]:
    """What holds gRPC's port; none when it is switched off or not installed."""
    if config.grpc is None:
        return []
    found = importlib.util.find_spec("grpc")
    if found is None or found.origin is None:  # no origin: some folder of this name
        logger.warning(
            "gRPC is not served: the package is not installed (pip install 'shmserve[grpc]'; "
            "--allow-grpc=false says that it is not wanted)"
        )
        return []
    return hold(config.grpc.address, config.grpc.port, "--grpc-address", config.guarded)


class Supervisor:
    """Owns the process tree. `run` is the whole life; `signals` are those that have come
    before it."""

    def __init__(
        self,
        config: ServerConfig,
        run_dir: RunDirectory,
        http: list[socket.socket],
        metrics: list[socket.socket],
        grpc: list[socket.socket],
        signals: list[int],
    ) -> None:
        self.config = config
        self._run_dir = run_dir
        self._http = http
        self._metrics = metrics
        self._grpc = grpc
        self._held = signals
        self._events = EventPublisher()
        self._signals: asyncio.Queue[int] = asyncio.Queue()
        self._health = m.HealthChanged(live=True, ready=False, exiting=False)
        self._started = False
        self._exiting = False

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

    async def signalled(self) -> int:
        """Wait for SIGTERM or SIGINT; its number."""
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

    def open(self) -> None:
        """Start the zygotes and everything that listens; nothing is loaded yet."""
        loop = asyncio.get_running_loop()
        for number in _ENDING:
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        for came in self._held:
            self._signals.put_nowait(came)
        # Who starts the server may have some blocked, of which deaths and the end would be unheard.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if self.config.without_effect:
            logger.warning("without effect here: %s", ", ".join(self.config.without_effect))
        events = self._events
        children = ProcessTable(
            self._process_exited,
            lambda child: events.publish(m.ProcessStarted(child.pid, child.title)),
        )
        control = Control(
            endpoints.control(self._run_dir.path),
            lambda pid: self.host.knows(pid),
            lambda pid, message: self.host.dispatch(pid, message),
        )
        # numpy's BLAS starts threads on import, and here nobody multiplies matrices.
        single = {**grpc.environment(os.environ), "OPENBLAS_NUM_THREADS": "1"}
        front = Zygote(children, self._run_dir, "front zygote", _FRONT_PRELOADS, single)
        # Models start processes, too; front's own zygote has no mark, and clears up after them.
        copying = marked(past_the_caches(os.environ), os.getpid(), self._run_dir.path)
        workers = Zygote(children, self._run_dir, "worker zygote", self._preloads(), copying)
        capabilities = Capabilities(secrets.token_bytes(KEY_SIZE))
        folder, log = self._run_dir.path, self.config.log
        self.host = SupervisorContext(
            self.config, folder, children, control, front, workers, capabilities, log, events=events
        )
        workers.start()  # first: torch takes longest
        front.start()
        self.gateways = Gateways(
            self.host, self._http, self._metrics, self._grpc, self._snapshot, self._asked
        )
        found = accelerators.accelerators(visible=self.config.visible_devices)
        self.handles = HandleCheck(
            found.count, lambda device_id: self.registry.workers_on(device_id), control.send
        )
        self.readiness = ReadinessCheck(control.send)
        # A server that has no descriptor left could start no process again.
        most = min(self.config.shm.max_regions, fd_limits.for_regions())
        self.regions = RegionRegistry(
            self.gateways.publish,
            self.gateways.pids,
            lambda msg: self.host.broadcast(msg, "worker"),
            replace(self.config.shm, max_regions=most),
            self.handles if found.kind == "cuda" else None,
            events.publish,
        )
        self.host.local_clients = LocalClientServer(
            self._run_dir.path,
            self.config.shm.group,
            capabilities,
            self.regions,
            self._told_to_local_clients,
            self._local_client_left,
        )
        planner = LoadPlanner(self.config, folder, found)
        self.registry = ModelRegistry(planner.metadata)
        self._feed = EventFeed(
            events,
            self.registry.states,
            children.all,
            self.regions.active,
            lambda: self._health,
            self.registry.publish_counters,
        )
        self.models = Models(
            self.host,
            self.gateways,
            planner,
            self.registry,
            self._asked,
            self._update_health,
            self._feed.models_changed,
        )
        self._poller = Poller(self.host, planner, self.registry, self.models)
        events.open(endpoints.events(folder), self._feed.subscribed)

    def _preloads(self) -> tuple[str, ...]:
        # Exported programs need torch's compiler: a second and 95 MB, for whoever has some; what
        # TorchScript needs is a tenth of that.
        roots = self.config.model_repositories
        wanted = list(_WORKER_PRELOADS)
        for pattern, module in (("*/*/*.pt", _SCRIPTED), ("*/*/*.pt2", _EXPORTED)):
            if any(any(root.glob(pattern)) for root in roots):
                wanted.append(module)
        return tuple(wanted)

    async def _start(self, began: float) -> int:
        gateways = asyncio.ensure_future(self.gateways.start())
        with StartupReport() as progress:
            loading = asyncio.ensure_future(self.models.start(progress))
            try:
                loaded, _ = await asyncio.gather(loading, gateways)
            except BaseException:
                await end_all(*(task for task in (loading, gateways) if not task.done()))
                raise
        for line in model_table(self.models.index(ready=False)):
            logger.info("%s", line)
        if not loaded and self.config.exit_on_error:
            logger.error(
                "a model could not be loaded; the server ends (--exit-on-error=false keeps it up)"
            )
            return 1
        self._started = True
        self._update_health()
        self._log_addresses(time.monotonic() - began)
        _give_memory_back()
        if self.config.model_control_mode == "poll":
            self.host.background(self._poller.run())
        return 0

    def _log_addresses(self, seconds: float) -> None:
        for name, sockets, start, path in (
            ("HTTP", self._http, "http://", ""),
            ("gRPC", self._grpc, "", ""),
            ("metrics", self._metrics, "http://", "/metrics"),
        ):
            for sock in sockets:
                if sock.family == socket.AF_UNIX:
                    logger.info("%s service at unix socket %s", name, sock.getsockname())
                    continue
                host, port = sock.getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                logger.info("%s service at %s%s:%d%s", name, start, shown, port, path)
        logger.info("shmserve.client service at %s", self._run_dir.path)
        logger.info("the server is ready after %.2f s", seconds)

    # --- events

    def _process_exited(self, child: Child) -> None:
        self.host.dismiss(child.pid)
        self.host.acknowledgements.exited(child.pid)
        self._events.publish(m.ProcessEnded(child.pid, child.title, child.reason))
        self.regions.gateway_exited(child.pid)
        self.host.background(self.regions.abandoned(child.pid))
        self.gateways.process_exited(child)
        self.registry.process_exited(child)
        if child.exited.result() == f"signal {signal.SIGBUS.value}":
            self.host.background(self.regions.drop_shrunk())
        self.host.broadcast(m.ProcessExited(child.pid), "gateway", "scheduler", "worker", "guest")

    def _told_to_local_clients(self) -> Iterator[Any]:
        yield from self.registry.published()
        yield self._health

    def _local_client_left(self, number: int) -> None:
        # Its requests first, so that no worker begins one whose memory it has dropped.
        self.host.broadcast(m.ProcessExited(number), "scheduler")
        self.regions.give_back(number)
        self.host.broadcast(m.ProcessExited(number), "worker")

    def _update_health(self) -> None:
        ready = self._started and not self._exiting and self._models_ready()
        health = m.HealthChanged(live=True, ready=ready, exiting=self._exiting)
        if health != self._health:
            self._health = health
            self.gateways.tell(health)
            self._events.publish(health)

    def _models_ready(self) -> bool:
        return not self.config.strict_readiness or self.registry.all_ready()

    def _snapshot(self) -> Iterator[Any]:
        yield from self.registry.published()
        yield from self.regions.published()
        yield self._health

    def _asked(self, pid: int, message: Any) -> None:
        """A gateway, or a model, wants something of the control plane."""
        match message:
            case m.RegionReleased(memory_id):
                self.regions.released(pid, memory_id)
            case m.RegisterRegion(number, name, key, offset, size, uid, groups, leased, pin):
                peer, lessor = Peer(uid, tuple(groups)), pid if leased else 0
                register = self.regions.register(name, key, offset, size, peer, lessor, pin)
                self._answer(pid, number, register)
            case m.RegisterCudaRegion(id=number, name=name, offset=offset, byte_size=size):
                handle = CudaHandle(message.handle, message.device_id, message.device_uuid)
                peer, exporter = Peer(message.uid, tuple(message.groups)), message.exporter_pid
                work = self.regions.register_cuda(name, handle, offset, size, peer, exporter)
                self._answer(pid, number, work)
            case m.RegionAbandoned(memory_id):
                self.host.background(self.regions.abandoned(pid, memory_id))
            case m.UnregisterRegion(number, name, uid, groups, cuda):
                peer = Peer(uid, tuple(groups))
                self._answer(pid, number, self.regions.unregister(name, peer, cuda))
            case m.MemoryChecked():
                self.handles.checked(pid, message)
            case m.ReadyChecked():
                self.readiness.checked(pid, message)
            case m.AskReady(id=number, name=name, version=version):
                self._answer(pid, number, self._ask_ready(name, version))
            case m.LoadModel(id=number, name=name, config=config, files=files):
                self._answer(pid, number, self.models.load_on_request(name, config, files))
            case m.UnloadModel(id=number, name=name):
                self._answer(pid, number, self.models.unload_on_request(name))
            case m.IndexRepository(id=number, ready=only_ready):
                self._answer(pid, number, self._index(only_ready))
            case m.ChangeLogging(id=number, changes=changes):
                self._answer(pid, number, self._change_logging(changes))
            case m.FindModel(id=number, name=name, version=version):
                self._answer(pid, number, self._find(name, version))
            case _:
                logger.warning("dropped a %s", type(message).__name__)

    async def _find(self, name: str, version: str) -> dict[str, Any]:
        return self.registry.find(name, version)

    async def _ask_ready(self, name: str, version: str) -> dict[str, Any]:
        pids = self.registry.asked_whether_ready(name, version)
        return {"ready": await self.readiness.check(pids)}

    async def _index(self, only_ready: bool) -> dict[str, Any]:
        return {"models": self.models.index(only_ready)}

    async def _change_logging(self, changes: dict[str, Any]) -> dict[str, Any]:
        return self.host.change_logging(changes)

    def _answer(self, pid: int, number: int, work: Any) -> None:
        async def answer() -> None:
            try:
                payload = await work
            except ShmserveError as error:
                self.host.control.send(pid, m.Refused(number, error.code, error.message))
            except Exception:
                logger.exception("a request to the control plane failed")
                failure = Internal("internal error")
                self.host.control.send(pid, m.Refused(number, failure.code, failure.message))
            else:
                self.host.control.send(pid, m.Answered(number, payload or {}))

        self.host.background(answer())

    # --- end

    async def end(self, status: int) -> None:
        """Drain for at most `exit_timeout_s`, or until a second signal; then stop everything."""
        self._exiting = True
        self.gateways.stopping = True
        logger.info(
            "stopping: finishing what is in flight, for at most %d s", self.config.exit_timeout_s
        )
        self._update_health()
        if status == 0:
            await self._finish()
        await end_all(*self.host.tasks)
        await self.models.kill()
        await self._kill_rest()
        if self.host.local_clients is not None:
            self.host.local_clients.close()
        self.regions.close()
        self._events.close()
        self.host.control.close()
        self.host.children.close()
        logger.info("the server has ended")

    async def _finish(self) -> None:
        limit_s = self.config.exit_timeout_s
        last_s = min(1.0, limit_s / 10)  # for what is not finished by then
        drained = asyncio.ensure_future(self._drain())
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
        """Have what is in flight answered: that it cannot be finished."""
        await self.models.kill()
        await self.gateways.drain()
        await self.gateways.stop()

    async def _drain(self) -> None:
        await self.gateways.drain()
        await self.models.stop()
        await self.gateways.stop()

    async def _kill_rest(self) -> None:
        for sock in (*self._http, *self._metrics, *self._grpc):
            close(sock)
        self.host.front_zygote.stop()
        self.host.worker_zygote.stop()
        rest = self.host.children.all()
        for child in rest:
            if not child.title.endswith("zygote"):
                child.kill()
        await asyncio.gather(*(self.host.end(child, 1.0) for child in rest))


def _give_memory_back() -> None:
    """Return what starting up took and freed: an idle server should be small."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
