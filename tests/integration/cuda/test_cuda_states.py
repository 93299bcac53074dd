"""Implicit state of models on a real device: it is there from request to request."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve.client
from tests.support import repositories
from tests.support.servers import Server, Start

pytestmark = pytest.mark.gpu

LENGTH = 1 << 20  # the size of a state in values of 4 bytes
MODEL = """
import torch

class Model(torch.nn.Module):
    def forward(self, x, before):
        assert before.is_cuda
        after = {step}
        where = torch.full_like(x, after.data_ptr() % 2**24)
        return {{"y": torch.cat([after[:, :1], where], dim=1), "after": after}}
"""
CONFIG = f"""
backend: "pytorch"
runtime: "model.py"
max_batch_size: 4
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 2 ] }} ]
instance_group [ {{ kind: KIND_GPU gpus: [ 0 ] count: 1 }} ]
sequence_batching {{
  direct {{ }}
  max_sequence_idle_microseconds: 60000000
  state [ {{
    input_name: "before" output_name: "after" data_type: TYPE_FP32 dims: [ {LENGTH} ] %s
  }} ]
}}
"""
MODELS = {
    "copied": ("before + x", ""),
    "in_place": ("before.add_(x)", "use_same_buffer_for_input_output: true"),
}


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    for name, (step, settings) in MODELS.items():
        repositories.write(models, name, CONFIG % settings, MODEL.format(step=step))
    return start(models, gpu=True)


@pytest.fixture
def client(server: Server) -> Iterator[shmserve.client.Server]:
    with shmserve.client.connect(server.run_dir) as native_client:
        yield native_client


def infer_sequence(client: shmserve.client.Server, model: str, **flags: Any) -> list[float]:
    x = np.ones((1, 1), np.float32)
    outputs: list[float] = client.infer(model, x=x, sequence=7, **flags)["y"][0].tolist()
    return outputs


@pytest.mark.parametrize("model", MODELS)
def test_states_stay_on_device(server: Server, client: shmserve.client.Server, model: str) -> None:
    sums = [infer_sequence(client, model, start=True)[0], infer_sequence(client, model)[0]]
    copied_before = server.metric("shmserve_copied_bytes_total", model=model)
    sums += [infer_sequence(client, model)[0] for _ in range(3)]
    copied = server.metric("shmserve_copied_bytes_total", model=model) - copied_before
    assert sums == [1, 2, 3, 4, 5]
    assert copied < LENGTH
    infer_sequence(client, model, end=True)


def test_input_and_output_of_a_state_have_one_address(client: shmserve.client.Server) -> None:
    infer_sequence(client, "in_place", start=True)  # begun from the host's zeros
    memory_ranges = {infer_sequence(client, "in_place")[1] for _ in range(4)}
    assert len(memory_ranges) == 1
    infer_sequence(client, "in_place", end=True)


def test_rows_of_sequences_are_gathered_on_the_device(client: shmserve.client.Server) -> None:
    x = np.ones((1, 1), np.float32)
    for index in range(4):
        futures = [
            client.infer_async(
                "copied", {"x": x * value}, sequence=value, start=index == 0, end=index == 3
            )
            for value in (1, 2, 3)
        ]
        sums = [float(future.result()["y"][0, 0]) for future in futures]
        assert sums == [value * (index + 1) for value in (1, 2, 3)]
