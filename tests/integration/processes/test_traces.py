"""The phases of requests: in responses, in the log, and in traces."""

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

import shmserve.client
from tests.rigs.pipelines import add_ensemble, add_model, tensor, xy_step
from tests.support import repositories
from tests.support.otlp import Collector, attributes, collector
from tests.support.servers import Server, Start, running
from tests.support.waiting import until
from tests.support.wire.grpc_calls import stub
from tests.support.wire.raw_http import Http, json_request, raw_connection
from tests.support.wire.triton import infer_inputs

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
UNSAMPLED = f"00-{TRACE_ID}-00f067aa0ba902b7-00"
ROW = np.ones((1, 1), np.float32)
X = json_request(X=ROW[0])
CALLING_METHOD = """
    call = pb_utils.InferenceRequest(
        model_name="one", requested_output_names=["Y"],
        inputs=[pb_utils.Tensor("X", self.input(request, "X").reshape(1, 1))])
    return self.response(Y=pb_utils.get_output_tensor_by_name(call.exec(), "Y").as_numpy()[0])
"""
TELL_TRACE = "return self.response(Y=np.array([str(request.trace().get_context())], object))"
MANY_RESPONSES = """
    sender = request.get_response_sender()
    for _ in range(2):
        time.sleep(0.005)
        sender.send(self.response(Y=self.input(request, "X")))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
PROTOCOLS = ("http", "grpc", "native")
PHASES = ["queue_us", "compute_input_us", "compute_infer_us", "compute_output_us"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write models, a pipeline of them, and one that calls another."""
    folder = tmp_path_factory.mktemp("traced")
    model_code = 'return self.response(Y=self.input(request, "X") + 1)'
    for name in ("one", "two"):
        add_model(folder, name, model_code, max_batch_size=4, settings="dynamic_batching { }")
    add_model(folder, "slow", f"time.sleep(0.005)\n{model_code}")
    add_model(folder, "boom", 'time.sleep(0.005)\nraise ValueError("boom")')
    add_model(folder, "calls", CALLING_METHOD)
    add_model(
        folder, "many", MANY_RESPONSES, settings="model_transaction_policy { decoupled: true }"
    )
    add_model(folder, "late", f"time.sleep(0.5)\n{model_code}")
    repositories.add(folder, "gated")
    add_model(folder, "tell", TELL_TRACE, outputs=[tensor("Y", "BYTES")])
    steps = [xy_step("one", "IN", "A"), xy_step("two", "A", "OUT")]
    add_ensemble(folder, "both", steps, max_batch_size=4)
    add_ensemble(folder, "fails", [xy_step("calls", "IN", "A"), xy_step("boom", "A", "OUT")])
    return folder


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    """Start a server that logs requests that take longer than a millisecond."""
    return start(models, "--slow-request-ms=1", grpc=True)


@pytest.fixture
def tracing_server(models: Path, tmp_path: Path) -> Iterator[Server]:
    file = f"--trace-config=triton,file={tmp_path / 'traces'}"
    with running(models, "--trace-config=rate=1", file, grpc=True) as running_server:
        yield running_server


def infer(
    server: Server,
    protocol: str,
    model: str,
    row: np.ndarray = ROW,
    parameters: dict[str, Any] | None = None,
    traceparent: str = "",
) -> tuple[Any, Any]:
    """Send X, or IN to "both"; return the output's element, and the explanation if there is one."""
    arrays = {"IN" if model == "both" else "X": row}
    if protocol == "native":
        with shmserve.client.connect(server.run_dir) as client:
            native_result = client.infer(
                model, arrays, parameters=parameters or {}, traceparent=traceparent
            )
            (output,) = native_result.values()
            return output.item(), native_result.parameters.get("explanation")
    module, url = (httpclient, server.url) if protocol == "http" else (grpcclient, server.grpc_url)
    name = "TraceParent" if protocol == "http" else "traceparent"
    headers = {name: traceparent} if traceparent else None
    with module.InferenceServerClient(url) as client:
        inputs = infer_inputs(module, **arrays)
        result = client.infer(model, inputs, parameters=parameters, headers=headers)
    response = result.get_response(as_json=True) if protocol == "grpc" else result.get_response()
    (output,) = (result.as_numpy(described["name"]) for described in response["outputs"])
    explanation = response.get("parameters", {}).get("explanation")
    if protocol == "grpc" and explanation:
        explanation = json.loads(explanation["string_param"])
    return output.item(), explanation


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_request_asks_why(server: Server, protocol: str) -> None:
    for _ in range(3):  # cached responses of earlier requests are not returned
        output, explanation = infer(server, protocol, "one", parameters={"explain": True})
        assert output == 2
        assert explanation["batch_size"] == 1 and explanation["batch_closed"] == "idle"
        check_phases(explanation)


