"""The shared workspace: two models that together need more memory than it has are both served."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import repositories
from tests.support.servers import Server, Start
from tests.support.workspace_models import add, request_body

MB = 1 << 20
POOL_BYTES = 12 * MB

NATIVE = '''
"""The same as a class."""
import time

from torch import Tensor

from shmserve.model import INT64


class Model:
    max_batch_size = 0

    def load(self, context):
        self.context = context

    def predict(self, X: INT64[Tensor, 1]) -> INT64[Tensor, 1]:
        with self.context.workspace(6 << 20) as buffer:
            buffer.fill_(7)
            time.sleep(0.002)
            return (buffer != 7).sum().reshape(1)
'''


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    """Start a server whose two models need 14 MB each, with a workspace of 12 MB."""
    add(models, "large", 8 * MB)
    add(models, "whole", POOL_BYTES)
    repositories.write(models, "small", 'backend: "native"\n', NATIVE)
    return start(models, f"--workspace-byte-size=cpu={POOL_BYTES}")


def test_plans_of_14_mb_on_a_pool_of_12_both_serve(server: Server) -> None:
    models = ["large", "small", "whole"] * 4

    def send_requests(index: int) -> list[int]:
        with server.http() as http:
            replies = [http.infer(models[index], request_body(index + n)).ok() for n in range(6)]
        return [int(next(iter(reply.tensors().values()))[0]) for reply in replies]

    with ThreadPoolExecutor(len(models)) as pool:
        assert list(pool.map(send_requests, range(len(models)))) == [[0] * 6] * len(models)
