"""The heaps of gateways and workers: freed blocks are used again, and returned after a pause."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support import repositories
from tests.support.servers import Server, running
from tests.support.waiting import until
from tests.support.wire.raw_http import Http

ELEMENTS = 150_000
REQUESTS = 20
PAGES = 4 * ELEMENTS // 4096  # of one tensor
FORMULA = """
    def one(self, request):
        values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        result = (2 * values + 1) * (values - 1) / (values + 3)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", result)])
"""


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    repository = folder / "models"
    config = repositories.identity_config("formula", "FP32", [-1])
    repositories.write(repository, "formula", config, repositories.python_model(FORMULA))
    with running(repository) as running_server:
        yield running_server


def count_faults(pid: int) -> int:
    """Return the number of page faults of a process that needed no disk."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def test_large_blocks_are_used_again_and_returned_after_a_pause(server: Server, http: Http) -> None:
    """By default, malloc returns them at once, and each request faults all their pages in."""
    values = np.arange(ELEMENTS, dtype=np.float32)
    processes = [server.find_one(start) for start in ("gateway http", "worker formula")]

    def send_requests() -> None:
        inputs = [("INPUT0", "FP32", [ELEMENTS], values.tobytes())]
        raw = {"Inference-Header-Content-Length": "0"}
        for _ in range(REQUESTS // 2):
            http.infer_binary("formula", inputs, parameters={"binary_data_output": True}).ok()
            http.infer("formula", values.tobytes(), raw).ok()

    send_requests()
    faults_before = [count_faults(process.pid) for process in processes]
    send_requests()
    for process, before in zip(processes, faults_before, strict=True):
        assert count_faults(process.pid) - before < REQUESTS * PAGES / 4
    rss = processes[1].memory_info().rss
    until("the worker has returned them", lambda: rss - processes[1].memory_info().rss > ELEMENTS)
