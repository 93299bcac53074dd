"""The processes that schedule the steps of ensembles, from load to unload."""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import shmserve.client
from tests.rigs.pipelines import add_ensemble, add_model, xy_step
from tests.support.load import Load, SendRequest
from tests.support.servers import Server, running
from tests.support.waiting import until
from tests.support.wire.raw_http import Http

ADD_ONE = 'return self.response(Y=self.input(request, "X") + 1)'


def fill(folder: Path) -> None:
    """Write the ensembles "first" (a -> b), "second" (b -> c) and "third" (c -> d), and "alone"."""
    for name in ("a", "b", "c", "d", "alone"):
        add_model(folder, name, ADD_ONE)
    for name, a, b in (("first", "a", "b"), ("second", "b", "c"), ("third", "c", "d")):
        add_ensemble(folder, name, [xy_step(a, "IN", "m"), xy_step(b, "m", "OUT")])


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    fill(tmp_path / "models")
    return tmp_path / "models"


def schedulers(server: Server) -> list[str]:
    titles = server.titles().elements()
    return sorted(title for title in titles if title.startswith(("scheduler ", "ensemble ")))


@contextlib.contextmanager
def clients(server: Server, *models: str) -> Iterator[Load]:
    """Send requests to the models over HTTP and shared memory; all responses must be right."""
    senders: list[SendRequest] = []
    with shmserve.client.connect(server.run_dir) as client:
        for model in models:
            senders += [partial(infer_over_http, model), partial(infer_natively, model, client)]
        with Load(server, senders=senders) as load:
            yield load
    assert load.troubles() == []


def infer_over_http(model: str, http: Http, number: int) -> str:
    values = np.arange(number, 20_000 + number, dtype=np.float32)
    tensors = [("X", "FP32", [values.size], values.tobytes())]
    requested_outputs = [{"name": "Y", "parameters": {"binary_data": True}}]
    reply = http.infer_binary(model, tensors, outputs=requested_outputs)
    if reply.status != 200:
        return f"{model}: {reply.status} {reply.error}"
    return f"{model}: wrong values" if (reply.tensors()["Y"] != values + 1).any() else ""


def infer_natively(model: str, client: shmserve.client.Server, _: Http, number: int) -> str:
    values = np.arange(number, 20_000 + number, dtype=np.float32)
    try:
        outputs = client.infer(model, {"X": values})
    except shmserve.client.ShmserveError as error:
        return f"{model}: {error}"
    return f"{model}: wrong values" if (outputs["Y"] != values + 1).any() else ""


def wait_answered(load: Load) -> None:
    answer_count = len(load.answers)
    until("all are asked", lambda: len(load.answers) > answer_count + 50)


@pytest.fixture
def server(empty_server: tuple[Server, Path]) -> Server:
    fill(empty_server[1])
    return empty_server[0]


def test_the_steps_of_ensembles_that_share_some_are_in_one_process(repository: Path) -> None:
    with running(repository) as server:
        assert schedulers(server) == ["ensemble first", "scheduler alone"]
        with clients(server, "a", "c") as load, server.http() as http:
            for name in ("first", "second", "third"):
                tensors = [("IN", "FP32", [1], np.float32(1).tobytes())]
                requested_outputs = [{"name": "OUT", "parameters": {"binary_data": True}}]
                reply = http.infer_binary(name, tensors, outputs=requested_outputs)
                assert reply.tensors()["OUT"].tolist() == [3.0]
            wait_answered(load)


def test_each_model_has_its_own_process_if_configured(repository: Path) -> None:
    with running(repository, "--ensemble-scheduling=separate") as server:
        pipes = [f"ensemble {n}" for n in ("first", "second", "third")]
        assert schedulers(server) == [
            *pipes,
            *(f"scheduler {n}" for n in ["a", "alone", "b", "c", "d"]),
        ]


def test_models_move_to_an_ensemble_that_is_loaded_and_back(server: Server) -> None:
    for name in ("a", "b", "c", "alone"):
        server.load(name)
    separate = [f"scheduler {name}" for name in ("a", "alone", "b", "c")]
    assert schedulers(server) == separate
    with clients(server, "a", "b", "c", "alone") as load:
        for _ in range(2):
            server.load("first")
            shared = ["ensemble first", "scheduler alone", "scheduler c"]
            until("a and b move", lambda: schedulers(server) == shared)  # noqa: B023
            server.load("second")
            all_shared = ["ensemble first", "scheduler alone"]
            until("c moves", lambda: schedulers(server) == all_shared)  # noqa: B023
            wait_answered(load)
            server.unload("second")
            until("c moves", lambda: len(schedulers(server)) == 3)
            server.unload("first")
            until("all are alone", lambda: len(schedulers(server)) == 4)


def test_models_that_an_ensemble_connects_share_a_process(server: Server) -> None:
    server.load("first")
    server.load("third")
    assert schedulers(server) == ["ensemble first", "ensemble third"]
    with clients(server, "a", "c", "d") as load:
        server.load("second")
        until("all are in one", lambda: len(schedulers(server)) == 1)
        wait_answered(load)


def test_a_step_is_reloaded_separately(server: Server, empty_server: tuple[Server, Path]) -> None:
    server.load("first")
    code = empty_server[1] / "a" / "1" / "model.py"
    with clients(server, "a", "b") as load:
        for number in range(3):
            code.write_text(code.read_text() + f"\n# {number}\n")
            server.load("a")
            assert schedulers(server) == ["ensemble first"]
        wait_answered(load)