def check_phases(explanation: dict[str, int]) -> None:
    """Check that the phases add up to the total; each is rounded to whole microseconds."""
    parts = [explanation[phase] for phase in ["receive_us", *PHASES, "respond_us"]]
    assert min(parts) >= 0
    assert explanation["total_us"] - 6 <= sum(parts) <= explanation["total_us"]


def test_no_explanation_without_the_parameter(http: Http) -> None:
    request = json_request(X=ROW) | {"parameters": {"explain": False}}
    assert "parameters" not in http.infer("one", request).ok().json()


@pytest.mark.parametrize(
    ("model", "row", "key", "inner"),
    [("both", ROW, "steps", ["one", "two"]), ("calls", ROW[0], "calls", ["one"])],
    ids=["steps", "calls"],
)
def test_the_time_of_inner_models_is_explained(
    server: Server, model: str, row: np.ndarray, key: str, inner: list[str]
) -> None:
    _, explanation = infer(server, "http", model, row, {"explain": True})
    assert [trace["model"] for trace in explanation[key]] == inner
    for trace in explanation[key]:
        assert sum(trace[phase] for phase in PHASES) <= trace["total_us"] <= explanation["total_us"]
        assert trace["batch_closed"] == "idle"


def slow_lines(server: Server, model: str) -> list[Any]:
    found = re.findall(
        rf"inference of model '{model}' was slow: (\{{.*?\}})(?: |$)(.*)", server.log()
    )
    return [(json.loads(trace_text), details) for trace_text, details in found]


def test_slow_requests_are_logged(server: Server) -> None:
    with server.http() as http:
        http.infer("slow", {**X, "id": "me"}).ok()
        assert http.infer("boom", X).status == 500
    server.wait_log("inference of model 'boom' was slow")
    ((trace_text, details),) = slow_lines(server, "slow")
    assert trace_text["compute_infer_us"] >= 5000 and trace_text["encode_us"] >= 0
    assert details.startswith("request=me trace=")
    ((trace_text, _),) = slow_lines(server, "boom")
    assert "boom" in trace_text["error"] and trace_text["total_us"] >= 5000


