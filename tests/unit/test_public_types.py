"""User code that passes the strict modes of type checkers against the public API."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import ROOT

_CLIENTS = ROOT / ".venv/clients/node_modules/.bin"
PYRIGHT = shutil.which("pyright") or shutil.which("pyright", path=_CLIENTS)

USER = """
import numpy as np
import shmserve
from shmserve import client
from shmserve.client import aio
from shmserve.model import FP32, Context


class Double:
    max_batch_size = 8

    def load(self, context: Context) -> None:
        self.name = context.name

    def predict(self, x: FP32[np.ndarray, 4]) -> FP32[np.ndarray, 4]:
        return x * 2


def ask() -> float:
    with shmserve.serve(Double, port=0) as server:
        x = np.ones((1, 4), np.float32)
        result = server.infer("double", x=x, timeout=3.0)
        for each in server.map("double", [{"x": x}]):
            print(each["output"])
        print(server.ready("double"), server.metadata("double")["name"], server.statistics())
        return float(result["output"].sum())


async def ask_later() -> None:
    async with aio.connect(timeout=3.0) as server:
        print((await server.infer("double", {"x": [1.0]}))["output"], await server.models())
        async for each in server.map("double", [{"x": [1.0]}]):
            print(each["output"])


async def connected_later() -> aio.Server:
    return await aio.connect()


def connected() -> None:
    with client.connect(timeout=1.0) as server:
        region = server.allocate({"x": ((1, 4), "FP32")})
        region["x"][:] = 1
        try:
            server.infer("double", region)
        except client.ShmserveError as error:
            print(error.message)
"""


def test_mypy_strict(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "user.py"]
    variables = {**os.environ, "MYPYPATH": str(ROOT)}
    result = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.skipif(PYRIGHT is None, reason="pyright is not installed; `make clients` does that")
def test_pyright(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    command = [str(PYRIGHT), "--pythonpath", sys.executable, "user.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "shmserve" / "py.typed").is_file()
    assert '"py.typed"' in (ROOT / "pyproject.toml").read_text()
