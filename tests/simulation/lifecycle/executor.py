"""The executor of the lifecycle's decisions, with simulated files, processes and clients."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from shmserve.common.trace_settings import TraceSettings
from shmserve.config.command_line import parse
from shmserve.config.server import from_flags
from shmserve.errors import ShmserveError
from shmserve.ipc.endpoints import Capabilities
from shmserve.ipc.messages.supervision import WorkerStart
from shmserve.logs import LogSettings
from shmserve.supervisor.context import SupervisorContext
from shmserve.supervisor.events import EventPublisher
from shmserve.supervisor.models.instance import Instance, bounds_of
from shmserve.supervisor.models.load_planner import VersionSpec
from shmserve.supervisor.models.manager import LifecycleExecutor, ModelPublisher
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.orders import ModelEntry, Order
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.models.scheduler_process import Group
from shmserve.supervisor.processes.control_socket import LogControl, TraceControl
from shmserve.supervisor.resources.rate_limiter import CacheShares, Tickets
from shmserve.supervisor.resources.workspaces import Workspaces
from tests.simulation.lifecycle.audience import SimulatedAudience, draw_delay_ns
from tests.simulation.lifecycle.loop import SimulatedLoop
from tests.simulation.lifecycle.oracles import LifecycleOracles, RecordedLifecycle
from tests.simulation.lifecycle.processes import SimulatedProcesses
from tests.simulation.lifecycle.repository import DrawnRepository
from tests.simulation.lifecycle.versions import ObservedVersion
from tests.simulation.world import World

_FOLDER = Path("/simulated")
_LOAD_LIMITS_S = 3, 60  # below and above the time after which a hang is reported
_CONFIGS = {
    (scheduling, limit_s): from_flags(
        parse(
            [
                "--model-repository=/",
                f"--load-timeout-secs={limit_s}",
                f"--ensemble-scheduling={scheduling}",
            ]
        ),
        {},
    )
    for scheduling in ("hosted", "separate")
    for limit_s in _LOAD_LIMITS_S
}


class NoLocalClients:
    """A fake of the local clients: there are none."""

    def numbers(self) -> list[int]:
        return []

    def broadcast(self, message: Any) -> None:
        pass


def do_nothing(*_: Any) -> None:
    """Do nothing."""


class SimulatedExecutor(LifecycleExecutor):
    """A `LifecycleExecutor` in virtual time; `live_versions` may have a process."""

    def __init__(self, world: World, loop: SimulatedLoop, shares_hosts: bool) -> None:
        self.world = world
        self.oracles = LifecycleOracles(self)
        self.loop = loop
        loop.report_violation = self.oracles.report_violation
        self.repository = DrawnRepository(world, self.oracles)
        self.registry = ModelRegistry()
        self.live_versions: list[ObservedVersion] = []
        self.updating_orders: set[Order] = set()
        self.actions = 0
        self.calls_after_answer: dict[Order, list[Callable[[], None]]] = {}
        self.audience = SimulatedAudience(world, self)
        self.processes = SimulatedProcesses(world, self)
        planner: Any = self.repository
        self.publisher = ModelPublisher()
        parts = (self._context(shares_hosts), planner, self.registry, self.publisher)
        super().__init__(*parts, [])
        self._audience = self.audience
        self.lifecycle = RecordedLifecycle(self.registry, self, shares_hosts, self.oracles)

    def _context(self, shares_hosts: bool) -> SupervisorContext:
        fake: Any = self.processes
        programs: Any = NoLocalClients()
        limit_s = self.world.random.choice(_LOAD_LIMITS_S)
        config = _CONFIGS["hosted" if shares_hosts else "separate", limit_s]
        return SupervisorContext(
            config=config,
            run_dir=_FOLDER,
            control=fake,
            front_zygote=fake,
            worker_zygote=fake,
            capabilities=Capabilities(bytes(32)),
            logging=LogControl(fake, LogSettings()),
            tracing=TraceControl(fake, TraceSettings()),
            local_clients=programs,
            events=EventPublisher(),
            cache_shares=CacheShares(0),
            tickets=Tickets(False, {}, do_nothing),
            workspaces=Workspaces(config.workspace_byte_sizes, do_nothing),
            scheduler_ids=itertools.count(1),
        )

    def resize(self) -> None:
        """Add or remove an instance of a random model, as the autoscaler does."""
        bounded = [v for v in self.live_versions if bounds_of(v.config) is not None]
        if not bounded:
            return
        v = self.world.random.choice(bounded)
        bounds, step = bounds_of(v.config), self.world.random.choice((1, -1))
        total, model = v.instances.count + step, self.registry.model(v.spec.name)
        serves = model.serving.get(v.spec.version) is v and not model.orders
        serves = serves and v.ready and v.instances.all_serve
        if serves and bounds is not None and bounds.minimum <= total <= bounds.maximum:
            self._record_action("resize", v, total)
            self.context.background(self._resize(v, total))

    async def _resize(self, version: ObservedVersion, total: int) -> None:
        try:
            await version.instances.resize(total)
        except ShmserveError as error:
            self.world.note("not resized", version, error)

    def version_of(self, number: int) -> ObservedVersion | None:
        """Return the version whose last scheduler has this number, if it exists."""
        for version in self.live_versions:
            last = version.scheduler._latest
            if last is not None and last.address.number == number:
                return version
        return None

    def instance_of(self, start: WorkerStart) -> tuple[ObservedVersion, Instance]:
        version = next(
            live_version
            for live_version in self.live_versions
            if live_version.scheduler.number == start.number
        )
        return version, next(i for i in version.all_instances if i.index == start.index)

    def _record_action(self, *words: Any) -> None:
        self.actions += 1
        self.world.note(*words)

    # --- the interface of LifecycleExecutor

    def read(self, order: Order) -> None:
        self._record_action("read", self.oracles.title(order))
        self.oracles.load_begun(order)
        self.world.after(draw_delay_ns(self.world), self._read, order)

    def _read(self, order: Order) -> None:
        plan = self.repository.plan_of(order.model.name, order.source)
        self.world.after(draw_delay_ns(self.world), self.lifecycle.load_planned, order, plan)

    def create(self, spec: VersionSpec, group: Group) -> ModelVersion:
        events = self.lifecycle.version_changed, self._finalise_config
        version = ObservedVersion(
            self.context, spec, group, self._hosts, self.registry.find_published, *events
        )
        self.live_versions.append(version)
        return version

    def start(self, version: ModelVersion) -> None:
        self._record_action("start", version)
        super().start(version)

    def update(self, order: Order) -> None:
        self._record_action("update", self.oracles.title(order))
        self.updating_orders.add(order)
        super().update(order)

    def move(self, order: Order, group: Group) -> None:
        self._record_action("move", order.model.name, sorted(group.names))
        super().move(order, group)

    def remove(self, model: ModelEntry) -> None:
        super().remove(model)
        self.audience.model_removed(model.name)

    def kill(self, version: ModelVersion) -> None:
        self._record_action("kill", version)
        self.oracles.version_killed(cast("ObservedVersion", version))
        super().kill(version)

    def retire(self, version: ModelVersion) -> None:
        self._record_action("retire", version)
        self.oracles.version_drained(cast("ObservedVersion", version))
        super().retire(version)

    def answer(self, order: Order) -> None:
        self._record_action("answer", self.oracles.title(order), order.error)
        self.oracles.order_answered(order)
        for call in self.calls_after_answer.pop(order, ()):
            self.world.after(0, call)
        super().answer(order)
