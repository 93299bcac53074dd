"""Models on demand: loaded by the first request, unloaded when idle or for other models."""

import asyncio
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

import shmserve.client
from shmserve.client import aio
from shmserve.errors import NotFound, TimedOut, Unavailable
from tests.support import repositories
from tests.support.servers import Server, Start, running
from tests.support.waiting import until
from tests.support.wire.raw_http import Http, json_request
from tests.support.wire.triton import infer_inputs

REQUEST_BODY = json_request(INPUT0=np.zeros(1, np.int32))
SLOW_BODY = json_request(INPUT0=np.zeros((1, 1), np.int32))
GRPC_INPUTS = infer_inputs(triton_grpc, INPUT0=np.zeros(1, np.int32))
ON_DEMAND = "ON_DEMAND"


NAMES = (
    *("http", "grpc", "stream", "native", "future", "map", "aio"),
    *("index", "metadata", "called"),
)
CALLING_MODEL = repositories.python_model("""
    def one(self, request):
        zeros = pb_utils.Tensor("INPUT0", np.zeros(1, np.int32))
        call = pb_utils.InferenceRequest(
            model_name="called", requested_output_names=["OUTPUT0"], inputs=[zeros]
        )
        return pb_utils.InferenceResponse(call.exec().output_tensors())
""")


def states(http: Http, **body: bool) -> dict[str, str]:
    index_entries = http.post("/v2/repository/index", body or None).ok().json()
    return {item["name"]: item.get("state", "") for item in index_entries}


