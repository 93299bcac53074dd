"""Builds the wheel, installs it into an empty venv and has it serve one request.

The server starts in a folder that has `workers` and `ipc` packages of its own, which raise when
they are imported: the installed package must not depend on where it is started, nor on a name
that a user's folder may have. Run it with the Python of a set-up checkout.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_CONSTRAINTS = _ROOT / ".ci" / "constraints.txt"
_READY_WITHIN_S = 60.0
_STOP_WITHIN_S = 45.0
_MAX_BYTES = 150_000_000  # that an installation without extras adds to a venv

_CONFIG = """\
backend: "python"
max_batch_size: 4
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 3 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 3 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
_MODEL = '''\
"""Doubles its input."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([self.doubled(request.inputs()[0])]) for request in requests
        ]

    def doubled(self, tensor):
        return pb_utils.Tensor("OUTPUT0", tensor.as_numpy() * 2)
'''


def main() -> None:
    """Build, install, serve, ask, stop; raises or exits non-zero when a step fails."""
    with tempfile.TemporaryDirectory(prefix="shmserve-wheel-") as folder:
        scratch = Path(folder)
        python = install(build(scratch), scratch / "venv")
        elsewhere = unrelated_folder(scratch / "elsewhere")
        serve_one_request(python, elsewhere)
    print("the wheel serves")


def build(scratch: Path) -> Path:
    """The wheel, built in a copy of the packages: nothing stale in it, nothing left behind."""
    source = scratch / "source"
    source.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(_ROOT / name, source)
    compiled = shutil.ignore_patterns("__pycache__")
    for name in ("ipc", "shmserve", "workers"):
        shutil.copytree(_ROOT / name, source / name, symlinks=True, ignore=compiled)
    pip(sys.executable, "wheel", "--no-deps", "-w", str(scratch / "dist"), str(source))
    (wheel,) = (scratch / "dist").glob("shmserve-*.whl")
    return wheel


def install(wheel: Path, venv: Path) -> Path:
    """An empty venv with the wheel and what it requires; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = venv / "bin" / "python"
    before = disk_bytes(venv)
    pip(str(python), "install", "-c", str(_CONSTRAINTS), str(wheel))
    taken = disk_bytes(venv) - before
    if taken > _MAX_BYTES:
        raise SystemExit(f"an installation without extras takes {taken / 1e6:.0f} MB")
    return python


def disk_bytes(folder: Path) -> int:
    """Return the space that the files of a folder take."""
    return 512 * sum(each.lstat().st_blocks for each in folder.rglob("*") if not each.is_symlink())


def pip(python: str, *arguments: str) -> None:
    """Run pip quietly."""
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments, "-q"]
    subprocess.run(command, check=True)


def unrelated_folder(folder: Path) -> Path:
    """A folder with a model repository and with packages that nobody may import."""
    for name in ("workers", "ipc"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f'raise RuntimeError("imported {name}")\n')
    version = folder / "models" / "double" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_MODEL)
    (version.parent / "config.pbtxt").write_text(_CONFIG)
    return folder


def serve_one_request(python: Path, folder: Path) -> None:
    """Start the server, infer once, stop it with SIGTERM."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # `-m` puts the working folder in front of everything else: the harder way to start.
    command = [
        *(str(python), "-m", "shmserve", "serve", "--model-repository=models"),
        *(
            "--http-address=127.0.0.1",
            f"--http-port={port}",
            "--allow-metrics=false",
            "--allow-grpc=false",
        ),
        f"--run-dir={folder / 'run'}",
    ]
    shown = subprocess.run(
        [python.with_name("shmserve"), "--version"],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    print(f"installed {shown.stdout.strip()}", flush=True)
    page = (python.with_name("shmserve"), "guide", "models")
    subprocess.run(page, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    server = subprocess.Popen(command, cwd=folder, env=environment)
    try:
        wait_ready(server, port)
        assert infer(port, [1, 2, 3]) == [2, 4, 6]
        server.terminate()
        status = server.wait(_STOP_WITHIN_S)
        assert status == 0, f"exit status {status} after SIGTERM"
    finally:
        server.kill()
        server.wait()


def wait_ready(server: subprocess.Popen[bytes], port: int) -> None:
    """Ask until the server is ready; raises when it ends or takes too long."""
    deadline = time.monotonic() + _READY_WITHIN_S
    ended = os.pidfd_open(server.pid)
    try:
        while not ready(port):
            assert time.monotonic() < deadline, "the server is not ready in time"
            assert not select.select([ended], [], [], 0.05)[0], "the server ended"
    finally:
        os.close(ended)


def ready(port: int) -> bool:
    """Whether the server says that it is."""
    try:
        return exchange(port, "GET", "/v2/health/ready")[0] == 200
    except OSError:
        return False


def infer(port: int, row: list[int]) -> list[int]:
    """What the model makes of one row."""
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, len(row)], "data": row}
    status, body = exchange(port, "POST", "/v2/models/double/infer", {"inputs": [tensor]})
    assert status == 200, body
    data: list[int] = json.loads(body)["outputs"][0]["data"]
    return data


def exchange(port: int, method: str, path: str, content: object = None) -> tuple[int, bytes]:
    """Send one request on a connection of its own; returns its answer's status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, None if content is None else json.dumps(content))
        response = connection.getresponse()
        return response.status, response.read()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
