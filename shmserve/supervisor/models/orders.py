"""Orders to load, unload and move models, the row of each model that they change, and the policy
that says what a load touches (pure).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from shmserve.errors import ShmserveError
from shmserve.supervisor.models.repository import IN_SEVERAL

if TYPE_CHECKING:
    from shmserve.supervisor.models.instances import InstanceUpdate, VersionSpec
    from shmserve.supervisor.models.model_version import ModelVersion


class LoadSource(NamedTuple):
    """The source of a load: a request's configuration and files, or the model's folder where there
    are none."""

    config: str
    files: dict[str, bytes]


FOLDER = LoadSource("", {})


class OrderKind(Enum):
    """The end of an order: that a model is there, or is not, or is in another process."""

    LOAD = auto()
    UNLOAD = auto()
    MOVE = auto()  # its scheduler, to where those of its group are


class OrderPhase(Enum):
    """The progress of an order."""

    QUEUED = auto()
    READING = auto()  # folder and configuration
    WAITING = auto()  # for the models of an ensemble's steps; for the ends of ensembles
    STARTING = auto()  # what differs
    OFFERED = auto()  # is published, and takes over once all know that it is ready
    TELLING = auto()  # all are told what serves now, or that nothing does
    DROPPING = auto()  # it failed: what was started ends
    MOVING = auto()
    SETTLED = auto()


class LoadPlan(NamedTuple):
    """The versions to load, as folder and configuration have them, or why there are none.

    `fingerprint` is that of the files from before they were read; `steps` are those of the models
    that an ensemble needs, by name, as their folders have them. `known`: there is such a model;
    `ambiguous`: in several repositories.
    """

    fingerprint: str
    specs: list[VersionSpec]
    steps: dict[str, list[str]]
    error: ShmserveError | None = None
    known: bool = True
    ambiguous: bool = False


class LoadOutcome(NamedTuple):
    """The end of a version, or of a load that had none: it was unloaded, or for which `reason` it
    failed."""

    reason: str
    failed: bool = True


UNLOADED = LoadOutcome("unloaded", failed=False)
# The repositories are at fault, and no load is.
DUPLICATE = LoadOutcome(IN_SEVERAL, failed=False)


_numbers = itertools.count(1)


@dataclass(slots=True, eq=False)
class Order:
    """An order about one model; orders have the numbers of their arrival.

    `asked`: somebody wants just this, and not an ensemble of which it is a step. `again`: an
    ensemble is loaded because a step was, or (an unload) is to be when one is. `pins`: the model is
    not on demand any more once it is loaded. `before` are orders that are to be settled before it
    goes on, `after` those that are part of its answer. `outdated`: a step has got another shape
    since it looked.
    """

    model: ModelEntry
    kind: OrderKind
    source: LoadSource = FOLDER
    asked: bool = True
    again: bool = False
    pins: bool = False
    before: list[Order] = field(default_factory=list)
    after: list[Order] = field(default_factory=list)
    number: int = field(init=False, default_factory=partial(next, _numbers))
    phase: OrderPhase = field(init=False, default=OrderPhase.QUEUED)
    fingerprint: str = field(init=False, default="")
    specs: list[VersionSpec] = field(init=False, default_factory=list)
    needs: list[str] = field(init=False, default_factory=list)
    updates: dict[str, InstanceUpdate] = field(init=False, default_factory=dict)
    starting: set[str] = field(init=False, default_factory=set)
    failures: dict[str, BaseException] = field(init=False, default_factory=dict)
    error: ShmserveError | None = field(init=False, default=None)
    answered: bool = field(init=False, default=False)
    outdated: bool = field(init=False, default=False)

    @property
    def settled(self) -> bool:
        """Whether the model is as it was to be, or will not be."""
        return self.phase is OrderPhase.SETTLED

    def repeats(self, later: Order) -> bool:
        """Whether it has not begun, and a later one would only be this again."""
        same = (self.kind, self.source) == (later.kind, later.source)
        return same and self.phase is OrderPhase.QUEUED

    @property
    def may_come(self) -> bool:
        """Whether it is a load that has not failed."""
        return self.kind is OrderKind.LOAD and self.phase is not OrderPhase.DROPPING

    @property
    def waits(self) -> bool:
        """Whether it has looked at nothing but the model's own files yet."""
        return self.phase in (OrderPhase.QUEUED, OrderPhase.READING, OrderPhase.WAITING)


