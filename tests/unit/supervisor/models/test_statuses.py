"""Statuses, as facts have them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.supervisor.models.orders import DUPLICATE, UNLOADED, LoadOutcome, ModelEntry
from shmserve.supervisor.models.repository import IN_SEVERAL
from shmserve.supervisor.models.statuses import is_ready, statuses


@dataclass
class Version:
    """A generation."""

    ready: bool = True
    problem: str = ""


def model(**facts: Any) -> ModelEntry:
    return ModelEntry("m", **facts)


def serving(version: Version, **more: Any) -> ModelEntry:
    return model(serving={"1": version}, **more)


def leaving() -> list[Any]:
    return [SimpleNamespace(spec=SimpleNamespace(version="1"))]


RESTARTING = "a process that ended is started again"
# (facts, state, reason, whether all of it serves that should)
TABLE = [
    (serving(Version()), "READY", "", True),
    (serving(Version(ready=False)), "LOADING", RESTARTING, False),
    (serving(Version(ready=False, problem="it broke")), "UNAVAILABLE", "it broke", False),
    (serving(Version(), coming={"1": Version(ready=False)}), "READY", "", True),
    (serving(Version(), retiring=leaving()), "READY", "", True),
    (serving(Version(), outcomes={"1": LoadOutcome("no")}), "READY", "", True),
    (model(coming={"1": Version()}, retiring=leaving()), "LOADING", "", False),
    (model(coming={"1": Version()}, offered=True), "LOADING", "", False),
    (model(retiring=leaving(), outcomes={"1": UNLOADED}), "UNLOADING", "", True),
    (model(outcomes={"1": UNLOADED}), "UNAVAILABLE", "unloaded", True),
    (model(outcomes={"1": DUPLICATE}), "UNAVAILABLE", IN_SEVERAL, True),
    (model(outcomes={"1": LoadOutcome("no memory")}), "UNAVAILABLE", "no memory", False),
]


@pytest.mark.parametrize(("facts", "state", "reason", "ready"), TABLE)
def test_a_status_is_the_first_that_holds(
    facts: ModelEntry, state: str, reason: str, ready: bool
) -> None:
    assert statuses(facts) == {"1": (state, reason)}
    assert is_ready(facts) is ready


def test_what_is_to_take_over_is_shown_in_the_place_of_what_serves() -> None:
    facts = serving(Version(), coming={"1": Version(ready=False)}, offered=True)
    assert statuses(facts) == {"1": ("LOADING", RESTARTING)}
