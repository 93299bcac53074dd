"""`shmserve.serve`: a server for a script, a test or a notebook."""

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shmserve
from shmserve.client import aio
from shmserve.errors import Internal, InvalidArgument, ShmserveError, Unavailable
from shmserve.model import FP32
from shmserve.testing import serve_model

__all__ = ["serve_model"]
X = np.ones((1, 4), np.float32)


class Double:
    def predict(self, x: FP32[np.ndarray, 4]) -> FP32[np.ndarray, 4]:
        return x * 2


class Broken(Double):
    def load(self, context: object) -> None:
        raise RuntimeError("the weights are gone")


SCRIPT = """
import numpy as np
import shmserve
from shmserve.model import FP32

FACTOR = 3

def scaled(x):
    return x * FACTOR

class Triple:
    def predict(self, x: FP32[np.ndarray, 4]) -> FP32[np.ndarray, 4]:
        return scaled(x)

with shmserve.serve(Triple) as server:
    print(server.infer("triple", x=np.ones((1, 4), np.float32))["output"].sum())
"""


def test_both_clients_ask_the_control_plane() -> None:
    class Local:
        def predict(self, x: FP32[np.ndarray, 4]) -> FP32[np.ndarray, 4]:
            return x + 1

    async def ask(run_dir: Path) -> list[float]:
        async with aio.connect(run_dir, timeout=10) as other:
            assert await other.ready() and await other.ready("local")
            assert (await other.metadata("local"))["name"] == "local"
            assert {each["name"] for each in await other.statistics()} == {"double", "local"}
            inputs = ({"x": X * i} for i in range(5))
            return [float(r["output"][0, 0]) async for r in other.map("double", inputs)]

    with shmserve.serve([Double, Local]) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert server.ready() and server.ready("double") and not server.ready("missing")
        assert server.metadata("double")["inputs"][0]["name"] == "x"
        assert server.infer("local", x=X)["output"].tolist() == [[2, 2, 2, 2]]
        assert server.statistics("local")[0]["inference_count"] == 1
        with pytest.raises(Unavailable, match="explicit model load"):
            server.load("double")
        assert asyncio.run(ask(server.run_dir)) == [0, 2, 4, 6, 8]
        with pytest.raises(InvalidArgument, match=r"'timeuot'.*did you mean 'timeout'"):
            server.infer("double", x=X, timeuot=3)
        with pytest.raises(InvalidArgument, match="'y' for model 'double', allowed are: x"):
            server.infer("double", y=X)
        run_dir = server.run_dir
    assert not run_dir.exists()


def test_the_error_of_a_model_is_raised() -> None:
    gone = "RuntimeError: the weights are gone"
    with pytest.raises(Internal, match=gone), shmserve.serve(Broken):
        raise AssertionError("entered")
    with pytest.raises(ShmserveError, match="no_such"), shmserve.serve("no_such.py:Class"):
        raise AssertionError("entered")


def test_models_of_a_repository_are_loaded_and_unloaded(tmp_path: Path, serve_model) -> None:
    version = tmp_path / "double" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(
        "import numpy as np\nfrom shmserve.model import FP32\nclass Model:\n"
        "    def predict(self, x: FP32[np.ndarray, 4]) -> FP32[np.ndarray, 4]:\n"
        "        return x * 2\n"
    )
    (tmp_path / "double" / "config.pbtxt").write_text('backend: "native"')
    server = serve_model(tmp_path, model_control_mode="explicit")
    assert server.models() == []
    server.load("double")
    assert server.infer("double", x=X)["output"].sum() == 8
    server.unload("double")
    assert server.models() == []
    assert serve_model(tmp_path / "double").models() == [("double", "1")]


def test_a_class_of_a_script_is_served(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert float(done.stdout) == 12.0
