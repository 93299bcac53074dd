"""`shmserve perf` with a real server: protocols, shared memory, loads, sequences, errors."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shmserve.cli import main
from shmserve.client import discovery
from tests.support import certificates, repositories
from tests.support.servers import ROOT, Server, Start, running
from tests.support.waiting import until

SHORT_FLAGS = ("--window=0.2", "--windows=3", "--warm-up=0.1")
Perf = Callable[..., dict[str, Any]]

# Sends each of its COUNT numbers as a response of its own.
COUNTER_MODEL = repositories.python_model("""
    def execute(self, requests):
        for request in requests:
            count = int(self.input(request, "COUNT")[0])
            sender = request.get_response_sender()
            for number in range(count):
                out = self.response(OUT=np.array([number], np.int32))
                is_wrong = count == 9 and number == 5
                sender.send(self.failure("in no mood") if is_wrong else out)
            sender.send(flags=FINAL)
""")
COUNTER_CONFIG = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
# Refuses negative values.
MOODY_MODEL = repositories.python_model("""
    def one(self, request):
        x = self.input(request, "INPUT0")
        if x[0] < 0:
            return self.failure("in no mood")
        return self.response(OUTPUT0=x)
""")
# Accepts only sequences of three requests, the first with START and the last with END.
STRICT_MODEL = repositories.python_model("""
    def initialize(self, args):
        self.seen = {}

    def one(self, request):
        names = ("START", "END", "CORRID")
        start, end, name = (int(self.input(request, name).ravel()[0]) for name in names)
        number = 1 if start else self.seen.get(name, 0) + 1
        self.seen[name] = number
        if (number == 1) != bool(start) or (number == 3) != bool(end):
            return self.failure(f"out of turn: {number}")
        return self.response(OUT=np.array([[number]], np.int32))
""")
STRICT_CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
sequence_batching {
  control_input [
    { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } },
    { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } },
    { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
  ]
}
"""


@pytest.fixture(scope="module")
def perf_server(models: Path, start: Start) -> Server:
    repositories.add(models, "simple", "identity")
    repositories.write(models, "counter", COUNTER_CONFIG, COUNTER_MODEL)
    repositories.write(models, "strict", STRICT_CONFIG, STRICT_MODEL)
    config = repositories.identity_config("moody", "FP32", [4])
    repositories.write(models, "moody", config, MOODY_MODEL)
    return start(models, grpc=True)


@pytest.fixture
def perf(perf_server: Server, tmp_path: Path) -> Perf:
    """Run it over a protocol and return the last point of its report."""

    def run(protocol: str, *arguments: str) -> dict[str, Any]:
        path = tmp_path / "report.json"
        assert (
            main(
                [
                    "perf",
                    *arguments,
                    *connection_flags(perf_server, protocol),
                    *SHORT_FLAGS,
                    f"--json={path}",
                ]
            )
            == 0
        )
        point: dict[str, Any] = json.loads(path.read_text())["points"][-1]
        return point

    return run


def connection_flags(server: Server, protocol: str) -> Sequence[str]:
    urls = {"http": f"http://{server.url}", "grpc": f"grpc://{server.grpc_url}"}
    return [f"--url={urls[protocol]}"] if protocol in urls else [f"--run-dir={server.run_dir}"]


def successes(server: Server) -> float:
    return server.metric("nv_inference_request_success", model="simple")


@pytest.mark.parametrize(
    "flags", [("--warm-up=60",), ("--warm-up=0.1", "--window=0.2", "--windows=1000")]
)
@pytest.mark.parametrize("protocol", ["http", "native"])
def test_an_interrupt_prints_the_measured_points(
    perf_server: Server, tmp_path: Path, protocol: str, flags: tuple[str, ...]
) -> None:
    path = tmp_path / "report.json"
    command = ["perf", "simple", "--concurrency=4,5", "--stability=1e-9", f"--json={path}"]
    successes_before = successes(perf_server)
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "shmserve",
            *command,
            *connection_flags(perf_server, protocol),
            *flags,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        until("the load has begun", lambda: successes(perf_server) > successes_before + 100)
        time.sleep(0.8)  # the second case ends its warm-up and some windows
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "concurrency 4: interrupted after" in output and "concurrency 5" not in output
    (point,) = json.loads(path.read_text())["points"]
    assert point["interrupted"] and point["requests"] > 10 and not point["errors"]


