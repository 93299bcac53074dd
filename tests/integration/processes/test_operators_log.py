"""The operator's log of failures, exits and recoveries, and commands with a token."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import shmserve.client
from shmserve.cli import main
from shmserve.errors import Internal
from tests.support import repositories
from tests.support.servers import Server, Start, running, write_tokens
from tests.support.wire.raw_http import json_request

TOKEN = "a-token-for-inference"
FAILING_MODEL = repositories.python_model("""
    def execute(self, requests):
        raise ValueError("Grüße\\nof two lines")
""")
STREAM = repositories.python_model("""
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(2):
                sender.send(self.response(OUTPUT0=np.array([number], np.float32)))
            sender.send(flags=FINAL)
""")
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
BAD_MODEL = """
def read():
    raise RuntimeError("no weights")

class Bad:
    def __init__(self):
        read()

    def predict(self, x: FP32[np.ndarray, -1]) -> FP32[np.ndarray, -1]:
        return x
"""


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    repositories.add(models, "identity")
    config = repositories.identity_config("fails", "FP32", [1])
    repositories.write(models, "fails", config, FAILING_MODEL)
    config = repositories.identity_config("stream", "FP32", [1]) + DECOUPLED
    repositories.write(models, "stream", config, STREAM)
    tokens = write_tokens(models / "tokens", f"{TOKEN} inference")
    return start(models, f"--auth-token-file={tokens}", grpc=True)


def test_a_failure_of_each_protocol_is_logged(server: Server) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    body = {"id": "over-http", **json_request(INPUT0=np.ones(1, np.float32))}
    with server.http() as http:
        assert http.post("/v2/models/fails/infer", body, headers).status == 500
    with shmserve.client.connect(server.run_dir) as native, pytest.raises(Internal):
        native.infer("fails", {"INPUT0": [1.0]}, request_id="natively")
    line = (
        r"\n([^\n]*)\] inference of model 'fails' failed: Failed to process the request\(s\) for "
        r"model 'fails_0', message: ValueError: Grüße request=(\S+)\n    of two lines\n"
    )
    server.wait_log("request=natively\n    of two")
    lines = re.findall(line, server.log())
    assert [request for _, request in lines] == ["over-http", "natively"]
    assert " gateway " in lines[0][0] and " scheduler fails" in lines[1][0]


def test_a_worker_that_is_back(server: Server) -> None:
    server.find_one("worker identity.0").kill()
    server.wait_log("worker identity.0 cpu runs again: pid ")
    server.wait_ready()
    pid = server.find_one("worker identity.0").pid
    ended, restarted = re.findall(
        r"worker identity\.0 cpu (ended|runs again: pid \d+)", server.log()
    )
    assert (ended, restarted) == ("ended", f"runs again: pid {pid}")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(("model", "responses"), [("identity", 1), ("stream", 2)])
def test_a_token_for_inference_is_enough_to_infer(
    server: Server, capsys: pytest.CaptureFixture[str], protocol: str, model: str, responses: int
) -> None:
    url = f"http://{server.url}" if protocol == "http" else f"grpc://{server.grpc_url}"
    token = f"--header=Authorization: Bearer {TOKEN}"
    value = "INPUT0=[1]" if model == "stream" else "INPUT0=[1, 2]"
    command = ["client", "infer", model, f"--url={url}", token, f"--input={value}"]
    assert main(command) == 0, capsys.readouterr().err
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["model_name"] for line in lines] == [model] * responses


def test_a_class_that_fails_to_load_is_reported_once_with_its_path(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(f"import numpy as np\nfrom shmserve.model import FP32\n{BAD_MODEL}")
    flags = ("--exit-on-error=false", "--strict-readiness=false")
    with running([], f"{file}:Bad", *flags) as server:
        server.wait_log("the server is ready")
        log = server.log()
    assert len(re.findall(r"(?m)^E .*no weights", log)) == 1
    assert f'    File "{file}", line 5, in read' in log and f'"{file}", line 9, in __init__' in log
    assert "workers/" not in log


def test_an_exception_of_predict_is_logged_with_the_frames_of_the_class(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    text = BAD_MODEL.replace("        read()", "        pass").replace("return x", "read()")
    file.write_text(f"import numpy as np\nfrom shmserve.model import FP32\n{text}")
    with running([], f"{file}:Bad") as server:
        server.wait_ready()
        with shmserve.client.connect(server.run_dir) as client, pytest.raises(Internal):
            client.infer("bad", x=[[1.0]])
        server.wait_log("RuntimeError: no weights\n")
        log = server.log()
    assert f'    File "{file}", line 12, in predict' in log and f'"{file}", line 5, in read' in log
    assert "model 'bad' failed\n    Traceback (most recent call last):\n" in log
    assert "workers/" not in log