@dataclass(slots=True, eq=False)
class ModelEntry:
    """Everything about one name. `orders` are followed one after the other. `serving` by version;
    `coming` are those of the load that is followed, which take over once they are `offered` and
    everybody knows it; `outcomes` are those of what is not there.

    `source`, `needs` (the models of an ensemble's steps) are of what serves, or is to when it can;
    `loaded_of`: the files' fingerprint and the sent configuration of the last load. `for_others`:
    nobody asked for it but ensembles. `expected`: it is loaded at the start, and to be ready from
    then on. `on_demand`: it is loaded when it is asked for, and unloaded where others need its
    memory; what an operator loads or unloads is not, from then on. `outdated`: a step of what
    serves has another shape by now, and an open load was to know it.
    """

    name: str
    orders: deque[Order] = field(default_factory=deque)
    serving: dict[str, ModelVersion] = field(default_factory=dict)
    coming: dict[str, ModelVersion] = field(default_factory=dict)
    dropping: list[ModelVersion] = field(default_factory=list)
    retiring: list[ModelVersion] = field(default_factory=list)
    draining: set[ModelVersion] = field(default_factory=set)  # those of `retiring` that are told
    outcomes: dict[str, LoadOutcome] = field(default_factory=dict)
    fingerprint: str = ""
    loaded_of: tuple[str, str] | None = None
    source: LoadSource = FOLDER
    needs: list[str] = field(default_factory=list)
    for_others: bool = False
    expected: bool = False
    on_demand: bool = False
    outdated: bool = False
    may_pass: bool = False  # the reason for which the last load failed: another may succeed

    @property
    def versions(self) -> Iterable[ModelVersion]:
        """Those that may have a process, serving or not."""
        found = (*self.serving.values(), *self.coming.values(), *self.dropping, *self.retiring)
        return dict.fromkeys(found)  # what stays is also among what is coming

    @property
    def offered(self) -> bool:
        """Whether what is coming is published."""
        return bool(self.orders) and self.orders[0].phase is OrderPhase.OFFERED

    @property
    def shown(self) -> dict[str, ModelVersion]:
        """What is published."""
        return {**self.serving, **self.coming} if self.offered else self.serving

    @property
    def leaving(self) -> set[str]:
        """The versions of which something finishes what it has."""
        return {version.spec.version for version in self.retiring}

    @property
    def latest(self) -> str:
        """The version that serves requests that name none; "" when there is none."""
        return max(self.coming if self.offered else self.serving, key=int, default="")

    @property
    def failed(self) -> bool:
        """Whether it, or a version of it, could not be loaded."""
        return any(outcome != UNLOADED for outcome in self.outcomes.values())

    @property
    def wanted_steps(self) -> list[str]:
        """The models that it needs, or will once the load is over that is followed."""
        order = self.orders[0] if self.orders else None
        return order.needs if order is not None and order.needs else self.needs

    @property
    def possible_steps(self) -> list[str]:
        """Those, and what it needs now: the load that is followed may fail."""
        now = [step.name for version in self.serving.values() for step in version.spec.steps]
        return [*self.wanted_steps, *now]


def differs(
    serving: Mapping[str, ModelVersion], specs: Sequence[VersionSpec], anew: bool
) -> tuple[dict[str, InstanceUpdate], list[VersionSpec]]:
    """The difference of `specs` to what serves: the update of each version that stays, and what is
    started. A version stays where neither its files nor its configuration differ, but for its
    instances. With `anew`, no file of the model differs from what was loaded: whoever loads it
    again means to start all of it."""
    updates: dict[str, InstanceUpdate] = {}
    fresh: list[VersionSpec] = []
    for spec in specs:
        version = serving.get(spec.version)
        update = version.update_to(spec) if version is not None else None
        if update is None or (anew and not update.differs):
            fresh.append(spec)
        else:
            updates[spec.version] = update
    return updates, fresh