@pytest.mark.parametrize("memory", ["none", "system"])
@pytest.mark.parametrize("protocol", ["http", "grpc", "native"])
def test_each_protocol_with_and_without_shared_memory(
    perf_server: Server, perf: Perf, protocol: str, memory: str
) -> None:
    point = perf(protocol, "simple", "--concurrency=8", f"--shared-memory={memory}")
    assert point["errors"] == 0 and point["requests"] > 8
    assert 0 < point["latency"]["p50"] <= point["latency"]["p99"] <= point["latency"]["max"]
    assert point["client_us"] > 0
    # The client and the server count the same requests, except at the edges of the windows.
    server = point["server"]["simple"]
    assert server["requests"] == pytest.approx(point["requests"], rel=0.5, abs=50)
    assert server["batch"] >= 1
    with perf_server.http() as http:
        regions = http.get("/v2/systemsharedmemory/status").ok().json()
    assert not [region for region in regions if region["name"].startswith("perf-")]


@pytest.mark.parametrize("protocol", ["http", "grpc", "native"])
def test_large_tensors_go_both_ways(perf: Perf, protocol: str) -> None:
    point = perf(protocol, "identity", "--shape=INPUT0:2000000", "--concurrency=2")
    assert point["errors"] == 0


@pytest.mark.parametrize("protocol", ["http", "grpc", "native"])
def test_streams_have_a_time_to_the_first_response(perf: Perf, protocol: str) -> None:
    point = perf(protocol, "counter", "--input=COUNT=[5]", "--concurrency=3")
    assert point["errors"] == 0
    assert point["responses_per_second"] == pytest.approx(5 * point["per_second"])
    assert 0 < point["first"]["p50"] <= point["latency"]["max"]
    assert point["gap"]["max"] > 0


@pytest.mark.parametrize("protocol", ["http", "grpc", "native"])
def test_sequences_are_begun_and_ended(perf: Perf, protocol: str) -> None:
    point = perf(protocol, "strict", "--sequence-length=3", "--concurrency=3")
    assert (point["errors"], point["error"]) == (0, "")


@pytest.mark.parametrize("arrivals", ["poisson", "constant"])
def test_an_open_loop_sends_at_its_rate(perf: Perf, arrivals: str) -> None:
    point = perf("http", "simple", "--rate=40,200", f"--arrivals={arrivals}", "--window=0.5")
    assert (point["kind"], point["value"]) == ("rate", 200)
    assert point["requests"] > 10


