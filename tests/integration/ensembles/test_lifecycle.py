"""Ensembles and their step models: loaded together, unloaded in order, ready when all are ready."""

import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rigs.pipelines import add_ensemble, add_model, step, xy_step
from tests.support.gates import WAITING_CODE, holding
from tests.support.servers import Server, refuses_connections, running
from tests.support.waiting import until
from tests.support.wire.raw_http import Http, json_input

MODEL_NAMES = ("add", "other", "inner", "outer")
CALLING_METHOD = """
wait()
tensors = [pb_utils.Tensor("X", self.input(request, "X"))]
call = pb_utils.InferenceRequest(model_name="add", requested_output_names=["Y"], inputs=tensors)
return pb_utils.InferenceResponse(call.exec().output_tensors())
"""
RETURN_INCREMENT = 'return self.response(Y=self.input(request, "X") + 1)'


@pytest.fixture
def repository(empty_server: tuple[Server, Path]) -> Path:
    return empty_server[1]


@pytest.fixture
def server(empty_server: tuple[Server, Path], repository: Path) -> Server:
    add_model(repository, "add", RETURN_INCREMENT)
    add_model(repository, "other", RETURN_INCREMENT)
    steps = [xy_step("add", "IN", "m"), xy_step("other", "m", "OUT")]
    add_ensemble(repository, "inner", steps)
    add_ensemble(repository, "outer", [step("inner", {"IN": "IN"}, {"OUT": "OUT"})])
    return empty_server[0]


def states(http: Http) -> dict[str, str]:
    rows = http.post("/v2/repository/index", {}).json()
    return {r["name"]: r["state"] for r in rows if "state" in r and r["name"] in MODEL_NAMES}


def infer_one(http: Http, model: str) -> Any:
    return http.infer(model, {"inputs": [json_input("IN", np.array([1], np.float32))]})


def test_step_models_are_loaded_and_unloaded_with_the_ensemble(http: Http) -> None:
    """An unloaded step model unloads the ensemble; loading the model restores both."""
    http.load("outer").ok()
    assert states(http) == dict.fromkeys(MODEL_NAMES, "READY")
    assert (infer_one(http, "outer").ok().tensors()["OUT"] == 3).all()
    http.unload("add").ok()
    unloaded = {"add": "UNAVAILABLE", "inner": "UNAVAILABLE", "outer": "UNAVAILABLE"}
    until("they are unloaded", lambda: states(http) == {**unloaded, "other": "READY"})
    assert infer_one(http, "outer").status == 404
    assert http.get("/v2/models/outer/ready").status == 400
    http.load("add").ok()
    assert states(http) == dict.fromkeys(MODEL_NAMES, "READY")
    assert (infer_one(http, "outer").ok().tensors()["OUT"] == 3).all()


def test_unload_dependents(http: Http) -> None:
    """With it, models that were loaded only for the ensemble are unloaded, too."""
    http.load("other").ok()
    http.load("inner").ok()
    http.unload("inner").ok()
    until("it is unloaded", lambda: states(http)["inner"] == "UNAVAILABLE")
    assert states(http)["add"] == states(http)["other"] == "READY"
    http.load("inner").ok()
    http.unload("inner", unload_dependents=True).ok()
    unloaded = {"add": "UNAVAILABLE", "inner": "UNAVAILABLE", "other": "READY"}
    until("what was its own is unloaded", lambda: unloaded.items() <= states(http).items())


def test_a_drain_answers_requests_of_ensembles_and_of_calling_models(tmp_path: Path) -> None:
    """Steps and calls begin after the drain has begun, including those of nested ensembles."""
    add_model(tmp_path, "add", RETURN_INCREMENT)
    add_model(tmp_path, "slow", f"wait()\n{RETURN_INCREMENT}")
    add_model(tmp_path, "caller", CALLING_METHOD)
    add_model(tmp_path, "calling", CALLING_METHOD)
    for name in ("slow", "caller", "calling"):
        file = tmp_path / name / "1" / "model.py"
        file.write_text(f"{WAITING_CODE}\n{file.read_text()}")
    add_ensemble(tmp_path, "steps", [xy_step("slow", "IN", "m"), xy_step("add", "m", "OUT")])
    add_ensemble(tmp_path, "calls", [xy_step("calling", "IN", "m"), xy_step("add", "m", "OUT")])
    request = {"steps": ("IN", "OUT", 3), "calls": ("IN", "OUT", 3), "caller": ("X", "Y", 2)}

    def answer(model: str) -> float:
        input_name, quantised, _ = request[model]
        with running_server.http(timeout_s=30) as http:
            body = {"inputs": [json_input(input_name, np.array([1], np.float32))]}
            return float(http.infer(model, body).ok().tensors()[quantised][0])

    with running(tmp_path) as running_server, ThreadPoolExecutor(len(request)) as people:
        with holding(running_server.gate):
            answers = {model: people.submit(answer, model) for model in request}
            for name in ("slow", "calling", "caller"):
                until(
                    name,
                    partial(running_server.metric, "shmserve_instances", model=name, state="busy"),
                )
            running_server.process.send_signal(signal.SIGTERM)
            until("nobody is let in", lambda: refuses_connections(running_server.http_port))
        assert {model: future.result() for model, future in answers.items()} == {
            model: expected for model, (_, _, expected) in request.items()
        }
        assert running_server.wait_exit(20) == 0
