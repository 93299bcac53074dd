"""A workspace pool on a real device: models whose needs add up to more than it has, all serve."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

import shmserve.client
from tests.support import repositories, servers
from tests.support.servers import Server, Start
from tests.support.waiting import until

pytestmark = pytest.mark.gpu

MB = 1 << 20
NATIVE = '''
"""Fills a workspace on its device, and counts what does not stay as it is."""
import torch
from torch import Tensor

from shmserve.model import INT64


class Model:
    max_batch_size = 0

    def load(self, context):
        self.context = context

    def predict(self, X: INT64[Tensor, 1]) -> INT64[Tensor, 1]:
        with self.context.workspace(SIZE) as buffer:
            assert buffer.is_cuda and buffer.numel() == SIZE
            buffer.copy_((X % 251).to(torch.uint8).expand(SIZE))
            for _ in range(20):
                buffer.add_(1)
            return (buffer != ((X + 20) % 251).to(torch.uint8)).sum().reshape(1)
'''
PYTHON = """
import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            with pb_utils.workspace(SIZE) as buffer:
                assert buffer.is_cuda
                buffer.fill_(7)
                wrong = (buffer != 7).sum().cpu().numpy().reshape(1)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("output", wrong)]))
        return responses
"""
GROUP = "instance_group [ { kind: KIND_GPU gpus: [ 0 ] count: 2 } ]\n"
CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "output" data_type: TYPE_INT64 dims: [ 1 ] } ]
"""


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    """14 MB of plans, twice over, on 12 MB."""
    source = NATIVE.replace("SIZE", str(6 * MB))
    repositories.write(models, "small", 'backend: "native"\n' + GROUP, source)
    source = PYTHON.replace("SIZE", str(8 * MB))
    repositories.write(models, "large", CONFIG + GROUP, source)
    return start(models, f"--workspace-byte-size=cuda:0={12 * MB}", gpu=True)


def wrong_outputs(server: Server, model: str, count: int) -> list[int]:
    with shmserve.client.connect(server.run_dir) as client:
        return [int(client.infer(model, X=np.array([n], int))["output"][0]) for n in range(count)]


def test_plans_of_14_mb_on_a_pool_of_12_both_serve(server: Server) -> None:
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(wrong_outputs, server, model, 30) for model in ("small", "large") * 3]
        assert [future.result() for future in calls] == [[0] * 30] * 6


def test_the_workspace_holder_dies(server: Server) -> None:
    def holders() -> list[int]:
        children = psutil.Process(server.pid).children(recursive=True)
        return [process.pid for process in children if "workspace cuda:0" in servers.title(process)]

    (holder,) = holders()
    os.kill(holder, signal.SIGKILL)
    until("there is another one", lambda: holders() not in ([], [holder]))
    for model in ("small", "large"):
        assert wrong_outputs(server, model, 5) == [0] * 5
