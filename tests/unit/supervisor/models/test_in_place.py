"""Reloads that change instances only: which qualify, and what they add and remove."""

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.errors import Unavailable
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models import instances
from shmserve.supervisor.models.instance import (
    Instance,
    InstanceState,
    InstanceUpdate,
    expand_instances,
    find_changes,
)
from shmserve.supervisor.models.load_planner import VersionSpec
from shmserve.supervisor.models.model_version import ModelVersion, differ_in_instances_only
from shmserve.supervisor.models.repository import find, version_fingerprint
from tests.rigs.process_rig import CONFIG, Processes, plan, run_loop_turns


def group(name: str, count: int, *gpus: int, **fields: Any) -> dict[str, Any]:
    kind = "KIND_GPU" if gpus else "KIND_CPU"
    return {"name": name, "kind": kind, "count": count, "gpus": list(gpus), **fields}


def config(*groups: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**CONFIG, "instance_group": list(groups), **fields}


def spec(config_dict: dict[str, Any], files: str = "") -> VersionSpec:
    return replace(plan(), config=ModelSpec.of(config_dict), fingerprint=files)


def test_only_instances_and_the_policy_of_versions_change_in_place() -> None:
    """Changes of other settings cause a full reload."""
    old = spec(config(group("m_0", 1)))
    assert differ_in_instances_only(old, spec(config(group("m_0", 2), group("g", 1, 0))))
    assert differ_in_instances_only(old, spec(config(group("m_0", 1), version_policy={"all": {}})))
    assert not differ_in_instances_only(old, spec(config(group("m_0", 2), max_batch_size=4)))
    assert not differ_in_instances_only(old, spec(config(group("m_0", 2)), files="others"))
    assert not differ_in_instances_only(
        old, replace(spec(config(group("m_0", 2))), model_dir=Path("/other"))
    )


