"""A run of one seed: orders, deaths and gateways, then an idle phase and the final checks."""

from collections.abc import Callable
from functools import partial
from typing import Any

from shmserve.supervisor.models.instance import Instance
from tests.simulation.lifecycle.executor import SimulatedExecutor
from tests.simulation.lifecycle.loop import SimulatedLoop
from tests.simulation.lifecycle.repository import ENSEMBLES, MAX_INSTANCES
from tests.simulation.lifecycle.versions import ObservedVersion
from tests.simulation.world import MS, SECOND, TRACED_EVENTS, World

_EVENTS_NS = 6 * SECOND
_LATE_DEATHS_NS = 38 * SECOND, 100 * SECOND
_IDLE_PHASE_NS = 300 * SECOND


class LifecycleRun:
    """A run of one seed with this number of requested orders."""

    def __init__(self, seed: int, orders: int = 40, traced: int = TRACED_EVENTS) -> None:
        self.seed = seed
        self.world = World(seed, traced)
        self.executor: SimulatedExecutor
        self.orders = orders
        self._random = self.world.random

    @property
    def request_count(self) -> int:
        """Return the number of orders, including orders caused by others."""
        return len(self.executor.oracles.orders)

    def run(self) -> None:
        """Run the seed; raise Violation if a rule was broken."""
        loop = SimulatedLoop(self.world)
        with loop.running():
            self.executor = SimulatedExecutor(self.world, loop, shares_hosts=self.seed % 2 == 1)
            self._run()

    def _run(self) -> None:
        world = self.world
        for _ in range(self._random.randint(0, 3)):
            self.executor.audience.connect_gateway()
        if world.chance(0.5):
            self._load_all()
        self._draw(self._give_order, self.orders)
        self._draw(self.executor.repository.change, self._random.randint(0, 20))
        self._draw(self._kill_process, self._random.randint(0, 20))
        self._draw(self._change_gateways, self._random.randint(0, 8))
        self._draw(self.executor.resize, self._random.randint(0, 20))
        self._draw(self._impede_update, self._random.randint(0, 8))
        for _ in range(self._random.randint(0, 4)):  # late deaths: the processes have run for long
            world.after(world.between(*_LATE_DEATHS_NS), self._kill_process)
        world.run(world.now_ns + _EVENTS_NS, self._check_when_idle)
        world.run(world.now_ns + _IDLE_PHASE_NS, self._check_when_idle)
        self._check_when_idle()
        self.executor.oracles.check_idle_state()

    def _draw(self, actions: Callable[[], None], count: int) -> None:
        bursts = [self._random.randrange(_EVENTS_NS) for _ in range(6)]
        for _ in range(count):
            at_ns = self._random.choice(bursts) + self.world.between(MS, 500 * MS)
            self.world.after(at_ns, actions)

    def _check_when_idle(self) -> bool:
        if self.world.busy:
            return False
        self.executor.oracles.check()
        if self.world.chance(0.1):
            self.executor.oracles.check_idempotence()
        return False

    def _load_all(self) -> None:
        executor = self.executor
        executor.lifecycle.expect(executor.repository.steps)
        for name in executor.repository.steps:
            executor.lifecycle.load(name)

    def _give_order(self) -> None:
        executor, world = self.executor, self.world
        names = [*executor.repository.steps, *ENSEMBLES]
        name = "nobody" if world.chance(0.02) else self._random.choice(names)
        draw = self._random.random()
        if draw < 0.4:
            if name in executor.repository.steps and world.chance(0.4):
                executor.repository.change_instance_count(name)
            executor.lifecycle.load(name)
        elif draw < 0.65:
            executor.lifecycle.load(name, executor.repository.draw_source(name))
        elif draw < 0.85:
            executor.lifecycle.unload(name)
        else:
            self._unload_dependents(name)

    def _unload_dependents(self, name: str) -> None:
        loaded_steps = self.executor.registry.loaded_for(name)
        order = self.executor.lifecycle.unload(name)
        for step in loaded_steps:
            call = partial(self._unload_dependents, step)
            if order.is_answered:
                call()
            else:
                self.executor.calls_after_answer.setdefault(order, []).append(call)

    def _impede_update(self) -> None:
        """Change the instances of a model while processes restart, or while an added one hangs."""
        executor, world = self.executor, self.world
        idle_models = {m.name for m in executor.registry.models.values() if not m.orders}
        versions = [
            version
            for version in executor.live_versions
            if version.ready and not version.spec.steps and version.spec.name in idle_models
        ]
        if not versions:
            return
        version = self._random.choice(versions)
        name, instances = version.spec.name, version.all_instances[:]
        impediment = self._random.choice(("hang", "failure", "restart", "scheduler"))
        if impediment == "restart" and len(instances) > 1:
            self._end_workers(instances[-1:], "dies")
            delay_ns = world.between(50 * MS, 2 * SECOND)
            world.after(delay_ns, self._resize, name, len(instances) - 1)
        elif impediment == "scheduler":
            self._resize(name, min(len(instances) + 1, MAX_INSTANCES))
            world.after(world.between(50 * MS, SECOND), self._end_scheduler, version)
        elif impediment != "restart":
            executor.processes.fates[name] = "hangs"
            self._resize(name, min(len(instances) + 1, MAX_INSTANCES))
            if impediment == "failure":
                self._end_workers(instances, "broken")
            else:
                world.after(world.between(MS, 2 * SECOND), self._unload, name)

    def _end_workers(self, instances: list[Instance], fate: str) -> None:
        """End the workers of instances; `fate` is what happens to their later workers."""
        processes = self.executor.processes
        for instance in instances:
            processes.fates[instance] = fate
            child: Any = instance.child
            if child is not None:
                processes.end_process(child, "signal 11")

    def _end_scheduler(self, version: ObservedVersion) -> None:
        if version.scheduler.serves:
            child: Any = version.scheduler.current.child
            self.executor.processes.end_process(child, "signal 11")

    def _unload(self, name: str) -> None:
        self.executor.lifecycle.unload(name)

    def _resize(self, name: str, count: int) -> None:
        self.executor.repository.instance_counts[name] = count
        self.executor.lifecycle.load(name)

    def _kill_process(self) -> None:
        processes = self.executor.processes
        actions = [processes.kill_worker] * 2
        actions += [processes.request_worker_kill, processes.kill_host, processes.break_version]
        self._random.choice(actions)()

    def _change_gateways(self) -> None:
        if self.world.chance(0.5):
            self.executor.audience.connect_gateway()
        else:
            self.executor.audience.disconnect_gateway()
