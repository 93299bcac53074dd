"""Models with their own Python environment, whose interpreter and packages have precedence."""

import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from shmserve.ipc import endpoints
from tests.support import repositories
from tests.support.servers import Server
from tests.support.waiting import until
from tests.support.wire.raw_http import Http, json_request

MODEL = repositories.python_model(
    """
    def one(self, request):
        said = json.dumps([conflicting.VERSION, sys.prefix, os.environ["PATH"].split(":")[0]])
        return self.response(Y=np.array([said.encode()], dtype=object))
""",
    before="import conflicting",
)
CLASS_MODEL = """import numpy as np
from shmserve.model import FP32, INT32
import conflicting

class Model:
    environment = {given!r}

    def predict(self, X: FP32[np.ndarray, 1]) -> INT32[np.ndarray, 1]:
        return np.full((len(X), 1), conflicting.VERSION, np.int32)
"""
CONFIG = """backend: "python"
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_STRING dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: {count} }} ]
parameters {{ key: "EXECUTION_ENV_PATH" value: {{ string_value: "{path}" }} }}
"""
X = json_request(X=np.zeros(1, np.float32))


def environment(folder: Path, version: int) -> Path:
    """Create a virtual environment with a version of a package, and with an unusable shmserve."""
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "conflicting.py").write_text(f"VERSION = {version}\n")
    (site / "shmserve.py").write_text("raise ImportError('a different shmserve')\n")
    return folder


def pack_environment(folder: Path, archive: Path) -> Path:
    """Create an archive of an environment like conda-pack and venv-pack."""
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, ".")
    return archive


def add(repository: Path, name: str, path: object, count: int = 1) -> Path:
    return repositories.write(repository, name, CONFIG.format(path=path, count=count), MODEL)


def answer(http: Http, model: str) -> list:
    return json.loads(http.infer(model, X).tensors()["Y"][0])


def test_conflicting_packages_share_a_server(
    repository: Path, tmp_path: Path, serve: Callable[..., Server]
) -> None:
    first_env, second_env = environment(tmp_path / "a b", 1), environment(tmp_path / "second", 2)
    add(repository, "first", first_env)
    add(repository, "second", "$$TRITON_MODEL_DIRECTORY/../../second")
    for name, env_path in (("absolute", str(second_env)), ("relative", "../../../a b")):
        repositories.write(
            repository, name, 'backend: "native"\n', CLASS_MODEL.format(given=env_path)
        )
    with serve(repository).http() as http:
        assert answer(http, "first") == [1, str(first_env), f"{first_env}/bin"]
        assert answer(http, "second")[0] == 2
        x = json_request(X=np.zeros((1, 1), np.float32))
        assert http.infer("absolute", x).tensors()["output"] == 2
        assert http.infer("relative", x).tensors()["output"] == 1


def test_an_archive_is_unpacked_once_and_removed(
    repository: Path, tmp_path: Path, serve: Callable[..., Server]
) -> None:
    model = add(repository, "one", "$$TRITON_MODEL_DIRECTORY/env.tar.gz", 2)
    prefix_path = environment(tmp_path / "made", 3)
    pack_environment(prefix_path, model / "env.tar.gz")
    shutil.rmtree(prefix_path)
    add(repository, "other", model / "env.tar.gz")
    server = serve(repository, "--model-control-mode=explicit", "--load-model=*")
    copies = endpoints.environments_dir(server.run_dir)
    with server.http() as http:
        prefix = answer(http, "one")[1]
        assert answer(http, "other") == [3, prefix, f"{prefix}/bin"]
        assert [str(path) for path in copies.iterdir() if path.is_dir()] == [prefix]
        server.find_one("worker other.0").kill()
        server.unload("one")
        assert answer(http, "other")[1] == prefix
        server.unload("other")
        until("the copy is removed", lambda: not any(copy.is_dir() for copy in copies.iterdir()))