def test_slow_requests_of_programs_are_logged(server: Server) -> None:
    def lines(model: str) -> list[Any]:
        return [(trace, more) for trace, more in slow_lines(server, model) if "native" in more]

    with shmserve.client.connect(server.run_dir) as client:
        assert client.infer("slow", X=ROW[0], request_id="native")["Y"].item() == 2
        assert len(list(client.stream("many", X=ROW[0], request_id="native"))) == 2
        with pytest.raises(shmserve.client.ShmserveError, match="boom"):
            client.infer("boom", X=ROW[0], request_id="native")
        with pytest.raises(shmserve.client.TimedOut):
            client.infer("late", X=ROW[0], request_id="native", timeout=0.1)
    for model in ("slow", "many", "boom", "late"):
        until(f"'{model}' is logged", partial(lines, model))
    ((trace, more),) = lines("slow")
    assert trace["compute_infer_us"] >= 5000
    assert re.fullmatch("request=native trace=[0-9a-f]{32}", more)
    ((trace, _),) = lines("boom")
    assert "boom" in trace["error"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_trace_is_passed_on(server: Server, protocol: str) -> None:
    output, _ = infer(server, protocol, "tell", ROW[0], traceparent=TRACEPARENT)
    context = json.loads(output)["traceparent"]
    assert re.fullmatch(rf"00-{TRACE_ID}-[0-9a-f]{{16}}-01", context)
    assert context != TRACEPARENT


def test_a_failure_is_logged_with_its_trace(server: Server) -> None:
    with server.http() as http:
        assert http.infer("boom", X, {"traceparent": TRACEPARENT}).status == 500
    server.wait_log(f"trace={TRACE_ID}")
    assert re.search(rf"E .*inference of model 'boom' failed: .* trace={TRACE_ID}", server.log())
    assert re.search(rf"E .*worker .*model 'boom' failed trace={TRACE_ID}", server.log())


def test_errors_name_the_trace(server: Server) -> None:
    headers = {"traceparent": TRACEPARENT}
    wrong_body = json_request(NOPE=ROW)
    with server.http() as http:
        for model, body in (("boom", X), ("one", wrong_body), ("nope", X)):
            refused_reply = http.infer(model, body, headers)
            assert refused_reply.status >= 400
            assert refused_reply.headers["traceparent"].startswith(f"00-{TRACE_ID}-")
            assert "traceparent" not in http.infer(model, wrong_body, {"traceparent": "x"}).headers
        untraced = http.infer("boom", X)  # all requests are timed for the log of slow requests
        trace_id = untraced.headers["traceparent"].split("-")[1]
    until("its line has it", lambda: re.search(f"slow: .*trace={trace_id}", server.log()))
    with stub(server) as call:
        for model, name in (("boom", "X"), ("one", "NOPE")):
            request = pb.ModelInferRequest(model_name=model, raw_input_contents=[ROW.tobytes()])
            request.inputs.add(name=name, datatype="FP32", shape=[1])
            with pytest.raises(grpc.RpcError) as error_info:
                call.ModelInfer(request, metadata=list(headers.items()), timeout=20)
            metadata = dict(error_info.value.trailing_metadata())
            assert metadata["traceparent"].startswith(f"00-{TRACE_ID}-")
    with shmserve.client.connect(server.run_dir) as native:
        with pytest.raises(shmserve.client.ShmserveError) as error_info:
            native.infer("boom", X=ROW[0], traceparent=TRACEPARENT)
        assert error_info.value.traceparent.startswith(f"00-{TRACE_ID}-")
        with pytest.raises(shmserve.client.ShmserveError) as error_info:
            native.infer("boom", X=ROW[0])
        assert error_info.value.traceparent == ""


def stream_by_http(server: Server) -> Any:
    accept = {"Accept": "text/event-stream"}
    body = {**X, "parameters": {"explain": True}}
    with server.http() as http:
        reply = http.infer("many", body, accept).ok()
    assert re.fullmatch("00-.*", reply.headers["traceparent"])
    *earlier, final = [json.loads(line[6:]) for line in reply.body.decode().split("\n\n") if line]
    assert len(earlier) == 2 and "parameters" not in earlier[-1]
    return final["parameters"]["explanation"]


def stream_by_grpc(server: Server) -> Any:
    queue: Queue[Any] = Queue()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        inputs = infer_inputs(grpcclient, X=ROW[0])
        client.start_stream(lambda result, error: queue.put(error or result))
        client.async_stream_infer("many", inputs, parameters={"explain": True})
        first_response, second_response, final_response = (queue.get(timeout=20) for _ in range(3))
        client.stop_stream()
    assert first_response.as_numpy("Y").item() == second_response.as_numpy("Y").item() == 1
    return json.loads(final_response.get_response().parameters["explanation"].string_param)


def stream_by_native(server: Server) -> Any:
    with shmserve.client.connect(server.run_dir) as client:
        *earlier, final = client.stream("many", X=ROW[0], parameters={"explain": True})
    assert [response["Y"].item() for response in earlier] == [1, 1] and not earlier[-1].parameters
    return final.parameters["explanation"]


@pytest.mark.parametrize("send_request", [stream_by_http, stream_by_grpc, stream_by_native])
def test_a_stream_is_explained_late(server: Server, send_request: Callable[[Server], Any]) -> None:
    explanation = send_request(server)
    assert explanation["compute_infer_us"] >= 10_000
    check_phases(explanation)


@pytest.mark.parametrize("protocol", ["http", "stream", "grpc"])
def test_a_request_of_a_disconnected_client_is_traced(server: Server, protocol: str) -> None:
    before = server.log().count("the client has disconnected")
    numbers = np.ones((1, 1), np.int32)
    with contextlib.ExitStack() as stack:
        if protocol == "grpc":
            client = stack.enter_context(grpcclient.InferenceServerClient(server.grpc_url))
            inputs = infer_inputs(grpcclient, INPUT0=numbers)
            disconnect = client.async_infer("gated", inputs, lambda result, error: None).cancel
        else:
            accept = "text/event-stream" if protocol == "stream" else "application/json"
            body = json.dumps(json_request(INPUT0=numbers)).encode()
            headers = {"Host": server.url, "Accept": accept, "Content-Length": str(len(body))}
            head = [
                "POST /v2/models/gated/infer HTTP/1.1",
                *map(": ".join, headers.items()),
                "",
                "",
            ]
            connection = stack.enter_context(raw_connection(server.http_port))
            connection.sendall("\r\n".join(head).encode() + body)
            disconnect = connection.close
        visit = server.gate.next()  # the request is being executed
        time.sleep(0.05)  # a part of the duration to be traced
        disconnect()
        until("it is told", lambda: server.log().count("the client has disconnected") == before + 1)
    visit.release()
    failures = [trace for trace, _ in slow_lines(server, "gated") if trace.get("error")]
    assert failures[-1]["total_us"] >= 50_000


def test_a_malformed_traceparent_is_refused(server: Server) -> None:
    with (
        shmserve.client.connect(server.run_dir) as client,
        pytest.raises(shmserve.client.InvalidArgument, match="traceparent must have W3C"),
    ):
        client.infer("one", X=ROW, traceparent="nonsense")


DISABLED_SETTINGS = {
    "trace_level": ["OFF"],
    "trace_rate": "1",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_mode": "triton",
}


def read(path: Path) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """Return the requests of a trace file: their fields, and their timestamps."""
    entries = json.loads(path.read_text())
    stamps = {e["id"]: e["timestamps"] for e in entries if "timestamps" in e}
    requests = [e for e in entries if "model_name" in e]
    return [(e, {s["name"]: s["ns"] for s in stamps[e["id"]]}) for e in requests]


def test_trace_settings_are_changed_and_reset(tracing_server: Server, tmp_path: Path) -> None:
    disabled = {**DISABLED_SETTINGS, "trace_file": str(tmp_path / "traces")}
    with httpclient.InferenceServerClient(tracing_server.url) as client:
        assert client.get_trace_settings() == disabled
        changes = {"trace_level": ["TIMESTAMPS"], "trace_rate": "2", "log_frequency": "3"}
        assert client.update_trace_settings("one", changes) == {**disabled, **changes}
        assert client.update_trace_settings(None, {"trace_count": 7})["trace_count"] == "7"
        assert client.get_trace_settings("two") == {**disabled, "trace_count": "7"}
        defaults = {"trace_level": None, "trace_rate": None, "log_frequency": None}
        assert client.update_trace_settings("one", defaults) == {**disabled, "trace_count": "7"}
    with grpcclient.InferenceServerClient(tracing_server.grpc_url) as client:
        two = client.update_trace_settings("two", {"trace_rate": "9"}, as_json=True)["settings"]
        assert two["trace_rate"] == {"value": ["9"]}
        assert two["trace_level"] == {"value": ["OFF"]}
        two = client.update_trace_settings("two", {"trace_rate": []}, as_json=True)["settings"]
        assert two["trace_rate"] == {"value": ["1"]}


def entries_in(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a file that another process may be writing."""
    try:
        return list(json.loads(path.read_text()))
    except ValueError:
        return []


def test_tensors_are_traced(tmp_path: Path, models: Path) -> None:
    """Covers a model, the steps of an ensemble, and a model that others call."""
    path = tmp_path / "traces.json"
    settings = ("level=TENSORS", "rate=1", f"triton,file={path}")
    flags = [f"--trace-config={setting}" for setting in settings]
    with running(models, *flags) as server, server.http() as http:

        def traced(model: str) -> list[tuple[str, ...]]:
            count_before = len(entries_in(path)) if path.exists() else 0
            row = ROW if model in ("one", "both") else ROW[0]
            name = "IN" if model in ("both", "fails") else "X"
            accept = {"Accept": "application/x-ndjson"}
            body = json_request(**{name: row})
            http.post(f"/v2/models/{model}/infer", body, accept if model == "many" else {})
            until("it is written", lambda: path.exists() and len(entries_in(path)) > count_before)
            entries = entries_in(path)[count_before:]
            assert not any("timestamps" in e for e in entries)
            tensors = [(e["activity"], e["tensor"]) for e in entries if "tensor" in e]
            return [(activity, *tensor.values()) for activity, tensor in tensors]

        assert traced("one") == [
            ("TENSOR_QUEUE_INPUT", "X", "1", "1,1", "FP32"),
            ("TENSOR_BACKEND_OUTPUT", "Y", "2", "1,1", "FP32"),
        ]
        assert len(traced("calls")) == 4
        traced_tensors = traced("both")
        assert [value for value in traced_tensors if value[1] in ("IN", "OUT")] == [
            ("TENSOR_QUEUE_INPUT", "IN", "1", "1,1", "FP32"),
            ("TENSOR_BACKEND_OUTPUT", "OUT", "3", "1,1", "FP32"),
        ]
        assert len(traced_tensors) == 6
        assert traced("boom") == [("TENSOR_QUEUE_INPUT", "X", "1", "1", "FP32")]
        assert sorted(traced("fails")) == [
            ("TENSOR_BACKEND_OUTPUT", "Y", "2", "1", "FP32"),
            ("TENSOR_BACKEND_OUTPUT", "Y", "2", "1,1", "FP32"),
            ("TENSOR_QUEUE_INPUT", "IN", "1", "1", "FP32"),
            ("TENSOR_QUEUE_INPUT", "X", "1", "1", "FP32"),
            ("TENSOR_QUEUE_INPUT", "X", "1", "1,1", "FP32"),
            ("TENSOR_QUEUE_INPUT", "X", "2", "1", "FP32"),
        ]
        assert [activity for activity, *_ in traced("many")] == [
            *("TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT", "TENSOR_BACKEND_OUTPUT")
        ]


def is_longer(path: Path, entries: int) -> bool:
    return path.exists() and len(entries_in(path)) > entries


def test_large_tensors_are_traced_with_all_elements(tmp_path: Path) -> None:
    """The text of a tensor is several megabytes; no trace may be cut, also not of an ensemble."""
    models, path = tmp_path / "models", tmp_path / "traces.json"
    identity_body = 'return self.response(Y=self.input(request, "X"))'
    add_model(models, "numbers", identity_body)
    add_model(models, "words", identity_body, [tensor("X", "BYTES")], [tensor("Y", "BYTES")])
    add_ensemble(models, "twice", [xy_step("numbers", "IN", "A"), xy_step("numbers", "A", "OUT")])
    numbers = np.random.default_rng(1).random(400_000, np.float32)
    text = 'A "word", \\ and ü.' * 200_000
    sent_tensors = {"numbers": numbers, "twice": numbers, "words": np.array([text], np.object_)}
    flags = ["level=TIMESTAMPS", "level=TENSORS", "rate=1", f"triton,file={path}"]
    with running(models, *(f"--trace-config={flag}" for flag in flags)) as server:
        for model, values in sent_tensors.items():
            before = len(entries_in(path)) if path.exists() else 0
            name = "IN" if model == "twice" else "X"
            with httpclient.InferenceServerClient(server.url) as client:
                client.infer(model, infer_inputs(httpclient, **{name: values}))
            until("it is written", partial(is_longer, path, before))
            tensors = [flag["tensor"] for flag in entries_in(path)[before:] if "tensor" in flag]
            assert len(tensors) == (6 if model == "twice" else 2)
            for flag in tensors:
                assert flag["shape"] == str(len(values))
                if model == "words":
                    assert flag["data"] == f'"{text}"'
                else:
                    traced_numbers = np.array(flag["data"].split(","), np.float32)
                    np.testing.assert_allclose(traced_numbers, numbers, rtol=1e-5)  # six digits


@pytest.mark.parametrize(
    ("settings", "status", "expected_error"),
    [
        ({"trace_level": ["OFF", "TIMESTAMPS"]}, 400, "Expect only one trace level 'OFF'"),
        ({"trace_level": "SOME"}, 400, "Unable to parse 'trace_level', got: SOME"),
        ({"trace_rate": "x"}, 400, "Unable to parse 'trace_rate', got: x"),
        ({"trace_rate": "-1"}, 400, "Unable to parse 'trace_rate', value is out of range"),
        ({"trace_rate": "9" * 20}, 400, "Unable to parse 'trace_rate', value is out of range"),
        ({"trace_level": ["TENSORS"]}, 400, "Attempting to set invalid trace setting :trace file "),
        ({"trace_level": ["TENSORS"], "trace_rate": "0"}, 400, "sample rate must be non-zero"),
        ({"trace_count": "-2"}, 400, "'trace_count'. Expecting value >= -1, got:-2"),
        ({"trace_file": "/x"}, 501, "trace file location can not be updated through network"),
        ({"trace_file": None}, 501, "trace file location can not be updated through network"),
        ({"trace_rate": {}}, 400, "'trace_rate' must be a string"),
    ],
)
def test_unknown_trace_settings_are_refused(
    server: Server, settings: dict[str, Any], status: int, expected_error: str
) -> None:
    with server.http() as http:
        reply = http.post("/v2/trace/setting", settings)
        assert reply.status == status
        assert expected_error in reply.error
        reply = http.get("/v2/models/nope/trace/setting")
        assert (reply.status, reply.error) == (400, "Request for unknown model : nope")
        assert http.get("/v2/trace/setting").json()["trace_level"] == ["OFF"]
    if "trace_rate" in settings and isinstance(settings["trace_rate"], str):
        with (
            grpcclient.InferenceServerClient(server.grpc_url) as client,
            pytest.raises(InferenceServerException, match=expected_error),
        ):
            client.update_trace_settings(None, settings)


def test_a_trace_file_is_as_tritons(tracing_server: Server, tmp_path: Path) -> None:
    path = tmp_path / "traces"
    with tracing_server.http() as http:
        http.post("/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]}).ok()
        http.infer("both", {"id": "me", **json_request(IN=ROW)}).ok()
        http.infer("calls", X).ok()
        assert http.infer("boom", X).status == 500
    infer(tracing_server, "grpc", "one")
    with shmserve.client.connect(tracing_server.run_dir) as native:
        native.infer("two", X=ROW, request_id="native")
    until("8 requests are in the file", lambda: path.exists() and len(read(path)) == 8)
    traces = {(t["model_name"], "parent_id" in t): (t, times) for t, times in read(path)}
    root, times = traces["both", False]
    assert root["request_id"] == "me" and root["model_version"] == 1
    first_step, second_step = traces["one", True], traces["two", True]
    # Either of the two calls of "one" may have been read last.
    assert second_step[0]["parent_id"] == root["id"]
    assert list(times.values()) == sorted(times.values())
    assert list(times) == [
        *("HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "QUEUE_START"),
        *("INFER_RESPONSE_COMPLETE", "REQUEST_END", "HTTP_SEND_START", "HTTP_SEND_END"),
    ]
    assert list(first_step[1]) == [
        *("REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END"),
        *("COMPUTE_OUTPUT_START", "COMPUTE_END", "INFER_RESPONSE_COMPLETE", "REQUEST_END"),
    ]
    assert (
        times["QUEUE_START"] <= second_step[1]["COMPUTE_START"] <= times["INFER_RESPONSE_COMPLETE"]
    )
    assert "GRPC_SEND_END" in traces["one", False][1]
    request_entry, times = traces["two", False]
    assert request_entry["request_id"] == "native"
    assert list(times)[:2] == ["REQUEST_START", "QUEUE_START"] and list(times)[-1] == "REQUEST_END"
    assert list(times.values()) == sorted(times.values())
    assert "COMPUTE_START" in traces["boom", False][1]


def test_trace_rate_and_trace_count(tracing_server: Server, tmp_path: Path) -> None:
    settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": "2", "trace_count": "3"}
    with tracing_server.http() as http:
        http.post("/v2/models/one/trace/setting", settings | {"log_frequency": "2"}).ok()
        for number in range(12):
            http.infer("one", {"id": str(number), **json_request(X=ROW)}).ok()
            http.infer("two", json_request(X=ROW)).ok()
    paths = [tmp_path / "traces.0", tmp_path / "traces.1"]
    until("two files are written", lambda: paths[1].exists() and paths[1].stat().st_size)
    ids = [[trace["request_id"] for trace, _ in read(path)] for path in paths]
    assert ids == [["1", "3"], ["5"]]
    assert not (tmp_path / "traces").exists()


@pytest.fixture(scope="module")
def server_and_collector(models: Path) -> Iterator[tuple[Server, Collector]]:
    """Yield a server that sends its traces to a collector, and the collector."""
    with collector() as spans:
        flags = ("level=TIMESTAMPS", "rate=1", "mode=opentelemetry")
        exporter = (f"url={spans.url}", "resource=deployment=test", "bsp_schedule_delay=100")
        trace_flags = (*flags, *(f"opentelemetry,{setting}" for setting in exporter))
        with running(
            models, *(f"--trace-config={setting}" for setting in trace_flags), grpc=True
        ) as running_server:
            yield running_server, spans


def spans_of(trace_collector: Collector, count: int) -> dict[str, Any]:
    """Wait for `count` spans; return them by name, the first of each."""
    until(f"{count} spans have come", lambda: len(trace_collector.spans) >= count)
    assert len(trace_collector.spans) == count
    spans = {span.name: span for span in reversed(trace_collector.spans)}
    trace_collector.spans.clear()
    return spans


PARTS = ("queue", "compute_input", "compute", "compute_output")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_spans_are_exported_of_a_request_and_its_steps(
    server_and_collector: tuple[Server, Collector], protocol: str
) -> None:
    server, collected_spans = server_and_collector
    assert infer(server, protocol, "both", traceparent=TRACEPARENT) == (3, None)
    if protocol == "native":
        infer(server, protocol, "both", traceparent=UNSAMPLED)
    spans = spans_of(collected_spans, 12 if protocol == "native" else 14)
    if protocol != "native":
        order = [spans[name] for name in ("receive", "both", "encode")]
        assert {entry.parent_span_id for entry in order} == {spans["InferRequest"].span_id}
        ranges = [(entry.start_time_unix_nano, entry.end_time_unix_nano) for entry in order]
        assert ranges[0][1] == ranges[1][0] <= ranges[1][1] <= ranges[2][0] <= ranges[2][1]
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE_ID}
    root, ensemble, first, second = (spans[name] for name in ("InferRequest", "both", "one", "two"))
    assert root.parent_span_id.hex() == "00f067aa0ba902b7"
    assert ensemble.parent_span_id == root.span_id
    assert first.parent_span_id == second.parent_span_id == ensemble.span_id
    assert attributes(first)["shmserve.batch_closed"] == "idle"
    assert attributes(root)["triton.model_name"] == "both"
    for outer, inner in ((root, ensemble), (ensemble, first), (ensemble, second)):
        begin, end = inner.start_time_unix_nano, inner.end_time_unix_nano
        assert outer.start_time_unix_nano <= begin <= end <= outer.end_time_unix_nano
    assert {spans[part].parent_span_id for part in PARTS} == {first.span_id}
    assert abs(root.start_time_unix_nano / 1e9 - time.time()) < 60
    assert collected_spans.resources[0]["service.name"] == "shmserve"
    assert collected_spans.resources[0]["deployment"] == "test"


def test_spans_of_calls_and_of_failures(server_and_collector: tuple[Server, Collector]) -> None:
    server, collected_spans = server_and_collector
    with server.http() as http:
        http.infer("calls", X).ok()
        spans = spans_of(collected_spans, 13)
        assert spans["one"].parent_span_id == spans["calls"].span_id
        assert not spans["InferRequest"].parent_span_id
        assert http.infer("boom", X).status == 500
        failed_span = spans_of(collected_spans, 8)["InferRequest"]
        assert failed_span.status.code == 2 and "boom" in failed_span.status.message
        http.infer("one", json_request(X=ROW), {"traceparent": UNSAMPLED}).ok()
        http.infer("one", json_request(X=ROW)).ok()
        assert TRACE_ID not in {s.trace_id.hex() for s in spans_of(collected_spans, 8).values()}


def test_unsent_spans_are_sent_at_the_end(models: Path) -> None:
    with collector() as spans:
        flags = ("level=TIMESTAMPS", "rate=1", "mode=opentelemetry")
        more = (*flags, f"opentelemetry,url={spans.url}", "opentelemetry,bsp_schedule_delay=60000")
        with running(models, *(f"--trace-config={setting}" for setting in more)) as server:
            with server.http() as http:
                http.infer("one", json_request(X=ROW)).ok()
            assert not spans.spans
            server.stop()
        assert len(spans.spans) == 8
