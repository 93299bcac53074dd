"""The bytes of tensors in shared memory that a server copies, by its metrics."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tests.support import repositories
from tests.support.regions import SharedObject
from tests.support.servers import Server
from tests.support.wire.raw_http import in_region, shm_input

ROWS, SIDE = 4096, 1024
SIZE = ROWS * SIDE * 4  # 16 MiB
MODEL = f"""
import torch

class Model(torch.nn.Linear):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__({SIDE}, {SIDE})
"""
CONFIG = f"""
backend: "pytorch"
input [ {{ name: "input" data_type: TYPE_FP32 dims: [ -1, {SIDE} ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ -1, {SIDE} ] }} ]
instance_group [ {{ kind: KIND_CPU }} ]
"""


def copied_bytes(server: Server) -> dict[str, float]:
    return {d: server.metric("shmserve_copied_bytes_total", direction=d) for d in ("in", "out")}


def test_only_outputs_are_copied(repository: Path, serve: Callable[..., Server]) -> None:
    repositories.write(repository, "linear", CONFIG, MODEL)
    server = serve(repository)
    x = np.random.default_rng(0).standard_normal((ROWS, SIDE)).astype(np.float32)
    torch.manual_seed(0)
    with torch.inference_mode():
        expected = torch.nn.Linear(SIDE, SIDE)(torch.from_numpy(x)).numpy()
    request = {
        "inputs": [shm_input("input", "FP32", x.shape, "r", SIZE)],
        "outputs": [{"name": "y", "parameters": in_region("r", SIZE, SIZE)}],
    }
    with SharedObject(2 * SIZE) as region, server.http() as http:
        region.write(x)
        http.register("r", region.key, 2 * SIZE).ok()
        http.infer("linear", request).ok()
        # The input is copied, too, until the model is known not to write to it.
        assert copied_bytes(server) == {"in": SIZE, "out": SIZE}
        for count in range(2, 5):
            region.write(np.zeros(8, np.float32), SIZE)
            http.infer("linear", request).ok()
            output = region.read(np.float32, ROWS * SIDE, SIZE).reshape(x.shape)
            assert np.allclose(output, expected, atol=1e-5)
            assert copied_bytes(server) == {"in": SIZE, "out": count * SIZE}
        http.unregister().ok()
