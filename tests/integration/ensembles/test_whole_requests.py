"""An ensemble's request across processes: timeout, cancellation, limits, sequence parameters."""

import ast
import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.ensembles.clients import floats, stream
from tests.rigs.pipelines import add_ensemble, add_model, step, tensor, xy_step
from tests.support import repositories
from tests.support.request_pool import RequestPool, values
from tests.support.servers import Server, Start
from tests.support.texts import Beginning
from tests.support.waiting import until
from tests.support.wire.raw_http import json_input, raw_connection

TEXT_METHODS = {
    "id": {"sequence_id": 99},
    "text": {"sequence_id": "abc"},
    "end": {"sequence_end": True},
    "no_start": {"sequence_start": False},
    "all": {"sequence_id": 99, "sequence_start": False, "sequence_end": True},
    "other": {"colour": "blue"},
}
INTEGER_TENSORS = [tensor("INPUT0", "INT32")], [tensor("OUTPUT0", "INT32")]
WATCHING_METHOD = """
    x = self.input(request, "X")
    if x[0]:
        pb_utils.Logger.log_warn("it runs")
        while not request.is_cancelled():
            time.sleep(0.002)
        pb_utils.Logger.log_warn("it sees that nobody waits")
    return self.response(Y=x)
"""
COUNT = """
    sender = request.get_response_sender()
    for i in range(int(self.input(request, "X")[0])):
        sender.send(self.response(Y=np.array([i], np.int32)))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

_EXPIRED_TEXT = Beginning("in ensemble 'waits', Request timeout expired (")


@pytest.fixture(scope="module")
def server(models: Path, start: Start) -> Server:
    add_model(models, "same", 'return self.response(Y=self.input(request, "X"))')
    _sequences(models)
    _add_gated_models(models)
    add_model(models, "watches", WATCHING_METHOD)
    add_model(models, "behind", 'return self.response(Y=self.input(request, "X"))')
    wired = [
        xy_step("same", "IN", "a"),
        xy_step("watches", "a", "b"),
        xy_step("behind", "b", "OUT"),
    ]
    add_ensemble(models, "watched", wired)
    return start(models, grpc=True)


def _sequences(repository: Path) -> None:
    fields = "[request.correlation_id(), request.flags()]"
    code = f"return self.response(Y=np.array([repr({fields})], object))"
    texts = [tensor("OUT", "BYTES")]
    add_model(repository, "tell", code, outputs=[tensor("Y", "BYTES")])
    for name, parameters in TEXT_METHODS.items():
        method_body = f"""
            x = pb_utils.Tensor("Y", self.input(request, "X"))
            return pb_utils.InferenceResponse([x], parameters={parameters!r})
        """
        add_model(repository, f"says_{name}", method_body)
        steps = [
            xy_step(f"says_{name}", "IN", "a"),
            xy_step("same", "a", "b"),
            xy_step("tell", "b", "OUT"),
        ]
        add_ensemble(repository, f"then_{name}", steps, outputs=texts)
    parallel_steps = [xy_step("says_all", "IN", "SAID"), xy_step("tell", "IN", "OUT")]
    add_ensemble(repository, "beside", parallel_steps, outputs=[*texts, tensor("SAID")])


def _add_gated_models(repository: Path) -> None:
    repositories.add(repository, "gated")
    method_body = 'return self.response(OUTPUT0=self.input(request, "INPUT0"))'
    add_model(repository, "first", method_body, *INTEGER_TENSORS, max_batch_size=8)
    gated = {"INPUT0": "a"}, {"OUTPUT0": "OUTPUT0"}
    steps = [step("first", {"INPUT0": "INPUT0"}, {"OUTPUT0": "a"}), step("gated", *gated)]
    add_ensemble(repository, "waits", steps, *INTEGER_TENSORS, max_batch_size=8)

    config_path = repositories.add_as(repository, "wide", "gated") / "config.pbtxt"
    config_path.write_text(config_path.read_text().replace("count: 1", "count: 3"))
    add_model(
        repository,
        "count",
        COUNT,
        outputs=[tensor("Y", "INT32")],
        settings="model_transaction_policy { decoupled: true }",
    )
    code = repository / "count" / "1" / "model.py"
    code.write_text(code.read_text().replace("return [self.one(request)", "[self.one(request)"))
    steps = [xy_step("count", "IN", "a"), step("wide", {"INPUT0": "a"}, {"OUTPUT0": "OUT"})]
    for name, scheduling in (("limited", "max_inflight_requests: 2"), ("unlimited", "")):
        outputs = [tensor("OUT", "INT32")]
        add_ensemble(repository, name, steps, outputs=outputs, scheduling=scheduling)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("then_id", [99, 1]), ("then_text", ["abc", 1]), ("then_end", [7, 3]),
        ("then_no_start", [7, 0]), ("then_all", [99, 2]), ("then_other", [7, 1]),
    ],
)  # fmt: skip
def test_sequence_parameters_of_a_step_hold_for_later_steps(
    server: Server, model: str, expected: list[Any]
) -> None:
    """A step's `sequence_*` parameters override the request's flags and are in the response."""
    seen_fields, parameters = ask_sequence(server, model)
    assert seen_fields == expected
    assert parameters == {
        "sequence_id": expected[0],
        "sequence_start": bool(expected[1] & 1),
        "sequence_end": bool(expected[1] & 2),
    }


def test_sequence_parameters_of_a_step_do_not_reach_parallel_steps(server: Server) -> None:
    seen_fields, parameters = ask_sequence(server, "beside")
    assert seen_fields == [7, 1]
    assert parameters["sequence_id"] == 99


def ask_sequence(server: Server, model: str) -> tuple[Any, dict[str, Any]]:
    """Begin sequence 7; return the fields of the last step, and the response's parameters."""
    body = {
        "parameters": {"sequence_id": 7, "sequence_start": True},
        "inputs": [json_input("IN", floats(1))],
    }
    with server.http() as http:
        reply = http.infer(model, body).ok()
    return ast.literal_eval(reply.tensors()["OUT"][0].decode()), reply.json()["parameters"]


