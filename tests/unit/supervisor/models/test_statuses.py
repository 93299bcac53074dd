"""Statuses, as facts have them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from shmserve.supervisor.models.repository import IN_SEVERAL
from shmserve.supervisor.models.statuses import (
    DUPLICATE,
    UNLOADED,
    Generation,
    Outcome,
    is_ready,
    statuses,
)


@dataclass
class Version:
    """A generation."""

    ready: bool = True
    problem: str = ""


@dataclass
class Model:
    """The facts of one model."""

    serving: dict[str, Generation] = field(default_factory=dict)
    shown: dict[str, Generation] = field(default_factory=dict)
    coming: dict[str, Generation] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    outcomes: dict[str, Outcome] = field(default_factory=dict)


def serving(version: Version, **more: Any) -> Model:
    return Model(serving={"1": version}, shown={"1": version}, **more)


RESTARTING = "a process that ended is started again"
# (facts, state, reason, whether all of it serves that should)
TABLE = [
    (serving(Version()), "READY", "", True),
    (serving(Version(ready=False)), "LOADING", RESTARTING, False),
    (serving(Version(ready=False, problem="it broke")), "UNAVAILABLE", "it broke", False),
    (serving(Version(), coming={"1": Version(ready=False)}), "READY", "", True),
    (serving(Version(), leaving={"1"}), "READY", "", True),
    (serving(Version(), outcomes={"1": Outcome("no")}), "READY", "", True),
    (Model(coming={"1": Version()}, leaving={"1"}), "LOADING", "", False),
    (Model(shown={"1": Version()}, coming={"1": Version()}), "LOADING", "", False),
    (Model(leaving={"1"}, outcomes={"1": UNLOADED}), "UNLOADING", "", True),
    (Model(outcomes={"1": UNLOADED}), "UNAVAILABLE", "unloaded", True),
    (Model(outcomes={"1": DUPLICATE}), "UNAVAILABLE", IN_SEVERAL, True),
    (Model(outcomes={"1": Outcome("no memory")}), "UNAVAILABLE", "no memory", False),
]


@pytest.mark.parametrize(("model", "state", "reason", "ready"), TABLE)
def test_a_status_is_the_first_that_holds(
    model: Model, state: str, reason: str, ready: bool
) -> None:
    assert statuses(model) == {"1": (state, reason)}
    assert is_ready(model) is ready


def test_what_is_to_take_over_is_shown_in_the_place_of_what_serves() -> None:
    model = serving(Version())
    model.shown = {"1": Version(ready=False)}
    assert statuses(model) == {"1": ("LOADING", RESTARTING)}
