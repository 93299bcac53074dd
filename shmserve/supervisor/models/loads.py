"""The steps of a load that change what a model is: start what differs, offer it in the place of
what serves, take over, or drop it all (pure).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shmserve.errors import Internal, InvalidArgument, ShmserveError, Unavailable
from shmserve.ipc.model_spec import ModelSpec
from shmserve.model_config import GraphProblem
from shmserve.supervisor.models.instances import VersionSpec
from shmserve.supervisor.models.model_version import ModelVersion
from shmserve.supervisor.models.orders import (
    FOLDER,
    UNLOADED,
    LoadOutcome,
    Order,
    OrderPhase,
    differs,
)
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.processes.scheduler_hosts import Group

logger = logging.getLogger(__name__)

UPDATES = "updates"  # among what is starting


class LifecycleActions(Protocol):
    """Carries out what is decided. It returns at once, and calls the lifecycle later."""

    def read(self, order: Order) -> None:
        """Read a model's folder and configuration: `Lifecycle.was_read`."""

    def create(self, spec: VersionSpec, group: Group) -> ModelVersion:
        """A version without any process: `Lifecycle.changed`, whenever it has."""

    def start(self, version: ModelVersion) -> None:
        """Start a version: `Lifecycle.config_completed`, then `Lifecycle.started`."""

    def complete(self, spec: VersionSpec, completed: dict[str, Any]) -> ModelSpec:
        """Return the final configuration of a version; raises InvalidArgument."""

    def update(self, order: Order) -> None:
        """Add the instances of an order's updates: `Lifecycle.updated`."""

    def move(self, order: Order, group: Group) -> None:
        """Have what serves scheduled with a group: `Lifecycle.moved`."""

    def kill(self, version: ModelVersion) -> None:
        """End a version that nobody knows: `Lifecycle.ended`."""

    def retire(self, version: ModelVersion) -> None:
        """Have a version finish what it has, and end: `Lifecycle.ended`."""

    def forward(self, version: ModelVersion, successor: ModelVersion | None) -> None:
        """Have what reached a version too late that has ended go to who serves now."""

    def discard(self, specs: Iterable[VersionSpec]) -> None:
        """Remove the folders that were written for these alone, where nothing of them runs."""

    def answer(self, order: Order) -> None:
        """Tell who gave an order that it is over."""

    def changed(self) -> None:
        """Note that the status of a model may have changed."""


@dataclass(slots=True, eq=False)
class Loads:
    """The loads of a registry's models."""

    _registry: ModelRegistry
    _executor: LifecycleActions

    def start(self, order: Order, group: Group) -> None:
        """Start the versions that differ from what serves, and add the instances that do."""
        model = order.model
        model.outcomes.pop("", None)
        anew = model.loaded_of == (order.fingerprint, order.source.config)
        order.updates, fresh = differs(model.serving, order.specs, anew)
        new = [self._executor.create(spec, group) for spec in fresh]
        latest = model.serving.get(model.latest)
        for version in new:
            before = model.serving.get(version.spec.version, latest)
            if before is not None:
                version.instances.begin_like(before.instances)
        kept = {number: model.serving[number] for number in order.updates}
        model.coming = {**kept, **{version.spec.version: version for version in new}}
        order.phase = OrderPhase.STARTING
        order.starting = {spec.version for spec in fresh} | ({UPDATES} if order.updates else set())
        for version in new:
            logger.info("loading: %s:%s", model.name, version.spec.version)
            self._executor.start(version)
        if order.updates:
            self._executor.update(order)

    def offer(self, order: Order) -> None:
        """Have what was started be published in the place of what serves."""
        model = order.model
        for number, version in model.coming.items():
            old = model.serving.get(number)
            if old is not None and old is not version:
                old.hand_counts_to(version)
        order.phase = OrderPhase.OFFERED

    def lost(self, order: Order) -> bool:
        """Whether something of what is offered broke for good."""
        for number, version in order.model.coming.items():
            if not version.ready and version.hopeless:
                order.failures[number] = Unavailable(version.hopeless)
        return bool(order.failures)

    def accepted(self, order: Order) -> bool:
        """Whether all of what is offered is ready, and everybody knows it."""
        known = self._registry.known(order.model)
        return known and all(version.ready for version in order.model.coming.values())

    def take_over(self, order: Order) -> bool:
        """Have what is offered serve, and what it replaces retire; whether the configurations of
        the model are others then."""
        model, new = order.model, order.model.coming
        before = self._registry.configurations(model.name)
        for number, update in order.updates.items():
            new[number].commit(update)
        old, model.serving = model.serving, new
        model.coming, model.outdated = {}, order.outdated
        model.on_demand &= not order.pins
        # What failed and is not wanted any more is nobody's concern.
        model.outcomes = {
            number: outcome
            for number, outcome in model.outcomes.items()
            if number not in new and not outcome.failed
        } | dict.fromkeys(old.keys() - new.keys(), UNLOADED)
        model.retiring += [v for number, v in old.items() if new.get(number) is not v]
        keep_wish(order)
        model.loaded_of = order.fingerprint, order.source.config
        order.phase = OrderPhase.TELLING
        logger.info("successfully loaded '%s'", model.name)
        return before != self._registry.configurations(model.name)

    def drop(self, order: Order, given_up: bool) -> None:
        """Have all end that was started; what served goes on serving."""
        model, was_offered = order.model, order.model.offered
        coming, model.coming, order.phase = model.coming, {}, OrderPhase.DROPPING
        reasons = _reasons(order.failures)
        for number, version in coming.items():
            old = model.serving.get(number)
            if old is version:
                continue
            if old is None:
                failed = LoadOutcome(reasons.get(number, "another version failed"))
                model.outcomes[number] = UNLOADED if given_up else failed
            else:
                old.hand_counts_to(None)
            if was_offered:
                model.retiring.append(version)
            else:
                model.dropping.append(version)
                self._executor.kill(version)
        order.starting &= {UPDATES}  # these are told before they end
        for number, update in order.updates.items():
            model.serving[number].instances.retire(update.added)
        if not model.serving:
            keep_wish(order)


def keep_wish(order: Order) -> None:
    """Have a model be loaded as an order has it, when it is loaded again for its steps' sake. Of
    any other nothing is kept that was sent."""
    order.model.needs = order.needs
    order.model.source = order.source if order.needs else FOLDER


def refusal(order: Order) -> InvalidArgument:
    """The refusal of a load of which versions failed; the reasons are logged."""
    name, reasons = order.model.name, _reasons(order.failures)
    for number, reason in reasons.items():
        logger.error("failed to load '%s' version %s: %s", name, number, reason)
    logger.error("failed to load '%s'", name)
    errors = order.failures.values()
    order.model.may_pass = all(isinstance(error, Unavailable) for error in errors)
    graph_problem = next((e for e in errors if isinstance(e, GraphProblem)), None)
    if graph_problem is not None:
        text = f"load failed for model '{name}': {graph_problem.message}\n"
        return InvalidArgument(text)
    failed = "".join(
        f"version {number} is at UNAVAILABLE state: {reason};\n"
        for number, reason in reasons.items()
    )
    return InvalidArgument(f"load failed for model '{name}': {failed}")


def _reasons(failures: Mapping[str, BaseException]) -> dict[str, str]:
    known = {
        number: error if isinstance(error, ShmserveError) else Internal("internal error")
        for number, error in failures.items()
    }
    return {number: f"{error.title}: {error.message}" for number, error in known.items()}
