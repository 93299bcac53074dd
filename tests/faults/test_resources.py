"""What models share misbehaves, or who holds it dies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tests.rigs.pipelines import add_model
from tests.support.leaks import resident_bytes
from tests.support.servers import running

_LARGE = 250_000  # elements: 1 MB
_TIMES = 40


def test_a_cache_that_gets_only_values_larger_than_itself(tmp_path: Path) -> None:
    """Every answer is right, nothing is kept, no process grows; what fits is cached after."""
    repository = tmp_path / "models"
    add_model(
        repository,
        "large",
        'return self.response(Y=self.input(request, "X") + 1)',
        more="response_cache { enable: true }",
    )
    with running(repository, "--cache-config=local,size=100000") as server:

        def ask(number: int, size: int = _LARGE) -> None:
            array = np.full(size, number, np.float32)
            with server.http() as http:
                given = [("X", "FP32", [size], array.tobytes())]
                outputs = [{"name": "Y", "parameters": {"binary_data": True}}]
                reply = http.infer_binary("large", given, outputs=outputs).ok()
            assert (reply.tensors()["Y"] == array + 1).all()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, range(8)))
            before = resident_bytes(server)["scheduler large"]
            list(pool.map(ask, range(_TIMES)))
            assert resident_bytes(server)["scheduler large"] < before + (16 << 20)
        assert server.metric("shmserve_cache_entries", model="large") == 0
        assert server.metric("nv_cache_num_misses_per_model", model="large") == 8 + _TIMES
        for _ in range(2):
            ask(1, size=4)
        assert server.metric("nv_cache_num_hits_per_model", model="large") == 1
