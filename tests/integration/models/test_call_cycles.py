"""Calls in a cycle fail at once, and calls of a disconnected client are cancelled."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.support import repositories
from tests.support.gates import WAITING_CODE, holding
from tests.support.servers import Server, running
from tests.support.waiting import until
from tests.support.wire.raw_http import Http, Reply, json_request

CALLING_MODEL = """import asyncio, threading
import triton_python_backend_utils as pb_utils

def prepared(request):
    value = int(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0])
    inputs = [pb_utils.Tensor("X", pb_utils.get_input_tensor_by_name(request, "X").as_numpy() - 1)]
    target = TARGETS[-1 if value >= 10 else 0]
    return pb_utils.InferenceRequest(model_name=target, requested_output_names=["Y"], inputs=inputs)

def response(found):
    if found.has_error():
        return pb_utils.InferenceResponse(error=found.error())
    return pb_utils.InferenceResponse(found.output_tensors())
"""
BLOCKING_CODE = """
class TritonPythonModel:
    def execute(self, requests):
        return [response(prepared(request).exec()) for request in requests]
"""
COROUTINE_CODE = """
class TritonPythonModel:
    async def execute(self, requests):
        return [response(found) for found in await asyncio.gather(*map(self.ask, requests))]

    async def ask(self, request):
        return await prepared(request).async_exec()
"""
STREAM = """
class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(response(await prepared(request).async_exec()), flags=1)
"""
FINAL_CODE = """
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        if pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0] > 0:
            return response(prepared(request).exec())
        y = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])
