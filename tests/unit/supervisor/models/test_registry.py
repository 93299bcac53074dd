"""Statuses of models, and readiness checks by workers."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.ipc.messages.supervision import CheckReady, ReadyChecked
from shmserve.ipc.model_spec import ModelSpec
from shmserve.supervisor import control_api
from shmserve.supervisor.control_api import ReadinessCheck
from shmserve.supervisor.host.console import StartupReport, example_command, model_table
from shmserve.supervisor.models.orders import (
    DUPLICATE,
    UNLOADED,
    LoadOutcome,
    ModelEntry,
    Order,
    OrderKind,
    OrderPhase,
)
from shmserve.supervisor.models.registry import ModelRegistry, ModelSummary, index_rows, statuses
from shmserve.supervisor.models.repository import DUPLICATE_MODEL, ModelFolder


@dataclass
class Version:
    ready: bool = True
    problem: str = ""


def model(**fields: Any) -> ModelEntry:
    return ModelEntry("m", **fields)


def serving_entry(version: Version, **fields: Any) -> ModelEntry:
    return model(serving={"1": version}, **fields)


def offered_entry(entry: ModelEntry) -> ModelEntry:
    order = Order(entry, OrderKind.LOAD)
    order.phase = OrderPhase.OFFERED
    entry.orders.append(order)
    return entry


def retiring_versions() -> list[Any]:
    return [SimpleNamespace(spec=SimpleNamespace(version="1"))]


RESTARTING_REASON = "a process is being restarted"
# (facts, state, reason, whether all of it serves that should)
TABLE = [
    (serving_entry(Version()), "READY", "", True),
    (serving_entry(Version(ready=False)), "LOADING", RESTARTING_REASON, False),
    (serving_entry(Version(ready=False, problem="it broke")), "UNAVAILABLE", "it broke", False),
    (serving_entry(Version(), incoming={"1": Version(ready=False)}), "READY", "", True),
    (serving_entry(Version(), retiring=retiring_versions()), "READY", "", True),
    (serving_entry(Version(), outcomes={"1": LoadOutcome("no")}), "READY", "", True),
    (model(incoming={"1": Version()}, retiring=retiring_versions()), "LOADING", "", False),
    (offered_entry(model(incoming={"1": Version()})), "LOADING", "", False),
    (model(retiring=retiring_versions(), outcomes={"1": UNLOADED}), "UNLOADING", "", True),
    (model(outcomes={"1": UNLOADED}), "UNAVAILABLE", "unloaded", True),
    (model(outcomes={"1": DUPLICATE}), "UNAVAILABLE", DUPLICATE_MODEL, True),
    (model(outcomes={"1": LoadOutcome("no memory")}), "UNAVAILABLE", "no memory", False),
    (model(on_demand=True, outcomes={"1": UNLOADED}), "ON_DEMAND", "", True),
    (model(on_demand=True, outcomes={"1": LoadOutcome("no")}), "UNAVAILABLE", "no", True),
    (model(on_demand=True, incoming={"1": Version()}), "LOADING", "", True),
    (serving_entry(Version(ready=False), on_demand=True), "LOADING", RESTARTING_REASON, True),
]


@pytest.mark.parametrize(("entry", "state", "reason", "ready"), TABLE)
def test_the_first_matching_status_is_reported(
    entry: ModelEntry, state: str, reason: str, ready: bool
) -> None:
    assert statuses(entry) == {"1": (state, reason)}
    assert ModelSummary.of(entry).is_ready is ready


def test_an_unloaded_model_on_demand_has_no_version() -> None:
    assert statuses(model(on_demand=True)) == {"": ("ON_DEMAND", "")}
    assert statuses(model()) == {}


def test_an_unloaded_model_without_a_folder_is_not_in_the_index() -> None:
    folder = ModelFolder("m", Path("m"))
    unloaded, failed = (model(outcomes={"1": end}) for end in (UNLOADED, LoadOutcome("broken")))
    shown_reasons = [
        [row["reason"] for row in index_rows("m", statuses(entry), model_folder, ready_only=False)]
        for entry in (unloaded, failed)
        for model_folder in (folder, None)
    ]
    assert shown_reasons == [["unloaded"], [], ["broken"], ["broken"]]


def test_a_successor_is_shown_instead_of_the_serving_version() -> None:
    entry = offered_entry(serving_entry(Version(), incoming={"1": Version(ready=False)}))
    assert statuses(entry) == {"1": ("LOADING", RESTARTING_REASON)}


PROGRESS = [
    (model(), "loading"),
    (offered_entry(model(incoming={"1": Version()})), "loading"),
    (serving_entry(Version()), "ready"),
    (serving_entry(Version(ready=False)), "loading"),
    (serving_entry(Version(ready=False, problem="it broke")), "failed: version 1: it broke"),
    (model(outcomes={"": LoadOutcome("no such folder")}), "failed: no such folder"),
    (model(outcomes={"": DUPLICATE}), f"failed: {DUPLICATE_MODEL}"),
    (
        model(outcomes={"1": UNLOADED, "2": LoadOutcome("no"), "3": LoadOutcome("neither")}),
        "failed: version 2: no; version 3: neither",
    ),
]


@pytest.mark.parametrize(("entry", "text"), PROGRESS)
def test_the_progress_of_a_load_is_a_view_of_its_statuses(entry: ModelEntry, text: str) -> None:
    entry.is_expected = True
    assert ModelSummary.of(entry).progress == text


def test_the_start_report_logs_each_change_once(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    current_states: dict[str, str] = {}
    observers: list[Callable[[], None]] = []
    report = StartupReport(lambda: dict(current_states), observers)

    def after(**new_states: str) -> list[tuple[str, str]]:
        caplog.clear()
        current_states.update(new_states)
        for notify in observers:
            notify()
        return [(record.levelname, record.getMessage().split(" (")[0]) for record in caplog.records]

    assert after(a="loading") == []
    report._is_terminal = True
    with report:
        assert after(b="loading") == [("INFO", "model a: loading"), ("INFO", "model b: loading")]
        assert capsys.readouterr().err.endswith(
            "\r\x1b[K\x1b[?7l[0/2 models] loading a, b\x1b[?7h"  # without automatic wrapping
        )
        assert after(b="ready") == [("INFO", "model b: ready")]
        assert after(a="failed: no") == [("ERROR", "model a: failed: no")]
        assert after() == []
    assert after(b="loading") == []


@pytest.mark.parametrize(
    ("answers", "expects_ready"),
    [
        ({}, False), ({1: True}, True), ({1: False}, False), ({1: True, 2: True}, True),
        ({1: True, 2: False}, False), ({1: None}, False), ({1: None, 2: True}, True),
        ({1: None, 2: False}, False),
    ],
)  # fmt: skip
async def test_the_combined_readiness_of_workers(
    answers: dict[int, bool | None], expects_ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: it does not answer in time, as while it executes."""
    monkeypatch.setattr(control_api, "PATIENCE_S", 0.05)
    loop = asyncio.get_running_loop()

    def send(pid: int, message: Any) -> None:
        assert isinstance(message, CheckReady)
        answer = answers[pid]
        if answer is not None:
            loop.call_soon(check.handle_response, pid, ReadyChecked(message.id, answer))

    check = ReadinessCheck(send)
    assert (await check.check(list(answers))) is expects_ready


