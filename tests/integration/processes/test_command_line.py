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
from tests.support.regions import SharedObject
from tests.support.servers import Server, hold_ports, port_of, run_command, running
from tests.support.wire.raw_http import Http, json_input


@pytest.mark.parametrize(
    ("flags", "flag_name"),
    [
        (("--no-such-flag=1",), "--no-such-flag"),
        (("--http-port=x",), "--http-port"),
        (("--load-model=x",), "--load-model"),
    ],
)
def test_bad_flags(repository: Path, flags: tuple[str, ...], flag_name: str) -> None:
    """One flag for each kind of error; tests/unit/config/test_options.py covers all flags."""
    completed = run_command("serve", f"--model-repository={repository}", *flags)
    assert completed.returncode == 2
    assert flag_name in completed.stderr
    assert len(completed.stderr.strip().splitlines()) == 1 and completed.stdout == ""


def test_a_missing_repository_is_refused(tmp_path: Path) -> None:
    completed = run_command("serve")
    assert completed.returncode == 2 and "--model-repository" in completed.stderr
    completed = run_command("serve", f"--model-repository={tmp_path / 'nowhere'}")
    assert completed.returncode not in (0, None) and "nowhere" in completed.stderr
    assert "Traceback" not in completed.stderr


def test_a_command_line_of_triton_starts(repository: Path, serve: Callable[..., Server]) -> None:
    """The log contains models and addresses, and one warning for each flag without effect."""
    repositories.add(
        repository,
        "constant",
        config='optimization { graph { level: 1 } } metric_tags { key: "a" value: "b" }',
    )
    flags = [
        "--backend-directory=/opt/tritonserver/backends",
        "--allow-client-shm=true",
        "--metrics-interval-ms=500",
        "--cache-config=local,size=1048576",
        "--rate-limit=off",
        "--pinned-memory-pool-byte-size=268435456",
        "--cuda-memory-pool-byte-size=0:67108864",
        "--backend-config=python,shm-default-byte-size=1048576",
        "--min-supported-compute-capability=6.0",
        "--model-load-thread-count=2",
        "--grpc-infer-allocation-pool-size=8",
        "--log-verbose=1",
        "--log-info=true",
        "--trace-config",
        "level=OFF",
        "--http-thread-count",
        "4",
        "--allow-gpu-metrics",
        "false",
    ]
    server = serve(repository, *flags)
    log = server.log()
    lines = log.splitlines()
    for flag in ("--backend-directory", "--metrics-interval-ms", "--http-thread-count"):
        assert len([line for line in lines if f"{flag} has no effect" in line]) == 1
    assert not [line for line in lines if "--rate-limit" in line]
    assert f"127.0.0.1:{server.http_port}" in log
    assert f"127.0.0.1:{server.metrics_port}" in log
    assert [line for line in lines if "constant" in line and "READY" in line]
    assert len([line for line in lines if "optimization" in line]) == 1


@pytest.mark.parametrize(
    "line",
    [
        "--allow-grpc=true --allow-http=true --model-control-mode=POLL --repository-poll-secs=5",
        "--trace-file=FOLDER/t.json --trace-level=MIN --trace-rate=1 --strict-model-config=False",
        "--trace-config level=TIMESTAMPS --trace-config rate=1 --exit-on-error=false --id=rank0",
        "--model-store=FOLDER --log-verb 1 --backend-config=python,shm-default-byte-size=1048576",
    ],
)
def test_a_link_named_tritonserver_takes_its_command_lines(
    repository: Path, tmp_path: Path, line: str, serve: Callable[..., Server]
) -> None:
    repositories.add(repository, "simple")
    link = tmp_path / "tritonserver"
    link.symlink_to(Path(sys.executable).with_name("shmserve"))
    flags = line.replace("FOLDER", str(repository)).split()
    server = serve(repository, *flags, program=[link], grpc="allow-grpc" in line)
    with server.http() as http:
        simple = np.zeros((1, 16), np.int32)
        inputs = [json_input(name, simple) for name in ("INPUT0", "INPUT1")]
        http.infer("simple", {"inputs": inputs}).ok()
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
    assert f"'{repository}' is a model folder" in done.stderr
    output = done.stdout + done.stderr
    assert "nonsense" in output and "broken on purpose" in output
    assert "config.pbtxt" in output
    assert [line for line in done.stdout.splitlines() if line.strip() == "and twice (model.py:1)"]


