"""`shmserve perf` with tensors on a real device."""

import json
from pathlib import Path

import pytest

from shmserve.cli import main
from tests.support import repositories
from tests.support.servers import running

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("protocol", ["http", "grpc", "native"])
def test_tensors_stay_on_the_device(tmp_path: Path, protocol: str) -> None:
    repository = tmp_path / "models"
    repositories.add(repository, "simple")
    with running(repository, gpu=True, grpc=True) as server:
        urls = {"http": f"--url=http://{server.url}", "grpc": f"--url=grpc://{server.grpc_url}"}
        server_option = urls.get(protocol, f"--run-dir={server.run_dir}")
        report = tmp_path / "report.json"
        short_flags = ("--window=0.2", "--windows=3", "--warm-up=0.1", f"--json={report}")
        assert main(["perf", "simple", server_option, "--shared-memory=cuda", *short_flags]) == 0
    (point,) = json.loads(report.read_text())["points"]
    assert (point["errors"], point["error"]) == (0, "")
