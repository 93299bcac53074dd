"""The lifecycle of models: a state machine that executes the orders of each model in turn.

The state machine decides; `LifecycleActions` executes the decisions and reports back by events.
`Order` changes the state of a model: `start`, `offer`, then `take_over`, or `drop` if a load fails.
It calls running versions directly, to pass on counters and to add and remove instances.

load:    read -> the step models are loaded -> versions that differ start, or instances are added ->
         published -> every client has acknowledged them as ready -> they serve, old versions
         retire -> ensembles with the model reload if its immutable configuration changed
unload:  loads that have begun end, unless they hang -> ensembles with the model are unloaded ->
         every client has acknowledged the withdrawal -> the versions retire, and are finalized
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from shmserve.errors import Internal, InvalidArgument, ShmserveError
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.orders import (
    DUPLICATE,
    FOLDER,
    UNLOADED,
    UPDATES,
    Cause,
    LifecycleActions,
    LoadOutcome,
    LoadPlan,
    LoadSource,
    ModelEntry,
    Order,
    OrderKind,
    OrderPhase,
)
from shmserve.supervisor.models.registry import ModelRegistry, statuses
from shmserve.supervisor.models.scheduler_process import Group

logger = logging.getLogger(__name__)

# Phases that only an event or a later order of the model ends. Orders in these phases are skipped,
# because most orders are in such a phase while a server starts.
_EVENT_PHASES = (OrderPhase.READING, OrderPhase.STARTING, OrderPhase.MOVING)


class Lifecycle:
    """The state machine that executes orders about the models of a registry."""

    def __init__(
        self, registry: ModelRegistry, actions: LifecycleActions, shares_hosts: bool
    ) -> None:
        """Create a lifecycle without orders.

        Args:
            registry: The models.
            actions: Executes the decisions.
            shares_hosts: Whether the schedulers of an ensemble and of its steps share a process.
        """
        self._registry = registry
        self._actions = actions
        self._shares_hosts = shares_hosts
        self._open_orders: list[Order] = []  # orders that were not answered yet
        self._is_running = self._has_changed = False
        self._changed_models: set[str] = set()  # the models whose status may have changed
        self._phase_methods: Mapping[OrderPhase, Callable[[Order], bool]] = {
            OrderPhase.QUEUED: self._begin,
            OrderPhase.WAITING: self._advance_waiting,
            OrderPhase.STARTING: self._cancel_hanging,
            OrderPhase.OFFERED: self._take_over,
            OrderPhase.PUBLISHING: self._finish_once_acknowledged,
            OrderPhase.DROPPING: self._finish_once_acknowledged,
        }

    # --- creation of orders

    def expect(self, steps: Mapping[str, list[str]]) -> None:
        """Register the models that are loaded at the start, with the steps of each.

        The steps determine which schedulers share a process.
        """
        for name, step_models in steps.items():
            model = self._registry.model(name)
            model.step_models, model.is_expected = step_models, True
            self._changed_models.add(name)

    def offer_on_demand(self, names: Iterable[str]) -> None:
        """Publish that these models are loaded on demand."""
        for name in names:
            model = self._registry.model(name)
            model.on_demand = True
            self._publish(model)
        self._run()

    def load(self, name: str, source: LoadSource = FOLDER, pins: bool = True) -> Order:
        """Order a model to be loaded or reloaded, and return the order.

        Args:
            name: The model.
            source: The configuration and files of a request.
            pins: Whether the model then stays loaded, even if it was loaded on demand before.
        """
        cause = Cause.PIN if pins else Cause.CALLER
        order = self._load(self._registry.model(name), source, cause)
        order.model.is_step_only = False
        self._run()
        return order

    def load_on_demand(self, name: str) -> Order | None:
        """Return the open load of a model, or a new one; None if the model serves."""
        model = self._registry.model(name)
        last_order = model.last_order
        if last_order is not None and last_order.may_succeed:
            return last_order
        if last_order is None and model.serving:
            return None
        return self.load(name, pins=False)

    def unload(self, name: str, on_demand: bool = False) -> Order:
        """Order a model to be unloaded after the loads that run; cancel loads that have not begun.

        A load that hangs is cancelled, too. Ensembles that need the model are unloaded before it,
        and reloaded when the model is loaded again.

        Args:
            name: The model; it may be unknown.
            on_demand: Whether the next request loads the model again.
        """
        model = self._registry.model(name)
        order = self._unload(model, {}, on_demand)
        group = self._group(name)
        model.is_step_only, model.source, model.step_models = False, FOLDER, []
        self._regroup(group)
        self._run()
        return order

    def _load(self, model: ModelEntry, source: LoadSource, cause: Cause) -> Order:
        return self._add_unless_repeated(Order(model, OrderKind.LOAD, source, cause))

    def _add_unless_repeated(self, order: Order) -> Order:
        """Add an order, or return the model's last order if it has the same effect."""
        last_order = order.model.orders[-1] if order.model.orders else None
        if last_order is None or not last_order.is_repeated_by(order):
            return self._add(order)
        last_order.causes |= order.causes
        return last_order

    def _add(self, order: Order) -> Order:
        order.model.orders.append(order)
        self._open_orders.append(order)
        self._changed_models.add(order.model.name)
        return order

    def _unload(
        self,
        model: ModelEntry,
        orders_by_model: dict[ModelEntry, Order | None],
        on_demand: bool = False,
    ) -> Order:
        """Order the ensembles that need a model, and then the model, to be unloaded.

        Args:
            model: The model.
            orders_by_model: The unloads that this recursion has ordered so far; None for a model
                whose ensembles are still visited.
            on_demand: Whether the next request loads the model again.
        """
        cause = Cause.STEP if orders_by_model else Cause.CALLER
        orders_by_model[model] = None
        model.on_demand = on_demand
        model.is_outdated = False  # the serving versions are not reloaded
        ensembles = dict.fromkeys(self._registry.ensembles_using(model))
        for order in [*model.orders, *self._registry.loads_waiting_for(model)]:
            if order.kind is not OrderKind.LOAD:
                continue
            will_fail = order.hangs or any(step.error is not None for step in order.prerequisites)
            if will_fail or order.phase is OrderPhase.QUEUED:
                self._cancel(order)
            elif order.model is not model:
                ensembles[order.model] = None  # the ensemble is unloaded once it has been loaded
        for user in ensembles:
            if user not in orders_by_model:
                orders_by_model[user] = self._unload(user, orders_by_model, on_demand)
        unloads = [unload for user in ensembles if (unload := orders_by_model[user]) is not None]
        order = Order(model, OrderKind.UNLOAD, causes=cause, prerequisites=unloads)
        orders_by_model[model] = self._add(order)
        return order

    def _group(self, name: str) -> Group:
        models = self._registry.models.items()
        step_models = {entry: steps for entry, model in models if (steps := model.needed_steps)}
        return Group.of(name, step_models, self._shares_hosts)

    def _regroup(self, group: Group) -> None:
        """Order the schedulers of a group to move to one process, which they share from now on."""
        for name in sorted(group.names) if len(group.names) > 1 else ():
            if name in self._registry.models:
                self._add_unless_repeated(Order(self._registry.models[name], OrderKind.MOVE))

    # --- execution of orders

    def _run(self) -> None:
        """Advance all orders as far as possible.

        A nested call returns at once; the outer call then handles the changes.
        """
        self._has_changed = True
        if self._is_running:
            return
        self._is_running = True
        try:
            while self._has_changed:
                self._has_changed = False
                self._advance_all()
        finally:
            self._is_running = False
        if self._changed_models:
            self._registry.update(self._changed_models)
            self._changed_models.clear()
            self._actions.report_change()

    def _advance_all(self) -> None:
        for model in list(self._registry.models.values()):
            orders = model.orders
            can_advance = orders and (orders[0].phase not in _EVENT_PHASES or len(orders) > 1)
            if model.retiring or can_advance:
                self._advance(model)
        finished_orders = [o for o in self._open_orders if o.phase is OrderPhase.FINISHED]
        for order in finished_orders:
            if not order.ending_versions and all(o.is_answered for o in order.follow_ups):
                self._open_orders.remove(order)
                order.is_answered = self._has_changed = True
                for model in self._registry.remove_unused(order.model):
                    self._actions.remove(model)
                self._actions.answer(order)

    def _advance(self, model: ModelEntry) -> None:
        try:
            while model.orders and self._execute_step(model.orders[0]):
                self._has_changed = True
                self._publish(model)
            self._retire(model)
        except Exception:  # the orders of the other models continue
            text = "the state of model '%s' could not be updated; its current load or unload fails"
            logger.exception(text, model.name)
            if model.orders and not model.orders[0].is_finished:
                self._fail(model.orders[0], Internal())

    def _execute_step(self, order: Order) -> bool:
        """Execute the next step of an order, and return whether it could be executed."""
        execute_phase = self._phase_methods.get(order.phase)
        return execute_phase is not None and execute_phase(order)

    # --- the phases of an order; QUEUED and READING

    def _begin(self, order: Order) -> bool:
        model = order.model
        if order.kind is OrderKind.LOAD:
            order.phase, model.failure_is_temporary = OrderPhase.READING, False
            self._actions.read(order)
        elif order.kind is OrderKind.UNLOAD:
            order.phase = OrderPhase.WAITING
        else:
            order.phase = OrderPhase.MOVING
            self._actions.move(order, self._group(model.name))
        return True

    def load_planned(self, order: Order, plan: LoadPlan) -> None:
        """Handle the plan of a load whose folder and configuration were read."""
        if order.phase is not OrderPhase.READING:  # the order was cancelled in the meantime
            return
        model = order.model
        model.fingerprint = order.fingerprint = plan.fingerprint
        order.specs = plan.specs
        if plan.error is not None:
            # Errors of sent configurations and of names without a folder are not stored, because
            # clients may have mistyped the configuration or the name.
            is_stored = plan.is_known or model.has_failed or model.on_demand
            if is_stored and not model.serving and order.source == FOLDER:
                outcome = DUPLICATE if plan.is_ambiguous else LoadOutcome(plan.error.message)
                model.outcomes = {"": outcome}
            self._finish(order, plan.error)
        else:
            names = (step.name for spec in plan.specs for step in spec.steps)
            order.step_models = list(dict.fromkeys(names))
            cycle = self._registry.find_cycle(model.name, order.step_models, plan.steps)
            if cycle:
                text = f"circular dependency between ensembles: {cycle[0]} -> ... -> "
                text += f"{' -> '.join(cycle[-2:])} ({' -> '.join(cycle)})\n"
                self._fail(order, InvalidArgument(f"load failed for model '{model.name}': {text}"))
            else:
                order.phase = OrderPhase.WAITING
                self._load_steps(order)
        self._publish(model)
        self._run()

    def _load_steps(self, order: Order) -> None:
        """Order loads of an ensemble's step models that do not serve."""
        for name in order.step_models:
            step = self._registry.model(name)
            last_order = step.last_order
            if (
                last_order is not None
                and last_order.kind is OrderKind.UNLOAD
                and last_order.number > order.number
            ):
                if {*last_order.prerequisites} & {*order.model.orders}:
                    continue  # the unload of the step waits for this ensemble
                self._cancel(order)
                return
            load = last_order if last_order is not None and last_order.may_succeed else None
            if load is None and (not step.serving or last_order is not None):
                step.is_step_only = True
                step.on_demand |= order.model.on_demand
                load = self._load(step, FOLDER, Cause.ENSEMBLE)
            if load is not None:
                order.prerequisites.append(load)

    # --- phase WAITING

    def _advance_waiting(self, order: Order) -> bool:
        if not all(prerequisite.is_finished for prerequisite in order.prerequisites):
            return self._cancel_hanging(order)
        if order.kind is OrderKind.LOAD:
            order.start(self._actions, self._group(order.model.name))
        else:
            self._withdraw(order)
        return True

    def _cancel_hanging(self, order: Order) -> bool:
        """Cancel a load that hangs if the model is to be unloaded."""
        is_abandoned = order.kind is OrderKind.LOAD and order.model.unloads_later and order.hangs
        if is_abandoned:
            self._cancel(order)
        return is_abandoned

    def _withdraw(self, order: Order) -> None:
        model = order.model
        withdrawn_versions, model.serving = model.serving, {}
        error = order.failures.get("")  # the logged error of a reload that this unload follows
        outcome = LoadOutcome(str(error).rstrip(), is_logged=True) if error else UNLOADED
        model.outcomes = dict.fromkeys({*withdrawn_versions, *model.outcomes} - {""}, outcome)
        model.fingerprint, model.last_load = "", None
        model.retiring += withdrawn_versions.values()
        order.ending_versions.update(withdrawn_versions.values())
        if withdrawn_versions:
            self._actions.await_ends(order)
        order.phase = OrderPhase.PUBLISHING

    # --- phase STARTING

    def version_started(self, version: ModelVersion, error: BaseException | None) -> None:
        """Handle a version that has started, or that has failed and ended."""
        model = self._registry.model(version.spec.name)
        order = model.orders[0] if model.orders else None
        if order is None or model.incoming.get(version.spec.version) is not version:
            return  # the order was cancelled in the meantime
        order.starting_versions.discard(version.spec.version)
        if error is not None:
            order.failures[version.spec.version] = error
        self._offer_once_started(order)

    def updates_finished(self, order: Order, errors: Mapping[str, BaseException]) -> None:
        """Handle the end of an order's changes to the instances of serving versions.

        Args:
            order: The order.
            errors: The errors of the failed changes, by version.
        """
        order.starting_versions.discard(UPDATES)
        order.failures |= errors
        self._offer_once_started(order)

    def _offer_once_started(self, order: Order) -> None:
        if order.phase is OrderPhase.STARTING and not order.starting_versions:
            if order.failures:
                self._fail(order, order.log_failures())
            else:
                order.offer()
                self._publish(order.model)
        self._run()

    # --- phase OFFERED

    def _take_over(self, order: Order) -> bool:
        incoming = order.model.incoming.values()
        if order.store_failures():
            self._fail(order, order.log_failures())
        elif self._actions.is_published(order.model) and all(version.ready for version in incoming):
            self._load_ensembles(order, order.take_over())
            if any(update.removed_instances for update in order.updates.values()):
                order.ending_versions.add(UPDATES)
                self._actions.await_ends(order)
            self._regroup(self._group(order.model.name))
        else:
            return False
        return True

    def _load_ensembles(self, order: Order, config_changed: bool) -> None:
        """Reload ensembles that lacked the order's model, or use an old configuration of it.

        Loads that have not read the model's configuration yet are not changed. No ensemble is
        reloaded if the model is to be unloaded.
        """
        name = order.model.name
        if order.model.unloads_later:
            return
        models = self._registry.models.values()
        for user in [model for model in models if model.has_steps or model.needed_steps]:
            load_orders = [load for load in user.orders if load.kind is OrderKind.LOAD]
            if config_changed and load_orders:
                user.is_outdated |= any(version.uses(name) for version in user.serving.values())
                for load in load_orders:
                    load.is_outdated |= not load.is_planning and name in load.step_models
            is_unloaded = user.on_demand and not (user.serving or load_orders)
            steps = [self._registry.models.get(step) for step in user.needed_steps]
            # If an operator has unloaded another step's model, the ensemble is reloaded only by a
            # load of that model or of the ensemble itself.
            is_unloaded |= any(step and step.name != name and step.is_unloaded for step in steps)
            is_needed = name in user.needed_steps and not is_unloaded
            if not is_needed or any(load.is_planning for load in load_orders):
                continue
            if config_changed or not (user.serving or load_orders):
                source = load_orders[0].source if load_orders else user.source
                order.follow_ups.append(self._load(user, source, Cause.STEP))

    # --- phases PUBLISHING, DROPPING, MOVING and FINISHED

    def _finish_once_acknowledged(self, order: Order) -> bool:
        model = order.model
        if model.dropping or order.starting_versions or not self._actions.is_published(model):
            return False
        self._finish(order, order.error)
        return True

    def move_finished(self, order: Order) -> None:
        """Handle the end of a move, whether or not the schedulers have moved."""
        self._finish(order)
        self._run()

    def _finish(self, order: Order, error: ShmserveError | None = None) -> None:
        if order.is_finished:
            return
        model, order.error, order.phase = order.model, error, OrderPhase.FINISHED
        model.orders.remove(order)
        if error is not None and model.is_expected and not statuses(model):
            model.outcomes[""] = LoadOutcome(error.message)  # no repository has the model
        if error is not None and Cause.STEP in order.causes and order.kind is OrderKind.LOAD:
            text = "ensemble '%s' could not be reloaded with its new steps, so it cannot serve: %s"
            logger.error(text, model.name, error.message)
            if model.serving:  # otherwise the reason of the failure stays visible
                unload = self._unload(model, {model: None}, model.on_demand)
                unload.failures[""] = error
                order.follow_ups.append(unload)
        elif error is not None and order.kind is OrderKind.LOAD:
            self._load_outdated(order)
        self._has_changed = True
        self._changed_models.add(model.name)

    def _load_outdated(self, order: Order) -> None:
        """Reload a serving ensemble whose load has failed, if it is outdated."""
        model = order.model
        if model.is_outdated and model.serving and model.last_order is None:
            model.is_outdated = False
            order.follow_ups.append(self._load(model, model.source, Cause.STEP))

    # --- failures

    def _cancel(self, order: Order) -> None:
        """Cancel an order because its model is unloaded or no other order needs it."""
        order.causes &= ~Cause.STEP
        text = f"failed to load '{order.model.name}', no version is available"
        self._fail(order, InvalidArgument(text), is_cancelled=True)

    def _fail(self, order: Order, error: ShmserveError, is_cancelled: bool = False) -> None:
        """Let an order fail: end the versions that it has started. Serving versions continue."""
        model, phase = order.model, order.phase
        if phase in (OrderPhase.PUBLISHING, OrderPhase.DROPPING, OrderPhase.FINISHED):
            return
        step_orders, order.prerequisites = order.prerequisites, []
        for step_order in step_orders:
            is_needed = any(step_order in user.prerequisites for user in self._open_orders)
            if step_order.causes is Cause.ENSEMBLE and not is_needed:
                self._cancel(step_order)
        if order.is_planning:
            if phase is OrderPhase.WAITING and order.kind is OrderKind.LOAD and not model.serving:
                order.keep_source()
            self._actions.discard(order.specs)
            self._finish(order, error)
            return
        order.error = error
        order.drop(self._actions, is_cancelled)
        self._publish(model)

    # --- changes of versions, and their ends

    def version_changed(self, version: ModelVersion) -> None:
        """Handle a change of a version's readiness, endpoint or failure."""
        model = self._registry.models.get(version.spec.name)
        if model is not None and model.published.get(version.spec.version) is version:
            self._publish(model)
        if model is not None:
            self._run()

    def _retire(self, model: ModelEntry) -> None:
        """Drain versions that every client has replaced and that no ensemble needs."""
        waiting_versions = [version for version in model.retiring if version not in model.draining]
        if not waiting_versions or not self._actions.is_published(model):
            return
        for version in waiting_versions:
            if model.serving or not self._registry.users_to_end(version):
                model.draining.add(version)
                self._actions.retire(version)

    def version_ended(self, version: ModelVersion) -> None:
        """Handle a version whose processes have all ended."""
        model, number = self._registry.model(version.spec.name), version.spec.version
        if version in model.dropping:
            model.dropping.remove(version)
        elif version in model.retiring:
            logger.info("successfully unloaded '%s' version %s", model.name, number)
            self._actions.forward(version, model.serving.get(number))
            model.retiring.remove(version)
        model.draining.discard(version)
        self._actions.discard([version.spec])
        for order in self._open_orders:
            order.ending_versions.discard(version)
        self._publish(model)
        self._run()

    def wait_finished(self, order: Order) -> None:
        """End an order's wait for removed instances, and for versions with long requests."""
        ending_versions = (v for v in order.ending_versions if not isinstance(v, str))
        order.ending_versions = {version for version in ending_versions if version.drained}
        self._run()

    # --- publications

    def publication_acknowledged(self) -> None:
        """Continue the orders that wait for clients to acknowledge a publication."""
        self._run()

    def publish(self, model: ModelEntry) -> None:
        """Publish the changes of a model to the clients, and continue the orders."""
        self._publish(model)
        self._run()

    def _publish(self, model: ModelEntry) -> None:
        self._changed_models.add(model.name)
        self._actions.publish(model)
        for ensemble in self._registry.ensembles_of(model.name):
            ensemble.report_change()
