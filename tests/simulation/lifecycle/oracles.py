"""The rules of the lifecycle's core. Each reported violation begins with the number of its rule.

1   every order is answered exactly once
2   a repeated query changes nothing, and the loop of decisions ends
3   no process exits while a peer would still send requests to it
4   ensembles end before their steps
5   nothing is left over once the system is idle
6   a version that serves was ready before
7   a process belongs to exactly one instance
8   the last successful order for a name determines its state
9   no publication repeats the previous one
10  a serving version is withdrawn only by an order
11  restarts back off, and end after five failures
12  a version is published as ready exactly if it could serve
13  unchanged models keep their processes
14  the folder of an override is removed exactly once
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shmserve.errors import ShmserveError
from shmserve.ipc.messages.publications import ModelPublished
from shmserve.supervisor.models.instances import InstanceState, VersionSpec
from shmserve.supervisor.models.lifecycle import Lifecycle
from shmserve.supervisor.models.model_version import ModelVersion, differ_in_instances_only
from shmserve.supervisor.models.orders import ModelEntry, Order, OrderKind, OrderPhase
from shmserve.supervisor.models.registry import ModelRegistry, ModelState, ModelSummary, statuses
from tests.simulation.lifecycle.versions import ObservedVersion, counts_of
from tests.simulation.world import Violation

if TYPE_CHECKING:
    from tests.simulation.lifecycle.executor import SimulatedExecutor

_MAX_CHECKS = 1000  # maximum number of checks at one moment


class RecordedLifecycle(Lifecycle):
    """The core with a record of its orders, and of the number of decisions per event."""

    def __init__(
        self, registry: ModelRegistry, executor: Any, hosted: bool, oracles: LifecycleOracles
    ) -> None:
        super().__init__(registry, executor, hosted)
        self._oracles = oracles

    def _add(self, order: Order) -> Order:
        self._oracles.entered(order)
        return super()._add(order)

    def _advance_all(self) -> None:
        self._oracles.looked()
        super()._advance_all()

    def _finish(self, order: Order, error: ShmserveError | None = None) -> None:
        fresh, dropping = not order.is_finished, order.phase is OrderPhase.DROPPING
        super()._finish(order, error)
        if fresh and error is None:
            self._oracles.succeeded(order)
        elif dropping:
            self._oracles.dropped(order)

    def updated(self, order: Order, errors: Mapping[str, BaseException]) -> None:
        self._oracles.updated(order)
        super().updated(order, errors)

    def ended(self, version: ModelVersion) -> None:
        self._oracles.ended(cast("ObservedVersion", version))
        super().ended(version)


class LifecycleOracles:
    """The state observed so far.

    A violation is stored, because the core would catch an exception; `check` raises it after the
    event.
    """

    def __init__(self, executor: SimulatedExecutor) -> None:
        self._executor = executor
        self.orders: list[Order] = []
        self._answers: Counter[Order] = Counter()
        self._problems: list[str] = []
        self._looks = 0
        self._took_over: set[ObservedVersion] = set()
        self._last: dict[str, Order] = {}  # the last order of each model that succeeded
        self._served: dict[str, dict[str, tuple[ObservedVersion, VersionSpec]]] = {}
        self._loaded_of: dict[str, tuple[str, str]] = {}

    def broke(self, problem: str) -> None:
        """Record a violation; the text begins with the number of the rule."""
        self._problems.append(problem)

    def title(self, order: Order) -> str:
        return f"{order.kind.name} {order.model.name} #{self.orders.index(order)}"

    def check(self) -> None:
        """Raise Violation if the last event broke a rule."""
        for model in list(self._executor.registry.models.values()):
            self._check_statuses(model)
        self._check_instances()
        if self._problems:
            raise Violation(self._problems[0])
        self._looks = 0

    def check_again(self) -> None:
        """Check that a second query of the core changes nothing."""
        executor = self._executor
        before = executor.actions, executor.audience.update_count, len(self.orders)
        executor.lifecycle.acknowledged()
        if before != (executor.actions, executor.audience.update_count, len(self.orders)):
            self.broke(f"2: asking again gave something new after {executor.world.trace[-1]}")

    def looked(self) -> None:
        """Count an evaluation of all models by the core."""
        self._looks += 1
        if self._looks > _MAX_CHECKS:
            raise Violation("2: it does not end")

    # --- orders

    def entered(self, order: Order) -> None:
        self.orders.append(order)
        self._executor.world.note("entered", self.title(order))

    def answered(self, order: Order) -> None:
        self._answers[order] += 1
        if self._answers[order] > 1:
            self.broke(f"1: {self.title(order)} is answered twice")
        if not order.is_finished:
            self.broke(f"1: {self.title(order)} is answered, and goes on")
        if order.error is not None and order.error.message == "internal error":
            self.broke(f"1: {self.title(order)} could not be followed")

    def succeeded(self, order: Order) -> None:
        """Check that the state is the one that a successful order has requested."""
        name, serving = order.model.name, self._serving_of(order.model)
        if order.kind is OrderKind.MOVE:
            return
        self._last[name] = order
        before = self._served.get(name, {})
        if order.kind is OrderKind.UNLOAD:
            self._loaded_of.pop(name, None)
            if serving:
                self.broke(f"8: {name} serves, and was unloaded")
        else:
            self._check_loaded(order, before, serving)
            self._loaded_of[name] = order.fingerprint, order.source.config
        self._served[name] = {v: (version, version.spec) for v, version in serving.items()}

    def dropped(self, order: Order) -> None:
        """Record that an order has failed, so that the next order of the model may begin."""
        if order in self._executor.updating:
            self.broke(f"1: {self.title(order)} is over, and instances are still added")
        for version in self._executor.alive:
            if version.spec.name == order.model.name and version.stopping and not version.drains:
                self.broke(f"1: {self.title(order)} is over, and {version} has not ended")

    def _check_loaded(
        self,
        order: Order,
        before: dict[str, tuple[ObservedVersion, VersionSpec]],
        serving: dict[str, ObservedVersion],
    ) -> None:
        name = order.model.name
        ordered_specs = {spec.version: spec for spec in order.specs}
        if ordered_specs.keys() != serving.keys():
            self.broke(f"8: {name} serves {[*serving]}, and {[*ordered_specs]} were loaded")
            return
        anew = self._loaded_of.get(name) == (order.fingerprint, order.source.config)
        for number, spec in ordered_specs.items():
            version = serving[number]
            if version.config.source != spec.config.source:
                self.broke(f"8: {version} has another configuration than was loaded last")
            if not version.instances.failure and version.active_count not in counts_of(spec.config):
                self.broke(f"8: {version} has {version.active_count} instances")
            if not version.was_ready:
                self.broke(f"6: {version} was never ready")
            old, old_spec = before.get(number, (None, None))
            if old is None or old_spec is None or old.instances.failure:
                continue
            keeps = differ_in_instances_only(old_spec, spec)
            other = old_spec.config.source != spec.config.source
            if keeps and (other or not anew) and old is not version:
                self.broke(f"13: {version} does not differ from {old}")
            if keeps and anew and not other and old is version:
                self.broke(f"13: {version} was to be started anew")

    def _serving_of(self, model: ModelEntry) -> dict[str, ObservedVersion]:
        versions: Any = model.serving
        return dict(versions)

    def withdrawn(self, name: str, number: str) -> None:
        """Record that gateways were notified of a withdrawal."""
        model = self._executor.registry.models.get(name)
        served = self._served.get(name, {})
        order = model.orders[0] if model is not None and model.orders else None
        if order is not None and order.kind is OrderKind.UNLOAD:
            self._check_no_user(name)
            return
        if number not in served:
            return
        replaced = order is not None and order.phase is OrderPhase.PUBLISHING
        if order is None or not replaced or number in {spec.version for spec in order.specs}:
            self.broke(f"10: {name} {number} is withdrawn, and no order says so")

    def _check_no_user(self, name: str) -> None:
        audience = self._executor.audience
        for update in audience.last.values():
            if isinstance(update, ModelPublished):
                user = audience.by_endpoint[update.endpoint]
                if user.uses(name):
                    self.broke(f"4: {name} is withdrawn, and {user} is not")

    # --- the end of versions

    def killed(self, version: ObservedVersion) -> None:
        audience = self._executor.audience
        for update in audience.last.values():
            if (
                isinstance(update, ModelPublished)
                and audience.by_endpoint[update.endpoint] is version
            ):
                self.broke(f"3: {version} is killed, and published")
        self._check_unknown(version, "killed")

    def retired(self, version: ObservedVersion) -> None:
        """Check that a drained version receives no more requests."""
        if version.drains:
            self.broke(f"3: {version} is drained twice")
        version.drains = True
        self._check_unknown(version, "drained")
        model = self._executor.registry.models.get(version.spec.name)
        if model is None or not model.serving:
            for user in self._executor.alive:
                if user.uses(version.spec.name) and not self._in_circle(version, user):
                    self.broke(f"4: {version} is drained before {user}")

    def ended(self, version: ObservedVersion) -> None:
        self._executor.world.note("ended", version)
        self._check_unknown(version, "gone")
        self._executor.alive.remove(version)
        for child in self._executor.processes.workers:
            if child.version is version and child.entered and not child.to_end:
                self.broke(f"5: {version} has ended, and {child} has not")

    def updated(self, order: Order) -> None:
        self._executor.updating.discard(order)

    def _check_unknown(self, version: ObservedVersion, state: str) -> None:
        audience = self._executor.audience
        endpoints = {endpoint for endpoint, has in audience.by_endpoint.items() if has is version}
        for gateway in audience.gateways:
            if any(update.endpoint in endpoints for update in gateway.known.values()):
                self.broke(f"3: {version} is {state}, and a gateway would send it a request")
        for peer in audience.ensembles:
            update = peer.latest.get(version.spec.name)
            if update is None or update.endpoint not in endpoints:
                continue
            if not self._in_circle(version, peer.ensemble) and peer.ensemble is not version:
                self.broke(f"3: {version} is {state}, and {peer.ensemble} would send it a step")

    def _in_circle(self, version: ObservedVersion, user: ObservedVersion) -> bool:
        """Return whether two live generations depend on each other."""
        return version in self._users_of(user) and user in self._users_of(version)

    def _users_of(self, version: ObservedVersion) -> set[ObservedVersion]:
        users: set[ObservedVersion] = set()
        waiting = [version]
        while waiting:
            name = waiting.pop().spec.name
            more = {each for each in self._executor.alive if each.uses(name)} - users
            users |= more
            waiting += more
        return users

    def discarded(self, folder: Path) -> None:
        for version in self._executor.alive:
            if folder in self._executor.repository.folders and version.spec.model_dir == folder:
                self.broke(f"14: {folder} is removed, and {version} runs")

    # --- states

    def _check_heard(self, version: ObservedVersion) -> None:
        audience = self._executor.audience
        for gateway in audience.gateways:
            if (
                version not in map(audience.by_endpoint.get, gateway.known_endpoints)
                and gateway.first_update < audience.first[version]
            ):
                self.broke(f"3: {version} takes over, and a gateway does not know it")

    def _could_serve(self, version: ObservedVersion, depth: int = 0) -> bool:
        if not (version.loaded and version.scheduler.serves) or depth > 9:
            return False
        if not version.spec.steps:
            return any(
                instance.alive and instance.state is InstanceState.READY
                for instance in version.all_instances
            )
        return all(self._step_could_serve(step.name, depth) for step in version.spec.steps)

    def _step_could_serve(self, name: str, depth: int) -> bool:
        for (known, _), update in self._executor.audience.last.items():
            if known == name and isinstance(update, ModelPublished) and update.latest:
                return self._could_serve(
                    self._executor.audience.by_endpoint[update.endpoint], depth + 1
                )
        return False

    def _check_statuses(self, model: ModelEntry) -> None:
        for number, version in self._serving_of(model).items():
            if not version.was_ready:
                self.broke(f"6: {version} serves, and was never ready")
            if version not in self._took_over:
                self._took_over.add(version)
                self._check_heard(version)
                if not self._could_serve(version):
                    self.broke(f"6: {version} takes over, and is not ready")
            if not isinstance(
                self._executor.audience.last.get((model.name, number)), ModelPublished
            ):
                self.broke(f"10: {version} serves, and is not published")
        shown: Any = model.published
        registry = self._executor.registry
        models = registry.models.values()
        moves = any(e.orders and e.orders[0].phase is OrderPhase.MOVING for e in models)
        # A version in transition is checked after the transition.
        if not moves and registry._summaries.get(model.name) != ModelSummary.of(model):
            self.broke(f"12: the stored status of {model.name} is not the current one")
        for number, status in statuses(model).items():
            could = number in model.serving and self._could_serve(shown[number])
            if (status.state is ModelState.READY) is not could:
                self.broke(f"12: {model.name} {number} is {status.state}; it could serve: {could}")
            update = self._executor.audience.last.get((model.name, number))
            if isinstance(update, ModelPublished):
                could = self._could_serve(self._executor.audience.by_endpoint[update.endpoint])
                if update.ready is not could and not moves:
                    self.broke(f"12: {model.name} {number} is published as ready: {update.ready}")

    # --- processes

    def _check_instances(self) -> None:
        """Check that each worker belongs to one instance, unless it is about to exit, and that
        each ready instance has a process.
        """
        instance_counts = Counter(
            instance.child
            for version in self._executor.alive
            for instance in version.all_instances
            if instance.alive
        )
        for child in self._executor.processes.workers:
            if child.version not in self._executor.alive:
                continue  # the worker started after its version had ended, and exits next
            if instance_counts[child] != 1 and child.entered and not child.to_end:
                self.broke(f"7: {child} belongs to {instance_counts[child]} instances")

    # --- shutdown

    def check_quiet(self) -> None:
        executor = self._executor
        for order in self.orders:
            if self._answers[order] != 1:
                self.broke(f"1: {self.title(order)} {order.phase} is never answered")
        serving: set[Any] = {
            v for m in executor.registry.models.values() for v in self._serving_of(m).values()
        }
        if serving != {*executor.alive} or serving != {*executor.registry.live}:
            self.broke(f"5: {executor.alive} are alive, and {serving} serve")
        for model in executor.registry.models.values():
            if model.orders or model.incoming or model.dropping or model.retiring or model.draining:
                self.broke(f"5: something of {model.name} goes on")
            self._check_last(model)
        for version in serving:
            self._check_shapes(version)
            if not (version.ready or version.problem):
                self.broke(f"6: {version} is neither ready nor failed")
        self._check_known(serving)
        self._check_processes(serving)
        used = {version.spec.model_dir for version in serving}
        for folder, removed in executor.repository.folders.items():
            if removed != (folder not in used):
                self.broke(f"14: {folder} was removed {removed} times; used: {folder in used}")
        self.check()

    def _check_processes(self, serving: set[ObservedVersion]) -> None:
        """Check that only serving versions have processes."""
        processes = self._executor.processes
        workers = {
            instance.child
            for version in serving
            for instance in version.all_instances
            if instance.alive
        }
        if workers != set(processes.workers):
            self.broke(f"7: {processes.workers} run, and {workers} serve")
        hosts = {version.scheduler.serving.child for version in serving}
        if hosts != set(processes.hosts):
            self.broke(f"7: {processes.hosts} run, and {hosts} serve")
        for version in serving:
            for instance in version.all_instances:
                child: Any = instance.child
                if child is not None and not version.knows(instance.index, child):
                    self.broke(f"12: {version} and {child} do not know one another")

    def _check_last(self, model: ModelEntry) -> None:
        order = self._last.get(model.name)
        ordered_specs = order.specs if order is not None and order.kind is OrderKind.LOAD else []
        serving = self._serving_of(model)
        loaded = {
            (n, version.spec.model_dir, version.spec.fingerprint) for n, version in serving.items()
        }
        if loaded != {(spec.version, spec.model_dir, spec.fingerprint) for spec in ordered_specs}:
            self.broke(f"8: {model.name} serves {serving}, and the last order was another")

    def _check_shapes(self, version: ObservedVersion) -> None:
        if not version.spec.steps:
            if len(version.all_instances) not in counts_of(version.config):
                self.broke(f"8: {version} has {len(version.all_instances)} instances")
        elif version.steps_known() != version.shapes:
            self.broke(f"5: {version} knows its steps as they were")

    def _check_known(self, serving: set[ObservedVersion]) -> None:
        expected = {(v.spec.name, v.spec.version): (v.endpoint, v.ready) for v in serving}
        for gateway in self._executor.audience.gateways:
            known = {key: (update.endpoint, update.ready) for key, update in gateway.known.items()}
            if known != expected:
                self.broke(f"5: a gateway knows {known}, and {expected} is so")
        latest = {(v.spec.name): v for v in sorted(serving, key=lambda v: v.spec.version)}
        for peer in self._executor.audience.ensembles:
            assert peer.ensemble is not None
            for step in peer.ensemble.spec.steps:
                update, version = peer.latest.get(step.name), latest.get(step.name)
                if update is None or version is None or update.endpoint != version.endpoint:
                    self.broke(f"5: {peer.ensemble} sends steps to {update}, and not to {version}")
