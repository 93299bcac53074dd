"""The benchmark's load of streams reads what it asked for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.servers import ROOT, Server, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The benchmark's model."""
    folder = tmp_path_factory.mktemp("streams")
    shutil.copytree(ROOT / "bench" / "models" / "repeat", folder / "repeat")
    with running(folder, grpc=True) as started:
        yield started


@pytest.mark.parametrize(("way", "streams"), [("grpc", 1), ("grpc", 4), ("native", 1)])
def test_the_load_of_streams(server: Server, way: str, streams: int) -> None:
    where = server.grpc_url if way == "grpc" else str(server.run_dir)
    done = subprocess.run(
        [sys.executable, "-m", "bench.load.streams", way, where, str(streams), "20", "0.2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["responses/s"] > 0 and found["µs"] > 0
