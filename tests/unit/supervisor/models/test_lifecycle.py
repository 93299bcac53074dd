"""The decisions about models, one event at a time."""

import logging
from typing import Any

import pytest

from shmserve.errors import Internal
from shmserve.supervisor.models.orders import LoadSource, ModelEntry, OrderPhase
from shmserve.supervisor.models.registry import statuses
from tests.rigs.lifecycle_rig import EVENTS, LifecycleRig

GIVEN_UP_ERROR = "failed to load 'm', no version is available"


@pytest.mark.parametrize("is_served", [True, False])
@pytest.mark.parametrize("event_count", range(4))
def test_an_unload_at_every_moment_of_a_load(event_count: int, is_served: bool) -> None:
    """Each order is answered once, a finished load stays finished, and nothing remains."""
    rig = LifecycleRig()
    if is_served:
        rig.load("m")
    load = rig.lifecycle.load("m")
    for kind in EVENTS[:event_count]:
        rig.execute_pending(kind)
    unload = rig.lifecycle.unload("m")
    later_load = rig.load("m")
    assert load.error is unload.error is later_load.error is None
    assert rig.answered_orders[-3:] == [load, unload, later_load]
    assert len(rig.answered_orders) == (4 if is_served else 3)
    (version,) = rig.registry.models["m"].serving.values()
    assert rig.live_versions == [version]
    rig.unload("m")
    assert not rig.live_versions and not rig.pending_actions
    assert [status.reason for status in statuses(rig.registry.models["m"]).values()] == ["unloaded"]


def test_the_old_version_serves_until_all_peers_know_the_new_one() -> None:
    """A new version must be ready first; a load that fails for good is undone."""
    rig = LifecycleRig()
    rig.load("m")
    model = rig.registry.models["m"]
    (old_version,) = model.serving.values()
    load = rig.lifecycle.load("m")
    rig.execute_pending("read", "start")
    new_version: Any
    (new_version,) = model.incoming.values()
    new_version.ready = False
    rig.execute_pending("known")
    assert model.serving == {"1": old_version} and model.published == {"1": new_version}
    new_version.ready = True
    new_version.report_change()
    assert model.serving == {"1": new_version} and load.is_answered and load.error is None
    load = rig.load("m")
    (new_version,) = model.serving.values()
    load = rig.lifecycle.load("m")
    rig.execute_pending("read", "start")
    broken_version: Any
    (broken_version,) = model.incoming.values()
    broken_version.ready = False
    broken_version.problem = "it broke"
    broken_version.report_change()
    assert model.published == {"1": new_version} and not load.is_answered, "it is to be known first"
    rig.execute_pending("known", "end")
    assert load.error is not None
    assert load.error.message == (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Unavailable: it broke;\n"
    )
    assert rig.live_versions == [new_version]


def test_a_load_derives_the_statuses_of_its_own_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    derived: list[str] = []

    def record(model: ModelEntry) -> dict[str, Any]:
        derived.append(model.name)
        return statuses(model)

    rig = LifecycleRig()
    for name in "abcdef":
        rig.load(name)
    monkeypatch.setattr("shmserve.supervisor.models.registry.statuses", record)
    rig.load("m")
    assert set(derived) == {"m"}
    assert rig.registry.states().keys() == {(name, "1") for name in "abcdefm"}


def test_an_ensemble_that_needs_itself_is_refused() -> None:
    rig = LifecycleRig()
    rig.steps = {"a": ["b"], "b": ["c"], "c": ["a"]}
    load = rig.load("a")
    cycle = "a -> ... -> c -> a (a -> b -> c -> a)"
    text = f"load failed for model 'a': circular dependency between ensembles: {cycle}\n"
    assert load.error is not None and load.error.message == text


def test_the_progress_of_a_start_names_every_model_from_the_beginning() -> None:
    rig = LifecycleRig()
    rig.lifecycle.expect({"m": [], "n": []})
    rig.lifecycle.load("m")
    assert rig.registry.progress() == {"m": "loading", "n": "loading"}


def test_an_unload_behind_a_load_changes_the_status_of_a_model_on_demand_at_once() -> None:
    rig = on_demand("m")
    rig.load_on_demand("m")
    rig.unload("m", on_demand=True)
    rig.lifecycle.load("m")
    assert rig.registry.states() == {("m", "1"): ("ON_DEMAND", "")}
    rig.lifecycle.unload("m")
    assert rig.registry.states() == {("m", "1"): ("UNAVAILABLE", "unloaded")}


