"""Triton's Python models, unmodified: errors, exceptions, calls of other models, coroutines, self-
description.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import repositories
from tests.crowd import Crowd, crowd
from tests.raw_http import Http, Reply, json_input
from tests.servers import Server, running

ROW = np.array([[1, 2, 3, 4]], np.int32)


def crime(command: str) -> dict:
    """A request for the model "crimes"."""
    given = {"name": "COMMAND", "datatype": "BYTES", "shape": [1, 1], "data": [command]}
    return {"inputs": [given, json_input("INPUT0", ROW)]}


def call(target: str) -> dict:
    """A request for the models that call others."""
    given = {"name": "TARGET", "datatype": "BYTES", "shape": [1], "data": [target]}
    first, second = np.arange(16, dtype=np.int32).reshape(1, 16), np.full((1, 16), 5, np.int32)
    return {"inputs": [given, json_input("INPUT0", first), json_input("INPUT1", second)]}


@pytest.fixture(scope="module")
def criminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the model "crimes"."""
    repository = tmp_path_factory.mktemp("crimes")
    repositories.add(repository, "crimes")
    with running(repository) as started:
        yield started


def together(server: Server, people: Crowd, commands: list[str]) -> list[Reply]:
    """Answers to requests that were executed as one batch."""
    holder = people.infer("crimes", crime("gate"))
    visit = server.gate.next()
    answers = []
    for count, command in enumerate(commands, 1):
        answers.append(people.infer("crimes", crime(command)))
        server.wait_pending("crimes", count)
    visit.release()
    assert holder.result().status == 200
    return [answer.result() for answer in answers]


def assert_fine(reply: Reply) -> None:
    assert (reply.tensors()["OUTPUT0"] == ROW).all()


def test_an_error_for_one_request_of_a_batch(criminal: Server) -> None:
    with crowd(criminal) as people:
        good, bad, fine = together(criminal, people, ["ok", "error", "ok"])
    assert_fine(good)
    assert_fine(fine)
    assert bad.status == 500
    assert bad.error.endswith("as you wished")


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("raise", "ValueError: raised as you wished"),
        ("speechless", "message: Speechless"),
        ("wrong_count", ""),
        ("not_a_list", "Expected a list in the execute return, found type"),
        (
            "not_a_response",
            "Expected an 'InferenceResponse' object in the execute function return list, found "
            "type",
        ),
    ],
)
def test_a_mistake_spoils_only_its_own_request(criminal: Server, command: str, error: str) -> None:
    with crowd(criminal) as people:
        good, bad, fine = together(criminal, people, ["ok", command, "ok"])
    assert_fine(good)
    assert_fine(fine)
    assert bad.status == 500
    assert error in bad.error
    with criminal.http() as http:
        assert_fine(http.infer("crimes", crime("ok")))


def test_a_process_that_a_model_forks_answers_nobody(criminal: Server) -> None:
    with crowd(criminal) as people:
        for reply in together(criminal, people, ["ok", "fork", "ok"]):
            assert_fine(reply)
    with criminal.http() as http:
        assert_fine(http.infer("crimes", crime("fork")))


def test_a_model_calls_another(http: Http) -> None:
    found = http.infer("caller", call("simple")).tensors()["OUTPUT0"]
    assert (found == np.arange(16)).all()


def test_calls_at_the_same_time(http: Http) -> None:
    found = http.infer("async_caller", call("simple")).tensors()["OUTPUT0"]
    assert (found == 2 * np.arange(16)).all()


@pytest.mark.parametrize("model", ["caller", "async_caller"])
def test_calling_what_is_not_there(http: Http, model: str) -> None:
    reply = http.infer(model, call("nothing"))
    assert reply.status in (404, 500)
    assert "nothing" in reply.error
    assert http.infer(model, call("simple")).status == 200


def test_many_calls(server: Server) -> None:
    with crowd(server, 8) as people:
        answers = [
            people.infer(model, call("simple"))
            for model in ("caller", "async_caller")
            for _ in range(16)
        ]
        assert all(answer.result().status == 200 for answer in answers)


def test_self_description(http: Http) -> None:
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    found = http.infer("completed", {"inputs": [json_input("INPUT0", values)]}).tensors()["OUTPUT0"]
    assert (found == 2 * values).all()


def test_a_model_logs(server: Server, http: Http) -> None:
    http.infer("echo_request", {"inputs": [json_input("INPUT0", np.array([1], np.int32))]}).ok()
    server.wait_log("described a request")


FAILING = """
import os
import sys

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        {}

    def execute(self, requests):
        return []
"""


def test_initialize_that_fails_says_why(repository: Path, serve: Callable[..., Server]) -> None:
    """Of two instances, of which one or both say so before the load is given up."""
    two = "instance_group { kind: KIND_CPU count: 2 }"
    told = {
        "raise ValueError('not today')": "Internal: ValueError: not today",
        "raise pb_utils.TritonModelException('no')": "Internal: TritonModelException: no",
        "sys.exit(3)": "Internal: SystemExit: 3",
        "os._exit(3)": "Unavailable: the process of instance 'model_3_",
    }
    for number, statement in enumerate(told):
        config = repositories.identity_config(f"model_{number}", "FP32", [1], more=two)
        repositories.write(repository, f"model_{number}", config, FAILING.format(statement))
    server = serve(repository, "--model-control-mode=explicit")
    with server.http() as http:
        for number, says in enumerate(told.values()):
            reply = http.post(f"/v2/repository/models/model_{number}/load")
            assert reply.status == 400
            where = f"load failed for model 'model_{number}': version 1 is at UNAVAILABLE state: "
            assert reply.error.startswith(where + says)


