"""Models on demand: which are unloaded, how large they are, and loads that fail."""

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import Internal
from shmserve.supervisor.models import on_demand
from shmserve.supervisor.models.on_demand import MemoryUse, OnDemand, Resident, select_unloads
from shmserve.supervisor.models.registry import ModelRegistry
from shmserve.supervisor.processes.children import RestartBackoff
from tests.rigs.process_rig import Processes, run_loop_turns

NAMES = "abcdefgh"


@st.composite
def residents(draw: st.DrawFn) -> list[Resident]:
    """Draw models, some of which are steps of earlier ones."""
    names = NAMES[: draw(st.integers(0, len(NAMES)))]
    return [
        Resident(
            name,
            byte_size=draw(st.integers(0, 5)),
            last_used_ns=draw(st.integers(0, 9)),
            must_stay=draw(st.booleans()),
            idle_limit_ns=draw(st.sampled_from([0, 0, 4])),
            ensembles=draw(st.frozensets(st.sampled_from(names[:index]), max_size=1))
            if index
            else frozenset(),
        )
        for index, name in enumerate(names)
    ]


BOUND_SIZES = st.integers(0, 20)


@given(residents(), BOUND_SIZES)
def test_needed_and_pinned_models_are_not_unloaded(models: list[Resident], bound: int) -> None:
    by_name = {model.name: model for model in models}
    unloaded_names: set[str] = set()
    for name in select_unloads(models, bound, 10):
        assert not by_name[name].must_stay and by_name[name].ensembles <= unloaded_names
        unloaded_names.add(name)


@given(residents(), BOUND_SIZES)
def test_no_more_models_are_unloaded_than_needed(models: list[Resident], bound: int) -> None:
    names = select_unloads(models, bound, 10)
    unloaded: set[str] = set()
    resident_models = {r.name: r for r in models}

    def is_over_bound() -> bool:
        return bool(bound) and sum(r.byte_size for r in resident_models.values()) > bound

    def is_idle(r: Resident) -> bool:
        return 0 < r.idle_limit_ns <= 10 - r.last_used_ns

    def free_residents() -> list[Resident]:
        return [r for r in resident_models.values() if not r.must_stay and r.ensembles <= unloaded]

    for name in names:
        assert is_over_bound() or is_idle(resident_models[name])
        if is_over_bound():
            assert resident_models[name].last_used_ns == min(
                r.last_used_ns for r in free_residents()
            )
        del resident_models[name]
        unloaded.add(name)
    assert not (is_over_bound() and free_residents())
    assert not any(map(is_idle, free_residents()))


def test_an_ensemble_is_unloaded_with_its_steps() -> None:
    models = [
        Resident("step", 4, last_used_ns=1, ensembles=frozenset({"ensemble"})),
        Resident("ensemble", 0, last_used_ns=2),
        Resident("other", 4, last_used_ns=3),
    ]
    assert select_unloads(models, 8, 9) == []
    assert select_unloads(models, 7, 9) == ["ensemble", "step"]
    assert select_unloads(models, 3, 9) == ["ensemble", "step", "other"]


@dataclass(eq=False)
class Version:
    """A version with these processes."""

    spec: SimpleNamespace
    running: list[int]
    has_loaded: bool
    instances: SimpleNamespace

    def pids(self) -> list[int]:
        return self.running


def version(name: str, *pids: int, is_loaded: bool = True, device: int = 0) -> Any:
    instances = SimpleNamespace(device_byte_size=device)
    return Version(SimpleNamespace(name=name), list(pids), is_loaded, instances)


def model(name: str, *versions: Any) -> Any:
    return SimpleNamespace(name=name, versions=versions)


def test_models_are_as_large_as_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {1: 100, 2: 60, 3: 40}
    monkeypatch.setattr(on_demand, "private_bytes", sizes.__getitem__)
    first_version, second_version, loading_version = (
        version("a", 1, 2, device=7),
        version("b", 2, 3),
        version("c", is_loaded=False),
    )
    use = MemoryUse()

    def model_sizes(*models: Any) -> list[int]:
        return [use.byte_size(model) for model in models]

    assert model_sizes(model("a", first_version)) == [0], "nothing is known"
    first, second = model("a", first_version), model("b", second_version)
    models = {"a": first, "b": second, "c": model("c", loading_version)}
    asyncio.run(use.measure(models))
    # The second process belongs to two models. A loading model counts as large as the mean of the
    # others.
    assert model_sizes(
        model("a", first_version), model("b", second_version), model("c", loading_version)
    ) == [137, 70, 103]
    sizes[1] = 1000
    asyncio.run(use.measure({"a": first, "b": second}))
    assert model_sizes(model("a", first_version)) == [137], "it was looked at just now"
    asyncio.run(use.measure({"a": model("a"), "b": second}))
    assert model_sizes(model("a", version("a", is_loaded=False))) == [137], "as much as it had"
    assert model_sizes(model("a", first_version, version("a", is_loaded=False))) == [274]
    asyncio.run(use.measure({"b": model("b", version("b", 1))}, measures_again=True))
    assert use._last_sizes.keys() == {"b"}, "a removed model is forgotten"


async def test_an_unexpected_error_of_loads_is_internal(caplog: pytest.LogCaptureFixture) -> None:
    """Every caller receives it, and the next load waits, as after any failure."""
    processes, registry = Processes(), ModelRegistry()
    registry.model("m").on_demand = True
    broken_models: Any = MagicMock(**{"load_on_demand.side_effect": RuntimeError("a defect")})
    on_demand = OnDemand(processes.context, registry, broken_models, MagicMock(), [])
    on_demand._failures["removed"] = RestartBackoff(), 0.0
    callers = [on_demand.load("m", 5.0) for _ in range(2)]
    errors: Any = await asyncio.gather(*callers, return_exceptions=True)
    await processes.end()
    assert [(type(e), e.message) for e in errors] == [(Internal, Internal().message)] * 2
    assert caplog.text.count("RuntimeError: a defect") == 1
    assert on_demand._failures.keys() == {"m"}


async def test_a_wait_for_a_load_fails_when_the_server_stops() -> None:
    processes, registry = Processes(), ModelRegistry()
    registry.model("m").on_demand = True
    hanging: Any = asyncio.Event()
    on_demand = OnDemand(processes.context, registry, MagicMock(), lambda _: hanging.wait(), [])
    caller = asyncio.ensure_future(on_demand.load("m", 0))
    await run_loop_turns()
    await processes.end()
    with pytest.raises(Exception, match="the server ends"):
        await caller


async def test_an_error_does_not_end_the_unloads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(on_demand, "_CHECK_EVERY_S", 0)
    registry, processes = ModelRegistry(), Processes()
    loader = OnDemand(processes.context, registry, MagicMock(), MagicMock(), [])
    error = RuntimeError("can't start new thread")
    free_memory = AsyncMock(side_effect=[error, None, asyncio.CancelledError])
    monkeypatch.setattr(loader, "free_memory", free_memory)
    with pytest.raises(asyncio.CancelledError):
        await loader.run()
    assert caplog.text.count("RuntimeError: can't start new thread") == 1