def on_demand(*names: str) -> LifecycleRig:
    rig = LifecycleRig()
    rig.lifecycle.offer_on_demand(names)
    rig.execute_pending("known")
    return rig


def test_a_model_on_demand_is_loaded_once_for_all_requests() -> None:
    rig = on_demand("m")
    first_load = rig.lifecycle.load_on_demand("m")
    assert first_load is not None and first_load is rig.lifecycle.load_on_demand("m")
    rig.execute_pending("read")
    assert first_load is rig.load_on_demand("m")
    assert first_load.is_answered and rig.answered_orders == [first_load]
    assert rig.lifecycle.load_on_demand("m") is None, "it serves"
    rig.lifecycle.unload("m", on_demand=True)
    second_load = rig.lifecycle.load_on_demand("m")
    assert second_load is not None and not second_load.is_answered, "it comes back when it has left"
    rig.execute_all()
    assert second_load.is_answered and len(rig.live_versions) == 1


def test_a_failed_model_is_loaded_at_the_next_request() -> None:
    rig = on_demand("m")
    rig.broken_models = {"m"}
    first_load = rig.load_on_demand("m")
    assert first_load is not None and first_load.error is not None
    rig.broken_models = set()
    second_load = rig.load_on_demand("m")
    assert second_load is not None and second_load.error is None


def test_an_operators_order_holds_for_a_model_on_demand() -> None:
    """A failed order keeps the model on demand; an unload ends that, also for ensembles."""
    rig = on_demand("m", "s", "e")
    rig.steps = {"e": ["s"]}
    model = rig.registry.models["m"]
    rig.broken_models = {"m"}
    rig.load("m")
    assert model.on_demand
    rig.broken_models = set()
    rig.load("m", pins=False)
    assert model.on_demand
    rig.load("m")
    assert not model.on_demand
    rig.load_on_demand("e")
    rig.unload("s")
    assert not any(model.on_demand for model in rig.registry.models.values())


def test_a_step_that_is_loaded_wakes_no_ensemble_on_demand() -> None:
    rig = on_demand("s", "e")
    rig.steps = {"e": ["s"]}
    rig.load_on_demand("e")
    assert sorted(version.spec.name for version in rig.live_versions) == ["e", "s"]
    for name in ("e", "s"):
        rig.unload(name, on_demand=True)
    rig.load_on_demand("s")
    assert [version.spec.name for version in rig.live_versions] == ["s"]


def ensemble(*loaded_models: str) -> LifecycleRig:
    """Return a lifecycle with an ensemble "e" of "s", both loaded."""
    rig = LifecycleRig()
    rig.steps = {"e": ["s"]}
    for name in loaded_models:
        rig.load(name)
    return rig


def test_a_load_of_a_step_does_not_load_another_step_that_was_unloaded() -> None:
    rig = LifecycleRig()
    rig.steps = {"e": ["s", "t"]}
    for order, name in ("load", "e"), ("unload", "s"), ("load", "t"):
        getattr(rig, order)(name)
    assert [version.spec.name for version in rig.live_versions] == ["t"]


def test_the_failure_of_a_step_is_available_to_its_ensemble() -> None:
    rig = LifecycleRig()
    rig.steps = {"e": ["s"]}
    rig.broken_models = {"s"}
    rig.load("e")
    failure = "version 1 is at UNAVAILABLE state: Internal: broken;"
    assert [rig.registry.load_failure(name) for name in ("s", "nosuch")] == [failure, ""]
    rig.unload("s")
    assert rig.registry.load_failure("s") == ""


def pending_ends(rig: LifecycleRig) -> list[str]:
    return sorted(kind.split()[1] for kind, _ in rig.pending_actions if kind.startswith("end"))


def test_a_step_stops_after_its_ensemble() -> None:
    rig = ensemble("e")
    unload = rig.lifecycle.unload("s")
    assert pending_ends(rig) == []
    rig.execute_pending("known")
    assert not unload.is_answered and pending_ends(rig) == ["e"]
    rig.execute_pending("end")
    assert unload.is_answered and not rig.live_versions