def test_check_reports_an_ensemble_without_a_version_folder(repository: Path) -> None:
    repositories.add(repository, "identity")
    (repository / "both").mkdir()
    (repository / "both" / "config.pbtxt").write_text(
        """platform: "ensemble"
        input { name: "in" data_type: TYPE_FP32 dims: [ -1 ] }
        output { name: "out" data_type: TYPE_FP32 dims: [ -1 ] }
        ensemble_scheduling { step { model_name: "identity" model_version: -1
            input_map { key: "INPUT0" value: "in" } output_map { key: "OUTPUT0" value: "out" } } }
        """
    )
    completed = run_command("check", str(repository))
    assert completed.returncode == 2, completed.stderr
    (line,) = [text for text in completed.stdout.splitlines() if text.startswith("both ")]
    assert "FAILED  load failed for model 'both': at least one version must be available" in line


def test_check_names_the_line_of_every_mistake(repository: Path) -> None:
    repositories.write(
        repository,
        "wrong",
        'backend: "python"\ninput {\n  name: "A"\n  dims: [ 1, 0 ]\n}\noutput [\n  { dims: 1 }\n]\n'
        "max_batch: 1\n",
        "",
    )
    completed = run_command("check", str(repository))
    assert completed.returncode == 2
    first_line, *other_lines = completed.stdout.splitlines()
    assert first_line.split(maxsplit=1) == [
        "wrong",
        "FAILED  failed to load 'wrong', failed to poll from model repository: wrong/config.pbtxt:"
        '9:1: max_batch: no such field; did you mean "max_batch_size"?',
    ]
    assert [line.strip() for line in other_lines] == [
        "wrong/config.pbtxt:4:14: input[0].dims[1]: model input 'A' dimension must be integer >= "
        "1, or -1 to indicate a variable-size dimension for wrong",
        "wrong/config.pbtxt:7:3: output[0].name: model output must specify 'name' for wrong",
    ]


DECODER_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            (text,) = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy().ravel()
            assert text.startswith(b"\\x89PNG"), "no PNG"
        out = pb_utils.Tensor("SIZE", np.zeros((1, 2), np.int32))
        return [pb_utils.InferenceResponse([out]) for _ in requests]
