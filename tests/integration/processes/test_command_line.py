"""The command line: help, errors, the flags of a `tritonserver` command, other commands."""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.cli import client
from tests.support import repositories
from tests.support.load import infer_simple
from tests.support.regions import SharedObject
from tests.support.servers import Server, hold_ports, port_of, run_command, running
from tests.support.wire.raw_http import Http


@pytest.mark.parametrize(
    "line",
    [
        "--trace-file=FOLDER/t.json --trace-level=MIN --trace-rate=1 --strict-model-config=False",
        "--trace-config level=TIMESTAMPS --model-store=FOLDER "
        "--backend-config=python,shm-default-byte-size=1048576",
    ],
)
def test_a_link_named_tritonserver_takes_its_command_lines(
    repository: Path, tmp_path: Path, line: str, serve: Callable[..., Server]
) -> None:
    repositories.add(repository, "simple")
    link = tmp_path / "tritonserver"
    link.symlink_to(Path(sys.executable).with_name("shmserve"))
    flags = line.replace("FOLDER", str(repository)).split()
    server = serve(repository, *flags, program=[link])
    with server.http() as http:
        assert infer_simple(http, 0) == ""
    log = server.log()
    server.stop()
    if "trace-file" in line:
        assert "COMPUTE_START" in (repository / "t.json").read_text()
    untraced = "requests are not traced: trace file name is not given"
    assert (untraced in log) is ("--trace-config" in line)
    idle = "--backend-config=python,shm-default-byte-size=1048576 has no effect"
    assert (idle in log) is ("shm-default" in line)


def test_the_first_word_of_a_container_and_a_repository_in_an_object_store() -> None:
    completed = run_command("/opt/tritonserver/bin/tritonserver", "--model-store=s3://b/models")
    assert completed.returncode == 2
    assert "aws s3 sync s3://b/models FOLDER" in completed.stderr
    assert len(completed.stderr.strip().splitlines()) == 1


def test_check(repository: Path) -> None:
    repositories.add(repository, "constant", "simple", "repeat")
    done = run_command("check", str(repository))
    assert done.returncode == 0, done.stderr
    assert "constant" in done.stdout and "simple" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.split()[:2] == ["repeat:1", "ok"]]
    config = repository / "simple" / "config.pbtxt"
    config.write_text(config.read_text() + "nonsense: 1\n")
    (repository / "constant" / "1" / "model.py").write_text(
        "raise RuntimeError('broken on purpose\\nand twice')\n"
    )
    (repository / "config.pbtxt").touch()
    done = run_command("check", str(repository))
    assert done.returncode == 2
    assert f"'{repository}' is a model: set --model-repository to its parent" in done.stderr
    output = done.stdout + done.stderr
    assert "nonsense" in output and "broken on purpose" in output
    assert "config.pbtxt" in output
    assert [line for line in done.stdout.splitlines() if line.strip() == "and twice (model.py:1)"]


DECODER_MODEL = repositories.python_model("""
    def one(self, request):
        (text,) = self.input(request, "IMAGE").ravel()
        assert text.startswith(b"\\x89PNG"), "no PNG"
        return self.response(SIZE=np.zeros((1, 2), np.int32))
""")