def test_generations_that_need_each_other_do_not_deadlock() -> None:
    """The old generation of a needs b, and the new generation of b needs a."""
    rig = LifecycleRig()
    rig.steps = {"a": ["b"]}
    rig.load("a")
    for rig.steps, name in (({"a": ["s"]}, "a"), ({"a": ["s"], "b": ["a"]}, "b")):
        assert not rig.lifecycle.load(name, LoadSource("another", {})).is_answered
        rig.execute_pending("read", "start", "known", "move")
    unload = rig.lifecycle.unload("a")
    rig.execute_pending("known", "move")
    assert not unload.is_answered
    rig.execute_pending("end")
    assert unload.is_answered
    assert [version.spec.name for version in rig.live_versions] == ["s"]


def test_a_step_that_is_in_a_cycle_waits_for_other_ensembles() -> None:
    """The ending x needs y, and the starting y needs x; z is no part of this cycle."""
    rig = LifecycleRig()
    rig.steps = {"z": ["x"], "x": ["y"]}
    rig.load("z")
    rig.lifecycle.unload("x")
    rig.execute_pending("known", "move")
    assert pending_ends(rig) == ["z"]
    rig.steps, rig.broken_models = {"y": ["x"]}, {"x"}
    rig.lifecycle.load("y", LoadSource("another", {}))
    rig.execute_pending("read", "start x")
    rig.execute_pending("end x")
    assert rig.registry.models["y"].incoming
    assert sorted(version.spec.name for version in rig.live_versions) == ["x", "y", "y", "z"]


def test_a_load_behind_a_load_that_waits_for_its_unload_is_cancelled() -> None:
    """The load of y waits for x, which waits for the unload of a, which waits for that of y."""
    rig = LifecycleRig()
    rig.steps = {"x": ["a"], "y": ["a", "x"]}
    rig.load("a")
    orders = [rig.lifecycle.load("x", LoadSource("another", {})), rig.lifecycle.load("x")]
    orders.append(rig.lifecycle.load("y"))
    rig.execute_pending("read y")
    orders += [rig.lifecycle.unload("a"), rig.lifecycle.load("a")]
    rig.execute_all()
    assert [order.is_answered for order in orders] == [True] * 5


def test_only_queued_loads_are_merged() -> None:
    rig = LifecycleRig()
    begun_load, queued_load, third_load = (rig.lifecycle.load("m") for _ in range(3))
    assert begun_load is not queued_load is third_load
    assert rig.lifecycle.load("m", LoadSource("another", {})) is not third_load
    rig.execute_all()
    assert len(rig.answered_orders) == 3


def test_a_load_begins_after_the_end_of_an_abandoned_one() -> None:
    """A device has no room for both."""
    rig = LifecycleRig()
    rig.lifecycle.load("m")
    rig.execute_pending("read")
    rig.lifecycle.unload("m")
    later_load = rig.lifecycle.load("m")
    rig.execute_pending("known", "read")
    assert later_load.phase is OrderPhase.QUEUED
    rig.execute_all()
    assert later_load.is_answered and later_load.error is None


@pytest.mark.parametrize(
    ("override", "is_broken"), [("", False), ("another", False), ("another", True)]
)
def test_an_ensemble_is_reloaded_after_a_step_of_new_shape(
    caplog: pytest.LogCaptureFixture, override: str, is_broken: bool
) -> None:
    """The step's load is answered after the reload; an ensemble that does not fit fails."""
    caplog.set_level(logging.INFO)
    rig = ensemble("e")
    (before,) = rig.registry.models["e"].serving.values()
    rig.broken_models = {"e"} if is_broken else set()
    load = rig.lifecycle.load("s", LoadSource(override, {}))
    rig.execute_pending("read", "start s", "known")
    assert load.is_answered is (not override)
    rig.execute_all()
    assert load.is_answered and load.error is None
    serving = list(rig.registry.models["e"].serving.values())
    assert serving == ([] if is_broken else rig.live_versions[-1:] if override else [before])
    assert rig.registry.models["e"].has_failed is is_broken
    assert "continue to serve" not in caplog.text
    rig.broken_models = set()
    rig.load("s")
    assert rig.registry.models["e"].serving