FINALIZING = '''
"""Says goodbye."""
import os
from pathlib import Path

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.told = Path(args["model_repository"]) / "told"

    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]

    def finalize(self):
        self.told.write_text("goodbye")
'''


def test_finalize_is_called(repository: Path, serve: Callable[..., Server]) -> None:
    config = repositories.identity_config("model", "FP32", [1])
    repositories.write(repository, "model", config, FINALIZING)
    server = serve(repository)
    server.process.terminate()
    assert server.wait_exit(30) == 0
    (told,) = repository.rglob("told")
    assert told.read_text() == "goodbye"


HELPERS = '''
"""Imports a module that lies beside it, and finds its own folder."""
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from beside import ANSWER


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"])
        assert (folder / args["model_version"] / "beside.py").exists(), folder

    def execute(self, requests):
        made = pb_utils.Tensor("OUTPUT0", np.array([ANSWER], np.float32))
        return [pb_utils.InferenceResponse([made]) for _ in requests]
'''


def test_modules_beside_the_model(repository: Path, serve: Callable[..., Server]) -> None:
    """Two models with modules of the same name do not see each other's."""
    for name, answer in (("one", 1), ("two", 2)):
        config = repositories.identity_config(name, "FP32", [1])
        folder = repositories.write(repository, name, config, HELPERS)
        (folder / "1" / "beside.py").write_text(f"ANSWER = {answer}\n")
    server = serve(repository)
    with server.http() as http:
        for name, answer in (("one", 1), ("two", 2)):
            request = {"inputs": [json_input("INPUT0", np.zeros(1, np.float32))]}
            assert http.infer(name, request).tensors()["OUTPUT0"].tolist() == [answer]


SETTINGS = """
import argparse

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parser = argparse.ArgumentParser()
        parser.add_argument("--answer", type=int, default=42)
        self.settings = parser.parse_args()

    def execute(self, requests):
        made = pb_utils.Tensor("OUTPUT0", np.array([self.settings.answer], np.int32))
        return [pb_utils.InferenceResponse([made]) for _ in requests]
"""


def test_a_model_that_parses_its_command_line(
    repository: Path, serve: Callable[..., Server]
) -> None:
    """Libraries that models use do so; nothing is there, so every setting has its default."""
    config = repositories.identity_config("settings", "INT32", [1])
    repositories.write(repository, "settings", config, SETTINGS)
    with serve(repository).http() as http:
        request = {"inputs": [json_input("INPUT0", np.zeros(1, np.int32))]}
        assert http.infer("settings", request).tensors()["OUTPUT0"].tolist() == [42]


SPEAKER = """
import os

import numpy as np
import triton_python_backend_utils as pb_utils

ODD = os.fsdecode(b"n\\xe4me")  # of a file, by bytes that are not UTF-8


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request.request_id()) for request in requests]

    def answer(self, way):
        if way == "raise":
            raise FileNotFoundError(ODD)
        if way == "error":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(ODD))
        if way == "call":
            pb_utils.InferenceRequest(
                model_name=ODD, requested_output_names=["OUTPUT0"], inputs=[]
            ).exec()
        if way == "measure":
            family = pb_utils.MetricFamily("odd", ODD, pb_utils.MetricFamily.GAUGE)
            family.Metric({"file": ODD}).set(1)
        ready = np.array([pb_utils.is_model_ready("speaker")], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", ready)])
"""


def test_a_model_that_says_what_is_no_unicode(
    repository: Path, serve: Callable[..., Server]
) -> None:
    config = repositories.identity_config("speaker", "INT32", [1])
    repositories.write(repository, "speaker", config, SPEAKER)
    server = serve(repository)
    with server.http() as http:

        def ask(way: str) -> Reply:
            given = json_input("INPUT0", np.zeros(1, np.int32))
            return http.infer("speaker", {"id": way, "inputs": [given]})

        for way in ("raise", "error"):
            assert ask(way).error.endswith("n\\udce4me")
        for way in ("call", "measure", "nothing"):
            assert ask(way).tensors()["OUTPUT0"].tolist() == [1]
        assert 'odd{file="n\\\\udce4me"} 1' in server.metrics()


COUNTDOWN = """
import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        number = request.inputs()[0].as_numpy()
        if number[0] == 0:
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", number)])
        call = pb_utils.InferenceRequest(
            model_name="countdown",
            requested_output_names=["OUTPUT0"],
            inputs=[pb_utils.Tensor("INPUT0", abs(number) - 1)],
        )
        return call.exec() if number[0] > 0 else asyncio.run(self.soon(call))

    async def soon(self, call):
        return await call.async_exec()
"""


def test_a_model_that_calls_itself(repository: Path, serve: Callable[..., Server]) -> None:
    config = repositories.identity_config("countdown", "INT32", [1])
    repositories.write(repository, "countdown", config, COUNTDOWN)
    server = serve(repository, "--model-control-mode=explicit", "--load-model=countdown")

    def ask(number: int) -> Reply:
        given = json_input("INPUT0", np.array([number], np.int32))
        return http.infer("countdown", {"inputs": [given]})

    with server.http() as http:
        for number in (1, -1):
            reply = ask(number)
            assert reply.status == 500
            assert "it would wait for its only instance" in reply.error
        assert ask(0).status == 200
        two = config + "instance_group { kind: KIND_CPU count: 2 }\n"
        repositories.write(repository, "countdown", two, COUNTDOWN)
        http.post("/v2/repository/models/countdown/load").ok()
        assert [ask(number).status for number in (0, 1, -1)] == [200, 200, 200]
