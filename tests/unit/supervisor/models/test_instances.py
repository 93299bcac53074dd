"""Instances of a version, the states of their processes, and loads that hang."""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.errors import IllegalEvent, Unavailable
from shmserve.ipc.messages import supervision as m
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor.models import instance as instance_module
from shmserve.supervisor.models import instances
from shmserve.supervisor.models.instance import (
    TRANSITIONS,
    Instance,
    InstanceState,
    _await_written,
    bounds_of,
    expand_instances,
    find_model_frame,
    stacks_of,
    with_instance_count,
)
from shmserve.supervisor.models.model_version import ModelVersion
from tests.rigs.process_rig import STACKS_FD, FakeChild, Processes, plan
from tests.support.waiting import until_async


def group(name: str, kind: str, count: int, *gpus: int) -> dict[str, Any]:
    return {"name": name, "kind": kind, "count": count, "gpus": list(gpus)}


def test_one_instance_for_each_count_and_accelerator() -> None:
    """Names, kinds and devices equal those that Triton passes to `initialize`."""
    config = {
        "instance_group": [
            group("m_0", "KIND_CPU", 2),
            group("m_1", "KIND_MODEL", 1),
            group("m_2", "KIND_GPU", 2, 0, 3),
        ]
    }
    rows = [
        (i.index, i.name, i.kind, i.device, i.device_id)
        for i in expand_instances(ModelSpec.of(config))
    ]
    assert rows == [
        (0, "m_0_0", "CPU", "cpu", 0),
        (1, "m_0_1", "CPU", "cpu", 0),
        (2, "m_1_0", "MODEL", "cpu", 0),
        (3, "m_2_gpu0_0", "GPU", "gpu:0", 0),
        (4, "m_2_gpu0_1", "GPU", "gpu:0", 0),
        (5, "m_2_gpu3_0", "GPU", "gpu:3", 3),
        (6, "m_2_gpu3_1", "GPU", "gpu:3", 3),
    ]


def test_groups_of_equal_names_have_instances_of_different_names() -> None:
    """Triton accepts equal names, which configurations with a group for each device have."""
    groups = [group("m", "KIND_CPU", 2), group("m", "KIND_CPU", 1), group("m", "KIND_GPU", 1, 0)]
    instances = expand_instances(ModelSpec.of({"instance_group": groups}))
    assert [instance.name for instance in instances] == ["m_0", "m_1", "m_2", "m_gpu0_0"]


def bounded(count: int, *gpus: int, **bounds: str) -> ModelSpec:
    more = {name: {"string_value": text} for name, text in bounds.items()}
    kind = "KIND_GPU" if gpus else "KIND_CPU"
    return ModelSpec.of({"instance_group": [group("m_0", kind, count, *gpus)], "parameters": more})


def test_a_group_with_bounds_has_its_minimum() -> None:
    assert bounds_of(bounded(1)) is None
    assert bounds_of(bounded(1, max_instances="4")) == (1, 4)
    config = bounded(1, min_instances="3", max_instances="4")
    assert [i.name for i in expand_instances(config)] == ["m_0_0", "m_0_1", "m_0_2"]
    assert len(expand_instances(bounded(4, min_instances="3", max_instances="4"))) == 4


def test_a_group_with_bounds_keeps_its_running_count() -> None:
    """The count is bounded by the maximum; groups without bounds have their configured count."""
    for configured, running_count, expected in ((1, 3, 3), (1, 7, 4), (3, 2, 3), (2, 0, 2)):
        config = bounded(configured, max_instances="4")
        assert len(expand_instances(config, running_count)) == expected
    assert len(expand_instances(bounded(1), 3)) == 1


def test_instances_are_spread_evenly_over_devices() -> None:
    names = [i.name for i in expand_instances(with_instance_count(bounded(1, 0, 2), 3))]
    assert names == ["m_0_gpu0_0", "m_0_gpu0_1", "m_0_gpu2_0"]
    assert [i.name for i in expand_instances(with_instance_count(bounded(2, 0, 2), 1))] == [
        "m_0_gpu0_0"
    ]
    assert len(expand_instances(with_instance_count(bounded(1), 2))) == 2


def instance() -> Instance:
    return Instance(0, "m_0_0", "cpu", "CPU", 0)


def test_every_state_has_an_event_and_can_be_reached() -> None:
    assert TRANSITIONS.keys() == {*InstanceState} and all(TRANSITIONS.values())
    assert {state for row in TRANSITIONS.values() for state in row.values()} == {*InstanceState}


def test_illegal_events_raise() -> None:
    new_instance = instance()
    with pytest.raises(IllegalEvent):
        new_instance.transition("restart")
    assert new_instance.state is InstanceState.STARTING


def test_a_worker_exits_and_restarts() -> None:
    new_instance = instance()
    for event in ("started", "loaded", "exited", "restart", "started", "loaded", "stop", "exited"):
        new_instance.transition(event)
    asyncio.run(new_instance.discard())
    assert new_instance.state is InstanceState.STOPPED, "a failed load restarts no stopped instance"


