"""Where a request's time went: asked for, logged, and by whose trace."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

import shmserve.client
from tests.rigs.pipelines import add_ensemble, add_model, step, tensor
from tests.support.servers import Server, running
from tests.support.wire.raw_http import json_input

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
ROW = np.ones((1, 1), np.float32)
X = {"inputs": [json_input("X", ROW[0])]}
CALL = """
    call = pb_utils.InferenceRequest(
        model_name="one", requested_output_names=["Y"],
        inputs=[pb_utils.Tensor("X", self.input(request, "X").reshape(1, 1))])
    return self.response(Y=pb_utils.get_output_tensor_by_name(call.exec(), "Y").as_numpy()[0])
"""
TELL = "return self.response(Y=np.array([str(request.trace().get_context())], object))"
PHASES = ["queue_us", "compute_input_us", "compute_infer_us", "compute_output_us"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that logs what takes longer than a millisecond."""
    folder = tmp_path_factory.mktemp("traced")
    one = 'return self.response(Y=self.input(request, "X") + 1)'
    for name in ("one", "two"):
        add_model(folder, name, one, max_batch_size=4, more="dynamic_batching { }")
    add_model(folder, "slow", f"time.sleep(0.005)\n{one}")
    add_model(folder, "boom", 'time.sleep(0.005)\nraise ValueError("boom")')
    add_model(folder, "calls", CALL)
    add_model(folder, "tell", TELL, outputs=[tensor("Y", "BYTES")])
    steps = [step("one", {"X": "IN"}, {"Y": "A"}), step("two", {"X": "A"}, {"Y": "OUT"})]
    add_ensemble(folder, "both", steps, max_batch_size=4)
    with running(folder, "--slow-request-ms=1", grpc=True) as started:
        yield started


def by_http(server: Server) -> Any:
    with httpclient.InferenceServerClient(server.url) as client:
        given = httpclient.InferInput("X", [1, 1], "FP32")
        given.set_data_from_numpy(ROW)
        result = client.infer("one", [given], parameters={"explain": True})
    assert result.as_numpy("Y").item() == 2
    return result.get_response()["parameters"]["explanation"]


def by_grpc(server: Server) -> Any:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        given = grpcclient.InferInput("X", [1, 1], "FP32")
        given.set_data_from_numpy(ROW)
        result = client.infer("one", [given], parameters={"explain": True})
    assert result.as_numpy("Y").item() == 2
    return json.loads(result.get_response().parameters["explanation"].string_param)


def by_native(server: Server) -> Any:
    with shmserve.client.connect(server.run_dir) as client:
        result = client.infer("one", X=ROW, parameters={"explain": True})
        assert result["Y"].item() == 2
        return result.parameters["explanation"]


@pytest.mark.parametrize("ask", [by_http, by_grpc, by_native])
def test_a_request_asks_why(server: Server, ask: Callable[[Server], Any]) -> None:
    for _ in range(3):  # templates of earlier responses are not taken for it
        told = ask(server)
        assert told["batch_size"] == 1
        assert told["batch_closed"] == "idle"
        parts = [told[phase] for phase in ["receive_us", *PHASES, "respond_us"]]
        assert min(parts) >= 0
        assert told["total_us"] - 6 <= sum(parts) <= told["total_us"]  # each is rounded


def test_who_does_not_ask_is_not_told(server: Server) -> None:
    request = {"inputs": [json_input("X", ROW)], "parameters": {"explain": False}}
    with server.http() as http:
        assert "parameters" not in http.infer("one", request).ok().json()


def explained(server: Server, model: str, given: str = "X") -> Any:
    batched = ROW if model == "both" else ROW[0]
    request = {"inputs": [json_input(given, batched)], "parameters": {"explain": True}}
    with server.http() as http:
        return http.infer(model, request).ok().json()["parameters"]["explanation"]


@pytest.mark.parametrize(
    ("model", "given", "key", "inner"),
    [("both", "IN", "steps", ["one", "two"]), ("calls", "X", "calls", ["one"])],
)
def test_what_others_took_is_told(
    server: Server, model: str, given: str, key: str, inner: list[str]
) -> None:
    told = explained(server, model, given)
    assert [each["model"] for each in told[key]] == inner
    for each in told[key]:
        assert sum(each[phase] for phase in PHASES) <= each["total_us"] <= told["total_us"]
        assert each["batch_closed"] == "idle"


def slow_lines(server: Server, model: str) -> list[Any]:
    found = re.findall(
        rf"inference of model '{model}' was slow: (\{{.*?\}})(?: |$)(.*)", server.log()
    )
    return [(json.loads(told), more) for told, more in found]


def test_slow_requests_are_logged(server: Server) -> None:
    with server.http() as http:
        http.infer("slow", {**X, "id": "me"}).ok()
        assert http.infer("boom", X).status == 500
    server.wait_log("inference of model 'boom' was slow")
    ((told, more),) = slow_lines(server, "slow")
    assert told["compute_infer_us"] >= 5000
    assert told["encode_us"] >= 0
    assert more.startswith("request=me trace=")
    ((told, _),) = slow_lines(server, "boom")
    assert "boom" in told["error"]
    assert told["total_us"] >= 5000


def told_by_http(server: Server) -> Any:
    with server.http() as http:
        (output,) = http.infer("tell", X, {"TraceParent": TRACEPARENT}).ok().json()["outputs"]
        return output["data"][0]


def told_by_grpc(server: Server) -> Any:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        given = grpcclient.InferInput("X", [1], "FP32")
        given.set_data_from_numpy(ROW[0])
        result = client.infer("tell", [given], headers={"traceparent": TRACEPARENT})
    return result.as_numpy("Y").item().decode()


def told_natively(server: Server) -> Any:
    with shmserve.client.connect(server.run_dir) as client:
        return client.infer("tell", X=ROW[0], traceparent=TRACEPARENT)["Y"].item().decode()


@pytest.mark.parametrize("ask", [told_by_http, told_by_grpc, told_natively])
def test_a_trace_is_taken_and_passed_on(server: Server, ask: Callable[[Server], Any]) -> None:
    context = json.loads(ask(server))["traceparent"]
    assert re.fullmatch(rf"00-{TRACE}-[0-9a-f]{{16}}-01", context)
    assert context != TRACEPARENT


def test_a_failure_is_logged_with_its_trace(server: Server) -> None:
    with server.http() as http:
        assert http.infer("boom", X, {"traceparent": TRACEPARENT}).status == 500
    server.wait_log(f"trace={TRACE}")
    assert re.search(rf"E .*inference of model 'boom' failed: .* trace={TRACE}", server.log())


def test_a_program_hears_of_a_traceparent_that_is_none(server: Server) -> None:
    with (
        shmserve.client.connect(server.run_dir) as client,
        pytest.raises(shmserve.client.InvalidArgument, match="traceparent must be as W3C"),
    ):
        client.infer("one", X=ROW, traceparent="nonsense")