@pytest.mark.parametrize("protocol", ["http", "grpc", "native"])
def test_errors_are_counted_and_reported(
    perf: Perf, protocol: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data.json"
    for model, items in (
        ("moody", [{"INPUT0": [number] * 4} for number in (1, 2, -1)]),
        ("counter", [{"COUNT": [number]} for number in (1, 2, 9)]),
    ):
        path.write_text(json.dumps(items))
        point = perf(protocol, model, "--concurrency=2", f"--data={path}")
        assert point["errors"] == pytest.approx(point["requests"] / 2, rel=0.2, abs=3)
        assert "requests failed; mostly: " in capsys.readouterr().out
        assert "in no mood" in point["error"]


def test_a_report_is_written_drawn_and_compared(
    perf_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [f"--json={tmp_path}/1.json", f"--csv={tmp_path}/1.csv", f"--plot={tmp_path}/1.svg"]
    server = [*connection_flags(perf_server, "http"), *SHORT_FLAGS]
    assert main(["perf", "simple", "--concurrency=1:2", *server, *files]) == 0
    assert (tmp_path / "1.svg").read_text().startswith("<svg")
    assert len((tmp_path / "1.csv").read_text().splitlines()) == 3
    capsys.readouterr()
    compare_arguments = [
        "perf", "simple", "--concurrency=2", f"--compare={tmp_path}/1.json", *server,
    ]  # fmt: skip
    assert main(compare_arguments) == 0
    assert "new / old" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("protocol", "arguments", "status", "expected_error"),
    [
        ("http", ["nobody"], 1, "unknown model: 'nobody'"),
        ("grpc", ["nobody"], 1, "unknown model: 'nobody'"),
        ("native", ["nobody"], 1, "unknown model: 'nobody'"),
        ("http", ["identity"], 2, "--shape INPUT0:N"),
        ("http", ["simple", "--input=X=3"], 2, "no input 'X'; it has INPUT0, INPUT1"),
        ("http", ["simple", "--batch=0"], 2, "--batch: 0 is out of range (allowed: 1 to"),
        ("http", ["simple", "--batch=99"], 1, "the first request to 'simple' failed: 400"),
        ("grpc", ["simple", "--batch=99"], 1, "the first request to 'simple' failed: "),
        ("http", ["simple", "--rate=fast"], 2, "--rate: 'fast' is invalid (allowed: N"),
        ("http", ["simple", "--window=0"], 2, "--window: 0 is out of range"),
        ("http", ["simple", "--compare=/none"], 2, "--compare: cannot read '/none'"),
        ("native", ["simple", "--openai=chat"], 2, "--openai requires --url http://HOST:PORT"),
        ("native", ["simple", "--plot=a.png"], 2, "--plot: 'a.png' does not end in .svg"),
        ("grpc", ["identity", "--shape=INPUT0:99999", "--shared-memory=system"], 1,
         "--output-byte-size"),
    ],
)  # fmt: skip
def test_an_error_is_one_line(
    perf_server: Server,
    capsys: pytest.CaptureFixture[str],
    protocol: str,
    arguments: list[str],
    status: int,
    expected_error: str,
) -> None:
    assert main(["perf", *arguments, *connection_flags(perf_server, protocol)]) == status
    error = capsys.readouterr().err
    assert expected_error in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["simple"], ["counter", "--input=COUNT=[2]"]])
def test_a_server_without_http_and_grpc_is_measured(
    perf: Perf, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "addresses", lambda _: ())
    point = perf("native", *arguments)
    assert point["requests"] > 10 and not point["errors"] and not point["server"]


def test_a_missing_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perf", "simple", "--url=127.0.0.1:9"]) == 1
    assert "refused" in capsys.readouterr().err


def test_tls_and_a_server_that_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = certificates.make(tmp_path)
    repository = tmp_path / "models"
    repositories.add(repository, "identity")
    flags = (f"--grpc-server-cert={keys}/server.pem", f"--grpc-server-key={keys}/server.key")
    with running(repository, "--grpc-use-ssl=true", *flags, grpc=True) as server:
        server_option = f"--url=grpcs://localhost:{server.grpc_port}"
        large_flags = ("--shape=INPUT0:100000", "--concurrency=4", f"--root-cert={keys}/ca.pem")
        assert main(["perf", "identity", server_option, *large_flags, *SHORT_FLAGS]) == 0
        assert main(["perf", "identity", server_option, *large_flags[:-1], *SHORT_FLAGS]) == 1
        capsys.readouterr()
        # The server stops during the load.
        stopping = threading.Timer(1.0, server.stop)
        stopping.start()
        command = ["perf", "identity", f"--url={server.url}", *large_flags[:-1]]
        assert main([*command, "--window=60", "--patience=5"]) == 1
        stopping.join()
        # The error depends on the moment of the stop.
        assert re.search("cannot be reached|no response|failed", capsys.readouterr().err)


@pytest.mark.parametrize("arguments", [["simple"], ["counter", "--input=COUNT=[2]"]])
def test_a_native_load_ends_with_its_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    repositories.add(tmp_path, "simple")
    repositories.write(tmp_path, "counter", COUNTER_CONFIG, COUNTER_MODEL)
    with running(tmp_path) as server:
        stopping = threading.Timer(1.0, server.stop)
        stopping.start()
        flags = [*connection_flags(server, "native"), "--concurrency=4", "--window=60"]
        assert main(["perf", *arguments, *flags]) == 1
        stopping.join()
    # The error depends on the moment of the stop.
    expected_error = "server was closed before|server is no longer running"
    assert re.search(expected_error, capsys.readouterr().err)
