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
15  a load fails only with an error for clients; other exceptions are defects
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shmserve.errors import Internal, ShmserveError
from shmserve.ipc.messages.publications import ModelPublished
from shmserve.supervisor.models.instance import InstanceState
from shmserve.supervisor.models.lifecycle import Lifecycle
from shmserve.supervisor.models.load_planner import VersionSpec
from shmserve.supervisor.models.model_version import ModelVersion, differ_in_instances_only
from shmserve.supervisor.models.orders import ModelEntry, Order, OrderKind, OrderPhase
from shmserve.supervisor.models.registry import ModelRegistry, ModelState, ModelSummary, statuses
from tests.simulation.lifecycle.versions import ObservedVersion, counts_of
from tests.simulation.world import Violation

if TYPE_CHECKING:
    from tests.simulation.lifecycle.executor import SimulatedExecutor

_MAX_EVALUATIONS = 1000  # maximum number of checks at one moment


class RecordedLifecycle(Lifecycle):
    """The core with a record of its orders, and of the number of decisions per event."""

    def __init__(
        self, registry: ModelRegistry, executor: Any, shares_hosts: bool, oracles: LifecycleOracles
    ) -> None:
        super().__init__(registry, executor, shares_hosts)
        self._oracles = oracles

    def _add(self, order: Order) -> Order:
        self._oracles.order_added(order)
        return super()._add(order)

    def _advance_all(self) -> None:
        self._oracles.count_evaluation()
        super()._advance_all()

    def _finish(self, order: Order, error: ShmserveError | None = None) -> None:
        was_open, dropping = not order.is_finished, order.phase is OrderPhase.DROPPING
        super()._finish(order, error)
        if was_open and error is None:
            self._oracles.order_succeeded(order)
        elif dropping:
            self._oracles.order_failed(order)

    def version_started(self, version: ModelVersion, error: BaseException | None) -> None:
        if not isinstance(error, ShmserveError | None):
            self._oracles.report_violation(f"15: {version} failed with {error!r}")
        super().version_started(version, error)

    def updates_finished(self, order: Order, errors: Mapping[str, BaseException]) -> None:
        self._oracles.updates_finished(order)
        super().updates_finished(order, errors)

    def version_ended(self, version: ModelVersion) -> None:
        self._oracles.version_ended(cast("ObservedVersion", version))
        super().version_ended(version)