STREAM = repositories.python_model("""
    def execute(self, requests):
        for request in requests:
            send = request.get_response_sender().send
            send(self.response(SUM=np.zeros(1, np.float32)), FINAL)
""")
ARRAY_MODEL = """
import numpy as np
from shmserve.model import FP32

class Model:
    def predict(self, x: FP32[np.ndarray, 2]) -> FP32[np.ndarray, 2]:
        return x.sum(1)
"""
STREAM_CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: 1 }
output [{ name: "Y" data_type: TYPE_FP32 dims: 1 }, { name: "SUM" data_type: TYPE_FP32 dims: 1 }]
model_transaction_policy { decoupled: true }
"""


def test_check_sends_requests_and_compares_the_outputs(repository: Path, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG")
    sample = (
        'model_warmup { name: "s" batch_size: 1 inputs { key: "IMAGE" value '
        '{ data_type: TYPE_STRING dims: 1 input_data_file: "image" } } }'
    )
    for name, replacement, settings in (
        ("dies", "assert/__import__('os')._exit(3) #", ""),
        ("empty", "", ""),
        ("given", 'IMAGE"/PICTURE"', ""),
        ("name", "SIZE/AREA", sample),
        ("sampled", "", sample),
        ("shape", "(1, 2)/(1, 3)", sample),
        ("type", "int32/float32", sample),
    ):
        old_text, _, new_text = replacement.partition("/")
        entry = "PICTURE" if new_text == 'PICTURE"' else "IMAGE"
        config = (
            f'backend: "python" max_batch_size: 2 input {{ name: "{entry}" data_type: TYPE_STRING '
            f'dims: 1 }} output {{ name: "SIZE" data_type: TYPE_INT32 dims: 2 }} {settings}'
        )
        source = DECODER_MODEL.replace(old_text, new_text) if old_text else DECODER_MODEL
        folder = repositories.write(repository, name, config, source)
        (folder / "warmup").mkdir()
        (folder / "warmup" / "image").write_bytes(b"\4\0\0\0\x89PNG")
    repositories.write(repository, "unnamed", 'backend: "python"', DECODER_MODEL)
    repositories.write(repository, "returns_a_shape", "", ARRAY_MODEL)
    wide = ARRAY_MODEL.replace("sum(1)", "astype(np.float64)")
    repositories.write(repository, "returns_a_type", "", wide)
    two_outputs = "tuple[FP32[np.ndarray, 2], FP32[np.ndarray, 2]]"
    one_of_two = ARRAY_MODEL.replace("-> FP32[np.ndarray, 2]", f"-> {two_outputs}")
    repositories.write(repository, "returns_one", "", one_of_two)
    repositories.write(repository, "yields_one", STREAM_CONFIG, STREAM)
    none_of_them = STREAM.replace("SUM=", "sum=")
    repositories.write(repository, "yields_other", STREAM_CONFIG, none_of_them)
    fails_late = STREAM.replace(", FINAL)", "); send(self.failure('late'), FINAL)")
    repositories.write(repository, "fails_late", STREAM_CONFIG, fails_late)
    completed = run_command("check", str(repository), f"--input=PICTURE=@{picture}", "--input=Z=1")
    assert completed.returncode == 2
    told_of = (line for line in completed.stdout.splitlines() if ":1 " in line)
    verdicts = {line.split(":")[0]: line.split()[1] for line in told_of}
    assert verdicts == {
        "dies": "FAILED", "returns_a_shape": "differs", "returns_a_type": "differs",
        "returns_one": "differs",
        "empty": "refused", "given": "ok", "name": "differs", "sampled": "ok", "shape": "differs",
        "fails_late": "refused", "type": "differs", "unnamed": "refused", "yields_one": "ok",
        "yields_other": "differs",
    }  # fmt: skip
    lines = [" ".join(line.split()) for line in completed.stdout.splitlines()]
    assert any(line.endswith("AssertionError: no PNG") for line in lines)
    assert any(line.startswith("the inputs were zeros and empty strings") for line in lines)
    assert "SIZE TYPE_INT32 [1,2] missing" in lines
    assert "SIZE TYPE_INT32 [1,2] TYPE_INT32 [1,3]" in lines
    assert "SIZE TYPE_INT32 [1,2] TYPE_FP32 [1,2]" in lines
    assert lines[-2:] == [
        "--input: no loaded model has an input 'Z'",
        "14 models: 3 ok, 3 refused, 7 differs, 1 FAILED",
    ]


def test_check_loads_models_of_a_gpu_on_the_cpu(repository: Path) -> None:
    repositories.add(repository, "identity")
    config = repository / "identity" / "config.pbtxt"
    config.write_text(config.read_text() + "instance_group { kind: KIND_GPU gpus: 7 }\n")
    file = repository / "identity" / "1" / "model.py"
    file.write_text(f"{file.read_text()}\nprint('imported')\n")
    assert run_command("check", str(repository)).returncode == 2
    completed = run_command("check", str(repository), "--on-cpu", "--json")
    assert "imported" in completed.stderr
    report = json.loads(completed.stdout)
    assert (completed.returncode, report["models"][0]["outcome"]) == (0, "ok")
    assert report["summary"] == {"ok": 1, "refused": 0, "differs": 0, "FAILED": 0}


def test_check_continues_after_an_input_that_is_too_large(repository: Path) -> None:
    repositories.add(repository, "simple")
    repositories.add_identity(repository, "huge", "FP64", [1 << 40])
    completed = run_command("check", str(repository))
    assert completed.returncode == 0
    huge, simple, summary = completed.stdout.splitlines()
    assert huge.split(maxsplit=1) == [
        "huge:1",
        "refused not tested: a batch of zeros is too large for a message",
    ]
    assert simple.split()[:2] == ["simple:1", "ok"]
    assert summary == "2 models: 1 ok, 1 refused"


@pytest.fixture(scope="module")
def connection_flags(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the flag for each way to connect to a server."""
    folder = tmp_path_factory.mktemp("connections")
    flags = ("--model-control-mode=explicit", "--load-model=*")
    repositories.add(folder, "completed", "text")
    repositories.add_identity(folder, "halves", "BF16", [-1])
    with tempfile.TemporaryDirectory(prefix="sd-") as sockets:
        path = f"{sockets}/http"
        with running(folder, *flags, f"--http-unix-socket={path}", grpc=True) as server:
            yield {
                "native": f"--run-dir={server.run_dir}",
                "http": f"--url=http://{server.url}",
                "unix": f"--url=unix:{path}",
                "grpc": f"--url=grpc://{server.grpc_url}",
            }


