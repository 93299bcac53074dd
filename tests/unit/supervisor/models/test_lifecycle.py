"""The decisions about models, one event at a time."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.supervisor.models.statuses import statuses
from tests.rigs.lifecycle_rig import LifecycleRig

EVENTS = ("read", "start", "known", "end")
GIVEN_UP = "failed to load 'm', no version is available: Unavailable: the model is unloaded"


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("moment", range(4))
def test_an_unload_at_every_moment_of_a_load(moment: int, served: bool) -> None:
    """Each order is answered once, a load that is over stays over, and nothing is left."""
    rig = LifecycleRig()
    if served:
        rig.lifecycle.load("m")
        rig.happen(*EVENTS)
    load = rig.lifecycle.load("m")
    for kind in EVENTS[:moment]:
        rig.happen(kind)
    unload = rig.lifecycle.unload("m")
    later = rig.lifecycle.load("m")
    rig.happen(*EVENTS)
    assert (load.error.message if load.error else "") == ("" if moment == 3 else GIVEN_UP)
    assert unload.error is later.error is None
    assert rig.answers[-3:] == [load, unload, later]
    assert len(rig.answers) == (4 if served else 3)
    (version,) = rig.registry.models["m"].serving.values()
    assert rig.alive == [version]
    rig.lifecycle.unload("m")
    rig.happen(*EVENTS)
    assert not rig.alive and not rig.pending
    assert [status.reason for status in statuses(rig.registry.models["m"]).values()] == ["unloaded"]


def test_the_old_serves_until_all_know_that_the_new_is_ready() -> None:
    """That it was ready once is not enough; and what breaks for good is taken back."""
    rig = LifecycleRig()
    rig.lifecycle.load("m")
    rig.happen(*EVENTS)
    model = rig.registry.models["m"]
    (old,) = model.serving.values()
    load = rig.lifecycle.load("m")
    rig.happen("read", "start")
    new: Any
    (new,) = model.coming.values()
    new.ready = False
    rig.happen("known")
    assert model.serving == {"1": old} and model.shown == {"1": new}
    new.ready = True
    new.changed()
    assert model.serving == {"1": new} and load.answered and load.error is None
    load = rig.lifecycle.load("m")
    rig.happen(*EVENTS[:3])
    rig.happen("end")
    (new,) = model.serving.values()
    load = rig.lifecycle.load("m")
    rig.happen("read", "start")
    broken: Any
    (broken,) = model.coming.values()
    broken.ready = False
    broken.problem = "it broke"
    broken.changed()
    assert model.shown == {"1": new} and not load.answered, "it is to be known first"
    rig.happen("known", "end")
    assert load.error is not None
    assert load.error.message == (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Unavailable: it broke;\n"
    )
    assert rig.alive == [new]


def test_nothing_is_left_of_an_order_about_what_nobody_knows() -> None:
    rig = LifecycleRig()
    order = rig.lifecycle.unload("m")
    assert order.answered and order.error is None
    assert rig.registry.models == {}


def test_an_error_about_one_model_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = LifecycleRig()

    def fail(rig: LifecycleRig, order: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("a defect")

    monkeypatch.setattr(LifecycleRig, "read", fail)
    broken, good = rig.lifecycle.load("m"), rig.lifecycle.load("n")
    rig.happen(*EVENTS)
    assert broken.answered and broken.error is not None
    assert broken.error.message == "internal error"
    assert good.answered and good.error is None
