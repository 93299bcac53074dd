"""Full queues and full arenas. For a full /dev/shm see faults/test_rows.py."""

import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from tests.faults.scene import assert_recovers, scene
from tests.support.request_pool import values
from tests.support.servers import Server
from tests.support.wire.raw_http import Reply


def test_the_queue_is_full(serve: Callable[..., Server]) -> None:
    small_queue_server = serve("--max-queue-size=4")
    with scene(small_queue_server) as stage:
        first_request = stage.pool.number("gated", 0)
        holder = small_queue_server.gate.next()
        waiting: list[Future[Reply]] = []
        for value in range(1, 5):
            waiting.append(stage.pool.number("gated", value))
            small_queue_server.wait_pending("gated", value)
        for _ in range(10):
            refused_reply = stage.pool.number("gated", 9).result()
            assert refused_reply.status == 503
            assert refused_reply.error == "[request id: <id_unknown>] Exceeds maximum queue size"
            assert int(refused_reply.headers["Retry-After"]) >= 1
        holder.release()
        for value, answer in enumerate(waiting, 1):
            small_queue_server.gate.next().release()
            assert values(answer.result()) == [value]
        assert values(first_request.result()) == [0]
        assert_recovers(stage, time.monotonic())
        assert stage.load.troubles() == []


def test_the_memory_for_tensors_is_full(serve: Callable[..., Server]) -> None:
    """Requests that do not fit into the arena are rejected or wait. Small requests are served."""
    server = serve(f"--arena-byte-size={8 << 20}")
    large_array = np.zeros(1_500_000, np.float32)
    with scene(server) as stage:
        refused = stage.http.infer_binary(
            "identity", [("INPUT0", "FP32", [3_000_000], bytes(12_000_000))]
        )
        assert refused.status == 400
        assert f"--arena-byte-size allows {8 << 20}" in refused.error
        inputs = [("INPUT0", "FP32", [len(large_array)], large_array.tobytes())]
        outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
        pending_calls = [
            stage.pool.send(lambda http: http.infer_binary("identity", inputs, outputs=outputs))
            for _ in range(8)
        ]
        replies = [answer.result() for answer in pending_calls]
        assert {reply.status for reply in replies} <= {200, 503}
        assert stage.http.infer_binary("identity", inputs, outputs=outputs).status == 200
        assert_recovers(stage, time.monotonic())
        assert stage.load.troubles() == []