def answer(http: Http, name: str) -> int:
    return int(http.infer(name, REQUEST_BODY).tensors()["OUTPUT0"][0])


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one model for each test, "slow", which loads at the gate, and "broken_native"."""
    folder = tmp_path_factory.mktemp("models")
    for name in NAMES:
        repositories.add_as(folder, name, "constant")
    calls = repositories.add_as(folder, "calls", "constant")
    (calls / "1" / "model.py").write_text(CALLING_MODEL)
    for name in ("slow", "slow_native"):
        repositories.add_slow(folder, name)
    broken_folder = repositories.add_as(folder, "broken_native", "constant")
    (broken_folder / "1" / "model.py").write_text("raise RuntimeError('broken on purpose')\n")
    return folder


@pytest.fixture(scope="module")
def shared_server(repository: Path, start: Start) -> Server:
    return start(repository, "--load-on-demand", "--model-control-mode=explicit", grpc=True)


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """Yield the shared server, and afterwards unload the models that the test has loaded."""
    yield shared_server
    with shared_server.http() as http:
        for name, state in states(http).items():
            if state != ON_DEMAND:
                http.unload(name).ok()
    until("all have ended", lambda: not shared_server.find("scheduler"))


def loads(server: Server, name: str) -> int:
    """Return how often a model was loaded."""
    return server.log().count(f"loading: {name}:1")


def test_an_unloaded_model_on_demand_is_ready(server: Server) -> None:
    """The index lists the model as ready, too; readiness checks load nothing."""
    with server.http() as http, triton_grpc.InferenceServerClient(server.grpc_url) as client:
        assert http.get("/v2/health/ready").status == 200
        assert http.get("/v2/models/index/ready").status == 200
        assert client.is_model_ready("index")
        assert states(http)["index"] == states(http, ready=True)["index"] == ON_DEMAND
        rows = client.get_model_repository_index().models
        assert {row.state for row in rows if row.name == "index"} == {ON_DEMAND}
        assert http.get("/v2/models/unknown/ready").status == 400
    assert not loads(server, "index")


def test_the_first_request_loads_the_model(server: Server) -> None:
    with triton_http.InferenceServerClient(server.url) as client:
        inputs = infer_inputs(triton_http, INPUT0=np.zeros(1, np.int32))
        assert client.infer("http", inputs).as_numpy("OUTPUT0") == [1]
    with server.http() as http, triton_grpc.InferenceServerClient(server.grpc_url) as grpc_client:
        assert grpc_client.infer("grpc", GRPC_INPUTS).as_numpy("OUTPUT0") == [1]
        assert states(http)["http"] == states(http)["grpc"] == "READY"
        assert http.infer("grpc/versions/7", REQUEST_BODY).status == 404
        with pytest.raises(InferenceServerException, match="version 7 is not found"):
            grpc_client.infer("grpc", GRPC_INPUTS, "7")


def test_a_stream_waits_for_the_load_in_order(server: Server) -> None:
    answers: list[tuple[str, str]] = []

    def take(result: triton_grpc.InferResult | None, error: object) -> None:
        response = result.get_response() if result is not None else None
        answers.append(("failed", str(error)) if response is None else (response.id, ""))

    with triton_grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(take)
        client.async_stream_infer("stream", [triton_grpc.InferInput("INPUT0", [1], "INT32")])
        for number, name in enumerate(("stream", "unknown", "stream")):
            client.async_stream_infer(name, GRPC_INPUTS, request_id=str(number))
        until("all are answered", lambda: len(answers) == 4)
        client.stop_stream()
    assert [answer for answer, _ in answers] == ["failed", "0", "failed", "2"]
    assert "unable to find data for input tensor 'INPUT0'" in answers[0][1]


def test_local_clients_load_the_model(server: Server) -> None:
    zeros = np.zeros(1, np.int32)
    with shmserve.client.connect(server.run_dir) as native:
        assert ("native", "") in native.models()
        assert native.infer("native", INPUT0=zeros)["OUTPUT0"] == [1]
        assert ("native", "1") in native.models()
        assert native.infer_async("future", INPUT0=zeros).result()["OUTPUT0"] == [1]
        assert [r["OUTPUT0"] for r in native.map("map", [{"INPUT0": zeros}] * 2)] == [1, 1]
        with pytest.raises(NotFound, match="version 7 is not found"):
            native.infer("native", version="7", INPUT0=zeros)
        with pytest.raises(NotFound, match="is not found"):
            native.infer("unknown", INPUT0=zeros)
        with pytest.raises(Unavailable, match="broken on purpose"):
            native.infer("broken_native", INPUT0=zeros)
        with pytest.raises(TimedOut):
            native.infer("slow_native", timeout=0.2, INPUT0=np.zeros((1, 1), np.int32))
        server.gate.next().release()

    async def main() -> Any:
        async with aio.connect(server.run_dir) as asynchronous:
            return (await asynchronous.infer("aio", INPUT0=zeros))["OUTPUT0"]

    assert asyncio.run(main()) == [1]


def test_a_model_that_a_model_calls_is_loaded_for_the_call(http: Http) -> None:
    assert answer(http, "calls") == 1
    assert states(http)["called"] == "READY"


def test_metadata_and_configuration_load_a_model(http: Http) -> None:
    assert http.get("/v2/models/metadata").json()["versions"] == ["1"]
    assert http.config("metadata")["name"] == "metadata"
    assert states(http)["metadata"] == "READY"


def test_requests_during_a_load_wait_for_the_load(server: Server) -> None:
    """A request whose own timeout expires fails, and the load continues."""
    late_body = {**SLOW_BODY, "parameters": {"deadline_us": 200_000}}
    with server.http() as http, ThreadPoolExecutor(4) as threads:
        start_s = time.monotonic()
        reply = http.infer("slow", late_body)
        assert time.monotonic() - start_s < 5
        assert reply.status == 503
        assert reply.error == "model 'slow' was not loaded within the request's timeout"

        def send_request(_: int) -> int:
            with server.http() as own_client:
                return own_client.infer("slow", SLOW_BODY).status

        def ask_late() -> str:
            with triton_grpc.InferenceServerClient(server.grpc_url) as client:
                inputs = infer_inputs(triton_grpc, INPUT0=np.zeros((1, 1), np.int32))
                with pytest.raises(InferenceServerException) as error_info:
                    client.infer("slow", inputs, parameters={"deadline_us": 200_000})
                return str(error_info.value.message())

        assert threads.submit(ask_late).result() == reply.error
        waiting = [threads.submit(send_request, number) for number in range(3)]
        assert states(http)["slow"] == "LOADING"
        assert http.get("/v2/health/ready").status == 200
        server.gate.next().release()
        server.gate.close()
        assert [future.result() for future in waiting] == [200] * 3
    assert loads(server, "slow") == 1


def test_idle_models_are_unloaded_and_loaded_again(tmp_path: Path) -> None:
    """The limit is a flag or a parameter of the model; explicitly loaded models remain."""
    never_idle = 'parameters { key: "idle_unload_secs" value { string_value: "0" } }'
    for name, config in (("goes", ""), ("stays", never_idle), ("kept", ""), ("first", "")):
        repositories.add_as(tmp_path, name, "constant", config)
    flags = ("--load-on-demand", "--idle-unload-secs=1", "--model-control-mode=explicit")
    with running(tmp_path, *flags, "--load-model=first") as server, server.http() as http:
        assert states(http)["first"] == "READY"
        http.load("kept").ok()
        for _ in range(2):
            assert answer(http, "goes") == answer(http, "stays") == 1
            until("it is unloaded", lambda: states(http)["goes"] == ON_DEMAND)
        expected = {"goes": ON_DEMAND, "stays": "READY", "kept": "READY", "first": "READY"}
        assert states(http) == expected
        assert loads(server, "goes") == 2 and loads(server, "stays") == 1


HEAVY_MODEL = """\
    def initialize(self, args):
        self.held = np.ones(64 << 20, np.uint8)

    def execute("""


def test_the_least_recently_used_models_are_unloaded_for_a_new_model(tmp_path: Path) -> None:
    """Of models with at least 64 MB each, two fit into 200 MB."""
    names = ["a", "b", "c", "d"]
    for name in names:
        repositories.insert(repositories.add_as(tmp_path, name, "constant"), HEAVY_MODEL)
    flags = ("--load-on-demand", f"--max-loaded-byte-size={220 << 20}")
    with running(tmp_path, *flags) as server, server.http() as http:
        for name in [*names, *names]:
            assert answer(http, name) == 1
            model_states = states(http)
            assert model_states[name] == "READY"
            assert 1 <= list(model_states.values()).count("READY") <= 2
        assert answer(http, "c") == 1 and answer(http, "a") == 1
        until("d has left", lambda: states(http)["d"] == ON_DEMAND)
        assert states(http)["c"] == states(http)["a"] == "READY"
        assert loads(server, "c") == 2 and loads(server, "a") == 3


def test_polling_registers_new_models_and_reloads_loaded_ones(tmp_path: Path) -> None:
    repositories.add_as(tmp_path, "there", "constant")
    flags = ("--load-on-demand", "--model-control-mode=poll", "--repository-poll-secs=1")
    with running(tmp_path, *flags) as server, server.http() as http:
        assert answer(http, "there") == 1
        repositories.add_as(tmp_path, "comes", "constant")
        until("it is seen", lambda: states(http).get("comes") == ON_DEMAND)
        for name in ("there", "comes"):
            code = tmp_path / name / "1" / "model.py"
            code.write_text(code.read_text().replace("ANSWER = 1", "ANSWER = 2"))
        until("it is reloaded", lambda: answer(http, "there") == 2)
        assert not loads(server, "comes")
        assert answer(http, "comes") == 2
        for name in ("there", "comes"):
            shutil.rmtree(tmp_path / name)
        until("they are gone", lambda: {*states(http).values()} <= {"UNAVAILABLE"})
        assert http.infer("comes", REQUEST_BODY).status == 404