def run_client(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[Any], str]:
    """Run `shmserve client`; return its status and its output on stdout and stderr."""
    status = client.run(arguments)
    captured = capsys.readouterr()
    return status, [json.loads(line) for line in captured.out.splitlines()], captured.err


@pytest.mark.parametrize("protocol", ["native", "http", "unix", "grpc"])
def test_client_infer(
    connection_flags: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    protocol: str,
    tmp_path: Path,
) -> None:
    def infer(*arguments: str) -> Any:
        status, (answer,), _ = run_client(capsys, "infer", *arguments, connection_flags[protocol])
        assert status == 0
        return answer

    assert infer("completed", "--input=INPUT0=[1, 2, 3, 4]", "--request-id=shell") == {
        "id": "shell",
        "model_name": "completed",
        "model_version": "1",
        "outputs": [
            {"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 4], "data": [[2, 4, 6, 8]]}
        ],
    }
    np.save(tmp_path / "rows.npy", np.ones((3, 4), np.float32))
    answer = infer("completed", f"--input=INPUT0=@{tmp_path / 'rows.npy'}", "--timeout-us=9000000")
    assert answer["outputs"][0]["data"] == [[2, 2, 2, 2]] * 3
    answer = infer("text", '--input=INPUT0=["a", "ü"]', "--output=OUTPUT0")
    assert answer["outputs"][0]["data"] == [["a", "ü"]]
    (output,) = infer("halves", "--input=INPUT0=[0.5, 3]", "--model-version=1")["outputs"]
    assert output == {"name": "OUTPUT0", "datatype": "BF16", "shape": [2], "data": [0.5, 3]}


def test_client_verbs(connection_flags: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """The verbs act and print the same over every protocol, with flags before or after."""
    printed_outputs = []
    for connection in connection_flags.values():
        assert run_client(capsys, connection, "unload", "halves") == (0, [], "")
        status, _, text = run_client(capsys, "ready", "halves", connection)
        assert status == 1 and "not ready" in text and text.count("\n") == 1
        assert run_client(capsys, "load", connection, "halves") == (0, [], "")
        for arguments in (("ready",), ("ready", "halves")):
            assert run_client(capsys, *arguments, connection) == (0, [{"ready": True}], "")
        _, output, _ = run_client(capsys, "models", connection)
        assert [row["name"] for row in output] == ["completed", "halves", "text"]
        _, (config,), _ = run_client(capsys, "config", "halves", connection)
        _, all_statistics, _ = run_client(capsys, connection, "stats")
        _, (stats,), _ = run_client(capsys, connection, "stats", "halves", "--model-version=1")
        assert [row["name"] for row in all_statistics] == ["completed", "halves", "text"]
        assert stats["inference_count"] == 0 and all_statistics[1].keys() == stats.keys()
        with SharedObject(4096) as shared_object:
            url = connection_flags["http"].removeprefix("--url=http://127.0.0.1:")
            with contextlib.closing(Http(int(url))) as http:
                http.register("r", shared_object.key, 4096).ok()
                _, regions, _ = run_client(capsys, "regions", connection)
                http.unregister("r").ok()
        (region,) = [row for row in regions if row["name"] == "r"]
        assert region.pop("key").startswith("/")
        assert region == {"name": "r", "offset": 0, "byte_size": 4096}
        printed_outputs.append((output, config, stats))
    for line in printed_outputs[1:]:
        assert line == printed_outputs[0]


def test_client_infer_finds_this_users_server(server: Server) -> None:
    environment = {**os.environ, "SHMSERVE_RUN_DIR": str(server.run_dir)}
    arguments = ("client", "infer", "completed", "--input=INPUT0=[1, 2, 3, 4]")
    done = run_command(*arguments, env=environment)
    assert json.loads(done.stdout)["outputs"][0]["data"] == [[2, 4, 6, 8]], done.stderr
    done = run_command(*arguments, env={**environment, "SHMSERVE_RUN_DIR": "/nowhere"})
    assert done.returncode == 1
    assert done.stderr == (
        "shmserve client infer: no server is running: there is no run directory /nowhere "
        "(from SHMSERVE_RUN_DIR; a server needs --run-dir)\n"
    )


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_client_infer_without_a_server(scheme: str) -> None:
    (port_socket,) = hold_ports(1)  # a port at which no server listens
    with port_socket:
        url = f"{scheme}://127.0.0.1:{port_of(port_socket)}"
        completed = run_command("client", "infer", "simple", "--input", "INPUT0=1", "--url", url)
    assert completed.returncode == 1 and f": {url}: no response: " in completed.stderr
    assert len(completed.stderr.strip().splitlines()) == 1