"""
LEAF_MODEL = f"""{WAITING_CODE}
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        wait()
        inputs = [pb_utils.get_input_tensor_by_name(each, "X").as_numpy() for each in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", each)]) for each in inputs]
"""
TENSORS = """input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
LIMITED_GROUP = """instance_group [ { kind: KIND_CPU count: 1
  rate_limiter { resources [ { name: "R" count: 1 } ] } } ]
"""
ENSEMBLE = """platform: "ensemble"
ensemble_scheduling { step [ { model_name: "inner" model_version: -1
  input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } } ] }
"""


def add(repository: Path, name: str, code: str, settings: str = "", *targets: str) -> None:
    source = f"TARGETS = {targets!r}\n{CALLING_MODEL if targets else ''}{code}"
    repositories.write(repository, name, f'backend: "python"\n{TENSORS}{settings}', source)


@pytest.fixture(scope="module")
def server_of_cycles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("cycles") / "models"
    for name, code in (("exec", BLOCKING_CODE), ("async", COROUTINE_CODE)):
        add(repository, f"{name}_itself", code, "", f"{name}_itself")
        add(repository, f"{name}_first", code, "", f"{name}_second")
        add(repository, f"{name}_second", code, "", f"{name}_first")
    add(repository, "deep", FINAL_CODE, "instance_group { kind: KIND_CPU count: 3 }\n", "deep")
    add(repository, "streams", STREAM, DECOUPLED, "by_stream")
    add(repository, "by_stream", FINAL_CODE, "", "leaf")
    add(repository, "inner", BLOCKING_CODE, "", "whole")
    (repository / "whole" / "1").mkdir(parents=True)
    (repository / "whole" / "config.pbtxt").write_text(TENSORS + ENSEMBLE)
    add(repository, "leaf", LEAF_MODEL)
    add(repository, "exec_leaf", BLOCKING_CODE, "", "leaf", "limited")
    add(repository, "async_leaf", COROUTINE_CODE, "", "leaf", "limited")
    add(repository, "stream_leaf", STREAM, DECOUPLED, "leaf", "limited")
    add(repository, "outer_leaf", BLOCKING_CODE, "", "exec_leaf")
    add(repository, "limited", LEAF_MODEL.replace("        wait()\n", ""), LIMITED_GROUP)
    add(repository, "holder", BLOCKING_CODE, LIMITED_GROUP, "between")
    add(repository, "between", BLOCKING_CODE, "", "limited")
    with running(repository, "--rate-limit=execution_count") as server:
        yield server


def infer(http: Http, model: str, value: int = 0) -> Reply:
    body = json_request(X=np.array([value], np.int32))
    return http.infer(model, body, {"Accept": "text/event-stream"} if "stream" in model else {})


@pytest.mark.parametrize(
    ("model", "chain"),
    [
        ("exec_itself", "exec_itself -> exec_itself"),
        ("exec_first", "exec_first -> exec_second -> exec_first"),
        ("async_itself", "async_itself -> async_itself"),
        ("async_first", "async_first -> async_second -> async_first"),
        ("inner", "inner -> inner"),
        ("whole", "inner -> inner"),
        ("holder", "holder -> between -> limited"),
    ],
)
def test_a_call_cycle_fails_and_is_named(server_of_cycles: Server, model: str, chain: str) -> None:
    with server_of_cycles.http(timeout_s=5) as http:
        for _ in range(2):
            reply = infer(http, model)
            assert reply.status == 500
            assert "deadlock" in reply.error and f"({chain})" in reply.error


def test_a_recursion_fails_only_without_a_free_instance(server_of_cycles: Server) -> None:
    with server_of_cycles.http(timeout_s=5) as http:
        assert [infer(http, "deep", depth).status for depth in (0, 1, 2, 3)] == [200, 200, 200, 500]
        assert infer(http, "streams").status == 200
    with ThreadPoolExecutor(6) as pool:

        def infer_once(_: int) -> int:
            with server_of_cycles.http(timeout_s=10) as http:
                return infer(http, "deep", 1).status

        assert set(pool.map(infer_once, range(24))) <= {200, 500}
    with server_of_cycles.http(timeout_s=5) as http:
        assert infer(http, "deep", 2).status == 200


@pytest.mark.parametrize("model", ["exec_leaf", "async_leaf", "stream_leaf", "outer_leaf"])
def test_a_disconnect_cancels_the_calls_of_a_model(server_of_cycles: Server, model: str) -> None:
    with ThreadPoolExecutor(1) as executor, server_of_cycles.http() as occupant:
        with holding(server_of_cycles.gate) as wait_held:
            occupying_request = executor.submit(infer, occupant, "leaf")
            wait_held()
            with server_of_cycles.http(timeout_s=0.5) as http, pytest.raises(TimeoutError):
                infer(http, model)
            # The outer model can serve the next request while the called model is still busy.
            nested = model == "outer_leaf"
            with server_of_cycles.http(timeout_s=5) as http:
                assert infer(http, "exec_leaf" if nested else model, 20).status == 200
            until("the calls are gone", lambda: not pending_count(server_of_cycles, "leaf"))
            assert not occupying_request.done()
        assert occupying_request.result().status == 200


def pending_count(server: Server, model: str) -> float:
    return server.metric("nv_inference_pending_request_count", model=model)


def test_a_deadline_holds_along_the_chain(server_of_cycles: Server) -> None:
    limit = {"X-Request-Timeout-Ms": "300"}
    with holding(server_of_cycles.gate), server_of_cycles.http(timeout_s=5) as http:
        body = json_request(X=np.zeros(1, np.int32))
        assert http.infer("outer_leaf", body, limit).status >= 500
    with server_of_cycles.http(timeout_s=5) as http:
        assert infer(http, "outer_leaf").status == 200


def is_busy(server: Server, model: str) -> bool:
    return server.metric("shmserve_instances", model=model, state="busy") == 1


def test_one_of_two_requests_that_wait_for_each_other_fails(
    repository: Path, serve: Callable[..., Server]
) -> None:
    """Each request occupies the only instance that the other one needs."""
    waiting_code = WAITING_CODE + FINAL_CODE.replace(
        "            return resp", "            wait()\n            return resp"
    )
    add(repository, "left", waiting_code, "", "right")
    add(repository, "right", waiting_code, "", "left")
    server = serve(repository)

    def reply(model: str) -> Reply:
        with server.http(timeout_s=20) as http:
            return infer(http, model, 1)

    with ThreadPoolExecutor(2) as people:
        with holding(server.gate):
            replies = [people.submit(reply, name) for name in ("left", "right")]
            for name in ("left", "right"):
                until(name, partial(is_busy, server, name))
        failed, succeeded = sorted((answer.result() for answer in replies), key=lambda r: -r.status)
    assert (failed.status, succeeded.status) == (500, 200)
    assert "requests that wait for its callers" in failed.error
    assert re.search(r"\((left -> right -> left|right -> left -> right)\)", failed.error)
    assert reply("right").status == 200
