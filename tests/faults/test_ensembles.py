"""Processes of an ensemble die under load: responses, resources and readiness stay correct."""

import contextlib
import fcntl
import http.client
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.faults.scene import RECOVERY_S, State, assert_is_as_it_was, wait_replaced
from tests.rigs.pipelines import add_ensemble, add_model, tensor, xy_step
from tests.support.load import Load
from tests.support.servers import Server, Start
from tests.support.waiting import until
from tests.support.wire.raw_http import Http, Reply, binary_request

ELEMENT_COUNT = 50_000
SLOWLY_READ = 8_000_000  # number of elements of a response that exceeds the socket buffers
ADD_ONE = 'return self.response(Y=self.input(request, "X") + 1)'
INITIALIZE = """\
    def initialize(self, args):
        import fcntl
        with open(os.environ["GO"]) as go:
            fcntl.flock(go, fcntl.LOCK_SH)

    def """
CLIENTS = 4
BINARY_OUTPUT = [{"name": "OUT", "parameters": {"binary_data": True}}]


@pytest.fixture(scope="module")
def load_lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file; while it is locked, the model "first" does not finish loading."""
    path = tmp_path_factory.mktemp("go") / "go"
    path.touch()
    return path


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("ensembles") / "models"
    add_model(repository, "first", ADD_ONE)
    code = repository / "first" / "1" / "model.py"
    _, separator, rest = code.read_text().partition("    def initialize(")
    code.write_text(
        code.read_text().replace(separator + rest.partition("execute(")[0], INITIALIZE, 1)
    )
    fixed = [tensor("X", dims=[ELEMENT_COUNT])], [tensor("Y", dims=[ELEMENT_COUNT])]
    add_model(repository, "second", ADD_ONE, *fixed)
    add_model(repository, "third", ADD_ONE)
    steps = [xy_step("first", "IN", "a"), xy_step("second", "a", "b"), xy_step("third", "b", "OUT")]
    add_ensemble(repository, "pipe", steps)
    add_model(repository, "grows", ADD_ONE)
    add_ensemble(repository, "last", [xy_step("grows", "IN", "OUT")])
    return repository


@pytest.fixture(scope="module")
def server(repository: Path, load_lock: Path, start: Start) -> Server:
    return start(repository, environment={"GO": str(load_lock)})


@pytest.fixture(scope="module")
def separate_server(repository: Path, load_lock: Path, start: Start) -> Server:
    """Start a server that schedules each model in its own process."""
    flag = "--ensemble-scheduling=separate"
    return start(repository, flag, environment={"GO": str(load_lock)})


def clients(server: Server) -> Load:
    return Load(server, senders=[partial(infer_pipe, factor + 1) for factor in range(CLIENTS)])


def infer_pipe(factor: int, http: Http, _: int) -> str:
    """Send a request to the ensemble; return "", or the difference from the correct response."""
    values = np.arange(ELEMENT_COUNT, dtype=np.float32) * factor
    tensors = [("IN", "FP32", [ELEMENT_COUNT], values.tobytes())]
    reply = http.infer_binary("pipe", tensors, outputs=BINARY_OUTPUT)
    if reply.status != 200:
        return f"{reply.status} {reply.error}"
    return "wrong values" if (reply.tensors()["OUT"] != values + 3).any() else ""


@pytest.mark.parametrize(
    ("mode", "victim"),
    [
        *(("hosted", f"worker {step}.0") for step in ("first", "second", "third")),
        ("hosted", "ensemble pipe"),
        *(("separate", victim) for victim in ("scheduler first", "scheduler third")),
        *(("separate", victim) for victim in ("worker second.0", "ensemble pipe")),
    ],
)
def test_a_process_dies(server: Server, separate_server: Server, mode: str, victim: str) -> None:
    """Requests are retried, or their results are in memory that survives; no response is wrong."""
    server = {"hosted": server, "separate": separate_server}[mode]
    with clients(server):  # memory that the first requests allocate permanently is not a leak
        pass
    state_before = State.of(server)
    with clients(server) as load:
        for _ in range(3):
            old_process = server.find_one(victim)
            old_process.kill()
            killed_at = time.monotonic()
            wait_replaced(server, old_process, victim, 5.0)
            load.wait_answered(killed_at)
    assert load.troubles() == []
    until("the server is ready", lambda: server.answers("/v2/health/ready"), RECOVERY_S)
    assert_is_as_it_was(server, state_before, 0)


@pytest.mark.parametrize("mode", ["hosted", "separate"])
def test_a_slow_reader_gets_its_output_after_the_ensemble_died(
    server: Server, separate_server: Server, mode: str
) -> None:
    """The worker reuses the memory of the output, but the client still reads the original."""
    server = {"hosted": server, "separate": separate_server}[mode]
    values = np.arange(SLOWLY_READ, dtype=np.float32)

    def slow_request(factor: int) -> tuple[bytes, dict[str, str]]:
        tensor = ("IN", "FP32", [SLOWLY_READ], (values * factor).tobytes())
        return binary_request([tensor], outputs=BINARY_OUTPUT)

    with (
        contextlib.closing(http.client.HTTPConnection(server.url)) as slow,
        server.http() as other_http,
    ):
        slow.request("POST", "/v2/models/last/infer", *slow_request(1))
        # The body is too large for the socket and waits for its reader.
        response = slow.getresponse()
        old_process = server.find_one("ensemble last")
        old_process.kill()
        wait_replaced(server, old_process, "ensemble last", 5.0)
        until("it is ready", lambda: server.answers("/v2/models/last/ready"), RECOVERY_S)
        for factor in range(2, 6):
            expected = values * factor + 1
            assert (
                other_http.infer("last", *slow_request(factor)).tensors()["OUT"] == expected
            ).all()
        output = Reply(response.status, response.headers, response.read()).tensors()["OUT"]
        assert (output == values + 1).all()


def test_readiness_follows_its_steps(server: Server, load_lock: Path) -> None:
    """Readiness reflects a step's state within a second; requests wait meanwhile."""
    ready = "/v2/models/pipe/ready"
    with open(load_lock) as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        server.find_one("worker first.0").kill()
        until("it is not ready", lambda: server.answers(ready, 400), RECOVERY_S)
        assert not server.answers("/v2/health/ready")
    until("it is ready again", lambda: server.answers(ready), RECOVERY_S)
    with clients(server) as load:
        pass
    assert load.troubles() == []
