"""Implicit state: outputs that become inputs, with every backend that supports it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve.client
from tests.support import repositories
from tests.support.sequence_models import IDLE_TIME, controls, instances
from tests.support.servers import ROOT, Server, Start, run_command

STATE_MODULE = '''
"""OUTPUT = SUM, which goes on with INPUT; COUNT goes on by one."""
import torch
from torch import nn


class Model(nn.Module):
    """Two states, the second of another datatype."""

    def forward(self, INPUT, SUM_IN, COUNT_IN):
        """By name."""
        total = SUM_IN + INPUT
        return {"OUTPUT": total, "SUM_OUT": total, "COUNT_OUT": COUNT_IN + 1}
'''
IN_PLACE = '''
"""OUTPUT = where the state lies; it is written where it is."""
import torch
from torch import nn


class Model(nn.Module):
    """Adds INPUT to its state in place."""

    def forward(self, INPUT, SUM_IN):
        """By name."""
        SUM_IN += INPUT
        where = torch.full_like(INPUT, SUM_IN.data_ptr() % 2**31)
        return {"OUTPUT": torch.cat([SUM_IN, where], dim=1), "SUM_OUT": SUM_IN}
'''
CONFIG = """
name: "{name}"
backend: "{backend}"
max_batch_size: {rows}
input [ {{ name: "INPUT" data_type: {data_type} dims: [ 1 ] }} ]
output [ {{ name: "OUTPUT" data_type: {data_type} dims: [ -1 ] }} ]
sequence_batching {{ {strategy} {idle} {given} }}
"""
SUM_STATE = (
    'state [ {{ input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_FP32 {dims} {how} }} '
)
COUNT = ', { input_name: "COUNT_IN" output_name: "COUNT_OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]'


def add(
    repository: Path,
    name: str,
    code: str,
    state_names: str,
    backend: str = "pytorch",
    data_type: str = "TYPE_FP32",
    strategy: str = "direct { }",
    rows: int = 4,
) -> None:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(code)
    config = CONFIG.format(
        name=name,
        backend=backend,
        rows=rows,
        data_type=data_type,
        strategy=strategy,
        idle=IDLE_TIME,
        given=state_names,
    )
    runtime = 'runtime: "model.py"\n' if backend == "pytorch" else ""
    (folder / "config.pbtxt").write_text(config + runtime + instances(1))


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    config = SUM_STATE.format(dims="dims: [ 1 ]", how="") + COUNT
    add(models, "zero", STATE_MODULE, config)
    add(
        models, "candidates", STATE_MODULE, config, strategy="oldest { max_candidate_sequences: 8 }"
    )
    add(models, "unbatched", STATE_MODULE, config, rows=0)
    same_buffer_config = (
        SUM_STATE.format(dims="dims: [ 1 ]", how="use_same_buffer_for_input_output: true") + "]"
    )
    add(models, "in_place", IN_PLACE, same_buffer_config, rows=1)
    class_parameter = 'parameters { key: "class" value { string_value: "Mean" } }'
    example = (ROOT / "examples" / "native_sequence.py").read_text()
    repositories.write(models, "mean", f'name: "mean" backend: "native" {class_parameter}', example)
    return start(models, "--exit-timeout-secs=2")


@pytest.fixture
def client(server: Server) -> Iterator[shmserve.client.Server]:
    with shmserve.client.connect(server.run_dir) as native_client:
        yield native_client


def number(value: float, *shape: int) -> Any:
    return np.full(shape or (1, 1), value, np.float32)


@pytest.mark.parametrize("model", ["zero", "candidates", "unbatched"])
def test_states_pass_from_request_to_request(client: shmserve.client.Server, model: str) -> None:
    """Each sequence has its own state, which begins at zero, and again at zero after a START."""
    shape = (1,) if model == "unbatched" else (1, 1)

    def sum_of(sequence: int, value: float, **flags: bool) -> float:
        result = client.infer(
            model,
            {"INPUT": number(value, *shape)},
            sequence=sequence,
            **flags,  # type: ignore[arg-type]
        )
        assert list(result) == ["OUTPUT"]  # states are not sent to clients
        return float(result["OUTPUT"].reshape(-1)[0])

    assert sum_of(1, 1, start=True) == 1
    sequence_count = 1 if model == "unbatched" else 4
    assert [
        sum_of(sequence_id, sequence_id, start=True) for sequence_id in range(2, sequence_count + 1)
    ] == list(range(2, sequence_count + 1))
    assert [sum_of(1, 10), sum_of(1, 100)] == [11, 111]
    assert [sum_of(sequence_id, 1) for sequence_id in range(2, sequence_count + 1)] == list(
        range(3, sequence_count + 2)
    )
    assert sum_of(1, 5, start=True) == 5
    for sequence_id in range(1, sequence_count + 1):
        sum_of(sequence_id, 0, end=True)


def test_states_of_a_batch_are_separate(client: shmserve.client.Server) -> None:
    """The sequences run in one execution, in the rows of their slots."""
    for index in range(6):
        futures = [
            client.infer_async(
                "zero",
                {"INPUT": number(sequence)},
                sequence=sequence,
                start=index == 0,
                end=index == 5,
            )
            for sequence in range(1, 5)
        ]
        sums = [float(future.result()["OUTPUT"][0, 0]) for future in futures]
        assert sums == [sequence * (index + 1) for sequence in range(1, 5)]


def test_a_state_may_use_one_buffer_for_input_and_output(client: shmserve.client.Server) -> None:
    """The model updates the buffer in place in each request."""
    states = []
    for index in range(5):
        result = client.infer("in_place", {"INPUT": number(2)}, sequence=1, start=index == 0)
        states.append(result["OUTPUT"][0].tolist())
    client.infer("in_place", {"INPUT": number(2)}, sequence=1, end=True)
    assert [total for total, _ in states] == [2, 4, 6, 8, 10]
    assert len({address for _, address in states}) == 1


def test_the_guides_example(client: shmserve.client.Server) -> None:
    text = (ROOT / "shmserve" / "guide" / "sequences.md").read_text()
    declared = text.partition("    def predict(self, value")[2].partition("```")[0]
    assert declared in (ROOT / "examples" / "native_sequence.py").read_text()
    running_means = [
        float(
            client.infer("mean", value=number(value), sequence="a", start=value == 1)["mean"][0, 0]
        )
        for value in (1, 2, 6)
    ]
    assert running_means == [1, 1.5, 3]
    client.infer("mean", value=number(0), sequence="a", end=True)


def test_check_runs_a_sequence_of_one_request(tmp_path: Path) -> None:
    for id_type in ("STRING", "UINT64"):
        config = f"sequence_batching {{ direct {{ }} {controls('TYPE_' + id_type)} }}"
        repositories.add_as(tmp_path, f"id_{id_type}", "sequencer", config)
    result = run_command("check", str(tmp_path))
    assert result.returncode == 0, result.stdout
