"""Processes that a test makes up: what the supervisor hears of them comes in the order that the
test wants.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from shmserve.common.trace_settings import TraceSettings
from shmserve.config.command_line import parse
from shmserve.config.server import from_flags
from shmserve.ipc.endpoints import Capabilities
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.supervision import SchedulerStart, decode_start
from shmserve.ipc.model_spec import ModelSpec
from shmserve.logs import LogSettings
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.events.feed import EventPublisher
from shmserve.supervisor.models.instances import VersionSpec
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.processes.control_socket import (
    Acknowledgements,
    Address,
    LogControl,
    SchedulerAddress,
    TraceControl,
    pid_of,
)
from shmserve.supervisor.processes.scheduler_hosts import Group, SchedulerHosts
from shmserve.supervisor.processes.table import Child
from shmserve.supervisor.resources.rate_limiter import CacheShares, Tickets
from shmserve.supervisor.resources.workspaces import Workspaces

CONFIG = {
    "name": "m",
    "backend": "python",
    "instance_group": [{"name": "m_0", "kind": "KIND_CPU", "count": 1}],
}
ALONE = Group("scheduler m", frozenset({"m"}))
STACKS_FD = 7  # of every worker
# The kernel gives no process a higher number: none that there is can be meant.
_HIGHEST_PID = 1 << 22


def plan(version: str = "1") -> VersionSpec:
    """A version of the model "m"."""
    folder = Path("/tmp")
    return VersionSpec("m", version, folder, folder, ModelSpec.of(CONFIG))


class ToldProcesses:
    """The processes of a server with one gateway; what that is told, and the workers, is kept."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.workers: list[Any] = []

    def pids(self, *roles: str) -> list[int]:
        """Those with these roles."""
        return [7] if roles == ("gateway",) else []

    def broadcast(self, message: Any, *roles: str) -> None:
        """To the workers, or to the gateway."""
        (role,) = roles
        {"worker": self.workers, "gateway": self.told}[role].append(message)

    async def publish(self, make: Callable[[int], Any], *roles: str) -> None:
        """To the gateway, which knows it at once."""
        assert roles == ("gateway",)
        self.told.append(make(1))


class Made(Child):
    """A process that dies when it is killed."""

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        """It ends, and that is known at once."""
        if self.alive:
            self.exited.set_result(f"signal {int(signal_number)}")


class Processes:
    """A zygote, its processes and the supervisor's socket to them: each says what is expected of
    it, unless `at_start` has something else happen to it, or `hanging`: then it loads until
    `load_held`, or it is not `draining`: then it finishes nothing.
    `flags` are the server's.
    """

    def __init__(self, *flags: str) -> None:
        self._pids = itertools.count(_HIGHEST_PID + 1)
        self.started: list[Made] = []
        self.at_start: Callable[[Made], None] = lambda child: None
        self.hanging = False
        self.draining = True
        self._held: list[Address] = []
        self.acknowledgements = Acknowledgements()
        config = from_flags(parse(["--model-repository=/tmp", *flags]), {})
        fake: Any = self
        folder, capabilities = Path("/tmp"), Capabilities(bytes(32))
        self.context = SupervisorContext(
            config=config,
            run_dir=folder,
            control=fake,
            front_zygote=fake,
            worker_zygote=fake,
            capabilities=capabilities,
            logging=LogControl(fake, LogSettings()),
            tracing=TraceControl(fake, TraceSettings()),
            local_clients=MagicMock(**{"numbers.return_value": []}),
            events=EventPublisher(),
            cache_shares=CacheShares(0),
            tickets=Tickets(False, {}, lambda pid, message: None),
            workspaces=Workspaces(config.workspace_byte_sizes, MagicMock()),
            hosts=SchedulerHosts(fake, fake, folder, LogControl(fake, LogSettings())),
        )
        self._handlers: dict[Address, Callable[[Any], None]] = {}

    def version(self, spec: VersionSpec, group: Group = ALONE) -> ModelVersion:
        """Return a version without processes, whose model completes nothing."""
        nothing: Any = MagicMock(return_value=None)
        complete = lambda spec, completed: spec.config  # noqa: E731
        return ModelVersion(self.context, spec, group, nothing, nothing, complete)

    async def spawn(self, title: str, entry: str, start: bytes, fds: Any = ()) -> Child:
        """As a zygote does."""
        loop = asyncio.get_running_loop()
        child = Made(next(self._pids), title, loop.create_future())
        self.started.append(child)
        hosts = "scheduler" in entry
        first = m.Started() if hosts else m.WorkerStarted(child.pid, STACKS_FD)
        loop.call_soon(self._dispatch, child.pid, first)
        loop.call_soon(self.at_start, child)
        return child

    def send(self, address: Address, message: Any) -> None:
        """As the supervisor's socket does."""
        answer: Any = None
        pid = pid_of(address)
        if isinstance(message, m.OpenScheduler):
            address = SchedulerAddress(pid, decode_start(SchedulerStart, message.start).number)
            answer = m.SchedulerReady(pid)
        elif isinstance(message, m.Stop) and isinstance(address, SchedulerAddress):
            answer, address = m.SchedulerClosed(address.number, ""), pid
        elif isinstance(message, m.CompleteConfig):
            answer = m.ConfigCompleted(message.config.source)
        elif isinstance(message, m.LoadInstance):
            answer = None if self.hanging else m.InstanceLoaded(0.0)
            self._held += [address] if self.hanging else []
        elif isinstance(message, m.Drain) and self.draining:
            answer = m.Drained()
        if answer is not None:
            asyncio.get_running_loop().call_soon(self._dispatch, address, answer)
        elif isinstance(message, m.Stop):
            for child in self.started:
                if child.pid == pid:
                    child.kill(signal.SIGTERM)

    def load_held(self) -> None:
        """Those that hang have loaded, and no other hangs."""
        self.hanging = False
        held, self._held = self._held, []
        for address in held:
            self._dispatch(address, m.InstanceLoaded(0.0))

    def enrol(self, address: Address, role: str, handler: Callable[[Any], None]) -> None:
        """It has said nothing yet."""
        self._handlers[address] = handler

    def withdraw(self, address: Address) -> None:
        """Nothing more is said."""
        self._handlers.pop(address, None)

    def _dispatch(self, address: Address, message: Any) -> None:
        handler = self._handlers.get(address)
        if handler is not None:
            handler(message)

    def connected(self, pid: int) -> bool:
        """Nobody says anything on this socket."""
        return False

    def broadcast(self, message: Any, *roles: str) -> None:
        """Nobody is told."""

    def flush(self) -> None:
        """Nothing is queued."""

    def announce(self, make: Callable[[int], Any], *roles: str, beside: Any = ()) -> int:
        """It is known everywhere."""
        return self.acknowledgements.begin(())

    async def end(self) -> None:
        """Nothing goes on."""
        for task in list(self.context.tasks):
            task.cancel()
        await asyncio.sleep(0)


async def turns(count: int = 20) -> None:
    """Let whoever can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)