class LifecycleOracles:
    """The state observed so far; `check` raises a violation after its event."""

    def __init__(self, executor: SimulatedExecutor) -> None:
        self._executor = executor
        self.orders: list[Order] = []
        self._answers: Counter[Order] = Counter()
        self._problems: list[str] = []
        self._evaluation_count = 0
        self._versions_that_served: set[ObservedVersion] = set()
        self._last: dict[str, Order] = {}  # the last order of each model that succeeded
        self._served_versions: dict[str, dict[str, tuple[ObservedVersion, VersionSpec]]] = {}
        self._loaded_sources: dict[str, tuple[str, str]] = {}

    def report_violation(self, problem: str) -> None:
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
        self._evaluation_count = 0

    def check_idempotence(self) -> None:
        """Check that a second query of the core changes nothing."""
        executor = self._executor
        before = executor.actions, executor.audience.update_count, len(self.orders)
        executor.lifecycle.publication_acknowledged()
        if before != (executor.actions, executor.audience.update_count, len(self.orders)):
            self.report_violation(
                f"2: a repeated query made new decisions after {executor.world.trace[-1]}"
            )

    def count_evaluation(self) -> None:
        self._evaluation_count += 1
        if self._evaluation_count > _MAX_EVALUATIONS:
            raise Violation("2: the loop of decisions does not end")

    # --- orders

    def order_added(self, order: Order) -> None:
        self.orders.append(order)
        self._executor.world.note("entered", self.title(order))

    def load_begun(self, order: Order) -> None:
        if order.model.unloads_later:
            self.report_violation(f"8: {self.title(order)} begins, and a later order unloads it")

    def order_answered(self, order: Order) -> None:
        self._answers[order] += 1
        if self._answers[order] > 1:
            self.report_violation(f"1: {self.title(order)} is answered twice")
        if not order.is_finished:
            self.report_violation(f"1: {self.title(order)} is answered, and is not finished")
        if order.error is not None and order.error.message == Internal().message:
            self.report_violation(f"1: {self.title(order)} failed with an internal error")

    def order_succeeded(self, order: Order) -> None:
        name, serving = order.model.name, self._serving_of(order.model)
        if order.kind is OrderKind.MOVE:
            return
        self._last[name] = order
        before = self._served_versions.get(name, {})
        if order.kind is OrderKind.UNLOAD:
            self._loaded_sources.pop(name, None)
            if serving:
                self.report_violation(f"8: {name} serves, and was unloaded")
        else:
            self._check_loaded(order, before, serving)
            self._loaded_sources[name] = order.fingerprint, order.source.config
        self._served_versions[name] = {v: (version, version.spec) for v, version in serving.items()}

    def order_failed(self, order: Order) -> None:
        """Record that an order has failed, so that the next order of the model may begin."""
        if order in self._executor.updating_orders:
            self.report_violation(f"1: {self.title(order)} failed while it still adds instances")
        for version in self._executor.live_versions:
            if (
                version.spec.name == order.model.name
                and version.is_stopping
                and not version.is_draining
            ):
                self.report_violation(f"1: {self.title(order)} failed, and {version} has not ended")

    def _check_loaded(
        self,
        order: Order,
        before: dict[str, tuple[ObservedVersion, VersionSpec]],
        serving: dict[str, ObservedVersion],
    ) -> None:
        name = order.model.name
        ordered_specs = {spec.version: spec for spec in order.specs}
        if ordered_specs.keys() != serving.keys():
            self.report_violation(
                f"8: {name} serves {[*serving]}, and {[*ordered_specs]} were loaded"
            )
            return
        is_repeated = self._loaded_sources.get(name) == (order.fingerprint, order.source.config)
        for number, spec in ordered_specs.items():
            version = serving[number]
            if version.config.source != spec.config.source:
                self.report_violation(
                    f"8: {version} has another configuration than was loaded last"
                )
            if not version.instances.failure and version.active_count not in counts_of(spec.config):
                self.report_violation(f"8: {version} has {version.active_count} instances")
            if not version.was_ready:
                self.report_violation(f"6: {version} was never ready")
            old, old_spec = before.get(number, (None, None))
            if old is None or old_spec is None or old.instances.failure:
                continue
            differs_in_instances_only = differ_in_instances_only(old_spec, spec)
            other = old_spec.config.source != spec.config.source
            if differs_in_instances_only and (other or not is_repeated) and old is not version:
                self.report_violation(f"13: {version} does not differ from {old}")
            if differs_in_instances_only and is_repeated and not other and old is version:
                self.report_violation(f"13: {version} was not started again by a repeated load")

    def _serving_of(self, model: ModelEntry) -> dict[str, ObservedVersion]:
        versions: Any = model.serving
        return dict(versions)

    def version_withdrawn(self, name: str, number: str) -> None:
        """Record that gateways were notified of a withdrawal."""
        model = self._executor.registry.models.get(name)
        served = self._served_versions.get(name, {})
        order = model.orders[0] if model is not None and model.orders else None
        if order is not None and order.kind is OrderKind.UNLOAD:
            self._check_no_user(name)
            return
        if number not in served:
            return
        replaced = order is not None and order.phase is OrderPhase.PUBLISHING
        if order is None or not replaced or number in {spec.version for spec in order.specs}:
            self.report_violation(f"10: {name} {number} is withdrawn without an order")

    def _check_no_user(self, name: str) -> None:
        audience = self._executor.audience
        for update in audience.last_publications.values():
            if isinstance(update, ModelPublished):
                user = audience.versions_by_endpoint[update.endpoint]
                if user.uses(name):
                    self.report_violation(f"4: {name} is withdrawn, and {user} is not")

    # --- the end of versions

    def version_killed(self, version: ObservedVersion) -> None:
        audience = self._executor.audience
        for update in audience.last_publications.values():
            if (
                isinstance(update, ModelPublished)
                and audience.versions_by_endpoint[update.endpoint] is version
            ):
                self.report_violation(f"3: {version} is killed, and published")
        self._check_receives_no_requests(version, "killed")

    def version_drained(self, version: ObservedVersion) -> None:
        if version.is_draining:
            self.report_violation(f"3: {version} is drained twice")
        version.is_draining = True
        self._check_receives_no_requests(version, "drained")
        model = self._executor.registry.models.get(version.spec.name)
        if model is None or not model.serving:
            for user in self._executor.live_versions:
                if user.uses(version.spec.name) and not self._is_in_cycle(version, user):
                    self.report_violation(f"4: {version} is drained before {user}")

    def version_ended(self, version: ObservedVersion) -> None:
        self._executor.world.note("ended", version)
        self._check_receives_no_requests(version, "ended")
        self._executor.live_versions.remove(version)
        for child in self._executor.processes.workers:
            if child.version is version and child.is_spawned and not child.will_exit:
                self.report_violation(f"5: {version} has ended, and {child} has not")

    def updates_finished(self, order: Order) -> None:
        self._executor.updating_orders.discard(order)

    def _check_receives_no_requests(self, version: ObservedVersion, state: str) -> None:
        audience = self._executor.audience
        found = {key for key, has in audience.versions_by_endpoint.items() if has is version}
        for gateway in audience.gateways:
            if any(update.endpoint in found for update in gateway.publications.values()):
                self.report_violation(
                    f"3: {version} is {state}, and a gateway would send it a request"
                )
        for peer in audience.ensembles:
            update = peer.latest_publications.get(version.spec.name)
            if update is None or update.endpoint not in found:
                continue
            user = peer.ensemble
            if user is not version and (user is None or not self._is_in_cycle(version, user)):
                self.report_violation(f"3: {version} is {state}, and {user} would send it a step")

    def _is_in_cycle(self, version: ObservedVersion, user: ObservedVersion) -> bool:
        """Return whether two live generations depend on each other."""
        return version in self._users_of(user) and user in self._users_of(version)

    def _users_of(self, version: ObservedVersion) -> set[ObservedVersion]:
        users: set[ObservedVersion] = set()
        waiting = [version]
        while waiting:
            name = waiting.pop().spec.name
            new_users = {user for user in self._executor.live_versions if user.uses(name)} - users
            users |= new_users
            waiting += new_users
        return users

    def folder_discarded(self, folder: Path) -> None:
        for version in self._executor.live_versions:
            if (
                folder in self._executor.repository.removals_by_folder
                and version.spec.model_dir == folder
            ):
                self.report_violation(f"14: {folder} is removed, and {version} runs")

    # --- states

    def _check_gateways_know(self, version: ObservedVersion) -> None:
        audience = self._executor.audience
        for gateway in audience.gateways:
            if (
                version not in map(audience.versions_by_endpoint.get, gateway.known_endpoints)
                and gateway.first_update < audience.first_publications[version]
            ):
                self.report_violation(f"3: {version} serves before a gateway has received it")

    def _can_serve(self, version: ObservedVersion, depth: int = 0) -> bool:
        if not (version.has_loaded and version.scheduler.serves) or depth > 9:
            return False
        if not version.spec.steps:
            return any(i.alive and i.state is InstanceState.READY for i in version.all_instances)
        return all(self._step_can_serve(step.name, depth) for step in version.spec.steps)

    def _step_can_serve(self, name: str, depth: int) -> bool:
        for (published_name, _), update in self._executor.audience.last_publications.items():
            if published_name == name and isinstance(update, ModelPublished) and update.latest:
                return self._can_serve(
                    self._executor.audience.versions_by_endpoint[update.endpoint], depth + 1
                )
        return False

    def _check_statuses(self, model: ModelEntry) -> None:
        for number, version in self._serving_of(model).items():
            if not version.was_ready:
                self.report_violation(f"6: {version} serves, and was never ready")
            if version not in self._versions_that_served:
                self._versions_that_served.add(version)
                self._check_gateways_know(version)
                if not self._can_serve(version):
                    self.report_violation(f"6: {version} takes over, and is not ready")
            if not isinstance(
                self._executor.audience.last_publications.get((model.name, number)), ModelPublished
            ):
                self.report_violation(f"10: {version} serves, and is not published")
        published_versions: Any = model.published
        registry = self._executor.registry
        models = registry.models.values()
        is_moving = any(e.orders and e.orders[0].phase is OrderPhase.MOVING for e in models)
        # A version in transition is checked after the transition.
        if not is_moving and registry._summaries.get(model.name) != ModelSummary.of(model):
            self.report_violation(f"12: the stored status of {model.name} is not the current one")
        for number, status in statuses(model).items():
            can_serve = number in model.serving and self._can_serve(published_versions[number])
            if (status.state is ModelState.READY) is not can_serve:
                self.report_violation(
                    f"12: {model.name} {number} is {status.state}; it could serve: {can_serve}"
                )
            update = self._executor.audience.last_publications.get((model.name, number))
            if isinstance(update, ModelPublished):
                can_serve = self._can_serve(
                    self._executor.audience.versions_by_endpoint[update.endpoint]
                )
                if update.ready is not can_serve and not is_moving:
                    self.report_violation(
                        f"12: {model.name} {number} is published as ready: {update.ready}"
                    )

    # --- processes

    def _check_instances(self) -> None:
        """Check that each worker belongs to one instance, and each ready instance has a process."""
        instance_counts = Counter(
            instance.child
            for version in self._executor.live_versions
            for instance in version.all_instances
            if instance.alive
        )
        for child in self._executor.processes.workers:
            if child.version not in self._executor.live_versions:
                continue  # the worker started after its version had ended, and exits next
            if instance_counts[child] != 1 and child.is_spawned and not child.will_exit:
                self.report_violation(f"7: {child} belongs to {instance_counts[child]} instances")

    # --- shutdown

    def check_idle_state(self) -> None:
        executor = self._executor
        for order in self.orders:
            if self._answers[order] != 1:
                self.report_violation(f"1: {self.title(order)} {order.phase} is never answered")
        serving: set[Any] = {
            v for m in executor.registry.models.values() for v in self._serving_of(m).values()
        }
        if serving != {*executor.live_versions} or serving != {*executor.registry.live_versions}:
            self.report_violation(f"5: {executor.live_versions} are alive, and {serving} serve")
        for model in executor.registry.models.values():
            if model.orders or model.incoming or model.dropping or model.retiring or model.draining:
                self.report_violation(f"5: something of {model.name} goes on")
            self._check_last_order(model)
        for version in serving:
            self._check_shapes(version)
            if not (version.ready or version.problem):
                self.report_violation(f"6: {version} is neither ready nor failed")
        self._check_peers(serving)
        self._check_processes(serving)
        used = {version.spec.model_dir for version in serving}
        for folder, removed in executor.repository.removals_by_folder.items():
            if removed != (folder not in used):
                self.report_violation(
                    f"14: {folder} was removed {removed} times; used: {folder in used}"
                )
        self.check()

    def _check_processes(self, serving: set[ObservedVersion]) -> None:
        processes = self._executor.processes
        workers = {i.child for v in serving for i in v.all_instances if i.alive}
        if workers != set(processes.workers):
            self.report_violation(f"7: {processes.workers} run, and {workers} serve")
        hosts = {v.scheduler.current.child for v in serving}
        if hosts != set(processes.hosts):
            self.report_violation(f"7: {processes.hosts} run, and {hosts} serve")
        for v in serving:
            for i in v.all_instances:
                child: Any = i.child
                if child is not None and not v.expects(i.index, child):
                    self.report_violation(f"12: {v} and {child} do not know one another")

    def _check_last_order(self, model: ModelEntry) -> None:
        order = self._last.get(model.name)
        ordered_specs = order.specs if order is not None and order.kind is OrderKind.LOAD else []
        serving = self._serving_of(model)
        loaded = {(n, v.spec.model_dir, v.spec.fingerprint) for n, v in serving.items()}
        if loaded != {(spec.version, spec.model_dir, spec.fingerprint) for spec in ordered_specs}:
            self.report_violation(
                f"8: {model.name} serves {serving}, and the last order was another"
            )

    def _check_shapes(self, version: ObservedVersion) -> None:
        if not version.spec.steps:
            if len(version.all_instances) not in counts_of(version.config):
                self.report_violation(f"8: {version} has {len(version.all_instances)} instances")
        elif version.published_step_configs() != version.step_configs:
            self.report_violation(f"5: {version} knows its steps as they were")

    def _check_peers(self, serving: set[ObservedVersion]) -> None:
        expected = {(v.spec.name, v.spec.version): (v.endpoint, v.ready) for v in serving}
        for gateway in self._executor.audience.gateways:
            received = {
                key: (update.endpoint, update.ready) for key, update in gateway.publications.items()
            }
            if received != expected:
                self.report_violation(f"5: a gateway knows {received}, and {expected} is so")
        latest = {(v.spec.name): v for v in sorted(serving, key=lambda v: v.spec.version)}
        for peer in self._executor.audience.ensembles:
            assert peer.ensemble is not None
            for step in peer.ensemble.spec.steps:
                update, version = peer.latest_publications.get(step.name), latest.get(step.name)
                if update is None or version is None or update.endpoint != version.endpoint:
                    self.report_violation(
                        f"5: {peer.ensemble} sends steps to {update}, and not to {version}"
                    )
