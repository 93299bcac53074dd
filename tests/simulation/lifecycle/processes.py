"""Simulated processes, zygotes, and a control socket with late or missing messages."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shmserve.common.tasks import resolve_future
from shmserve.errors import InvalidArgument, Unavailable
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.messages.publications import ModelPublished
from shmserve.ipc.messages.supervision import SchedulerStart, WorkerStart, decode_start
from shmserve.supervisor.models.instance import Instance
from shmserve.supervisor.processes.children import Child
from shmserve.supervisor.processes.control_socket import Address, SchedulerAddress, pid_of
from tests.simulation.lifecycle.audience import SimulatedAudience, draw_delay_ns
from tests.simulation.lifecycle.starts import Starts
from tests.simulation.world import MS, SECOND, US, World

if TYPE_CHECKING:
    from tests.simulation.lifecycle.executor import SimulatedExecutor
    from tests.simulation.lifecycle.versions import ObservedVersion

# The kernel assigns no pid above this number, so simulated pids match no real process.
_MAX_PID = 1 << 22
_FATES = ("loads",) * 16 + ("broken", "passing", "hangs", "dies")
_PERMANENT_FAILURE = m.LoadFailed(InvalidArgument.code, "it is broken")
_TEMPORARY_FAILURE = m.LoadFailed(Unavailable.code, "there is no memory")


class SimulatedChild(Child):
    """A process of a `version`, or a host of schedulers (None), which expects these pids."""

    def __init__(
        self, processes: SimulatedProcesses, title: str, version: ObservedVersion | None, fate: str
    ) -> None:
        pid = _MAX_PID + processes.world.new_pid()
        super().__init__(pid, title, processes.executor.loop.create_future())
        self.version, self.fate = version, fate
        self.scheduler_endpoint = (
            ""  # the endpoint of the scheduler to which the worker was offered
        )
        self.instance: Instance | None = None  # the instance that the worker was started for
        self.will_exit = self.is_spawned = False
        self.busy_until_ns = 0
        self.expected_pids: dict[tuple[int, int], int] = {}
        self._processes = processes

    def __repr__(self) -> str:
        return f"{self.title} ({self.pid - _MAX_PID})"

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        world = self._processes.world
        self.will_exit = True
        world.after(world.between(10 * US, 5 * MS), self._processes.end_process, self, "signal 9")


class SimulatedProcesses:
    """Fakes of the zygotes and the control socket, in virtual time.

    `live_processes` contains the processes that have not exited. Processes of `broken_versions`
    fail to load. `fates` determines the fate of workers, by model name or by instance.
    """

    def __init__(self, world: World, executor: SimulatedExecutor) -> None:
        self.world = world
        self.executor = executor
        self.audience: SimulatedAudience = executor.audience
        self.acknowledgements = executor.audience.acknowledgements
        self.live_processes: dict[int, SimulatedChild] = {}
        self.broken_versions: set[ObservedVersion] = set()
        self.fates: dict[str | Instance, str] = {}
        self._starts = Starts(executor.loop.time, executor.oracles.report_violation)
        self._handlers: dict[Address, Callable[[Any], None]] = {}
        self._undelivered_messages: dict[Address, list[Any]] = {}

    @property
    def workers(self) -> list[SimulatedChild]:
        return [child for child in self.live_processes.values() if child.version is not None]

    @property
    def hosts(self) -> list[SimulatedChild]:
        return [child for child in self.live_processes.values() if child.version is None]

    # --- the interface of a zygote

    async def spawn(self, title: str, entry: str, start: bytes, fds: Any = ()) -> Child:
        """Start a process, which connects later, and sometimes too late."""
        world, version, instance = self.world, None, None
        if "workers" in entry:
            version, instance = self.executor.instance_of(decode_start(WorkerStart, start))
            self._starts.instance_starts(instance)
        await self._pause()
        if world.chance(0.01):
            world.note("cannot be started", title)
            self._starts.instance_ended(instance)
            raise Unavailable("no process could be started")
        fate = self._draw_fate(version, instance)
        child = SimulatedChild(self, title, version, fate)
        child.instance = instance
        self.live_processes[child.pid] = child
        world.note("started", child, fate)
        if world.chance(0.02):
            world.after(draw_delay_ns(world), self.end_process, child, "signal 11")
        first = m.Started() if version is None else m.WorkerStarted(child.pid)
        world.after(draw_delay_ns(world), self._send_to_supervisor, child.pid, first)
        world.after(0, self._mark_spawned, child)
        return child

    def _draw_fate(self, version: ObservedVersion | None, instance: Instance | None) -> str:
        fate = self.world.random.choice(_FATES)
        if version is None or instance is None:
            return fate
        if version in self.broken_versions:
            return "broken"
        return self.fates.get(instance) or self.fates.pop(version.spec.name, fate)

    @staticmethod
    def _mark_spawned(child: SimulatedChild) -> None:
        child.is_spawned = True  # the process that asked for the child has received it by now

    async def _pause(self) -> None:
        future = self.executor.loop.create_future()
        self.world.after(draw_delay_ns(self.world), resolve_future, future, None)
        await future

    def end_process(self, child: SimulatedChild, reason: str) -> None:
        if not child.alive:
            return
        self.world.note("ends", child, reason)
        del self.live_processes[child.pid]
        self._starts.instance_ended(child.instance)
        for address in [handler for handler in self._handlers if pid_of(handler) == child.pid]:
            self.withdraw(address)
        child.exit_future.set_result(reason)

    # --- the interface of the control socket

    def register_peer(self, address: Address, role: str, handler: Callable[[Any], None]) -> None:
        """Register the handler of a process's messages, and deliver earlier messages to it."""
        if pid_of(address) in self.live_processes:
            self._handlers[address] = handler
            for message in self._undelivered_messages.pop(address, ()):
                handler(message)

    def withdraw(self, address: Address) -> None:
        self._handlers.pop(address, None)
        self.audience.remove_peer(address)

    def send(self, address: Address, message: Any) -> None:
        child = self.live_processes.get(pid_of(address))
        if child is None or address not in self._handlers:
            return
        if isinstance(message, ModelPublished):
            self.audience.deliver(address, message)
            return
        world = self.world
        if isinstance(message, m.Stop):
            child.will_exit |= address == child.pid
        child.busy_until_ns = max(child.busy_until_ns, world.now_ns) + draw_delay_ns(world) // 10
        world.after(
            child.busy_until_ns - world.now_ns, self._receive_message, child, address, message
        )

    def broadcast(self, message: Any, *roles: str) -> None:
        """Do nothing, because no process receives broadcasts."""

    def flush(self) -> None:
        """Do nothing, because messages are sent immediately."""

    def _send_to_supervisor(self, address: Address, message: Any) -> None:
        if pid_of(address) not in self.live_processes:
            return
        handler = self._handlers.get(address)
        if handler is not None:
            self.world.note("says", address, message)
            if isinstance(message, m.InstanceLoaded):
                self._starts.instance_ready(self.live_processes[pid_of(address)].instance)
            handler(message)
            if isinstance(message, m.InstanceRetired):
                self.world.after(SECOND, self._check_retired, message.process)
        elif address == pid_of(address):
            self._undelivered_messages.setdefault(address, []).append(message)

    def _check_retired(self, pid: int) -> None:
        child = self.live_processes.get(pid)
        if child is not None and not child.will_exit:
            self.executor.oracles.report_violation(f"5: {child} runs on, and has retired")

    def _receive_message(self, child: SimulatedChild, address: Address, message: Any) -> None:
        if not child.alive:
            return
        if isinstance(address, SchedulerAddress):
            self._receive_at_scheduler(child, address, message)
        elif isinstance(message, m.OpenScheduler):
            self._open_scheduler(child, decode_start(SchedulerStart, message.start))
        elif child.version is not None:
            self._receive_at_worker(child, message)
        elif isinstance(message, m.Stop):
            self.end_process(child, "exit status 0")

    def _receive_at_worker(self, child: SimulatedChild, message: Any) -> None:
        delay_ns = draw_delay_ns(self.world)
        match message:
            case m.Stop():
                if child.fate != "hangs":
                    self.end_process(child, "exit status 0")
            case m.CompleteConfig(config):
                if child.fate in ("loads", "dies") or self.world.chance(0.5):
                    completed = m.ConfigCompleted(dict(config.source))
                    self.world.after(delay_ns, self._send_to_supervisor, child.pid, completed)
                else:
                    self._fail(child)
            case m.Attach(endpoint):
                child.scheduler_endpoint = endpoint
            case m.LoadInstance():
                child.scheduler_endpoint = message.endpoint
                if self.world.chance(0.2):  # a delay longer than the start of a scheduler
                    delay_ns = self.world.between(300 * MS, 2 * SECOND)
                if child.fate in ("loads", "dies"):
                    self.world.after(
                        delay_ns, self._send_to_supervisor, child.pid, m.InstanceLoaded()
                    )
                else:
                    self._fail(child)
                if child.fate == "dies":
                    exit_delay_ns = delay_ns + draw_delay_ns(self.world)
                    self.world.after(exit_delay_ns, self.end_process, child, "signal 11")

    def _fail(self, child: SimulatedChild) -> None:
        if child.fate != "hangs":
            delay_ns = draw_delay_ns(self.world)
            failure = _PERMANENT_FAILURE if child.fate == "broken" else _TEMPORARY_FAILURE
            self.world.after(delay_ns, self._send_to_supervisor, child.pid, failure)
            self.world.after(
                delay_ns + draw_delay_ns(self.world), self.end_process, child, "exit status 1"
            )

    def _open_scheduler(self, child: SimulatedChild, start: SchedulerStart) -> None:
        address = SchedulerAddress(child.pid, start.number)
        if self.world.chance(0.03):
            self._send_to_supervisor(
                child.pid, m.SchedulerClosed(start.number, "there is no memory")
            )
            return
        version = self.executor.version_of(start.number)
        if version is not None and start.kind == "ensemble" and address in self._handlers:
            self.audience.connect_ensemble(address, version)
        self._send_to_supervisor(address, m.SchedulerReady(child.pid))

    def _receive_at_scheduler(
        self, child: SimulatedChild, address: SchedulerAddress, message: Any
    ) -> None:
        delay_ns = draw_delay_ns(self.world)
        match message:
            case m.Stop():
                self.audience.remove_peer(address)
                self._send_to_supervisor(child.pid, m.SchedulerClosed(address.number, ""))
            case m.Drain():
                delay_ns = self.world.between(1 * MS, 2 * SECOND)
                self.world.after(delay_ns, self._send_to_supervisor, address, m.Drained())
            case m.InstanceExpected(index, process):
                child.expected_pids[address.number, index] = process
            case m.RetireInstance(index):
                retired = m.InstanceRetired(child.expected_pids.get((address.number, index), 0))
                self.world.after(delay_ns, self._send_to_supervisor, address, retired)

    # --- events

    def kill_worker(self) -> None:
        if self.workers:
            child = self.world.random.choice(self.workers)
            self.world.fault("worker dies", child)
            self.end_process(child, "signal 11")

    def request_worker_kill(self) -> None:
        """Let the scheduler of a random worker request its end, some time after the overrun."""
        handlers = [handler for handler in self._handlers if isinstance(handler, SchedulerAddress)]
        if self.workers and handlers:
            child = self.world.random.choice(self.workers)
            number = child.version.scheduler.number if child.version is not None else 0
            for address in handlers:
                if address.number == number:
                    self.world.fault("worker overruns", child)
                    kill = m.KillInstance(child.pid, "it takes too long")
                    self.world.after(
                        draw_delay_ns(self.world), self._send_to_supervisor, address, kill
                    )

    def kill_host(self) -> None:
        if self.hosts:
            child = self.world.random.choice(self.hosts)
            self.world.fault("host dies", child)
            self.end_process(child, "signal 11")

    def break_version(self) -> None:
        """Make all further processes of a random version fail to load."""
        if self.executor.live_versions:
            version = self.world.random.choice(self.executor.live_versions)
            self.world.fault("breaks for good", version)
            self.broken_versions.add(version)
            for child in self.workers:
                if child.version is version:
                    self.end_process(child, "signal 11")
