"""`shmserve tune` against a real server: it loads, measures, writes, and leaves the model alone."""

import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmserve.cli import main
from tests.rigs.marked_configs import parse_pbtxt
from tests.support import repositories
from tests.support.servers import ROOT, Server, Start, running

# Takes a fixed time, and a time for each row.
SLOW_MODEL = repositories.python_model("""
    def execute(self, requests):
        rows = [self.input(r, "INPUT0") for r in requests]
        time.sleep(0.002 + 0.0005 * sum(map(len, rows)))
        return [self.response(OUTPUT0=x) for x in rows]
""")
CONFIG = """
backend: "python"
max_batch_size: 8
dynamic_batching { }
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""
SHORT_FLAGS = ("--window=0.05", "--runs=5", "--most-instances=2")


@pytest.fixture(scope="module")
def shared_server(models: Path, start: Start) -> Server:
    repositories.write(models, "slow", CONFIG, SLOW_MODEL)
    return start(models, "--model-control-mode=explicit", "--load-model=*")


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """Yield the server; its model has the configuration of its folder again afterwards."""
    yield shared_server
    shared_server.load("slow")


def effective_config(server: Server) -> dict[str, Any]:
    with server.http() as http:
        return http.config("slow")


@pytest.mark.parametrize("protocol", ["http", "native"])
def test_tune_recommends_a_loadable_configuration_and_restores_the_model(
    server: Server, tmp_path: Path, protocol: str
) -> None:
    config_before = effective_config(server)
    option = f"--url=http://{server.url}" if protocol == "http" else f"--run-dir={server.run_dir}"
    files = (f"--write={tmp_path / 'tuned.pbtxt'}", f"--plot={tmp_path / 'tried.svg'}")
    # Every configuration meets this target. The quality of the choice is tested by the
    # simulation.
    assert main(["tune", "slow", "--p99=60s", option, *SHORT_FLAGS, *files]) == 0
    assert effective_config(server) == config_before
    recommended = parse_pbtxt((tmp_path / "tuned.pbtxt").read_text())
    assert 1 <= recommended.max_batch_size <= 8
    assert 1 <= recommended.instance_group[0].count <= 2
    assert ET.parse(tmp_path / "tried.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_tune_prints_its_results_and_restores_the_model(
    server: Server, number: signal.Signals
) -> None:
    config_before = effective_config(server)
    command = ["tune", "slow", "--p99=60s", f"--url=http://{server.url}", "--window=0.2", "--apply"]
    with subprocess.Popen(
        [sys.executable, "-m", "shmserve", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("1. ")
        assert process.stderr.readline().startswith("2. ")  # the first run is recorded
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "# interrupted after" in output and "max_batch_size: 8" in output
    assert effective_config(server) == config_before


def test_tune_writes_its_recommendation_to_the_given_file(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    override = {**effective_config(server), "max_batch_size": 4, "dynamic_batching": {}}
    with server.http() as http:
        body = {"parameters": {"config": json.dumps(override)}}
        http.post("/v2/repository/models/slow/load", body).ok()
    url = f"--url=http://{server.url}"
    assert main(["tune", "slow", "--p99=1us", url, *SHORT_FLAGS]) == 1
    assert "no tested configuration has a p99 within 0.001 ms" in capsys.readouterr().err
    assert effective_config(server)["max_batch_size"] == 4  # not as its folder has it
    assert main(["tune", "slow", "--p99=60s", url, *SHORT_FLAGS, "--apply"]) == 0
    recommended = parse_pbtxt(capsys.readouterr().out)
    settings = effective_config(server)
    assert settings["max_batch_size"] == recommended.max_batch_size
    assert settings["instance_group"][0]["count"] == recommended.instance_group[0].count


@pytest.mark.parametrize(
    ("flags", "expected_error"),
    [
        (("--p99=soon",), "--p99: 'soon' is not a time (for example, 30ms, 1.5s or 800us)"),
        (("--p99=0",), "--p99: '0' is not a time"),
        (("--p99=3", "--plot=a.png"), "--plot: 'a.png' does not end in .svg, the only format"),
        (("--p99=3", "--write=/nowhere/a"), "--write: cannot write '/nowhere/a'"),
        (("--p99=3", "--runs=0"), "--runs: 0 is out of range (allowed: 1 to"),
        (("--p99=3", "--window=inf"), "--window: 'inf' is not a number"),
        (("--p99=3", "--openai=chat"), "--openai is not supported; tune generative models"),
    ],
)
def test_errors_of_tune_are_reported(
    flags: tuple[str, ...], expected_error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "slow", *flags]) == 2
    assert expected_error in capsys.readouterr().err


def test_a_server_that_loads_nothing_on_request_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / "models"
    repositories.write(repository, "slow", CONFIG, SLOW_MODEL)
    with running(repository) as server:
        assert main(["tune", "slow", "--p99=9ms", f"--url=http://{server.url}"]) == 1
    error = capsys.readouterr().err
    assert "--model-control-mode is none; restart the server with explicit" in error
    assert f"shmserve: http://{server.url}: " in error
