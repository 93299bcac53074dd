"""Ragged batches and optional inputs; models wait until three requests are queued."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.support import repositories
from tests.support.servers import Server, Start
from tests.support.wire.triton import infer_inputs

HELD_REQUESTS = 3
PYTHON = repositories.python_model("""
    def execute(self, requests):
        responses = []
        for request in requests:
            x, bias = self.input(request, "X"), self.input(request, "BIAS")
            out = [x.shape[1], len(requests), np.sum(x + (0 if bias is None else bias))]
            responses.append(self.response(Y=np.array([out], np.float32)))
        return responses
""")
PYTHON_CONFIG = """
backend: "python" max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] %s }
input { name: "BIAS" data_type: TYPE_FP32 dims: [ 1 ] optional: true }
output { name: "Y" data_type: TYPE_FP32 dims: [ 3 ] }
dynamic_batching { }
"""


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    """Start a server with one model for each test, since each model is held only once."""
    repositories.write(models, "each", PYTHON_CONFIG % "allow_ragged_batch: true", PYTHON)
    repositories.write(models, "mixed", PYTHON_CONFIG % "allow_ragged_batch: true", PYTHON)
    environment = {"TRITONSERVER_DELAY_SCHEDULER": str(HELD_REQUESTS)}
    return start(models, environment=environment, grpc=True)


def infer(server: Server, model: str, **arrays: Any) -> dict[str, np.ndarray[Any, Any]]:
    with triton.InferenceServerClient(server.grpc_url) as client:
        result = client.infer(model, infer_inputs(triton, **arrays))
        return {o.name: result.as_numpy(o.name) for o in result.get_response().outputs}


def ask_all(server: Server, model: str, requests: list[dict[str, Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(lambda arrays: infer(server, model, **arrays), requests))


def inputs_of_sizes(*sizes: int) -> list[dict[str, Any]]:
    return [{"X": np.arange(1, n + 1, dtype=np.float32)[None]} for n in sizes]


def test_a_python_model_gets_each_requests_own_tensor(server: Server) -> None:
    """3.6: the Python backend passes each request its own tensor."""
    answers = ask_all(server, "each", inputs_of_sizes(2, 4, 1))
    assert [answer["Y"].tolist() for answer in answers] == [
        [[2, HELD_REQUESTS, 3]],
        [[4, HELD_REQUESTS, 10]],
        [[1, HELD_REQUESTS, 1]],
    ]


def test_requests_with_other_inputs_do_not_share_a_batch(server: Server) -> None:
    """3.6: a batch needs identical sets of inputs; a missing input is None."""
    first_inputs, second_inputs, third = inputs_of_sizes(2, 2, 2)
    second_inputs["BIAS"] = np.ones((1, 1), np.float32)
    answers = ask_all(server, "mixed", [first_inputs, second_inputs, third])
    sizes = [answer["Y"][0, 1] for answer in answers]
    assert sizes[1] == 1 and sizes[0] < HELD_REQUESTS and sizes[2] < HELD_REQUESTS
    assert [answer["Y"][0, 2] for answer in answers] == [3, 5, 3]
