"""A gRPC whose private parts are other ones: what it makes public is enough, and a line says so."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.support import repositories
from tests.support.servers import Server, running

# grpc itself is made of what is hidden from us.
_HIDDEN = """
import builtins

real = builtins.__import__

def hiding(name, globals=None, *rest, **named):
    if name == "grpc._cython" and (globals or {}).get("__name__", "").startswith("shmserve."):
        raise ImportError(name)
    return real(name, globals, *rest, **named)

builtins.__import__ = hiding
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("public")
    repositories.add(folder / "models", "simple")
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_HIDDEN)
    with running(folder / "models", grpc=True, environment={"PYTHONPATH": str(site)}) as started:
        yield started


def inputs(value: int) -> list[triton.InferInput]:
    made = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for tensor in made:
        tensor.set_data_from_numpy(np.full((1, 16), value, np.int32))
    return made


def test_the_log_has_a_line(server: Server) -> None:
    assert server.log().count("calls go through grpc.aio alone") == 1
    assert "Traceback" not in server.log()


def test_a_call_and_its_error(server: Server) -> None:
    with triton.InferenceServerClient(server.grpc_url) as client:
        for value in range(5):
            found = client.infer("simple", inputs(value)).as_numpy("OUTPUT0")
            assert found is not None and (found == 2 * value).all()
        with pytest.raises(InferenceServerException, match="unknown model"):
            client.infer("nobody", inputs(1))


def test_a_stream(server: Server) -> None:
    answers: queue.Queue[tuple[triton.InferResult, Exception | None]] = queue.Queue()
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for value in range(20):
            client.async_stream_infer("simple", inputs(value))
        for value in range(20):
            result, error = answers.get(timeout=20)
            assert error is None
            assert (result.as_numpy("OUTPUT0") == 2 * value).all()
        client.stop_stream(cancel_requests=True)