def test_a_failed_load_leaves_no_ensemble_with_a_steps_old_shape() -> None:
    """The failed load was to determine the shape, and the load of the step waited only for it."""
    rig = ensemble("e")
    (version_before,) = rig.registry.models["e"].serving.values()
    rig.lifecycle.load("s", LoadSource("another", {}))
    rig.execute_pending("read", "start s")
    rig.broken_models = {"e"}
    load = rig.lifecycle.load("e", LoadSource("sent", {}))
    rig.execute_pending("known")
    rig.execute_pending("read", "start e")
    assert load.error is not None and rig.registry.models["e"].serving == {"1": version_before}
    rig.broken_models = set()
    rig.execute_all()
    (version_after,) = rig.registry.models["e"].serving.values()
    assert version_after is not version_before and load.is_answered
    assert not version_after.config.source["parameters"]["sent"]["string_value"]


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_failed_load_reports_the_versions_that_serve(
    caplog: pytest.LogCaptureFixture, is_ready: bool
) -> None:
    caplog.set_level(logging.INFO)
    rig = LifecycleRig()
    rig.load("m")
    rig.registry.models["m"].serving["1"].ready = is_ready  # type: ignore[misc]  # of a stand-in
    rig.broken_models = {"m"}
    rig.load("m", LoadSource("another", {}))
    assert ("'m': the loaded versions continue to serve: 1" in caplog.text) is is_ready


def test_a_model_that_a_request_unloaded_stays_unloaded() -> None:
    """Holds for all changes of its steps."""
    rig = ensemble("e")
    rig.unload("e")
    rig.load("s", LoadSource("another", {}))
    assert not rig.registry.models["e"].serving


def test_a_step_that_is_unloaded_later_stays_unloaded() -> None:
    """The load of the ensemble was requested earlier, but has not read the step yet."""
    rig = ensemble("s")
    load, unload = rig.lifecycle.load("e"), rig.lifecycle.unload("s")
    rig.execute_pending("read")
    assert load.is_answered and load.error is not None and not unload.is_answered
    rig.execute_all()
    assert not rig.live_versions


def test_an_order_for_an_unknown_model_is_not_stored() -> None:
    rig = LifecycleRig()
    order = rig.lifecycle.unload("m")
    assert order.is_answered and order.error is None
    assert rig.registry.models == {}


def test_an_error_about_one_model_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = LifecycleRig()

    def fail(rig: LifecycleRig, order: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("a defect")

    monkeypatch.setattr(LifecycleRig, "read", fail)
    broken_load, valid_load = rig.lifecycle.load("m"), rig.lifecycle.load("n")
    rig.execute_all()
    assert broken_load.is_answered and broken_load.error is not None
    assert broken_load.error.message == Internal().message
    assert valid_load.is_answered and valid_load.error is None


def test_the_oldest_unloaded_models_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise clients that load models under new names would fill the memory."""
    monkeypatch.setattr("shmserve.supervisor.models.registry.MAX_UNLOADED", 3)
    rig = LifecycleRig()
    rig.steps = {"ens": ["a"]}
    rig.load("ens")
    rig.lifecycle.unload("a")
    for name in "bcdef":
        rig.load(name)
        rig.unload(name)
    rig.load("ens")
    assert rig.registry.models.keys() == {"ens", "a", "d", "e", "f"}
    assert {message.name for message in rig.publisher.snapshot()} == rig.registry.models.keys()
    rig.load("b")
    assert rig.registry.states()["b", "1"] == ("READY", "")


def test_unloaded_steps_of_a_known_ensemble_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load of one step does not load the ensemble while an operator has unloaded another."""
    monkeypatch.setattr("shmserve.supervisor.models.registry.MAX_UNLOADED", 1)
    rig = LifecycleRig()
    rig.steps = {"ens": ["a", "b"]}
    for name in ("a", "b", "x", "y", "ens"):
        rig.load(name)
    for name in ("a", "b", "x", "y"):
        rig.unload(name)
    assert rig.registry.models.keys() == {"a", "b", "ens"}
    rig.load("a")
    assert rig.registry.states()["ens", "1"].state == "UNAVAILABLE"


def test_nothing_is_kept_of_a_model_that_is_no_longer_on_demand() -> None:
    rig = on_demand("m")
    rig.lifecycle.unload("m")
    assert len(list(rig.publisher.snapshot())) == 1, "the gateway has not acknowledged it"
    rig.execute_all()
    assert not rig.registry.models and not list(rig.publisher.snapshot())
