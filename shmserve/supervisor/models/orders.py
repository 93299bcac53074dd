"""Orders to load, unload and move models, states of models, and the steps of a load.

No step waits, reads files or starts processes. Some steps send messages to running versions.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from functools import partial
from typing import Any, NamedTuple, Protocol

from shmserve.errors import Internal, InvalidArgument, ShmserveError, Unavailable
from shmserve.ipc.messages.publications import ModelOnDemand, ModelPublication
from shmserve.model_config import GraphProblem
from shmserve.supervisor.models.instance import InstanceUpdate
from shmserve.supervisor.models.load_planner import VersionSpec
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.repository import DUPLICATE_MODEL, lacks_version
from shmserve.supervisor.models.scheduler_process import Group

logger = logging.getLogger(__name__)

UPDATES = "updates"  # the element of `Order.starting_versions` that stands for `Order.updates`


class LoadSource(NamedTuple):
    """The configuration and the files of a load request; both are empty to load the folder."""

    config: str
    files: dict[str, bytes]


FOLDER = LoadSource("", {})


class OrderKind(Enum):
    """The kind of an order."""

    LOAD = auto()
    UNLOAD = auto()
    MOVE = auto()  # the schedulers move to the process of the model's group


class Cause(Flag):
    """The reasons for an order; an order that serves several purposes has several causes."""

    CALLER = auto()  # a request, an operator or the poller needs the model
    PIN = auto()  # as CALLER, and the model stays loaded, even if it was loaded on demand before
    ENSEMBLE = auto()  # an ensemble needs the model for a step
    STEP = auto()  # the model is an ensemble, and a step's model has changed or is unloaded


class OrderPhase(Enum):
    """The phase of an `Order`, which loads or unloads a model."""

    QUEUED = auto()
    READING = auto()  # the folder and the configuration are read
    # The order waits for the models of an ensemble's steps, or for ensembles to end.
    WAITING = auto()
    STARTING = auto()  # new versions and instances start
    # The versions are published, and serve once every client has acknowledged them as ready.
    OFFERED = auto()
    PUBLISHING = auto()  # every client is notified of the serving versions
    DROPPING = auto()  # the load failed, and the versions that it started are stopped
    MOVING = auto()
    FINISHED = auto()


class LoadPlan(NamedTuple):
    """The versions to load, or the error of a load that cannot be planned.

    Attributes:
        fingerprint: The fingerprint of the files before they were read.
        specs: The versions to load.
        steps: For each model that a step runs, directly or not, the models of its own steps.
        error: The reason why there is no plan.
        is_known: Whether a repository has the model.
        is_ambiguous: Whether several repositories have the model.
    """

    fingerprint: str
    specs: list[VersionSpec]
    steps: dict[str, list[str]]
    error: ShmserveError | None = None
    is_known: bool = True
    is_ambiguous: bool = False


class LoadOutcome(NamedTuple):
    """The reason why a version does not serve: its load failed, or it was unloaded.

    `is_logged` is whether the reason is already in the log.
    """

    reason: str
    is_failure: bool = True
    is_logged: bool = False


UNLOADED = LoadOutcome("unloaded", is_failure=False)
# If several repositories have a model, no load has failed, and the server may still be ready.
DUPLICATE = LoadOutcome(DUPLICATE_MODEL, is_failure=False)


class LoggedFailure(InvalidArgument):
    """The error of a load whose reasons are in the log."""


class LifecycleActions(Protocol):
    """The actions by which the decisions of `Lifecycle` are executed.

    An action returns immediately. A method of `Lifecycle` is called when it has ended.
    """

    def read(self, order: Order) -> None:
        """Read a model's folder and configuration; `Lifecycle.load_planned` follows."""

    def create(self, spec: VersionSpec, group: Group) -> ModelVersion:
        """Create a version without processes; its changes call `Lifecycle.version_changed`."""

    def start(self, version: ModelVersion) -> None:
        """Start a version; `Lifecycle.version_started` follows."""

    def update(self, order: Order) -> None:
        """Start the instances that an order adds; `Lifecycle.updates_finished` follows."""

    def move(self, order: Order, group: Group) -> None:
        """Move the serving versions to a group's process; `Lifecycle.move_finished` follows."""

    def kill(self, version: ModelVersion) -> None:
        """End a version that was never published; `Lifecycle.version_ended` follows."""

    def retire(self, version: ModelVersion) -> None:
        """Drain a version and end it; `Lifecycle.version_ended` follows."""

    def await_ends(self, order: Order) -> None:
        """Wait for `order.ending_versions`, but not for long requests; `wait_finished` follows."""

    def forward(self, version: ModelVersion, successor: ModelVersion | None) -> None:
        """Redirect requests for a version that has ended to its successor."""

    def discard(self, specs: Iterable[VersionSpec]) -> None:
        """Remove the folders that were written for these specs, unless a process uses them."""

    def publish(self, model: ModelEntry) -> None:
        """Publish the changes of a model to every client."""

    def remove(self, model: ModelEntry) -> None:
        """Remove the record of the publications of a model that the registry has removed."""

    def is_published(self, model: ModelEntry) -> bool:
        """Check whether every client has acknowledged the publications of a model."""

    def answer(self, order: Order) -> None:
        """Report the end of an order to the callers that wait for it."""

    def report_change(self) -> None:
        """Report that the status of a model may have changed."""


