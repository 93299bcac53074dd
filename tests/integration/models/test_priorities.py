"""Priority levels, queue policies and batching strategies of a real server."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc

import shmserve.client
from tests.support import repositories
from tests.support.held_queue import Queue
from tests.support.request_pool import RequestPool
from tests.support.servers import Server
from tests.support.wire.triton import infer_inputs

PRIORITY_LEVELS = """
dynamic_batching {
  priority_levels: 5
  default_priority_level: 4
  default_queue_policy { max_queue_size: 4 }
  priority_queue_policy {
    key: 5
    value {
      timeout_action: DELAY default_timeout_microseconds: 1000 allow_timeout_override: true
    }
  }
}
"""
CALLER = """
backend: "python"
input [ { name: "PRIORITY" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ -1, -1 ] } ]
"""
CALLER_MODEL = repositories.python_model("""
    def one(self, request):
        priority = int(self.input(request, "PRIORITY")[0])
        called = pb_utils.InferenceRequest(
            model_name="levels",
            inputs=[pb_utils.Tensor("INPUT0", np.full((1, 1), priority, np.int32))],
            requested_output_names=["OUTPUT0"],
            priority=priority,
        ).exec()
        return self.response(OUT=called.output_tensors()[0].as_numpy())
""")
STRATEGY = (
    'parameters { key: "batching_strategy" value { string_value: "%s" } }'
    "dynamic_batching { max_queue_delay_microseconds: 30000000 }"
)
LATENCY_TARGET = 'parameters { key: "target_p99_ms" value { string_value: "5000" } }'


@pytest.fixture(scope="module")
def server(models: Path, serve_models: Callable[[Path], Server]) -> Server:
    """Start a server of models with levels and strategies, and one that calls with a priority."""
    path = repositories.add_as(models, "levels", "gated", PRIORITY_LEVELS) / "config.pbtxt"
    path.write_text(path.read_text().replace("max_batch_size: 8", "max_batch_size: 1"))
    repositories.write(models, "caller", CALLER, CALLER_MODEL)
    repositories.add_as(models, "prefer_latency", "gated", STRATEGY % "prefer_latency")
    repositories.add_as(models, "adaptive", "gated", STRATEGY % "adaptive" + LATENCY_TARGET)
    return serve_models(models)


def number(value: int) -> np.ndarray:
    return np.full((1, 1), value, np.int32)


def test_priorities_are_accepted_over_every_protocol(server: Server, pool: RequestPool) -> None:
    """The protocols are HTTP, gRPC, the local client's, and that of calls by a model."""

    def infer_over_grpc() -> None:
        with grpc.InferenceServerClient(server.grpc_url) as client:
            client.infer("levels", infer_inputs(grpc, INPUT0=number(3)), priority=3)

    def infer_natively() -> None:
        with shmserve.client.connect(server.run_dir) as client:
            client.infer("levels", INPUT0=number(2), priority=2)

    def from_a_model() -> None:
        with shmserve.client.connect(server.run_dir) as client:
            client.infer("caller", PRIORITY=np.array([1], np.int32))

    queue = Queue(server, pool, "levels")
    queue.add(5, priority=5)
    queue.add(4)  # without a priority: the default is level 4
    calls = [queue.call(function) for function in (infer_over_grpc, infer_natively, from_a_model)]
    assert queue.batches(5) == [[1], [2], [3], [4], [5]]
    for function in calls:
        function.result()


def test_a_levels_queue_is_full_and_the_others_are_not(server: Server, pool: RequestPool) -> None:
    queue = Queue(server, pool, "levels")
    for value in range(1, 5):
        queue.add(value, priority=1)
    refused_reply = pool.number("levels", 9, priority=1).result()
    assert refused_reply.status == 503 and int(refused_reply.headers["Retry-After"]) >= 1
    assert refused_reply.error == "[request id: <id_unknown>] Exceeds maximum queue size"
    queue.add(5, priority=2)
    assert queue.batches(5) == [[1], [2], [3], [4], [5]]


def test_a_late_request_of_a_level_that_delays_runs_last(server: Server, pool: RequestPool) -> None:
    """The request's own timeout, which is shorter than the level's, only delays it."""
    queue = Queue(server, pool, "levels")
    queue.add(1, priority=5, timeout=500)
    time.sleep(0.01)  # its timeout expires, so later requests precede it
    queue.add(2, priority=4)
    assert queue.batches(2) == [[2], [1]]
    assert all(future.result().status == 200 for future in pool.futures)


@pytest.mark.parametrize("model", ["prefer_latency", "adaptive"])
def test_strategies_without_delay_run_waiting_requests_at_once(
    server: Server, pool: RequestPool, model: str
) -> None:
    """The configured delay of these models is half a minute."""
    queue = Queue(server, pool, model)
    for value in (1, 2, 3):
        queue.add(value)
    assert queue.batches(1) == [[1, 2, 3]]