def test_a_timeout_expires_in_the_queue_of_a_step(server: Server, pool: RequestPool) -> None:
    """The client receives the error at once, and the step's model never receives the request."""
    first_request = pool.number("waits", 1)
    visit = server.gate.next()
    late_request = pool.number("waits", 2, deadline_us=300_000).result()
    assert (late_request.status, late_request.error) == (503, _EXPIRED_TEXT)
    visit.release()
    assert values(first_request.result()) == [1]
    assert server.gate.is_idle()


def test_a_timeout_expires_while_a_step_runs(server: Server, pool: RequestPool) -> None:
    """The client receives the error at once, and the later result of the step is discarded."""
    late_request = pool.number("waits", 1, deadline_us=1_000_000)
    visit = server.gate.next()
    reply = late_request.result()
    assert (reply.status, reply.error) == (503, _EXPIRED_TEXT)
    visit.release()
    next_request = pool.number("waits", 2)
    server.gate.next().release()
    assert values(next_request.result()) == [2]


def test_a_disconnecting_client_cancels_the_running_step(server: Server) -> None:
    """The step's model detects the cancellation, and no later step runs."""
    with disconnecting_client(server, "watched", floats(1)) as leave:
        server.wait_log("it runs")
        leave()
        server.wait_log("it sees that nobody waits")
    until("the cancellation is counted", lambda: cancelled_count(server, "watched") == 1)
    assert server.metric("nv_inference_exec_count", model="behind") == 0
    with server.http() as http:
        http.infer("watched", {"inputs": [json_input("IN", floats(0))]}).ok()
    assert server.metric("nv_inference_exec_count", model="behind") == 1


def cancelled_count(server: Server, model: str) -> float:
    return server.metric("nv_inference_request_failure", model=model, reason="CANCELED")


@contextlib.contextmanager
def disconnecting_client(server: Server, model: str, values: np.ndarray) -> Iterator[Any]:
    body = json.dumps({"inputs": [json_input("IN", values)]}).encode()
    with raw_connection(server.http_port) as connection:
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        yield connection.close


@pytest.mark.parametrize(("model", "max_requests"), [("limited", 2), ("unlimited", 3)])
def test_the_requests_in_flight_of_a_step_are_limited(
    server: Server, model: str, max_requests: int
) -> None:
    """`max_inflight_requests` limits a step for all requests, also after a decoupled step."""
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(stream, server, model, IN=floats(4)) for _ in range(2)]
        visits = [server.gate.next() for _ in range(max_requests)]
        assert server.gate.is_idle()
        for _ in range(8 - max_requests):
            visits.pop(0).release()
            visits.append(server.gate.next())
            assert server.gate.is_idle(0.01)
        for visit in visits:
            visit.release()
        assert [sorted(future.result()) for future in futures] == [[[0], [1], [2], [3]]] * 2