"""


STREAM = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            out = pb_utils.Tensor("SUM", np.zeros(1, np.float32))
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            sender.send(pb_utils.InferenceResponse([out]), final)
"""
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
        ("name", 'SIZE"/AREA"', sample),
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
    repositories.write(repository, "yields_one", STREAM_CONFIG, STREAM)
    none_of_them = STREAM.replace('"SUM"', '"sum"')
    repositories.write(repository, "yields_other", STREAM_CONFIG, none_of_them)
    completed = run_command("check", str(repository), f"--input=PICTURE=@{picture}", "--input=Z=1")
    assert completed.returncode == 2
    told_of = (line for line in completed.stdout.splitlines() if ":1 " in line)
    verdicts = {line.split(":")[0]: line.split()[1] for line in told_of}
    assert verdicts == {
        "dies": "FAILED", "returns_a_shape": "differs", "returns_a_type": "differs",
        "empty": "refused", "given": "ok", "name": "differs", "sampled": "ok", "shape": "differs",
        "type": "differs", "unnamed": "refused", "yields_one": "ok", "yields_other": "differs",
    }  # fmt: skip
    lines = [" ".join(line.split()) for line in completed.stdout.splitlines()]
    assert any(line.endswith("AssertionError: no PNG") for line in lines)
    assert any(line.startswith("the inputs were zeros and empty strings") for line in lines)
    assert "SIZE TYPE_INT32 [1,2] missing" in lines
    assert "SIZE TYPE_INT32 [1,2] TYPE_INT32 [1,3]" in lines
    assert "SIZE TYPE_INT32 [1,2] TYPE_FP32 [1,2]" in lines
    assert lines[-2:] == [
        "--input: no loaded model has an input 'Z'",
        "12 models: 3 ok, 2 refused, 6 differs, 1 FAILED",
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


def infer(connection_flag: str, *arguments: str) -> Any:
    completed = run_command("client", "infer", *arguments, connection_flag)
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


@pytest.mark.parametrize("protocol", ["native", "http", "unix", "grpc"])
def test_client_infer(connection_flags: dict[str, str], protocol: str, tmp_path: Path) -> None:
    link = connection_flags[protocol]
    assert infer(link, "completed", "--input=INPUT0=[1, 2, 3, 4]", "--request-id=shell") == {
        "id": "shell",
        "model_name": "completed",
        "model_version": "1",
        "outputs": [
            {"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 4], "data": [[2, 4, 6, 8]]}
        ],
    }
    np.save(tmp_path / "rows.npy", np.ones((3, 4), np.float32))
    answer = infer(
        link, "completed", f"--input=INPUT0=@{tmp_path / 'rows.npy'}", "--timeout-us=9000000"
    )
    assert answer["outputs"][0]["data"] == [[2, 2, 2, 2]] * 3
    answer = infer(link, "text", '--input=INPUT0=["a", "ü"]', "--output=OUTPUT0")
    assert answer["outputs"][0]["data"] == [["a", "ü"]]
    (output,) = infer(link, "halves", "--input=INPUT0=[0.5, 3]", "--model-version=1")["outputs"]
    assert output == {"name": "OUTPUT0", "datatype": "BF16", "shape": [2], "data": [0.5, 3]}


@pytest.mark.parametrize("protocol", ["native", "http", "unix", "grpc"])
def test_client_infer_that_is_refused(connection_flags: dict[str, str], protocol: str) -> None:
    """The error text is the same over every protocol, too."""
    for arguments, expected in (
        (("nothing", "--input=INPUT0=1"), "Request for unknown model: 'nothing' is not found"),
        (("completed", "--input=INPUT0=[1, 2]"), "unexpected shape for input 'INPUT0'"),
    ):
        completed = run_command("client", "infer", *arguments, connection_flags[protocol])
        assert (completed.returncode, completed.stdout) == (1, "")
        assert expected in completed.stderr and completed.stderr.count("\n") == 1


def run_client(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[Any], str]:
    """Run `shmserve client`; return its status and its output on stdout and stderr."""
    status = client.run(arguments)
    captured = capsys.readouterr()
    return status, [json.loads(line) for line in captured.out.splitlines()], captured.err


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


def test_client_without_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No command connects to another server at the default port."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for verb in (("infer", "m", "--input=X=1"), ("models",)):
        assert run_client(capsys, *verb) == (
            1,
            [],
            f"shmserve client {verb[0]}: no server of this user is running: there is no run "
            "directory "
            f"{tmp_path}/shmserve; start one by `shmserve serve`, or choose another by "
            "--run-dir, --url, SHMSERVE_RUN_DIR or connect(DIR)\n",
        )


def test_client_infer_finds_this_users_server(server: Server) -> None:
    environment = {**os.environ, "SHMSERVE_RUN_DIR": str(server.run_dir)}
    arguments = ("client", "infer", "completed", "--input=INPUT0=[1, 2, 3, 4]")
    done = run_command(*arguments, env=environment)
    assert json.loads(done.stdout)["outputs"][0]["data"] == [[2, 4, 6, 8]], done.stderr
    done = run_command(*arguments, env={**environment, "SHMSERVE_RUN_DIR": "/nowhere"})
    assert done.returncode == 1
    assert done.stderr == (
        "shmserve client infer: no server is running: there is no run directory /nowhere\n"
    )


@pytest.mark.parametrize(
    ("arguments", "status", "error"),
    [
        (("completed", "--input", "X=1"), 2, "no input 'X'"),
        (("completed",), 1, "missing required input(s) ['INPUT0']"),
    ],
)
def test_client_infer_that_fails(
    server: Server, arguments: tuple[str, ...], status: int, error: str
) -> None:
    url = f"http://127.0.0.1:{server.http_port}"
    completed = run_command("client", "infer", *arguments, "--url", url)
    assert completed.returncode == status
    assert error in completed.stderr
    assert len(completed.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_client_infer_without_a_server(scheme: str) -> None:
    (port_socket,) = hold_ports(1)  # a port at which no server listens
    with port_socket:
        url = f"{scheme}://127.0.0.1:{port_of(port_socket)}"
        completed = run_command("client", "infer", "simple", "--input", "INPUT0=1", "--url", url)
    assert completed.returncode == 1 and f": {url}: no response: " in completed.stderr
    assert len(completed.stderr.strip().splitlines()) == 1
