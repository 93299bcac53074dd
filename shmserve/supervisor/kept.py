"""Permanent processes (gateways and workspace holders), which are restarted with a backoff.

Gateways serve on the supervisor's listening sockets. Holders of the workspace pools of CUDA devices
(resources/workspaces.py) start before models are loaded. When a holder exits, its memory is lost,
and lease requests wait for the next holder.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from shmserve.common.host import cuda_devices
from shmserve.common.tasks import resolve_future, wait_any
from shmserve.errors import ShmserveError, Unavailable
from shmserve.gateway.settings import GatewayStart
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.supervision import WorkspaceAllocated, WorkspaceStart, encode_start
from shmserve.ipc.tensors.descriptors import CudaHandle, Memory
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.host.listeners import Listeners
from shmserve.supervisor.processes.children import Child, RestartBackoff
from shmserve.supervisor.processes.zygote import BOOT_FAILED

logger = logging.getLogger(__name__)


GRPC = "grpc"
_HTTP_ENTRY = "shmserve.gateway.http.main:run"
_GRPC_ENTRY = "shmserve.gateway.grpc.main:run"
_WORKSPACE_ENTRY = "shmserve.supervisor.resources.workspaces:run"


@dataclass(slots=True, eq=False)
class PermanentProcess:
    """The processes that run one after another under a name; `child` is the current one.

    `connect_future` resolves when the first process with this name has connected.
    """

    name: str
    connect_future: asyncio.Future[None]
    child: Child | None = None
    started_at: float = 0.0
    backoff: RestartBackoff = field(default_factory=RestartBackoff)


class PermanentProcesses(ABC):
    """The permanent processes of one role, which are restarted when they exit."""

    role: ClassVar[str]

    def __init__(self, context: SupervisorContext, names: Iterable[str]) -> None:
        loop = asyncio.get_running_loop()
        self._context = context
        self._processes = [PermanentProcess(name, loop.create_future()) for name in names]
        self._is_stopping = False

    @abstractmethod
    async def _spawn(self, name: str, title: str) -> Child:
        """Start a process with this name and title."""

    @abstractmethod
    def _handle_message(self, process: PermanentProcess, child: Child, message: Any) -> None:
        """Handle a message from a process."""

    def _would_fail_again(self, child: Child) -> bool:
        """Return whether a process that exited without connecting would exit again."""
        return True

    async def start(self) -> None:
        """Start all processes, and wait until they have connected.

        Raises:
            Unavailable: A process cannot run on this host; its log contains the reason.
        """
        await asyncio.gather(*map(self._start, self._processes))
        await asyncio.gather(*(process.connect_future for process in self._processes))

    async def _start(self, process: PermanentProcess) -> None:
        process.started_at = time.monotonic()
        child = process.child = await self._spawn(process.name, f"{self.role} {process.name}")
        handle = partial(self._handle_message, process, child)
        self._context.control.register_peer(child.pid, self.role, handle)
        child.exit_future.add_done_callback(partial(self._handle_exit, process, child))

    def _handle_exit(self, process: PermanentProcess, child: Child, _: object) -> None:
        """Restart a process that has exited."""
        if self._is_stopping:
            return
        if not process.connect_future.done() and self._would_fail_again(child):
            error = Unavailable(f"{child.title} ended during its start")
            process.connect_future.set_exception(error)
            # asyncio would warn of an exception that nothing reads.
            process.connect_future.exception()
        else:
            logger.error("process %s ended (%s); the server restarts it", child.title, child.reason)
            self._context.background(self._restart(process))

    async def _restart(self, process: PermanentProcess) -> None:
        await asyncio.sleep(process.backoff.pause_s(time.monotonic() - process.started_at))
        if self._is_stopping:
            return
        try:
            await self._start(process)
        except (ShmserveError, OSError) as error:  # an OSError if no descriptor or memory is free
            text = "process %s %s could not be started; the next attempt follows after a pause: %s"
            logger.error(text, self.role, process.name, error)
            self._context.background(self._restart(process))

    def retire(self) -> None:
        """Stop restarting processes, because the server exits."""
        self._is_stopping = True


class Gateways(PermanentProcesses):
    """The gateways: "0", "1", ... for HTTP, "grpc", "grpc1", ... for gRPC.

    `read_snapshot()` yields the messages that a new gateway receives.
    """

    role = "gateway"

    def __init__(
        self,
        context: SupervisorContext,
        listeners: Listeners,
        read_snapshot: Callable[[], Iterable[Any]],
    ) -> None:
        config = context.config
        worker_count = config.grpc.workers if listeners.grpc and config.grpc is not None else 0
        grpc_names = [f"{GRPC}{number or ''}" for number in range(worker_count)]
        super().__init__(context, [*map(str, range(config.gateways)), *grpc_names])
        self._listeners = listeners
        self._read_snapshot = read_snapshot
        self._drain_futures: dict[int, asyncio.Future[None]] = {}
        # Gateways accept no client at shared sockets until the models are loaded: until then, other
        # servers accept the clients, or the clients wait in the queues of the sockets.
        self._waits_for_models = bool(listeners.shared_sockets)

    async def _spawn(self, name: str, title: str) -> Child:
        config, listeners = self._context.config, self._listeners
        is_grpc = name.startswith(GRPC)
        sockets = listeners.grpc if is_grpc else [*listeners.http, *listeners.metrics]
        start = GatewayStart(
            gateway_name=name,
            run_dir=self._context.run_dir,
            settings=replace(
                config.gateway,
                tokens=dict(config.tokens),
                metrics_port=listeners.metrics_port,
                grpc_port=listeners.grpc_port,
                cuda_devices=cuda_devices(config.visible_devices),
                counter_latencies=config.metrics.counter_latencies,
                histogram_latencies=config.metrics.histogram_latencies,
                summary_latencies=config.metrics.summary_latencies,
            ),
            http_sockets=len(listeners.http),
            grpc=config.grpc.settings if is_grpc and config.grpc is not None else None,
            waits_for_accept=self._waits_for_models,
            log=self._context.log,
        )
        entry = _GRPC_ENTRY if is_grpc else _HTTP_ENTRY
        fds = [sock.fileno() for sock in sockets]
        return await self._context.front_zygote.spawn(title, entry, encode_start(start), fds)

    def _handle_message(self, process: PermanentProcess, child: Child, message: Any) -> None:
        match message:
            case m.GatewayReady():
                resolve_future(process.connect_future, None)
            case m.Started():
                # The tokens may have changed since the start of the server.
                tokens = dict(self._context.config.tokens)
                self._context.control.send(child.pid, m.SetTokens(tokens))
                for publication in self._read_snapshot():
                    self._context.control.send(child.pid, publication)
                if not self._waits_for_models:
                    self._context.control.send(child.pid, m.Accept())
            case m.Drained():
                resolve_future(self._drain_futures.get(child.pid), None)
            case _:
                logger.warning("unexpected message from a gateway: %s", type(message).__name__)

    def _would_fail_again(self, child: Child) -> bool:
        """Return whether the gateway's entry point failed, and would therefore fail again."""
        return child.exit_future.result() == f"exit status {BOOT_FAILED}"

    def _children(self) -> list[Child]:
        return [process.child for process in self._processes if process.child is not None]

    def accept(self) -> None:
        """Let the gateways accept the clients at shared sockets, since the models are loaded."""
        self._waits_for_models = False
        self._context.control.broadcast(m.Accept(), "gateway")

    def begin_drain(self, *, has_successor: bool, names: str = "") -> None:
        """Drain gateways that are not draining yet.

        Args:
            has_successor: Whether another server serves at the sockets, now or soon.
            names: The prefix of the names of the gateways to drain.
        """
        self._is_stopping = True
        # Each gateway closes its own copies of the sockets.
        self._listeners.close(grpc_only=names == GRPC)
        for process in self._processes:
            child = process.child
            if child is None or not child.alive or not process.name.startswith(names):
                continue
            if child.pid not in self._drain_futures and self._context.control.connected(child.pid):
                self._drain_futures[child.pid] = asyncio.get_running_loop().create_future()
                self._context.control.send(child.pid, m.Drain(has_successor=has_successor))

    async def drain(self, *, has_successor: bool) -> None:
        """Drain all gateways, and wait until they have finished or exited."""
        self.begin_drain(has_successor=has_successor)
        for child in self._children():
            if (drain_future := self._drain_futures.get(child.pid)) is not None:
                await wait_any(drain_future, child.exit_future)

    async def stop(self) -> None:
        """Stop all gateways and close the sockets."""
        self._is_stopping = True
        self._listeners.close()
        for child in self._children():
            if self._context.control.connected(child.pid):
                self._context.control.send(child.pid, m.Stop())
            else:
                child.kill()  # the process has not connected yet, so it cannot receive `Stop`
        await asyncio.gather(*(child.end(2.0) for child in self._children()))