async def test_unexpected_answers_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_api, "PATIENCE_S", 0.05)

    def send(pid: int, message: Any) -> None:
        check.handle_response(7, ReadyChecked(message.id, True))
        check.handle_response(pid, ReadyChecked(message.id + 1, True))

    check = ReadinessCheck(send)
    assert (await check.check([1])) is False


async def test_a_busy_worker_has_one_check_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is polled, and by however many."""
    monkeypatch.setattr(control_api, "PATIENCE_S", 0.01)
    sent_checks: list[CheckReady] = []
    check = ReadinessCheck(lambda pid, message: sent_checks.append(message))
    concurrent_checks = await asyncio.gather(*(check.check([1]) for _ in range(3)))
    later_check = await check.check([1])
    monkeypatch.setattr(control_api, "PATIENCE_S", 60.0)
    joined_check = asyncio.ensure_future(check.check([1]))
    await asyncio.sleep(0)
    check.handle_response(1, ReadyChecked(sent_checks[0].id, True))
    assert [*concurrent_checks, later_check, await joined_check] == [
        False, False, False, False, True,
    ]  # fmt: skip
    assert len(sent_checks) == 1


@pytest.mark.parametrize("other_pids", [[], [2]])
async def test_a_worker_that_ends_is_not_waited_for(other_pids: list[int]) -> None:
    def send(pid: int, message: Any) -> None:
        if pid == 2:
            check.handle_response(pid, ReadyChecked(message.id, True))

    check = ReadinessCheck(send)
    check_task = asyncio.ensure_future(check.check([1, *other_pids]))
    await asyncio.sleep(0)
    check.process_exited(1)
    check.process_exited(1)
    assert (await check_task) is bool(other_pids)


def spec_of(name: str, *inputs: dict[str, Any], **fields: Any) -> ModelSpec:
    return ModelSpec.of({"name": name, "input": list(inputs), **fields})


PIXELS = {"name": "image", "data_type": "TYPE_FP32", "dims": [-1, 2]}
WORDS = {"name": "of words", "data_type": "TYPE_STRING", "dims": [1]}
LARGE_INPUT = {"name": "large", "data_type": "TYPE_UINT8", "dims": [3, 224, 224]}


@pytest.mark.parametrize(
    ("models", "command"),
    [
        ([spec_of("m", PIXELS)], "client infer m --url URL --input 'image=[[1,1]]'"),
        ([spec_of("m", WORDS)], "client infer m --url URL --input 'of words=[\"text\"]'"),
        ([spec_of("m", WORDS, {**LARGE_INPUT, "optional": True})], "--input 'of words=[\"text\"]'"),
        ([spec_of("big", LARGE_INPUT), spec_of("m", PIXELS)], "client infer m --url URL"),
        ([spec_of("big", LARGE_INPUT)], "shmserve perf big --url URL"),
        ([spec_of("-m", PIXELS)], "--input 'image=[[1,1]]' -- -m"),
        ([spec_of("none"), spec_of("m", PIXELS, sequence_batching={})], ""),
        ([], ""),
    ],
)
def test_a_command_to_try_is_of_a_small_model(models: list[ModelSpec], command: str) -> None:
    assert command in example_command(models, "URL", needs_token=False)
    assert bool(command) == bool(example_command(models, "URL", needs_token=False))
    server = " --url URL --token-file FILE" if command else ""
    assert server in example_command(models, "URL", needs_token=True)


def test_the_table_of_models_wraps_the_reason_of_a_failure() -> None:
    reason = "the file\n" + "is not valid, " * 20
    rows = [{"name": "a", "version": "1", "state": "READY"}, {"name": "bc", "reason": reason}]
    table = model_table(rows)
    assert {len(line) for line in table} == {len(table[0])}
    assert len(table[0]) <= 105
    shown_reason = " ".join(line.split("|")[3].strip() for line in table[4:-1])
    assert shown_reason == " ".join(reason.split())


def test_many_paths_to_the_same_ensembles_are_no_cycle() -> None:
    """A step that 2**40 paths reach is visited once."""
    steps = {f"e{i}": [f"e{i + 1}", f"e{i + 1}", f"e{i + 2}"] for i in range(40)}
    models = ModelRegistry()
    assert models.find_cycle("top", ["e0", "e1"], steps) == []
    cycle = models.find_cycle("e20", ["e19"], steps)
    assert cycle[0] == cycle[-1] == "e20"
    assert "e19" in cycle