_order_numbers = itertools.count(1)


@dataclass(slots=True, eq=False)
class Order:
    """An order to load, unload or move a model. The orders of a model are executed in turn.

    Attributes:
        prerequisites: Orders that must be completed before this order continues.
        follow_ups: Orders whose results are part of the response to this order.
        updates: The changes of the instances of versions that continue to serve, by number.
        starting_versions: The versions that have not started yet, and `UPDATES` while instances of
            `updates` are starting.
        is_outdated: Whether the immutable configuration of a step's model has changed since the
            order was planned.
        ending_versions: The versions that must end before the order is answered. `UPDATES` stands
            for the instances that `updates` removes.
    """

    model: ModelEntry
    kind: OrderKind
    source: LoadSource = FOLDER
    causes: Cause = Cause.CALLER
    prerequisites: list[Order] = field(default_factory=list)
    follow_ups: list[Order] = field(default_factory=list)
    number: int = field(init=False, default_factory=partial(next, _order_numbers))
    phase: OrderPhase = field(init=False, default=OrderPhase.QUEUED)
    fingerprint: str = field(init=False, default="")
    specs: list[VersionSpec] = field(init=False, default_factory=list)
    step_models: list[str] = field(init=False, default_factory=list)
    updates: dict[str, InstanceUpdate] = field(init=False, default_factory=dict)
    starting_versions: set[str] = field(init=False, default_factory=set)
    failures: dict[str, BaseException] = field(init=False, default_factory=dict)
    error: ShmserveError | None = field(init=False, default=None)
    is_answered: bool = field(init=False, default=False)
    is_outdated: bool = field(init=False, default=False)
    ending_versions: set[ModelVersion | str] = field(init=False, default_factory=set)

    @property
    def hangs(self) -> bool:
        """Return whether the load takes long, or waits for such a load or for an unload.

        Waiting for an unload counts, since that unload may itself wait for this load.
        """
        if self.phase not in (OrderPhase.WAITING, OrderPhase.STARTING):
            return False
        awaited_orders, unvisited_orders = {self}, [self]
        while unvisited_orders:
            order = unvisited_orders.pop()
            if order.kind is OrderKind.UNLOAD or order._starts_slowly:
                return True
            model_orders = list(order.model.orders)
            index = model_orders.index(order) if order in model_orders else 0
            unvisited_orders += {*order.prerequisites, *model_orders[:index]} - awaited_orders
            awaited_orders.update(unvisited_orders)
        return False

    @property
    def _starts_slowly(self) -> bool:
        incoming = self.model.incoming.values() if self.phase is OrderPhase.STARTING else ()
        return any(version.instances.hangs for version in incoming)

    @property
    def is_finished(self) -> bool:
        """Return whether the order has been executed or has failed."""
        return self.phase is OrderPhase.FINISHED

    def is_repeated_by(self, later_order: Order) -> bool:
        """Check whether this order has not begun, and `later_order` would only repeat it."""
        has_same_effect = (self.kind, self.source) == (later_order.kind, later_order.source)
        return has_same_effect and self.phase is OrderPhase.QUEUED

    @property
    def may_succeed(self) -> bool:
        """Return whether the order is a load that has not failed."""
        return self.kind is OrderKind.LOAD and self.phase is not OrderPhase.DROPPING

    @property
    def is_planning(self) -> bool:
        """Return whether the order has started no version, and used no step's model."""
        return self.phase in (OrderPhase.QUEUED, OrderPhase.READING, OrderPhase.WAITING)

    # --- the steps of a load

    def start(self, actions: LifecycleActions, group: Group) -> None:
        """Start the versions that differ from the serving ones; add instances to the others."""
        model = self.model
        model.outcomes.pop("", None)
        is_repeated = model.last_load == (self.fingerprint, self.source.config)
        self.updates, specs_to_start = compare_versions(model.serving, self.specs, is_repeated)
        new_versions = {spec.version: actions.create(spec, group) for spec in specs_to_start}
        latest_version = model.serving.get(model.latest)
        for number, version in new_versions.items():
            replaced_version = model.serving.get(number, latest_version)
            if replaced_version is not None:
                version.instances.adopt_count(replaced_version.instances)
        model.incoming = {number: model.serving[number] for number in self.updates} | new_versions
        model.has_steps |= bool(self.step_models)
        self.phase = OrderPhase.STARTING
        self.starting_versions = {*new_versions} | ({UPDATES} if self.updates else set())
        for number, version in new_versions.items():
            logger.info("loading: %s:%s", model.name, number)
            actions.start(version)
        if self.updates:
            actions.update(self)

    def offer(self) -> None:
        """Enter the phase OFFERED, in which the started versions are published, but do not serve.

        Each version first receives the counters of the version that it replaces.
        """
        for number, version in self.model.incoming.items():
            old_version = self.model.serving.get(number)
            if old_version is not None and old_version is not version:
                old_version.pass_counters_to(version)
        self.phase = OrderPhase.OFFERED

    def store_failures(self) -> bool:
        """Store the failures of offered versions that cannot become ready.

        Returns:
            Whether the order has failures.
        """
        for number, version in self.model.incoming.items():
            if not version.ready and version.fatal_problem:
                self.failures[number] = Unavailable(version.fatal_problem)
        return bool(self.failures)

    def take_over(self) -> bool:
        """Replace the serving versions by the offered ones.

        Returns:
            Whether the immutable configurations of the serving versions have changed.
        """
        model, incoming = self.model, self.model.incoming
        old_configurations = model.configurations
        for number, update in self.updates.items():
            incoming[number].commit(update)
        old_versions, model.serving = model.serving, incoming
        model.incoming, model.is_outdated = {}, self.is_outdated
        model.on_demand &= Cause.PIN not in self.causes
        # Failures of versions that are no longer configured are removed.
        outcomes = {n: o for n, o in model.outcomes.items() if not o.is_failure}
        outcomes |= dict.fromkeys(old_versions, UNLOADED)
        model.outcomes = {n: o for n, o in outcomes.items() if n not in incoming}
        model.retiring += [v for number, v in old_versions.items() if incoming.get(number) is not v]
        self.keep_source()
        model.last_load = self.fingerprint, self.source.config
        self.phase = OrderPhase.PUBLISHING
        logger.info("successfully loaded '%s'", model.name)
        return old_configurations != model.configurations

    def drop(self, actions: LifecycleActions, is_cancelled: bool) -> None:
        """End the versions that were started; the serving versions continue."""
        model, was_offered = self.model, self.model.is_offered
        incoming_versions, model.incoming, self.phase = model.incoming, {}, OrderPhase.DROPPING
        reasons = _reasons(self.failures)
        for number, version in incoming_versions.items():
            old_version = model.serving.get(number)
            if old_version is version:
                continue
            if old_version is None:
                failure = LoadOutcome(reasons.get(number, "another version failed"), is_logged=True)
                model.outcomes[number] = UNLOADED if is_cancelled else failure
            else:
                old_version.pass_counters_to(None)
            if was_offered:
                model.retiring.append(version)
            else:
                model.dropping.append(version)
                actions.kill(version)
        # The order still waits for its updates, whose end is reported even if they are reverted.
        self.starting_versions &= {UPDATES}
        for number, update in self.updates.items():
            model.serving[number].instances.retire(update.added_instances)
        if not model.serving:
            self.keep_source()

    def keep_source(self) -> None:
        """Store the source of an ensemble; a reload because of a changed step uses this source."""
        self.model.step_models = self.step_models
        self.model.source = self.source if self.step_models else FOLDER

    def log_failures(self) -> LoggedFailure:
        """Log why versions of the load have failed, and return the error of the load."""
        name, reasons = self.model.name, _reasons(self.failures)
        for number, reason in reasons.items():
            text = "\n".join((reason, *getattr(self.failures[number], "__notes__", ())))
            logger.error("failed to load '%s' version %s: %s", name, number, text)
        ready_numbers = [n for n, version in self.model.serving.items() if version.ready]
        # An ensemble that does not fit its new steps is unloaded.
        if ready_numbers and Cause.STEP not in self.causes:
            text = "model '%s': the loaded versions continue to serve: %s"
            logger.info(text, name, ", ".join(ready_numbers))
        errors = self.failures.values()
        self.model.failure_is_temporary = all(isinstance(error, Unavailable) for error in errors)
        graph_problem = next((e for e in errors if isinstance(e, GraphProblem)), None)
        if graph_problem is not None:
            return LoggedFailure(f"load failed for model '{name}': {graph_problem.message}\n")
        lines = (f"version {n} is at UNAVAILABLE state: {text};\n" for n, text in reasons.items())
        return LoggedFailure(f"load failed for model '{name}': {''.join(lines)}")