# Stacks in faulthandler's format: a thread of the model's own, and the loading thread.
STACKS = """\
Thread 0x00007f1 (most recent call first):
  File "/tmp/1/watcher.py", line 3 in watch
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0 (most recent call first):
  File "/usr/lib/python3.11/socket.py", line 706 in readinto
  File "/tmp/1/model.py", line 12 in fetch
  File "/tmp/1/model.py", line 7 in initialize
  File "/opt/shmserve/workers/backends/python/__init__.py", line 90 in load
  File "/opt/shmserve/workers/main.py", line 130 in _load
"""
LIMIT = ("--load-timeout-secs=0.02",)
LIMIT_ERROR = "the model has not loaded within 0.02 s (--load-timeout-secs): it hangs in "
LIMIT_ERROR += "fetch, line 12 of 1/model.py"


@pytest.fixture(autouse=True)
def stack_requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    pending_calls: list[str] = []

    async def stacks_of(instance: Instance) -> str:
        assert instance.alive and instance.stacks_fd == STACKS_FD
        pending_calls.append(instance.name)
        return STACKS

    monkeypatch.setattr(instance_module, "stacks_of", stacks_of)
    return pending_calls


@contextlib.asynccontextmanager
async def running_version(*flags: str) -> AsyncIterator[tuple[Processes, ModelVersion]]:
    processes = Processes(*flags)
    try:
        async with asyncio.timeout(10):
            yield processes, processes.version(plan())
    finally:
        await processes.end()


def test_stacks_are_read_once_complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pieces = ["", STACKS[:100], STACKS[100:], "", "too late"]
    stacks = tmp_path / "stacks"

    async def write_while_sleeping(_: float) -> None:
        with stacks.open("a") as file:
            file.write(pieces.pop(0))

    monkeypatch.setattr("asyncio.sleep", write_while_sleeping)
    with stacks.open("a+b") as file:
        asyncio.run(_await_written(SimpleNamespace(alive=True), file.fileno()))  # type: ignore[arg-type]
    assert stacks.read_text() == STACKS


async def test_stacks_are_not_written_to_a_file_of_the_model(tmp_path: Path) -> None:
    """A model may close all descriptors, and then open its own files."""
    with (tmp_path / "data").open("w+") as file:
        file.write("of the model")
        file.flush()
        exited = asyncio.get_running_loop().create_future()
        child = FakeChild(os.getpid(), "worker", exited)
        (instance,) = expand_instances(plan().config)
        instance.child, instance.stacks_fd = child, file.fileno()
        assert await stacks_of(instance) == ""
    assert child.alive and (tmp_path / "data").read_text() == "of the model"


@pytest.mark.parametrize(
    ("stacks", "expected_frame"),
    [
        (STACKS, "fetch, line 12 of 1/model.py"),
        (STACKS.partition("\n\n")[0], "watch, line 3 of 1/watcher.py"),
        (STACKS.replace("/tmp/", "/tmpfs/"), ""),
        ("", ""),
    ],
)
def test_the_reported_frame_is_of_the_loading_thread(stacks: str, expected_frame: str) -> None:
    assert find_model_frame(stacks, Path("/tmp")) == expected_frame


async def test_a_load_that_hangs_is_logged_with_pauses_that_grow(
    stack_requests: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(instance_module, "FIRST_REPORT_S", 0.01)
    async with running_version() as (processes, model):
        processes.loads_hang = True
        load_task = asyncio.ensure_future(model.start())
        await until_async(lambda: len(stack_requests) == 3)
        processes.finish_hanging_loads()
        await load_task
        assert model.ready
    reported = re.findall(r"instance 'm_0_0' has been loading for (\S+) s; its stacks", caplog.text)
    assert reported == ["0.01", "0.03", "0.07"]
    assert "| readinto (/usr/lib/python3.11/socket.py:706) < fetch (/tmp/1/model.py:12) < init" in (
        caplog.text
    )


@pytest.mark.parametrize("silent_type", [m.CompleteConfig, m.LoadInstance])
async def test_a_load_over_the_limit_reports_where_it_hangs(silent_type: type[Any]) -> None:
    """Both what completes the configuration and what loads, and nothing of it is left."""
    async with running_version(*LIMIT) as (processes, model):
        send = processes.send
        processes.context.control.send = (  # type: ignore[method-assign]
            lambda address, message: (
                None if isinstance(message, silent_type) else send(address, message)
            )
        )
        with pytest.raises(Unavailable, match=re.escape(LIMIT_ERROR)):
            await model.start()
        assert not [child for child in processes.children if child.alive]


async def test_a_hanging_restart_is_retried_and_abandoned(
    stack_requests: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(instances, "_MAX_FAILED_LOADS", 2)
    async with running_version(*LIMIT) as (processes, model):
        await model.start()
        processes.loads_hang = True
        processes.children[0].kill()
        await until_async(lambda: model.instances.failure)
        assert model.instances.failure == LIMIT_ERROR
        assert len(stack_requests) == 2 and not model.ready
    for count in (1, 2):
        assert f"restarted (counted failures: {count} of 2): {LIMIT_ERROR}" in caplog.text


async def test_without_a_limit_a_load_may_take_any_time(stack_requests: list[str]) -> None:
    async with running_version() as (processes, model):
        processes.loads_hang = True
        load_task = asyncio.ensure_future(model.start())
        await asyncio.sleep(0.05)
        processes.finish_hanging_loads()
        await load_task
    assert stack_requests == []