def test_which_files_belong_to_a_version(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    for version in "12":
        (folder / version).mkdir(parents=True)
        (folder / version / "model.py").write_text("x = 1\n")
    (folder / "configs").mkdir()

    def read_fingerprint() -> str:
        versions = find([tmp_path], "m")
        assert versions is not None
        return version_fingerprint(versions, 1)

    fingerprint_before = read_fingerprint()
    for unrelated in ("config.pbtxt", "configs/other.pbtxt", "2/model.py"):
        (folder / unrelated).write_text("y = 2\n")
        assert read_fingerprint() == fingerprint_before
    for used_file in ("1/model.py", "labels.txt"):
        (folder / used_file).write_text("y = 23\n")
        assert read_fingerprint() != fingerprint_before
        fingerprint_before = read_fingerprint()


def test_instances_in_both_configurations_stay() -> None:
    """Instances match by name, then by kind, device and settings; failed ones are replaced."""
    present = expand_instances(ModelSpec.of(config(group("a", 2), group("g", 1, 0, 1))))
    present[1].state = InstanceState.FAILED
    added, removed = find_changes(present, ModelSpec.of(config(group("b", 2), group("g", 1, 1))))
    assert [(i.index, i.name) for i in added] == [(4, "b_1")]
    assert [i.name for i in removed] == ["a_1", "g_gpu0_0"]
    limited = group("b", 1, rate_limiter={"priority": 2})
    added, removed = find_changes(present[:1], ModelSpec.of(config(limited)))
    assert [(i.index, i.name) for i in added] == [(1, "b_0")]
    assert removed == present[:1]


groups = st.lists(
    st.builds(
        lambda name, count, gpus: group(name, count, *sorted(gpus)),
        st.sampled_from("abc"),
        st.integers(1, 3),
        st.sets(st.integers(0, 2)),
    ),
    min_size=1,
    max_size=3,
)


@given(groups, groups)
def test_an_update_has_the_new_configuration(old_groups: list[Any], new_groups: list[Any]) -> None:
    """As many instances of each kind and device as requested, by the fewest changes."""

    def kinds_and_devices(instances: list[Instance]) -> list[tuple[str, int]]:
        return sorted((i.kind, i.device_id) for i in instances)

    present = expand_instances(ModelSpec.of(config(*old_groups)))
    added, removed = find_changes(present, ModelSpec.of(config(*new_groups)))
    remaining = [i for i in present if i not in removed] + added
    assert kinds_and_devices(remaining) == kinds_and_devices(
        expand_instances(ModelSpec.of(config(*new_groups)))
    )
    assert len({i.index for i in present + added}) == len(present + added)
    assert not set(kinds_and_devices(added)) & set(kinds_and_devices(removed))


async def start_version(processes: Processes, count: int) -> ModelVersion:
    version = processes.version(spec(config(group("m_0", count))))
    await version.start()
    return version


def update(version: ModelVersion, count: int) -> InstanceUpdate:
    instance_update = version.update_to(spec(config(group("m_0", count))))
    assert instance_update is not None
    return instance_update


async def test_a_retiring_instance_ends_when_its_scheduler_reports_no_requests() -> None:
    ready_state, retiring_state = InstanceState.READY, InstanceState.RETIRING
    processes = Processes()
    model = await start_version(processes, 2)
    observed_states = []
    reduction = update(model, 1)
    await model.instances.add(reduction)
    model.commit(reduction)
    observed_states.append(model.instances.states())
    worker = model.instances.children()[1]
    model._on_message(m.InstanceRetired(worker.pid + 1))
    await run_loop_turns()
    assert worker.alive
    model._on_message(m.InstanceRetired(worker.pid))
    await run_loop_turns()
    assert not worker.alive and model.ready
    observed_states.append(model.instances.states())
    same_update = model.update_to(spec(config(group("m_0", 1))))
    assert same_update is not None and not same_update.config_differs
    await processes.end()
    assert observed_states == [[ready_state, retiring_state], [ready_state]]


async def test_a_retiring_instance_that_dies_is_not_restarted() -> None:
    processes = Processes()
    model = await start_version(processes, 2)
    reduction = update(model, 1)
    await model.instances.add(reduction)
    model.commit(reduction)
    model.instances.children()[1].kill()
    await run_loop_turns()
    observed_state = len(processes.children), model.instances.states()
    await processes.end()
    assert observed_state == (3, [InstanceState.READY])


async def test_a_failed_addition_leaves_the_other_instances_unchanged() -> None:
    """Given up while it loads, as an unload does: readiness and configuration stay."""
    processes = Processes()
    model = await start_version(processes, 1)
    config_before = model.config
    processes.loads_hang = True
    enlargement = update(model, 3)
    adding_task = asyncio.ensure_future(model.instances.add(enlargement))
    await run_loop_turns()
    assert model.ready and len(model.instances.states()) == 3
    model.instances.retire(enlargement.added_instances)
    with pytest.raises(Unavailable, match=r"instance .* was stopped while it was loading"):
        await adding_task
    await run_loop_turns()
    assert model.ready and model.config is config_before
    states = model.instances.states()
    await processes.end()
    assert states == [InstanceState.READY]


async def test_a_version_fails_when_the_last_starting_instance_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its other instances were abandoned before, while the addition could still have served."""
    monkeypatch.setattr(instances, "_MAX_FAILED_LOADS", 1)
    processes = Processes()
    model = await start_version(processes, 1)
    enlarged = update(model, 2)
    processes.loads_hang = True
    adding = asyncio.ensure_future(model.instances.add(enlarged))
    await run_loop_turns()
    processes.loads_hang = False
    processes.on_start = lambda child: child.kill(signal.SIGABRT)
    processes.children[0].kill(signal.SIGABRT)
    await run_loop_turns()
    states, failure = model.instances.states(), model.instances.failure
    model.instances.retire(enlarged.added_instances)
    await asyncio.gather(adding, return_exceptions=True)
    problem = model.problem
    await processes.end()
    assert (states, failure) == ([InstanceState.FAILED, InstanceState.LOADING], "")
    assert "ended while loading" in problem
