"""The lifecycle of models: orders are followed, one after the other of each model, until what
serves is as the last of them has it (pure: whoever carries out what is decided is told to, and
says later what came of it).

load:    read -> what it needs is there -> what differs is started, or nothing -> offered to all ->
         all know that it is ready -> it serves, what served retires -> ensembles load again
unload:  loads before it are given up -> ensembles that need it are unloaded -> all are told
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shmserve.errors import Internal, InvalidArgument, ShmserveError
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models.instances import VersionSpec
from shmserve.supervisor.models.loads import UPDATES, LifecycleActions, Loads, keep_wish, refusal
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.orders import (
    DUPLICATE,
    FOLDER,
    UNLOADED,
    LoadOutcome,
    LoadPlan,
    LoadSource,
    ModelEntry,
    Order,
    OrderKind,
    OrderPhase,
)
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.models.statuses import statuses
from shmserve.supervisor.processes.scheduler_hosts import Group

logger = logging.getLogger(__name__)


class Lifecycle:
    """Follows the orders about a registry's models. `hosted`: the models of an ensemble's steps are
    scheduled beside it."""

    def __init__(self, registry: ModelRegistry, executor: LifecycleActions, hosted: bool) -> None:
        self._registry = registry
        self._executor = executor
        self._hosted = hosted
        self._loads = Loads(registry, executor)
        self._open: list[Order] = []  # that were not answered
        self._running = self._news = self._published = False
        self._steps: Mapping[OrderPhase, Callable[[Order], bool]] = {
            OrderPhase.QUEUED: self._begin,
            OrderPhase.WAITING: self._go_on,
            OrderPhase.OFFERED: self._take_over,
            OrderPhase.TELLING: self._settle_once_known,
            OrderPhase.DROPPING: self._settle_once_known,
        }

    # --- orders

    def expect(self, steps: Mapping[str, list[str]]) -> None:
        """Enter what is loaded at the start, each with the models that it needs: where one is
        scheduled depends on these."""
        for name, needs in steps.items():
            model = self._registry.model(name)
            model.needs, model.expected = needs, True

    def offer(self, names: Iterable[str]) -> None:
        """Have everybody know that these models are on demand."""
        for name in names:
            model = self._registry.model(name)
            model.on_demand = True
            self._publish(model)
        self._run()

    def load(self, name: str, source: LoadSource = FOLDER, pins: bool = True) -> Order:
        """Have a model loaded, or loaded again. `pins`: it is not on demand any more once it is."""
        order = self._load(self._registry.model(name), source)
        order.pins |= pins
        order.model.for_others = False
        self._run()
        return order

    def want(self, name: str) -> Order | None:
        """Have a model on demand loaded; None where it serves. Where it loads already, that is the
        order."""
        model = self._registry.model(name)
        last = next((o for o in reversed(model.orders) if o.kind is not OrderKind.MOVE), None)
        if last is not None and last.may_come:
            return last
        if last is None and model.serving:
            return None
        return self.load(name, pins=False)

    def unload(self, name: str, on_demand: bool = False) -> Order:
        """Give up all loads of a model that are open, and have what serves end; ensembles that need
        it before that, until it is loaded again. `on_demand`: it is loaded when it is asked for."""
        model = self._registry.model(name)
        order = self._unload(model, {}, on_demand)
        group = self._group(name)
        model.for_others, model.source, model.needs = False, FOLDER, []
        self._regroup(group)
        self._run()
        return order

    def loaded_for(self, name: str) -> list[str]:
        """The models of an ensemble's steps that were loaded for it, and are no other's."""
        models = self._registry.models
        others = {step for each in models.values() if each.name != name for step in each.needs}
        needs = models[name].needs if name in models else []
        return [
            step
            for step in needs
            if step not in others and step in models and models[step].for_others
        ]

    def _load(
        self, model: ModelEntry, source: LoadSource, asked: bool = True, again: bool = False
    ) -> Order:
        return self._enter_once(Order(model, OrderKind.LOAD, source, asked, again))

    def _enter_once(self, order: Order) -> Order:
        """Enter an order, unless the last is such a one, and has not begun."""
        last = order.model.orders[-1] if order.model.orders else None
        if last is None or not last.repeats(order):
            return self._enter(order)
        last.asked |= order.asked
        last.again |= order.again
        return last

    def _enter(self, order: Order) -> Order:
        order.model.orders.append(order)
        self._open.append(order)
        return order

    def _unload(
        self,
        model: ModelEntry,
        entered: dict[ModelEntry, Order | None],
        on_demand: bool = False,
    ) -> Order:
        again = bool(entered)
        entered[model] = None
        model.on_demand = on_demand
        model.outdated = False  # what serves is not to be loaded again
        for order in [*model.orders, *self._waiting_for(model)]:
            if order.kind is OrderKind.LOAD:
                self._give_up(order)
        before = []
        for user in self._users(model):
            if user not in entered:
                entered[user] = self._unload(user, entered, on_demand)
            before.append(entered[user])
        ends = [order for order in before if order is not None]
        order = entered[model] = self._enter(
            Order(model, OrderKind.UNLOAD, asked=not again, again=again, before=ends)
        )
        return order

    def _users(self, model: ModelEntry) -> list[ModelEntry]:
        """The ensembles that need it; a generation on its way out needs nothing for long."""
        return [
            user
            for user in self._registry.models.values()
            if any(v.uses(model.name) for v in (*user.serving.values(), *user.coming.values()))
        ]

    def _waiting_for(self, model: ModelEntry) -> list[Order]:
        """The loads of ensembles that need it and have not started: it may serve until they do."""
        followed = [each.orders[0] for each in self._registry.models.values() if each.orders]
        return [
            order
            for order in followed
            if order.phase is OrderPhase.WAITING and model.name in order.needs
        ]

    def _group(self, name: str) -> Group:
        return self._registry.group(name, self._hosted)

    def _regroup(self, group: Group) -> None:
        """Models that belong to an ensemble's process, or not any more, move."""
        for name in sorted(group.names) if len(group.names) > 1 else ():
            if name in self._registry.models:
                self._enter_once(Order(self._registry.models[name], OrderKind.MOVE))

    # --- what came of it

    def was_read(self, order: Order, plan: LoadPlan) -> None:
        """Folder and configuration of a load were read."""
        if order.phase is not OrderPhase.READING:  # it was given up
            self._executor.discard(plan.specs)
            return
        model = order.model
        model.fingerprint = order.fingerprint = plan.fingerprint
        order.specs = plan.specs
        if plan.error is not None:
            # Nothing is kept of what a request has sent wrong, or of a name that no repository has:
            # anybody may have mistyped it, or may not know that it has gone.
            kept = plan.known or model.failed or model.on_demand
            if kept and not model.serving and order.source == FOLDER:
                failed = DUPLICATE if plan.ambiguous else LoadOutcome(plan.error.message)
                model.outcomes = {"": failed}
            self._settle(order, plan.error)
        else:
            order.needs = list(dict.fromkeys(s.name for each in plan.specs for s in each.steps))
            circle = self._registry.circle(model.name, order.needs, plan.steps)
            if circle:
                text = f"circular dependency between ensembles: {' -> '.join(circle)}"
                self._fail(order, InvalidArgument(text))
            else:
                order.phase = OrderPhase.WAITING
                self._have_steps(order)
        self._publish(model)
        self._run()

    def _have_steps(self, order: Order) -> None:
        for name in order.needs:
            step = self._registry.model(name)
            last = next((o for o in reversed(step.orders) if o.kind is not OrderKind.MOVE), None)
            if last is not None and last.kind is OrderKind.UNLOAD and last.number > order.number:
                return self._give_up(order)
            coming = last if last is not None and last.may_come else None
            if coming is None and (not step.serving or last is not None):
                step.for_others = True
                step.on_demand |= order.model.on_demand
                coming = self._load(step, FOLDER, asked=False)
            if coming is not None:
                order.before.append(coming)
        return None

    def config_completed(self, spec: VersionSpec, completed: dict[str, Any]) -> ModelSpec:
        """Decide on the final configuration of a version whose first worker has completed it.

        An ensemble has no worker: its configuration is completed with the models that serve.

        Args:
            spec: The version that is loaded, or that a serving version may be updated to.
            completed: The properties that the model has reported.

        Raises:
            InvalidArgument: The configuration is invalid.
        """
        if not spec.steps:
            return self._executor.complete(spec, completed)
        find = self._registry.serving
        models = [find(*step) for step in spec.steps]
        elsewhere = [find(step.name, "") is not None for step in spec.steps]
        configs = [None if model is None else model.config for model in models]
        return self._executor.complete(spec, {"steps": configs, "elsewhere": elsewhere})

    def started(self, version: ModelVersion, error: BaseException | None) -> None:
        """A version was started, or could not be: then it has ended."""
        model = self._registry.model(version.spec.name)
        order = model.orders[0] if model.orders else None
        if order is None or model.coming.get(version.spec.version) is not version:
            return  # it was given up
        order.starting.discard(version.spec.version)
        if error is not None:
            order.failures[version.spec.version] = error
        self._offer_once_started(order)
        self._run()

    def updated(self, order: Order, errors: Mapping[str, BaseException]) -> None:
        """The instances of an order's updates were added, but for those with an error."""
        order.starting.discard(UPDATES)
        order.failures |= errors
        self._offer_once_started(order)
        self._run()

    def moved(self, order: Order) -> None:
        """A model is scheduled where it belongs, or stays where it is."""
        self._settle(order)
        self._run()

    def ended(self, version: ModelVersion) -> None:
        """A version has no process any more."""
        model, number = self._registry.model(version.spec.name), version.spec.version
        if version in model.dropping:
            model.dropping.remove(version)
        elif version in model.retiring:
            logger.info("successfully unloaded '%s' version %s", model.name, number)
            self._executor.forward(version, model.serving.get(number))
            model.retiring.remove(version)
        model.draining.discard(version)
        self._executor.discard([version.spec])
        self._publish(model)
        self._run()

    def changed(self, version: ModelVersion) -> None:
        """The readiness, endpoint or failure of a version has changed."""
        model = self._registry.models.get(version.spec.name)
        if model is not None and model.shown.get(version.spec.version) is version:
            self._publish(model)
            self._run()

    def acknowledged(self) -> None:
        """Something that was announced is known everywhere."""
        self._run()

    def publish(self, model: ModelEntry) -> None:
        """Have everybody know what serves of a model, which has changed."""
        self._publish(model)
        self._run()

    # --- following

    def _run(self) -> None:
        """Follow all orders as far as they can be; what happens meanwhile is looked at, too."""
        self._news = True
        if self._running:
            return
        self._running = True
        try:
            while self._news:
                self._news = False
                self._look()
        finally:
            self._running = False
        if self._published:
            self._published = False
            self._executor.changed()

    def _look(self) -> None:
        for model in list(self._registry.models.values()):
            if model.orders or model.retiring:
                self._advance(model)
        for order in self._open[:]:
            if order.settled and all(each.answered for each in order.after):
                self._answer(order)

    def _answer(self, order: Order) -> None:
        self._open.remove(order)
        order.answered = self._news = True
        self._registry.forget(order.model)
        self._executor.answer(order)

    def _advance(self, model: ModelEntry) -> None:
        try:
            while model.orders and self._follow(model.orders[0]):
                self._news = True
                self._publish(model)
            self._retire(model)
        except Exception:  # of this one model: the others go on
            logger.exception("model '%s' could not be followed", model.name)
            if model.orders and not model.orders[0].settled:
                self._fail(model.orders[0], Internal("internal error"))

    def _follow(self, order: Order) -> bool:
        """Go on with an order, if it can be; whether it was."""
        step = self._steps.get(order.phase)
        return step is not None and step(order)

    def _begin(self, order: Order) -> bool:
        model = order.model
        if order.kind is OrderKind.LOAD:
            order.phase, model.may_pass = OrderPhase.READING, False
            self._executor.read(order)
        elif order.kind is OrderKind.UNLOAD:
            order.phase = OrderPhase.WAITING
        else:
            order.phase = OrderPhase.MOVING
            self._executor.move(order, self._group(model.name))
        return True

    def _go_on(self, order: Order) -> bool:
        if not all(each.settled for each in order.before):
            return False
        if order.kind is OrderKind.LOAD:
            self._loads.start(order, self._group(order.model.name))
        else:
            self._withdraw(order)
        return True

    def _withdraw(self, order: Order) -> None:
        model = order.model
        old, model.serving = model.serving, {}
        model.outcomes = dict.fromkeys({*old, *model.outcomes} - {""}, UNLOADED)
        model.fingerprint, model.loaded_of = "", None
        model.retiring += old.values()
        order.phase = OrderPhase.TELLING

    def _offer_once_started(self, order: Order) -> None:
        if order.starting or order.phase is not OrderPhase.STARTING:
            return
        if order.failures:
            self._fail(order, refusal(order))
        else:
            self._loads.offer(order)
            self._publish(order.model)

    def _take_over(self, order: Order) -> bool:
        if self._loads.lost(order):
            self._fail(order, refusal(order))
        elif self._loads.accepted(order):
            self._load_users(order, self._loads.take_over(order))
            self._regroup(self._group(order.model.name))
        else:
            return False
        return True

    def _load_users(self, order: Order, other_shape: bool) -> None:
        """Have the ensembles loaded again that lacked a model, or know it in another shape; one
        that is only about to look at it will know it."""
        name = order.model.name
        for user in list(self._registry.models.values()):
            loads = [each for each in user.orders if each.kind is OrderKind.LOAD]
            if other_shape and loads:
                user.outdated |= any(version.uses(name) for version in user.serving.values())
                for each in loads:
                    each.outdated |= not each.waits and name in each.needs
            asleep = user.on_demand and not (user.serving or loads)
            needed = name in user.wanted_steps and not asleep
            if not needed or any(each.waits for each in loads):
                continue
            if other_shape or not (user.serving or loads):
                source = loads[0].source if loads else user.source
                order.after.append(self._load(user, source, again=True))

    def _settle_once_known(self, order: Order) -> bool:
        model = order.model
        if model.dropping or order.starting or not self._registry.known(model):
            return False
        self._settle(order, order.error)
        return True

    def _settle(self, order: Order, error: ShmserveError | None = None) -> None:
        if order.settled:
            return
        model, order.error, order.phase = order.model, error, OrderPhase.SETTLED
        model.orders.remove(order)
        if error is not None and model.expected and not statuses(model):
            model.outcomes[""] = LoadOutcome(error.message)  # not even there
        if error is not None and order.again and order.kind is OrderKind.LOAD:
            logger.error("ensemble '%s': %s", model.name, error.message)
            if model.serving:  # else there is nothing to unload, and why it failed is to be known
                order.after.append(self._unload(model, {model: None}, model.on_demand))
        elif error is not None and order.kind is OrderKind.LOAD:
            self._load_outdated(order)
        self._news = self._published = True

    def _load_outdated(self, order: Order) -> None:
        """What serves goes on serving where a load has failed, and is loaded again if it was that
        load which was to know the shape that a step has now."""
        model = order.model
        later = any(each.kind is not OrderKind.MOVE for each in model.orders)
        if model.outdated and model.serving and not later:
            model.outdated = False
            order.after.append(self._load(model, model.source, again=True))

    # --- giving up

    def _give_up(self, order: Order) -> None:
        """An order is not to be followed any more: its model is unloaded, or nobody waits for
        it."""
        order.again = False
        text = f"failed to load '{order.model.name}', no version is available"
        self._fail(order, InvalidArgument(text), given_up=True)

    def _fail(self, order: Order, error: ShmserveError, given_up: bool = False) -> None:
        """Drop what an order has started; what served goes on serving."""
        model, phase = order.model, order.phase
        if phase in (OrderPhase.TELLING, OrderPhase.DROPPING, OrderPhase.SETTLED):
            return
        steps, order.before = order.before, []
        for step in steps:
            if not (step.asked or any(step in each.before for each in self._open)):
                self._give_up(step)
        if order.waits:
            if phase is OrderPhase.WAITING and order.kind is OrderKind.LOAD and not model.serving:
                keep_wish(order)
            self._executor.discard(order.specs)
            self._settle(order, error)
            return
        order.error = error
        self._loads.drop(order, given_up)
        self._publish(model)

    # --- the end of versions

    def _retire(self, model: ModelEntry) -> None:
        """Have those finish what they have that all know to be replaced, and that nobody needs who
        has not ended."""
        waiting = [version for version in model.retiring if version not in model.draining]
        if not waiting or not self._registry.known(model):
            return
        for version in waiting:
            if model.serving or not self._registry.has_users(version):
                model.draining.add(version)
                self._executor.retire(version)

    def _publish(self, model: ModelEntry) -> None:
        self._published = True
        self._registry.publish(model)
        for ensemble in self._registry.ensembles_of(model.name):
            ensemble.changed()
