"""Steps of an ensemble on one real device: the tensors between them stay on the device."""

from pathlib import Path

import numpy as np
import pytest

import shmserve.client
from tests.support import repositories
from tests.support.servers import Server, Start

pytestmark = pytest.mark.gpu

LENGTH = 1 << 20  # values of 4 bytes
MODEL = """
import torch

class Model(torch.nn.Module):
    def forward(self, X):
        assert X.is_cuda
        return {"Y": X * 2 + 1}
"""
CONFIG = f"""
max_batch_size: 4
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ {LENGTH} ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ {LENGTH} ] }} ]
"""
STEP_MODEL = """
backend: "pytorch"
runtime: "model.py"
dynamic_batching { }
instance_group [ { kind: KIND_GPU gpus: [ 0 ] count: 1 } ]
"""
NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    for name in NAMES:
        repositories.write(models, name, CONFIG + STEP_MODEL, MODEL)
    write_ensemble(models)
    return start(models, gpu=True)


def copied_bytes(server: Server, model: str, direction: str) -> float:
    return server.metric("shmserve_copied_bytes_total", model=model, direction=direction)


def write_ensemble(repository: Path) -> None:
    tensors = ("X", "a", "b", "Y")
    steps = ", ".join(
        f'{{ model_name: "{name}" model_version: -1 input_map {{ key: "X" value: "{source}" }} '
        f'output_map {{ key: "Y" value: "{output}" }} }}'
        for name, source, output in zip(NAMES, tensors, tensors[1:], strict=False)
    )
    (repository / "chain" / "1").mkdir(parents=True)
    (repository / "chain" / "config.pbtxt").write_text(
        f'platform: "ensemble"\n{CONFIG}ensemble_scheduling {{ step [ {steps} ] }}\n'
    )


def test_tensors_between_steps_stay_on_the_device(server: Server) -> None:
    assert "50.3 MB per request (33.6 MB on CUDA devices)" in server.log()
    values = np.random.default_rng(0).random((2, LENGTH), np.float32)
    with shmserve.client.connect(server.run_dir) as client:
        client.infer("chain", X=values)
        names = ("two", "three")  # readers and a writer, all on the device
        kinds = [(name, direction) for name in names for direction in ("in", "out")]
        copied_before = [copied_bytes(server, *kind) for kind in kinds]
        futures = [client.infer_async("chain", {"X": values + n}) for n in range(20)]
        for n, future in enumerate(futures):
            assert np.allclose(future.result()["Y"], ((values + n) * 2 + 1) * 4 + 3)
        for kind, before in zip(kinds, copied_before, strict=True):
            # Once each way, on the device: a batch is gathered, its outputs go where they are read;
            # what the client gets goes to the host first. The first request may be counted late.
            times = 2 if kind == ("three", "out") else 1
            assert copied_bytes(server, *kind) - before <= 21 * times * values.nbytes * 1.01, kind
