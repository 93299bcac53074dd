"""Simulated versions of models: instances and a scheduler that start, die and come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from shmserve.errors import InvalidArgument, ShmserveError, Unavailable
from shmserve.supervisor.models.version.model_version import differs_in_instances_only
from shmserve.supervisor.models.version.spec import VersionSpec
from shmserve.supervisor.processes.scheduler_hosts import Group
from tests.simulation.world import MS, SECOND

if TYPE_CHECKING:
    from tests.simulation.lifecycle.executor import SimulatedExecutor

LOAD_LIMIT_NS = 3 * SECOND
_FATES = ("loads",) * 14 + ("broken", "broken", "passing", "hangs", "dies", "breaks")


def count_of(config: Any) -> int:
    """The instances that a configuration asks for."""
    return int(config.source["instance_group"][0]["count"])


class SimulatedUpdate:
    """A change of the number of instances; `end` is what its addition comes to, once."""

    def __init__(self, version: SimulatedVersion, spec: VersionSpec) -> None:
        self.spec = spec
        self.differs = count_of(spec.config) != count_of(version.config)
        self._version = version
        self._added = 0
        self._cancelled = False
        self._end: Callable[[ShmserveError | None], None] | None = None

    def add(self, over: Callable[[ShmserveError | None], None]) -> None:
        """`over` is told once, with the reason where nothing was added."""
        world = self._version.world
        self._end = over
        fate = world.random.choice(_FATES)
        errors = {"broken": InvalidArgument("broken"), "passing": Unavailable("no memory")}
        late = LOAD_LIMIT_NS if fate == "hangs" else self._version.lag()
        error = Unavailable("it hangs") if fate == "hangs" else errors.get(fate)
        world.after(late, self._over, error)

    def _over(self, error: ShmserveError | None) -> None:
        if self._end is None:
            return
        end, self._end = self._end, None
        if self._cancelled:
            error = Unavailable("given up")
        if error is None:
            self._added = max(0, count_of(self.spec.config) - len(self._version.up))
            self._version.up += [True] * self._added
        end(error)

    def commit(self) -> None:
        """What is not asked for retires."""
        version = self._version
        version.config = self.spec.config
        del version.up[count_of(self.spec.config) :]

    def revert(self) -> None:
        """What was added retires."""
        del self._version.up[len(self._version.up) - self._added :]
        self._added = 0

    def cancel(self) -> None:
        """It fails, if it is still adding."""
        if self._end is not None:
            self._cancelled = True
            self._version.world.after(self._version.lag(), self._over, Unavailable("given up"))


class SimulatedVersion:
    """As `ModelVersion`, without processes; the instances that are `up` take requests. `endpoints`
    are all that it has ever had; its `instances`, of whose kind it is, are itself."""

    def __init__(self, executor: SimulatedExecutor, spec: VersionSpec, group: Group) -> None:
        self.executor, self.world = executor, executor.world
        self.spec, self.config, self.group = spec, spec.config, group
        self.labels: dict[str, list[str]] = {}
        self.checks_ready = False
        self.load_seconds = 0.0
        self.loaded = self.serves = self.was_ready = False
        self.retiring = self.stopping = self.gone = False
        self.no_scheduler = self.drains = False
        self.shapes: list[Any] = []
        self.failure = ""
        self.up: list[bool] = []
        self.endpoint = ""
        self.endpoints: set[str] = set()
        self._starting = False
        self._fate = self.world.random.choice(_FATES)

    def __repr__(self) -> str:
        return f"{self.spec.name}:{self.spec.version}@{self.endpoint}"

    # --- as ModelVersion

    @property
    def instances(self) -> SimulatedVersion:
        """Its instances' side."""
        return self

    @property
    def problem(self) -> str:
        """As `ModelVersion.problem`."""
        if self.spec.steps:
            registry = self.executor.registry
            return next(filter(None, map(registry.failure_now, self.spec.steps)), "")
        return self.failure

    @property
    def ready(self) -> bool:
        """As `ModelVersion.ready`."""
        ready_now = self.executor.registry.ready_now
        any_up = all(map(ready_now, self.spec.steps)) if self.spec.steps else any(self.up)
        ready = self.loaded and self.serves and any_up
        self.was_ready |= ready
        return ready

    @property
    def hopeless(self) -> str:
        """As `ModelVersion.hopeless`."""
        if self.retiring or self.stopping:
            return self.problem or "the model is unloaded"
        return self.problem or ("no scheduler could be started" if self.no_scheduler else "")

    def uses(self, name: str) -> bool:
        """As `ModelVersion.uses`."""
        return any(step.name == name for step in self.spec.steps)

    def update_to(self, spec: VersionSpec) -> SimulatedUpdate | None:
        """As `ModelVersion.update_to`."""
        if self.spec.steps or self.failure or not differs_in_instances_only(self.spec, spec):
            return None
        return SimulatedUpdate(self, spec)

    def commit(self, update: SimulatedUpdate) -> None:
        """As `ModelVersion.commit`."""
        update.commit()
        self.spec = update.spec

    def hand_counts_to(self, successor: SimulatedVersion | None) -> None:
        """It has counted nothing."""

    def changed(self) -> None:
        """As `ModelVersion.changed`."""
        self.world.after(0, self._look)
        self.executor.lifecycle.changed(cast("Any", self))

    # --- what happens

    def lag(self) -> int:
        """Up to 300 ms."""
        return self.executor.lag()

    def start(self) -> None:
        """It is loaded as is drawn, and `executor.started` once it is ready, or cannot be."""
        self._starting = True
        try:
            self.spec.complete({})
            self.shapes = self.steps_known()
        except ShmserveError as error:
            return self.world.after(self.lag(), self._failed, error)
        if self._fate == "hangs":
            return self.world.after(LOAD_LIMIT_NS, self._failed, Unavailable("it hangs"))
        if self._fate in ("broken", "passing"):
            kind = InvalidArgument if self._fate == "broken" else Unavailable
            return self.world.after(self.lag(), self._failed, kind("it does not load"))
        return self.world.after(self.lag(), self._load)

    def steps_known(self) -> list[Any]:
        """The configurations of its steps' models, as they are published."""
        found = map(self.executor.registry.published_now, self.spec.steps)
        return [None if news is None else news.config.immutable_config for news in found]

    def _load(self) -> None:
        if self.stopping:
            return
        self.up = [] if self.spec.steps else [True] * count_of(self.spec.config)
        self.loaded = True
        self.scheduler_up()
        if self._fate == "dies" and self.up:
            self.world.after(self.lag(), self.worker_dies)
        if self._fate == "breaks" and self.up:
            self.world.after(self.lag(), self.breaks)

    def _look(self) -> None:
        if self._starting and self.loaded:
            if self.ready:
                self._starting = False
                self.executor.started(self, None)
            elif self.hopeless:
                self._failed(Unavailable(self.hopeless))

    def _failed(self, error: ShmserveError) -> None:
        if self._starting:
            self._starting = False
            self.end()
            self.world.after(self.lag(), self.executor.started, self, error)

    def scheduler_up(self) -> None:
        """Its first scheduler, or another, is there."""
        if self.stopping:
            return
        self.move_to(self.executor.new_endpoint(self))
        self.serves, self.no_scheduler = True, False
        self.changed()

    def move_to(self, endpoint: str) -> None:
        """Requests go there."""
        self.executor.audience.left(self.endpoint)
        self.endpoint = endpoint
        self.endpoints.add(endpoint)
        if self.spec.steps:
            self.executor.audience.enter_ensemble(self)

    def scheduler_dies(self) -> None:
        """Another takes over in a while."""
        if not self.serves or self.stopping:
            return
        self.world.fault("scheduler dies", self)
        self.serves = False
        self.executor.audience.left(self.endpoint)
        self.changed()
        if self.world.chance(0.2):
            self.world.after(self.lag(), self._no_scheduler)
        self.world.after(self.lag() + 20 * MS, self.scheduler_up)

    def _no_scheduler(self) -> None:
        if not (self.serves or self.stopping):
            self.no_scheduler = True
            self.changed()

    def worker_dies(self) -> None:
        """One of its instances starts again in a while."""
        if self.stopping or not any(self.up):
            return
        self.world.fault("worker dies", self)
        self.up[self.up.index(True)] = False
        self.changed()
        self.world.after(self.lag(), self._worker_up)

    def _worker_up(self) -> None:
        if not (self.stopping or self.failure) and False in self.up:
            self.up[self.up.index(False)] = True
            self.changed()

    def breaks(self) -> None:
        """None of its instances starts again."""
        if self.stopping or not self.up:
            return
        self.world.fault("breaks for good", self)
        self.up = [False] * len(self.up)
        self.failure = "all of its processes have ended"
        self.changed()

    def end(self) -> None:
        """Its processes end, and nothing is said of it."""
        self.retiring = self.stopping = True
        self.serves = False
        self.executor.audience.left(self.endpoint)

    def killed(self) -> None:
        """Its processes end; a start of it fails, and says so first."""
        starting, self._starting = self._starting, False
        self.end()
        if starting:
            error = Unavailable("the model is unloaded")
            self.world.after(self.lag(), self.executor.started, self, error)
            self.world.after(301 * MS, self.executor.ended, self)
        else:
            self.world.after(self.lag() + 301 * MS, self.executor.ended, self)

    def drained(self) -> None:
        """It has finished what it had."""
        self.end()
        self.world.after(self.lag(), self.executor.ended, self)
