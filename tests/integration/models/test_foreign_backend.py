"""A backend in a package of its own, which the server finds by its entry point."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.support.servers import ROOT, Server, run_command
from tests.support.wire.triton import infer_inputs

EXAMPLE = ROOT / "examples" / "table_backend"
TABLE = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture(scope="module")
def backend_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install the example into a folder, as its README says; return the environment variables."""
    folder = tmp_path_factory.mktemp("backend")
    # A copy, because the build writes into the folder.
    source = shutil.copytree(EXAMPLE, folder / "source")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", f"--target={folder / 'site'}"]
    subprocess.run([*command, *options, str(source)], check=True, capture_output=True, text=True)
    path = [str(folder / "site"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def add(repository: Path, name: str, table: np.ndarray) -> None:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "table"\n')
    np.save(folder / "1" / "table.npy", table)


def test_a_backend_of_another_package_serves(
    repository: Path, serve: Callable[..., Server], backend_environment: dict[str, str]
) -> None:
    add(repository, "rows", TABLE)
    client = triton.InferenceServerClient(serve(repository, environment=backend_environment).url)
    metadata = client.get_model_metadata("rows")
    assert metadata["platform"] == "table"
    assert metadata["outputs"] == [{"name": "ROW", "datatype": "FP32", "shape": [-1, -1, 3]}]
    index = np.array([[2, 0]])
    result = client.infer("rows", infer_inputs(triton, INDEX=index)).as_numpy("ROW")
    np.testing.assert_array_equal(result, TABLE[index])
    with pytest.raises(InferenceServerException, match="INDEX must be in 0 to 3"):
        client.infer("rows", infer_inputs(triton, INDEX=index + 2))
    client.close()


def test_check_runs_foreign_backends(repository: Path, backend_environment: dict[str, str]) -> None:
    add(repository, "rows", TABLE)
    add(repository, "cube", TABLE.reshape(2, 2, 3))
    result = run_command("check", str(repository), env={**os.environ, **backend_environment})
    assert result.returncode == 2
    assert "table.npy must have 2 dimensions, it has 3" in result.stdout + result.stderr