class WorkspaceHolders(PermanentProcesses):
    """The workspace holders, one for each CUDA device with a pool, by the device's name."""

    role = "workspace"

    def __init__(self, context: SupervisorContext) -> None:
        self._sizes = context.config.workspace_byte_sizes
        super().__init__(context, [device for device in self._sizes if device != "cpu"])

    async def _spawn(self, name: str, title: str) -> Child:
        context = self._context
        start = WorkspaceStart(_device_index(name), self._sizes[name], context.run_dir, context.log)
        return await context.front_zygote.spawn(title, _WORKSPACE_ENTRY, encode_start(start))

    def _handle_message(self, process: PermanentProcess, child: Child, message: Any) -> None:
        match message:
            case WorkspaceAllocated(raw_handle, uuid):
                handle = CudaHandle(raw_handle, _device_index(process.name), uuid)
                byte_size = self._sizes[process.name]
                memory = Memory.on_device(secrets.randbits(62), byte_size, handle, child.pid)
                self._context.workspaces.on_allocated(process.name, memory)
                resolve_future(process.connect_future, None)

    def _handle_exit(self, process: PermanentProcess, child: Child, _: object) -> None:
        if not self._is_stopping:
            self._context.workspaces.holder_exited(process.name)
        super()._handle_exit(process, child, _)


def _device_index(device: str) -> int:
    return int(device.partition(":")[2])
