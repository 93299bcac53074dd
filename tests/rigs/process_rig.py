"""Simulated processes whose messages reach the supervisor in an order that a test chooses."""

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
from shmserve.supervisor.events import EventPublisher
from shmserve.supervisor.models.load_planner import VersionSpec
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.scheduler_process import Group, SchedulerHosts
from shmserve.supervisor.processes.children import Child
from shmserve.supervisor.processes.control_socket import (
    Acknowledgements,
    Address,
    LogControl,
    SchedulerAddress,
    TraceControl,
    pid_of,
)
from shmserve.supervisor.resources.rate_limiter import CacheShares, Tickets
from shmserve.supervisor.resources.workspaces import Workspaces

CONFIG: dict[str, Any] = {
    "name": "m",
    "backend": "python",
    "instance_group": [{"name": "m_0", "kind": "KIND_CPU", "count": 1}],
}
SINGLE_MODEL_GROUP = Group("scheduler m", frozenset({"m"}))
STACKS_FD = 7  # the descriptor for stacks in every worker
# The kernel assigns no higher pid, so no process can have it.
_MAX_PID = 1 << 22


def plan(version: str = "1", instances: int = 1) -> VersionSpec:
    folder = Path("/tmp")
    (group,) = CONFIG["instance_group"]
    config = {**CONFIG, "instance_group": [{**group, "count": instances}]}
    return VersionSpec("m", version, folder, ModelSpec.of(config))


class RecordedProcesses:
    """The processes of a server with one gateway. Messages to it and to workers are recorded."""

    def __init__(self) -> None:
        self.published: list[Any] = []
        self.workers: list[Any] = []

    def pids(self, *roles: str) -> list[int]:
        return [7] if roles == ("gateway",) else []

    def broadcast(self, message: Any, *roles: str) -> None:
        """Record a message to the workers or to the gateway."""
        (role,) = roles
        {"worker": self.workers, "gateway": self.published}[role].append(message)

    async def publish(self, make: Callable[[int], Any], *roles: str) -> None:
        """Record a message to the gateway, which acknowledges it at once."""
        assert roles == ("gateway",)
        self.published.append(make(1))


class FakeChild(Child):
    """A process that exits when it is killed."""

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        if self.alive:
            self.exit_future.set_result(f"signal {int(signal_number)}")


class Processes:
    """A zygote, its processes, and the supervisor's socket to them.

    Attributes:
        on_start: Called with each process that starts.
        loads_hang: Whether loads do not finish until `finish_hanging_loads`.
        drains_finish: Whether schedulers finish their requests.
    """

    def __init__(self, *flags: str) -> None:
        self._pids = itertools.count(_MAX_PID + 1)
        self.children: list[FakeChild] = []
        self.on_start: Callable[[FakeChild], None] = lambda child: None
        self.loads_hang = False
        self.drains_finish = True
        self._hanging_loads: list[Address] = []
        self.acknowledgements = Acknowledgements()
        config = from_flags(parse(["--model-repository=/tmp", *flags]), {})
        fake: Any = self
        self.context = SupervisorContext(
            config=config,
            run_dir=Path("/tmp"),
            control=fake,
            front_zygote=fake,
            worker_zygote=fake,
            capabilities=Capabilities(bytes(32)),
            logging=LogControl(fake, LogSettings()),
            tracing=TraceControl(fake, TraceSettings()),
            local_clients=MagicMock(**{"numbers.return_value": []}),
            events=EventPublisher(),
            cache_shares=CacheShares(0),
            tickets=Tickets(False, {}, lambda pid, message: None),
            workspaces=Workspaces(config.workspace_byte_sizes, MagicMock()),
        )
        self._hosts = SchedulerHosts(self.context)
        self._handlers: dict[Address, Callable[[Any], None]] = {}
        self.serve_requests = MagicMock()

    def version(self, spec: VersionSpec, group: Group = SINGLE_MODEL_GROUP) -> ModelVersion:
        """Return a version without processes whose model completes no configuration."""
        no_call: Any = MagicMock(return_value=None)
        complete = lambda spec, completed: spec.config  # noqa: E731
        return ModelVersion(self.context, spec, group, self._hosts, no_call, no_call, complete)

    async def spawn(self, title: str, entry: str, start: bytes, fds: Any = ()) -> Child:
        loop = asyncio.get_running_loop()
        child = FakeChild(next(self._pids), title, loop.create_future())
        self.children.append(child)
        is_scheduler_host = "scheduler" in entry
        start_message = m.Started() if is_scheduler_host else m.WorkerStarted(child.pid, STACKS_FD)
        loop.call_soon(self._dispatch, child.pid, start_message)
        loop.call_soon(self.on_start, child)
        return child

    def send(self, address: Address, message: Any) -> None:
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
            answer = None if self.loads_hang else m.InstanceLoaded()
            self._hanging_loads += [address] if self.loads_hang else []
        elif isinstance(message, m.Drain) and self.drains_finish:
            answer = m.Drained()
        if answer is not None:
            asyncio.get_running_loop().call_soon(self._dispatch, address, answer)
        elif isinstance(message, m.Stop):
            for child in self.children:
                if child.pid == pid:
                    child.kill(signal.SIGTERM)

    def finish_hanging_loads(self) -> None:
        """Report the hanging loads as finished; later loads do not hang."""
        self.loads_hang = False
        hanging_addresses, self._hanging_loads = self._hanging_loads, []
        for address in hanging_addresses:
            self._dispatch(address, m.InstanceLoaded())

    def register_peer(self, address: Address, role: str, handler: Callable[[Any], None]) -> None:
        self._handlers[address] = handler

    def withdraw(self, address: Address) -> None:
        self._handlers.pop(address, None)

    def _dispatch(self, address: Address, message: Any) -> None:
        handler = self._handlers.get(address)
        if handler is not None:
            handler(message)

    def connected(self, pid: int) -> bool:
        return False

    def broadcast(self, message: Any, *roles: str) -> None:
        pass

    def flush(self) -> None:
        pass

    def announce(self, make: Callable[[int], Any], *roles: str, extra_peers: Any = ()) -> int:
        return self.acknowledgements.begin(())

    async def end(self) -> None:
        for task in list(self.context.tasks):
            task.cancel()
        await asyncio.sleep(0)


async def run_loop_turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