def _reasons(failures: Mapping[str, BaseException]) -> dict[str, str]:
    def reason(error: BaseException) -> str:
        reported_error = error if isinstance(error, ShmserveError) else Internal()
        return f"{reported_error.title}: {reported_error.message}"

    return {number: reason(error) for number, error in failures.items()}


@dataclass(slots=True, eq=False)
class ModelEntry:
    """The state of one model.

    Attributes:
        orders: The open orders; only the first one is in progress, and later ones are queued.
        serving: The versions that serve, by number.
        incoming: The versions of the load in progress, which serve after they are offered.
        dropping: The versions of a failed load that have not ended.
        retiring: The versions that no longer serve and have not ended.
        draining: The versions of `retiring` whose drain has begun.
        outcomes: The reasons why versions do not serve, by number.
        source: The source of the last load of an ensemble.
        step_models: The models of an ensemble's steps.
        has_steps: Whether a version of the model is or was an ensemble.
        is_expected: Whether the model is loaded at the start and required for readiness.
        on_demand: Whether the model is loaded by its first request and unloaded to free memory.
            An operator's load or unload ends this.
        is_outdated: Whether the immutable configuration of a step's model has changed during a load
            of this ensemble. If the load fails, the serving ensemble is reloaded.
        failure_is_temporary: Whether the last load failed for a reason that may be temporary.
    """

    name: str
    orders: deque[Order] = field(default_factory=deque)
    serving: dict[str, ModelVersion] = field(default_factory=dict)
    incoming: dict[str, ModelVersion] = field(default_factory=dict)
    dropping: list[ModelVersion] = field(default_factory=list)
    retiring: list[ModelVersion] = field(default_factory=list)
    draining: set[ModelVersion] = field(default_factory=set)
    outcomes: dict[str, LoadOutcome] = field(default_factory=dict)
    fingerprint: str = ""
    last_load: tuple[str, str] | None = None  # the fingerprint and the sent configuration
    source: LoadSource = FOLDER
    step_models: list[str] = field(default_factory=list)
    has_steps: bool = False
    is_step_only: bool = False  # whether the model was loaded only as a step of ensembles
    is_expected: bool = False
    on_demand: bool = False
    is_outdated: bool = False
    failure_is_temporary: bool = False

    @property
    def versions(self) -> Iterable[ModelVersion]:
        """Return the versions that may have a process, serving or not."""
        current_versions = (*self.serving.values(), *self.incoming.values())
        # A version that an order updates is both serving and incoming.
        return dict.fromkeys((*current_versions, *self.dropping, *self.retiring))

    @property
    def is_offered(self) -> bool:
        """Return whether the versions of the load in progress are published."""
        return bool(self.orders) and self.orders[0].phase is OrderPhase.OFFERED

    @property
    def published(self) -> dict[str, ModelVersion]:
        """Return the published versions by number: those that serve or are about to serve."""
        return {**self.serving, **self.incoming} if self.is_offered else self.serving

    @property
    def latest(self) -> str:
        """Return the version for requests that name none; "" if no version serves."""
        return max(self.incoming if self.is_offered else self.serving, key=int, default="")

    @property
    def publications(self) -> dict[str, ModelPublication]:
        """Return the publications by version; "" has one if the model is loaded on demand."""
        latest_version, publications = self.latest, dict[str, ModelPublication]()
        for number, version in self.published.items():
            publications[number] = version.publication(number == latest_version)
        if self.on_demand:
            publications[""] = ModelOnDemand(self.name, 0)
        return publications

    @property
    def unpublished_versions(self) -> set[str]:
        """Return the versions that are loading, retiring or ended, also if they were published.

        Version "" is included if a load has found no version.
        """
        retiring_versions = (version.spec.version for version in self.retiring)
        versions = {*self.outcomes, *self.incoming, *retiring_versions} - self.published.keys()
        has_no_version = "" in versions and lacks_version(self.outcomes[""].reason)
        return versions if has_no_version else versions - {""}

    @property
    def configurations(self) -> dict[str, dict[str, Any]]:
        """Return the immutable configuration of each serving version, by number."""
        return {n: version.config.immutable_config for n, version in self.serving.items()}

    @property
    def has_failed(self) -> bool:
        """Return whether the model or a version could not be loaded."""
        return any(outcome != UNLOADED for outcome in self.outcomes.values())

    @property
    def unloads_later(self) -> bool:
        """Return whether an open order unloads the model."""
        return any(order.kind is OrderKind.UNLOAD for order in self.orders)

    @property
    def last_order(self) -> Order | None:
        """Return the last open order that loads or unloads the model."""
        return next((o for o in reversed(self.orders) if o.kind is not OrderKind.MOVE), None)

    @property
    def is_unloaded(self) -> bool:
        """Return whether the last order for the model was an operator's unload."""
        is_idle = not (self.serving or self.orders or self.on_demand)
        return is_idle and set(self.outcomes.values()) == {UNLOADED}

    @property
    def needed_steps(self) -> list[str]:
        """Return the models that this ensemble needs, or will need after the load in progress."""
        order = self.orders[0] if self.orders else None
        return order.step_models if order is not None and order.step_models else self.step_models

    @property
    def possible_steps(self) -> list[str]:
        """Return `needed_steps` and the current steps, which remain if the current load fails."""
        serving_steps = [step for version in self.serving.values() for step in version.spec.steps]
        return [*self.needed_steps, *(step.name for step in serving_steps)]


def compare_versions(
    serving: Mapping[str, ModelVersion], specs: Sequence[VersionSpec], is_repeated: bool
) -> tuple[dict[str, InstanceUpdate], list[VersionSpec]]:
    """Return the updates of the versions that are kept, and the specs that must be started.

    A version is kept if its files and its configuration, except for the instances, are the same.

    Args:
        serving: The serving versions by number.
        specs: The versions to load.
        is_repeated: Whether the model's files are the same as at its last load. The load then
            restarts every version whose instances do not differ.
    """
    updates: dict[str, InstanceUpdate] = {}
    specs_to_start: list[VersionSpec] = []
    for spec in specs:
        version = serving.get(spec.version)
        update = version.update_to(spec) if version is not None else None
        if update is None or (is_repeated and not update.config_differs):
            specs_to_start.append(spec)
        else:
            updates[spec.version] = update
    return updates, specs_to_start
